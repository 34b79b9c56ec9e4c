//! The sending end of a link, whatever carries it.
//!
//! Owns: the credit that the receiver gave, and the queue of what is to be carried. Never: waits, or
//! touches a socket: the carrying task does.
//! Invariant: no payload byte is queued that the receiver did not grant; what is not sent is credit again.
//!
//! Credit is taken before a block is even read ([`Link::reserve`]), so blocks that wait for credit
//! stand in nobody's queue: a seal or a loss sent meanwhile is behind nothing that is stuck. The
//! block is then read straight into what will carry it ([`Permit::buffer`]).

use crate::buffer::{Buffer, Buffers};
use crate::config::LinkDown;
use crate::nixl::Writer;
use crate::pass::{Pass, Passes};
use crate::pools::PeerPool;
use crate::shared_memory::{Ring, Slot, copy_past_caches};
use cleave_domain::{BlockRef, HandoffId, WorkerRef};
use cleave_kv::{BlockPart, Checksum, Packet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Bytes copied and summed in turns: few enough to be in a core's own cache for the second, many
/// enough for the processor to fetch ahead while another core does too. Measured over a whole link:
/// 11 to 12 GB/s at this size, 7 at 4 KiB.
const CACHED_BYTES: usize = 64 << 10;

/// To one worker in one of its lives. What is sent through it arrives whole, in any order, or the
/// link is lost and nobody knows what of it arrived.
#[derive(Debug)]
pub struct Link {
    peer: WorkerRef,
    credit: Arc<Credit>,
    /// None where nobody needs one.
    passes: Option<Passes>,
    /// Bounded by what it carries: frames by credit, and a few packets for each hand-off.
    queue: mpsc::UnboundedSender<Parcel>,
}

/// What the receiver granted, in bytes, and the memory that it may be used with.
#[derive(Debug)]
pub(crate) struct Credit {
    semaphore: Arc<Semaphore>,
    store: OnceLock<Store>,
}

/// Where payloads are put on their way out.
#[derive(Debug)]
pub(crate) enum Store {
    Buffers(Buffers),
    Ring(Arc<Ring>, Delivery),
    /// The peer's pool itself; frames are as long as it says.
    Pool {
        pool: Arc<dyn PeerPool>,
        frame_bytes: u32,
    },
}

/// How what is in a slot comes to the receiver.
#[derive(Clone, Debug)]
pub(crate) enum Delivery {
    /// It is there: both have mapped the slot.
    Mapped,
    /// It is written into the receiver's slot of the same number.
    Written(Arc<Writer>),
}

/// Bytes on their way out.
#[derive(Debug)]
pub(crate) enum Cargo {
    Buffer(Buffer),
    Slot(Slot),
}

/// A packet and, for a frame, its bytes, unless they are in the peer's pool already.
#[derive(Debug)]
pub(crate) struct Parcel {
    pub(crate) packet: Packet,
    pub(crate) cargo: Option<Cargo>,
    /// What lets it in: its hand-off may be over before it leaves.
    pub(crate) pass: Option<Pass>,
}

/// What the carrying task holds of a link.
#[derive(Debug)]
pub(crate) struct Carrier {
    pub(crate) credit: Arc<Credit>,
    pub(crate) queue: mpsc::UnboundedReceiver<Parcel>,
}

/// Credit for some payload bytes of one hand-off on one link. Dropped unused, it is credit again.
#[derive(Debug)]
pub struct Permit {
    link: Arc<Link>,
    pass: Option<Pass>,
    // Before the credit, so that a slot that was not sent is free when the credit is.
    cargo: Option<Cargo>,
    credit: OwnedSemaphorePermit,
}

/// Room for one frame's bytes, and the credit for them. Dropped unused, it is credit again.
#[derive(Debug)]
pub struct Room {
    // As in a permit.
    cargo: Cargo,
    credit: OwnedSemaphorePermit,
    link: Arc<Link>,
    pass: Option<Pass>,
}

/// What bytes on their way out are. `part.len` of them were put into the permit's buffer.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// The attempt.
    pub handoff: HandoffId,
    /// Where they go at the receiver.
    pub block: BlockRef,
    /// Which bytes of which block.
    pub part: BlockPart,
}

impl Link {
    /// A link without credit yet, and what its carrier needs.
    pub(crate) fn new(peer: WorkerRef, passes: Option<Passes>) -> (Arc<Self>, Carrier) {
        let credit = Arc::new(Credit {
            semaphore: Arc::new(Semaphore::new(0)),
            store: OnceLock::new(),
        });
        let (queue, receiver) = mpsc::unbounded_channel();
        let carrier = Carrier {
            credit: Arc::clone(&credit),
            queue: receiver,
        };
        let link = Self {
            peer,
            credit,
            passes,
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

    /// Takes credit for `bytes` of a hand-off's payload; `None` until the receiver has granted enough, which
    /// a `LinkEvent::Granted` tells. The hand-off may end before they are sent.
    pub fn reserve(self: &Arc<Self>, handoff: HandoffId, bytes: u32) -> Option<Permit> {
        let cost = self.credit.store.get()?.cost(bytes);
        let semaphore = Arc::clone(&self.credit.semaphore);
        Some(Permit {
            link: Arc::clone(self),
            pass: self.pass(handoff),
            cargo: None,
            credit: semaphore.try_acquire_many_owned(cost).ok()?,
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
        let pass = match &packet {
            Packet::Seal(seal) => self.pass(seal.handoff),
            _ => None,
        };
        self.enqueue(Parcel {
            packet,
            cargo: None,
            pass,
        })
    }

    fn pass(&self, handoff: HandoffId) -> Option<Pass> {
        self.passes.as_ref()?.held(handoff)
    }

    fn enqueue(&self, parcel: Parcel) -> Result<(), LinkDown> {
        let sent = self.queue.send(parcel);
        sent.map_err(|_| LinkDown::Broken(self.peer))
    }
}

impl Credit {
    /// The link stands: from now on payloads have a place.
    pub(crate) fn open(&self, store: Store, window: u32) {
        let first = self.store.set(store).is_ok();
        assert!(first, "a link is set up once");
        self.semaphore.add_permits(window as usize);
    }

    /// This many bytes were granted again; `false` if they cannot have been lent.
    pub(crate) fn grant(&self, bytes: u64, window: u32) -> bool {
        let free = self.semaphore.available_permits() as u64;
        if matches!(self.store.get(), Some(Store::Ring(..))) {
            return false;
        }
        if free.saturating_add(bytes) > u64::from(window) {
            return false;
        }
        let bytes = usize::try_from(bytes).expect("bounded by a u32 window");
        self.semaphore.add_permits(bytes);
        true
    }

    /// As [`Store::settled`].
    pub(crate) async fn settled(&self, slots: &[u32]) {
        if let Some(store) = self.store.get() {
            store.settled(slots).await;
        }
    }

    /// These slots may be written again; `false` if they were not lent.
    pub(crate) fn grant_slots(&self, slots: &[u32]) -> bool {
        let Some(Store::Ring(ring, _)) = self.store.get() else {
            return false;
        };
        // Free before there is credit for them: whoever has credit finds a slot.
        if !slots.iter().all(|slot| ring.give_back(*slot)) {
            return false;
        }
        let bytes = slots.len() * ring.shape().slot_bytes as usize;
        self.semaphore.add_permits(bytes);
        true
    }
}

impl Store {
    /// What brings slots to the receiver, if they do not get there by themselves.
    pub(crate) fn writer(&self) -> Option<Arc<Writer>> {
        match self {
            Self::Ring(_, Delivery::Written(writer)) => Some(Arc::clone(writer)),
            Self::Ring(_, Delivery::Mapped) | Self::Buffers(_) | Self::Pool { .. } => None,
        }
    }

    /// Returns when these slots, which the receiver is done with, are not read here any more either.
    pub(crate) async fn settled(&self, slots: &[u32]) {
        if let Some(writer) = self.writer() {
            writer.settled(slots).await;
        }
    }

    /// The longest frame.
    fn frame_bytes_max(&self) -> u32 {
        match self {
            Self::Buffers(buffers) => buffers.buffer_bytes(),
            Self::Ring(ring, _) => ring.shape().slot_bytes,
            Self::Pool { frame_bytes, .. } => *frame_bytes,
        }
    }

    /// Credit that one frame of `bytes` takes: a slot is taken whole.
    fn frame_cost(&self, bytes: usize) -> usize {
        match self {
            Self::Buffers(_) | Self::Pool { .. } => bytes,
            Self::Ring(ring, _) => ring.shape().slot_bytes as usize,
        }
    }

    /// Credit for `bytes` in as few frames as they fit.
    fn cost(&self, bytes: u32) -> u32 {
        match self {
            Self::Buffers(_) | Self::Pool { .. } => bytes,
            Self::Ring(ring, _) => bytes.next_multiple_of(ring.shape().slot_bytes),
        }
    }

    fn take(&self, bytes: u32) -> Cargo {
        match self {
            Self::Buffers(buffers) => Cargo::Buffer(buffers.take(bytes)),
            Self::Ring(ring, _) => Cargo::Slot(ring.take(bytes)),
            Self::Pool { .. } => panic!("where the peer's pool is open, frames have no bytes"),
        }
    }
}

impl Permit {
    fn store(&self) -> &Store {
        let store = self.link.credit.store.get();
        store.expect("a permit is given only once the link stands")
    }

    /// The longest frame that the link carries; a block is cut into as many as it takes.
    pub fn frame_bytes_max(&self) -> u32 {
        self.store().frame_bytes_max()
    }

    /// The peer's pool, where frames are written straight into its blocks and then told of; `None` where their bytes
    /// travel.
    pub fn pool(&self) -> Option<&Arc<dyn PeerPool>> {
        match self.store() {
            Store::Pool { pool, .. } => Some(pool),
            Store::Buffers(_) | Store::Ring(..) => None,
        }
    }

    /// Whether the link broke; what is sent now goes nowhere.
    pub fn is_broken(&self) -> bool {
        self.link.is_broken()
    }

    /// Tells the peer that a frame's bytes are in its block. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    ///
    /// # Panics
    /// If the bytes travel, or the permit does not cover them.
    pub fn tell(&mut self, frame: Frame, checksum: u64) -> Result<(), LinkDown> {
        assert!(self.pool().is_some(), "bytes that travel are sent");
        let spent = self.credit.split(frame.part.len as usize);
        spent.expect("a permit covers the frames told of").forget();
        self.link.enqueue(Parcel {
            packet: frame.packet(checksum),
            cargo: None,
            pass: self.pass,
        })
    }

    /// Room for one frame's bytes, all of them: `(bytes)` of whatever was there last. Several may be open at once, and
    /// they may be sent in any order.
    ///
    /// # Panics
    /// As [`Permit::buffer`].
    pub fn room(&mut self, bytes: u32) -> Room {
        let cost = self.store().frame_cost(bytes as usize);
        let credit = self.credit.split(cost);
        Room {
            cargo: self.store().take(bytes),
            credit: credit.expect("a permit covers the frames sent with it"),
            link: Arc::clone(&self.link),
            pass: self.pass,
        }
    }

    /// Where the next frame's bytes are to be put, all of them: `(bytes)` of whatever was there last.
    ///
    /// # Panics
    /// If `bytes` is more than [`Permit::frame_bytes_max`] or than the permit still covers.
    pub fn buffer(&mut self, bytes: u32) -> &mut [u8] {
        let cost = self.store().frame_cost(bytes as usize);
        let covered = self.credit.num_permits();
        assert!(cost <= covered, "a permit covers the frames sent with it");
        // The slot of a buffer that was asked for and not sent goes back first.
        self.cargo = None;
        let cargo = self.store().take(bytes);
        self.cargo.insert(cargo)
    }

    /// Sends bytes that the host can read where they are, `[part.len]`; as [`Permit::buffer`] and
    /// [`Permit::send`] would, in one pass, and past the caches: whoever takes them on from here runs
    /// on another core.
    ///
    /// # Errors
    /// `Broken` if the link is.
    pub fn copy(&mut self, frame: Frame, bytes: &[u8]) -> Result<u64, LinkDown> {
        let buffer = self.buffer(u32::try_from(bytes.len()).expect("at most a frame"));
        let mut checksum = Checksum::default();
        for (from, to) in bytes
            .chunks(CACHED_BYTES)
            .zip(buffer.chunks_mut(CACHED_BYTES))
        {
            // First, so that the copy finds the bytes in the cache.
            checksum.add(from);
            copy_past_caches(from, to);
        }
        self.dispatch(frame, checksum.value())
    }

    /// Sends what was put into the buffer, and says what its checksum is. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    ///
    /// # Panics
    /// If no buffer was asked for, or one of another length than the frame's part.
    pub fn send(&mut self, frame: Frame) -> Result<u64, LinkDown> {
        let cargo = self.cargo.as_deref();
        let checksum = crate::checksum(cargo.expect("a frame's bytes come first"));
        self.dispatch(frame, checksum)
    }

    fn dispatch(&mut self, frame: Frame, checksum: u64) -> Result<u64, LinkDown> {
        let cargo = self.cargo.take().expect("a frame's bytes come first");
        let len = cargo.len();
        assert_eq!(len, frame.part.len as usize, "a part measures its bytes");
        let spent = self.credit.split(self.store().frame_cost(len));
        spent.expect("checked when the buffer was given").forget();
        self.link.enqueue(Parcel {
            packet: frame.packet(checksum),
            cargo: Some(cargo),
            pass: self.pass,
        })?;
        Ok(checksum)
    }
}

impl Room {
    /// Sends what was put here, whose checksum that is. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    ///
    /// # Panics
    /// If the frame's part is of another length.
    pub fn send(self, frame: Frame, checksum: u64) -> Result<(), LinkDown> {
        let Self {
            cargo,
            credit,
            link,
            pass,
        } = self;
        let (len, part) = (cargo.len(), frame.part.len as usize);
        assert_eq!(len, part, "a part measures its bytes");
        credit.forget();
        link.enqueue(Parcel {
            packet: frame.packet(checksum),
            cargo: Some(cargo),
            pass,
        })
    }
}

impl Deref for Room {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.cargo
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.cargo
    }
}

impl Frame {
    fn packet(self, checksum: u64) -> Packet {
        let Self {
            handoff,
            block,
            part,
        } = self;
        Packet::Frame {
            handoff,
            block,
            part,
            checksum,
        }
    }
}

impl Deref for Cargo {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Slot(slot) => slot,
        }
    }
}

impl DerefMut for Cargo {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Slot(slot) => slot,
        }
    }
}
