//! The sending end of a link, whatever carries it.
//!
//! Credit is taken before a block is even read ([`Link::reserve`]), so blocks that wait for credit
//! stand in nobody's queue: a seal or a loss sent meanwhile is behind nothing that is stuck.

use crate::config::LinkDown;
use bytes::Bytes;
use cleave_domain::{BlockRef, HandoffId, WorkerRef};
use cleave_kv::{BlockPart, Packet};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// To one worker in one of its lives. Everything sent through it arrives in this order or, if it
/// breaks, not at all.
#[derive(Debug)]
pub struct Link {
    peer: WorkerRef,
    credit: Arc<Semaphore>,
    /// Bounded by what it carries: frames by credit, and a few packets for each hand-off.
    queue: mpsc::UnboundedSender<Parcel>,
}

/// A packet and, for a frame, its bytes.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) packet: Packet,
    pub(crate) payload: Bytes,
}

/// What the carrying task holds of a link.
#[derive(Debug)]
pub(crate) struct Carrier {
    pub(crate) credit: Arc<Semaphore>,
    pub(crate) queue: mpsc::UnboundedReceiver<Parcel>,
}

/// Credit for some payload bytes on one link. Dropped unused, it is credit again.
#[derive(Debug)]
pub struct Permit {
    link: Arc<Link>,
    credit: OwnedSemaphorePermit,
}

/// Bytes of a block on their way out.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The attempt.
    pub handoff: HandoffId,
    /// Where they go at the receiver.
    pub block: BlockRef,
    /// Which bytes of which block; `part.len == payload.len()`.
    pub part: BlockPart,
    /// The bytes.
    pub payload: Bytes,
}

impl Link {
    /// A link without credit yet, and what its carrier needs.
    pub(crate) fn new(peer: WorkerRef) -> (Arc<Self>, Carrier) {
        let credit = Arc::new(Semaphore::new(0));
        let (queue, receiver) = mpsc::unbounded_channel();
        let carrier = Carrier {
            credit: Arc::clone(&credit),
            queue: receiver,
        };
        let link = Self {
            peer,
            credit,
            queue,
        };
        (Arc::new(link), carrier)
    }

    /// To whom.
    pub fn peer(&self) -> WorkerRef {
        self.peer
    }

    /// Whether the link broke; what is sent now goes nowhere.
    pub fn is_broken(&self) -> bool {
        self.queue.is_closed()
    }

    /// Takes credit for `bytes` of payload; `None` until the receiver has granted enough, which a
    /// `LinkEvent::Granted` tells.
    pub fn reserve(self: &Arc<Self>, bytes: u32) -> Option<Permit> {
        let credit = Arc::clone(&self.credit);
        let credit = credit.try_acquire_many_owned(bytes).ok()?;
        Some(Permit {
            link: Arc::clone(self),
            credit,
        })
    }

    /// Sends a packet that is not a frame.
    ///
    /// # Errors
    /// `Broken` if the link is.
    pub fn send(&self, packet: Packet) -> Result<(), LinkDown> {
        assert!(
            !matches!(packet, Packet::Frame { .. }),
            "frames are sent with a permit"
        );
        self.enqueue(packet, Bytes::new())
    }

    fn enqueue(&self, packet: Packet, payload: Bytes) -> Result<(), LinkDown> {
        let parcel = Parcel { packet, payload };
        let sent = self.queue.send(parcel);
        sent.map_err(|_| LinkDown::Broken(self.peer))
    }
}

impl Permit {
    /// Sends a frame and says what its checksum is. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    pub fn send(&mut self, frame: Frame) -> Result<u64, LinkDown> {
        let Frame {
            handoff,
            block,
            part,
            payload,
        } = frame;
        let bytes = payload.len();
        assert_eq!(bytes, part.len as usize, "a frame's part measures it");
        let spent = self.credit.split(bytes);
        spent
            .expect("a permit covers the frames sent with it")
            .forget();
        let checksum = crate::checksum(&payload);
        let packet = Packet::Frame {
            handoff,
            block,
            part,
            checksum,
        };
        self.link.enqueue(packet, payload)?;
        Ok(checksum)
    }
}
