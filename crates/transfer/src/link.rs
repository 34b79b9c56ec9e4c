//! The sending end of a link, over any transport.
//!
//! Owns: the credit that the receiver granted, and the queue of outbound messages. Never: waits or
//! touches a socket; the carrying task does.
//! Invariant: no payload byte is queued that the receiver did not grant; credit that is not used is
//! returned.
//!
//! Credit is reserved before a block is even read ([`Link::reserve`]), so blocks that wait for
//! credit are in no queue, and a seal or a loss report is not delayed by them. The block is then
//! read directly into the memory that carries it ([`SendPermit::buffer`]).

use crate::buffer::{BufferPool, PooledBuffer};
use crate::config::LinkDown;
use crate::grant::{GrantIssuer, WriteGrant};
use crate::pools::PeerPool;
use crate::transports::nixl::RdmaWriter;
use crate::transports::shm::{SenderRing, SenderSlot, copy_past_caches};
use cleave_domain::{BlockRef, HandoffId, WorkerRef};
use cleave_kv::{BlockPart, Checksum, Packet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

/// Size of the pieces that are copied and checksummed in turns: small enough to stay in the cache
/// of one core for the second pass, large enough for hardware prefetch while another core copies
/// too. Measured over a whole link: 11 to 12 GB/s at this size, 7 GB/s at 4 KiB.
const COPY_CHUNK_BYTES: usize = 64 << 10;

/// The sending end of a link to one incarnation of a worker. Everything sent arrives whole, in any
/// order, or the link is lost; then it is unknown which messages arrived.
#[derive(Debug)]
pub struct Link {
    peer: WorkerRef,
    credit: Arc<SendCredit>,
    /// `None` if the fleet uses no write grants.
    grants: Option<GrantIssuer>,
    /// Bounded in practice: frames by credit, and a few packets for each hand-off.
    queue: mpsc::UnboundedSender<QueuedMessage>,
}

/// The bytes that the receiver granted, and the memory for the payloads.
#[derive(Debug)]
pub(crate) struct SendCredit {
    semaphore: Arc<Semaphore>,
    store: OnceLock<PayloadStore>,
}

/// The memory for outbound payloads.
#[derive(Debug)]
pub(crate) enum PayloadStore {
    Buffers(BufferPool),
    Ring(Arc<SenderRing>, SlotDelivery),
    /// The peer's pool itself; `frame_bytes` is the receiver's limit.
    Pool {
        pool: Arc<dyn PeerPool>,
        frame_bytes: u32,
    },
}

/// How the bytes of a slot reach the receiver.
#[derive(Clone, Debug)]
pub(crate) enum SlotDelivery {
    /// Both ends map the slot.
    Mapped,
    /// A network card writes the slot into the receiver's slot of the same number.
    RdmaWrite(Arc<RdmaWriter>),
}

/// The bytes of an outbound frame.
#[derive(Debug)]
pub(crate) enum OutboundPayload {
    Buffer(PooledBuffer),
    Slot(SenderSlot),
}

/// A packet and, for a frame, its bytes, unless they are already in the peer's pool.
#[derive(Debug)]
pub(crate) struct QueuedMessage {
    pub(crate) packet: Packet,
    pub(crate) payload: Option<OutboundPayload>,
    /// The write grant of its hand-off, kept here because the hand-off may end before this message
    /// is sent.
    pub(crate) grant: Option<WriteGrant>,
}

/// The part of a link that its carrying task owns.
#[derive(Debug)]
pub(crate) struct LinkCarrier {
    pub(crate) credit: Arc<SendCredit>,
    pub(crate) queue: mpsc::UnboundedReceiver<QueuedMessage>,
}

/// Credit for some payload bytes of one hand-off on one link. Dropping it returns the unused
/// credit.
#[derive(Debug)]
pub struct SendPermit {
    link: Arc<Link>,
    grant: Option<WriteGrant>,
    // Dropped before the credit, so that the slot is free when the credit is returned.
    payload: Option<OutboundPayload>,
    credit: OwnedSemaphorePermit,
}

/// Memory for the bytes of one frame, and the credit for them. Dropping it returns the credit.
#[derive(Debug)]
pub struct FrameBuffer {
    // Dropped before the credit, as in `SendPermit`.
    payload: OutboundPayload,
    credit: OwnedSemaphorePermit,
    link: Arc<Link>,
    grant: Option<WriteGrant>,
}

/// The description of an outbound frame. The permit's buffer holds its `part.len` bytes.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// The hand-off that the block belongs to.
    pub handoff: HandoffId,
    /// The block of the receiver's pool.
    pub block: BlockRef,
    /// The byte range of the block.
    pub part: BlockPart,
}

impl Link {
    /// A link without credit yet, and the part for its carrying task.
    pub(crate) fn new(peer: WorkerRef, passes: Option<GrantIssuer>) -> (Arc<Self>, LinkCarrier) {
        let credit = Arc::new(SendCredit {
            semaphore: Arc::new(Semaphore::new(0)),
            store: OnceLock::new(),
        });
        let (queue, receiver) = mpsc::unbounded_channel();
        let carrier = LinkCarrier {
            credit: Arc::clone(&credit),
            queue: receiver,
        };
        let link = Self {
            peer,
            credit,
            grants: passes,
            queue,
        };
        (Arc::new(link), carrier)
    }

    /// The worker at the receiving end.
    pub fn peer(&self) -> WorkerRef {
        self.peer
    }

    /// Whether the link broke; messages sent now are lost.
    pub fn is_broken(&self) -> bool {
        self.queue.is_closed()
    }

    /// Takes credit for `bytes` of payload of a hand-off; `None` until the receiver has granted
    /// enough, which `LinkEvent::CreditGranted` reports. The hand-off may end before the bytes are
    /// sent.
    pub fn reserve(self: &Arc<Self>, handoff: HandoffId, bytes: u32) -> Option<SendPermit> {
        let cost = self.credit.store.get()?.cost(bytes);
        let semaphore = Arc::clone(&self.credit.semaphore);
        Some(SendPermit {
            link: Arc::clone(self),
            grant: self.grant_for(handoff),
            payload: None,
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
        let grant = match &packet {
            Packet::Seal(seal) => self.grant_for(seal.handoff),
            _ => None,
        };
        self.enqueue(QueuedMessage {
            packet,
            payload: None,
            grant,
        })
    }

    fn grant_for(&self, handoff: HandoffId) -> Option<WriteGrant> {
        self.grants.as_ref()?.stored(handoff)
    }

    fn enqueue(&self, message: QueuedMessage) -> Result<(), LinkDown> {
        let sent = self.queue.send(message);
        sent.map_err(|_| LinkDown::Broken(self.peer))
    }
}

impl SendCredit {
    /// Opens the credit once the link is established: payloads have memory from now on.
    pub(crate) fn open(&self, store: PayloadStore, window: u32) {
        let first = self.store.set(store).is_ok();
        assert!(first, "the credit of a link is opened once");
        self.semaphore.add_permits(window as usize);
    }

    /// Returns granted bytes; `false` if the receiver returns more than it was sent.
    pub(crate) fn grant(&self, bytes: u64, window: u32) -> bool {
        let free = self.semaphore.available_permits() as u64;
        if matches!(self.store.get(), Some(PayloadStore::Ring(..))) {
            return false;
        }
        if free.saturating_add(bytes) > u64::from(window) {
            return false;
        }
        let bytes = usize::try_from(bytes).expect("bounded by a u32 window");
        self.semaphore.add_permits(bytes);
        true
    }

    /// As [`PayloadStore::wait_until_unread`], for the link's memory.
    pub(crate) async fn wait_until_unread(&self, slots: &[u32]) {
        if let Some(store) = self.store.get() {
            store.wait_until_unread(slots).await;
        }
    }

    /// Returns slots; `false` if one was not lent.
    pub(crate) fn grant_slots(&self, slots: &[u32]) -> bool {
        let Some(PayloadStore::Ring(ring, _)) = self.store.get() else {
            return false;
        };
        // The slot is freed before its credit is returned, so that a holder of credit always finds
        // a free slot.
        if !slots.iter().all(|slot| ring.return_slot(*slot)) {
            return false;
        }
        let bytes = slots.len() * ring.shape().slot_bytes as usize;
        self.semaphore.add_permits(bytes);
        true
    }
}

impl PayloadStore {
    /// The RDMA writer of slots; `None` where slots are mapped or not used.
    pub(crate) fn writer(&self) -> Option<Arc<RdmaWriter>> {
        match self {
            Self::Ring(_, SlotDelivery::RdmaWrite(writer)) => Some(Arc::clone(writer)),
            Self::Ring(_, SlotDelivery::Mapped) | Self::Buffers(_) | Self::Pool { .. } => None,
        }
    }

    /// Returns when these slots, which the receiver has released, are no longer read by the network
    /// card either.
    pub(crate) async fn wait_until_unread(&self, slots: &[u32]) {
        if let Some(writer) = self.writer() {
            writer.wait_until_unread(slots).await;
        }
    }

    /// The longest frame of this memory.
    fn frame_bytes_max(&self) -> u32 {
        match self {
            Self::Buffers(buffers) => buffers.buffer_bytes(),
            Self::Ring(ring, _) => ring.shape().slot_bytes,
            Self::Pool { frame_bytes, .. } => *frame_bytes,
        }
    }

    /// Credit that one frame of `bytes` takes: a slot counts whole.
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

    fn take_payload(&self, bytes: u32) -> OutboundPayload {
        match self {
            Self::Buffers(buffers) => OutboundPayload::Buffer(buffers.take(bytes)),
            Self::Ring(ring, _) => OutboundPayload::Slot(ring.take(bytes)),
            Self::Pool { .. } => panic!("frames for an open peer pool have no bytes on the link"),
        }
    }
}

impl SendPermit {
    fn store(&self) -> &PayloadStore {
        let store = self.link.credit.store.get();
        store.expect("permits exist only for established links")
    }

    /// The longest frame that the link carries; a longer block is cut into several.
    pub fn frame_bytes_max(&self) -> u32 {
        self.store().frame_bytes_max()
    }

    /// The peer's pool, if the sender writes frames directly into its blocks and then reports them;
    /// `None` if their bytes travel on the link.
    pub fn peer_pool(&self) -> Option<&Arc<dyn PeerPool>> {
        match self.store() {
            PayloadStore::Pool { pool, .. } => Some(pool),
            PayloadStore::Buffers(_) | PayloadStore::Ring(..) => None,
        }
    }

    /// Whether the link broke; messages sent now are lost.
    pub fn is_broken(&self) -> bool {
        self.link.is_broken()
    }

    /// Reports to the peer that the bytes of a frame are in its block. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    ///
    /// # Panics
    /// If the bytes travel, or the permit does not cover them.
    pub fn send_written(&mut self, frame: Frame, checksum: u64) -> Result<(), LinkDown> {
        assert!(
            self.peer_pool().is_some(),
            "only frames for an open peer pool are announced without bytes"
        );
        let spent = self.credit.split(frame.part.len as usize);
        spent
            .expect("a permit covers the frames announced with it")
            .forget();
        self.link.enqueue(QueuedMessage {
            packet: frame.packet(checksum),
            payload: None,
            grant: self.grant,
        })
    }

    /// Memory for all bytes of one frame, `(bytes)`, with arbitrary contents. Several may be open
    /// at once, and they may be sent in any order.
    ///
    /// # Panics
    /// As [`SendPermit::buffer`].
    pub fn frame_buffer(&mut self, bytes: u32) -> FrameBuffer {
        let cost = self.store().frame_cost(bytes as usize);
        let credit = self.credit.split(cost);
        FrameBuffer {
            payload: self.store().take_payload(bytes),
            credit: credit.expect("a permit covers the frames sent with it"),
            link: Arc::clone(&self.link),
            grant: self.grant,
        }
    }

    /// Memory for all bytes of the next frame, `(bytes)`, with arbitrary contents.
    ///
    /// # Panics
    /// If `bytes` is more than [`SendPermit::frame_bytes_max`] or than the permit still covers.
    pub fn buffer(&mut self, bytes: u32) -> &mut [u8] {
        let cost = self.store().frame_cost(bytes as usize);
        let covered = self.credit.num_permits();
        assert!(cost <= covered, "a permit covers the frames sent with it");
        // A buffer that was requested and not sent is returned first.
        self.payload = None;
        let payload = self.store().take_payload(bytes);
        self.payload.insert(payload)
    }

    /// Sends `[part.len]` bytes from host memory: as [`SendPermit::buffer`] and
    /// [`SendPermit::send`], in one pass and with stores that bypass the caches, because the task
    /// that sends them runs on another core.
    ///
    /// # Errors
    /// `Broken` if the link is.
    pub fn send_copy(&mut self, frame: Frame, bytes: &[u8]) -> Result<u64, LinkDown> {
        let buffer = self.buffer(u32::try_from(bytes.len()).expect("at most a frame"));
        let mut checksum = Checksum::default();
        for (from, to) in bytes
            .chunks(COPY_CHUNK_BYTES)
            .zip(buffer.chunks_mut(COPY_CHUNK_BYTES))
        {
            // The checksum runs first, so that the copy finds the bytes in the cache.
            checksum.add(from);
            copy_past_caches(from, to);
        }
        self.enqueue_frame(frame, checksum.value())
    }

    /// Sends the bytes in the buffer and returns their checksum. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    ///
    /// # Panics
    /// If no buffer was requested, or one of another length than the frame's part.
    pub fn send(&mut self, frame: Frame) -> Result<u64, LinkDown> {
        let payload = self.payload.as_deref();
        let checksum = crate::checksum(payload.expect("a frame's bytes come first"));
        self.enqueue_frame(frame, checksum)
    }

    fn enqueue_frame(&mut self, frame: Frame, checksum: u64) -> Result<u64, LinkDown> {
        let payload = self.payload.take().expect("a frame's bytes come first");
        let len = payload.len();
        assert_eq!(len, frame.part.len as usize, "a part measures its bytes");
        let spent = self.credit.split(self.store().frame_cost(len));
        spent.expect("checked when the buffer was given").forget();
        self.link.enqueue(QueuedMessage {
            packet: frame.packet(checksum),
            payload: Some(payload),
            grant: self.grant,
        })?;
        Ok(checksum)
    }
}

impl FrameBuffer {
    /// Sends the bytes, whose checksum is `checksum`. The credit is spent.
    ///
    /// # Errors
    /// `Broken` if the link is.
    ///
    /// # Panics
    /// If the length of the part differs.
    pub fn send(self, frame: Frame, checksum: u64) -> Result<(), LinkDown> {
        let Self {
            payload,
            credit,
            link,
            grant,
        } = self;
        let (len, part) = (payload.len(), frame.part.len as usize);
        assert_eq!(len, part, "a part measures its bytes");
        credit.forget();
        link.enqueue(QueuedMessage {
            packet: frame.packet(checksum),
            payload: Some(payload),
            grant,
        })
    }
}

impl Deref for FrameBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.payload
    }
}

impl DerefMut for FrameBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.payload
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

impl Deref for OutboundPayload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Slot(slot) => slot,
        }
    }
}

impl DerefMut for OutboundPayload {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Buffer(buffer) => buffer,
            Self::Slot(slot) => slot,
        }
    }
}
