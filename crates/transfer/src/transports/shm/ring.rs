//! Rings of payload slots: one that two processes of one host both map; or one in each process,
//! where the network card of the sender writes its slots into the receiver's ring (`nixl`).
//!
//! Owns: the memory and its mapping, the owner of each slot, and the passing of the descriptor. The
//! receiver creates the memory, so a peer occupies at most what it was granted; the sender fills
//! slots in place; the head on the socket names the contents of a slot.
//!
//! Never: reads or writes outside a slot; causes a SIGBUS: the memory is allocated before it is
//! used and sealed against shrinking before it is passed on, and the sender maps only sealed
//! memory.
//!
//! Trust: the peer runs under the same user (`shm` checks this) and is meant to be this program.
//! The checksum finds a defect that writes into a slot before it is verified (`payload` states
//! when, and what a malicious peer could do); the credit account finds a slot that is sent twice.
//!
//! Invariant: a slot is written by the holder of its [`SenderSlot`] and read by the holder of its
//! [`SlotView`], never by both at once; the memory is unmapped when link, slots and views are
//! dropped.

#![allow(unsafe_code)]

use parking_lot::{Mutex, MutexGuard};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// The alignment of slots, so that two slots never share a page.
const PAGE_BYTES: u64 = 4096;
/// The size of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;
/// Without the seal against shrinking, the memory could shrink under a mapping, and reading it
/// would kill the reader.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The shape of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingShape {
    pub(crate) slot_bytes: u32,
    pub(crate) slots_count: u32,
}

/// The end of a ring at the receiver, which reads.
#[derive(Clone, Debug)]
pub(crate) struct ReceiverRing {
    map: Arc<RingMapping>,
    shape: RingShape,
}

/// The bytes of a slot at the receiver.
#[derive(Debug)]
pub(crate) struct SlotView {
    map: Arc<RingMapping>,
    start: usize,
    len: usize,
}

/// The end of a ring at the sender, which writes.
#[derive(Debug)]
pub(crate) struct SenderRing {
    map: RingMapping,
    shape: RingShape,
    ledger: Mutex<SlotLedger>,
}

#[derive(Debug)]
struct SlotLedger {
    /// The slot returned last is used next: it is still in the processor's cache.
    free: Vec<u32>,
    owners: Vec<SlotOwner>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotOwner {
    Free,
    /// The sender fills it, or has queued it.
    Sender,
    Receiver,
}

/// A slot that is being filled. Dropping it frees the slot, unless it was lent.
#[derive(Debug)]
pub(crate) struct SenderSlot {
    ring: Arc<SenderRing>,
    slot: u32,
    len: usize,
}

/// The address range of mapped memory; nothing is read or written through it here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedArea {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl SlotLedger {
    fn of(shape: RingShape) -> Self {
        Self {
            free: (0..shape.slots_count).rev().collect(),
            owners: vec![SlotOwner::Free; shape.slots_count as usize],
        }
    }
}

impl RingShape {
    fn stride(self) -> u64 {
        u64::from(self.slot_bytes).next_multiple_of(PAGE_BYTES)
    }

    /// The memory of a ring; both factors have 32 bits, or one more.
    pub(crate) fn bytes(self) -> u64 {
        self.stride() * u64::from(self.slots_count)
    }

    /// The memory of a ring, if it can be mapped.
    fn len(self) -> io::Result<usize> {
        let too_long = |_| io::Error::other("the ring is longer than memory can be");
        usize::try_from(self.bytes()).map_err(too_long)
    }

    /// The offset of a slot in a mapped ring.
    pub(crate) fn start(self, slot: u32) -> usize {
        usize::try_from(self.stride() * u64::from(slot)).expect("inside a mapping")
    }

    /// [`Self::window`] as a `u32`, for a ring whose size was derived from credit.
    pub(crate) fn credit(self) -> u32 {
        u32::try_from(self.window()).unwrap_or(u32::MAX)
    }

    /// The credit that the whole ring stands for.
    pub(crate) fn window(self) -> u64 {
        u64::from(self.slot_bytes) * u64::from(self.slots_count)
    }
}

// === impl Mirror ===

impl ReceiverRing {
    /// Creates a ring; the descriptor is for the sender.
    pub(crate) fn create(shape: RingShape) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("cleave-ring", flags)?;
        // Allocates now, so that missing memory is an error here and no signal later.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, shape.bytes())?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)?;
        let map = RingMapping::new(fd.as_fd(), shape.len()?, ProtFlags::READ)?;
        let map = Arc::new(map);
        Ok((Self { map, shape }, fd))
    }

    /// Creates a ring that no other process maps, for a network card to write to.
    pub(crate) fn private(shape: RingShape) -> io::Result<Self> {
        let map = Arc::new(RingMapping::private(shape.len()?)?);
        Ok(Self { map, shape })
    }

    /// The address range of the whole ring, for a network card.
    pub(crate) fn area(&self) -> MappedArea {
        self.map.area()
    }

    /// The size of a slot, which is the longest frame.
    pub(crate) fn slot_bytes(&self) -> u32 {
        self.shape.slot_bytes
    }

    /// The first `len` bytes of a slot that the credit account holds.
    pub(crate) fn view(&self, slot: u32, len: u32) -> Option<SlotView> {
        let inside = slot < self.shape.slots_count && len <= self.shape.slot_bytes;
        inside.then(|| SlotView {
            map: Arc::clone(&self.map),
            start: self.shape.start(slot),
            len: len as usize,
        })
    }
}

impl Deref for SlotView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `view` checked that the range is inside the mapping, which this keeps alive and
        // whose memory cannot shrink. The sender writes to a slot only while it is not lent, and it
        // is lent until the hold that goes with this view is dropped.
        unsafe { std::slice::from_raw_parts(self.map.start.as_ptr().add(self.start), self.len) }
    }
}

// === impl Ring ===

impl SenderRing {
    /// Maps a ring that a receiver created.
    pub(crate) fn open(fd: &OwnedFd, shape: RingShape) -> io::Result<Arc<Self>> {
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::other("the peer's ring is not sealed"));
        }
        let size = rustix::fs::fstat(fd)?.st_size;
        if !u64::try_from(size).is_ok_and(|size| size >= shape.bytes()) {
            return Err(io::Error::other("the peer's ring is shorter than it said"));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        Ok(Arc::new(Self {
            map: RingMapping::new(fd.as_fd(), shape.len()?, protection)?,
            shape,
            ledger: Mutex::new(SlotLedger::of(shape)),
        }))
    }

    /// A ring that no other process maps, for a network card to read from.
    pub(crate) fn private(shape: RingShape) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            map: RingMapping::private(shape.len()?)?,
            shape,
            ledger: Mutex::new(SlotLedger::of(shape)),
        }))
    }

    /// The address range of the whole ring, for a network card.
    pub(crate) fn area(&self) -> MappedArea {
        self.map.area()
    }

    pub(crate) fn shape(&self) -> RingShape {
        self.shape
    }

    /// Takes a free slot, for `len` bytes. A holder of credit for a slot always finds one.
    pub(crate) fn take(self: &Arc<Self>, len: u32) -> SenderSlot {
        assert!(len <= self.shape.slot_bytes, "a frame fits its slot");
        let mut ledger = self.lock();
        let slot = ledger.free.pop().expect("credit covers a slot");
        ledger.owners[slot as usize] = SlotOwner::Sender;
        SenderSlot {
            ring: Arc::clone(self),
            slot,
            len: len as usize,
        }
    }

    /// Frees a slot that the receiver has returned; `false` if it was not lent.
    pub(crate) fn return_slot(&self, slot: u32) -> bool {
        let mut ledger = self.lock();
        let lent = ledger.owners.get(slot as usize) == Some(&SlotOwner::Receiver);
        if lent {
            ledger.owners[slot as usize] = SlotOwner::Free;
            ledger.free.push(slot);
        }
        lent
    }

    fn lock(&self) -> MutexGuard<'_, SlotLedger> {
        self.ledger.lock()
    }
}

impl SenderSlot {
    /// Passes the slot to the receiver; called before the head that names it is sent.
    pub(crate) fn lend_to_receiver(self) -> u32 {
        self.ring.lock().owners[self.slot as usize] = SlotOwner::Receiver;
        self.slot
    }
}

impl Drop for SenderSlot {
    fn drop(&mut self) {
        let mut ledger = self.ring.lock();
        let owner = &mut ledger.owners[self.slot as usize];
        if *owner == SlotOwner::Sender {
            *owner = SlotOwner::Free;
            ledger.free.push(self.slot);
        }
    }
}

impl Deref for SenderSlot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.ring.shape.start(self.slot);
        // SAFETY: the slot's number and `len` were checked by `take`; the ring keeps the mapping,
        // whose memory cannot shrink. This slot has one owner, and the receiver reads it only once
        // it was lent, which consumes this.
        unsafe { std::slice::from_raw_parts(self.ring.map.start.as_ptr().add(start), self.len) }
    }
}

impl DerefMut for SenderSlot {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.ring.shape.start(self.slot);
        // SAFETY: as for `deref`; `&mut self` is the only way to this slot in this process, and the
        // mapping is writable.
        unsafe { std::slice::from_raw_parts_mut(self.ring.map.start.as_ptr().add(start), self.len) }
    }
}

// === copies between cores ===

/// Copies into memory that another core has read last and reads next. Ordinary stores would first
/// fetch each line from that core's cache, which costs three times the copy itself; these stores
/// bypass the caches.
pub(crate) fn copy_past_caches(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "as many bytes as there is room for");
    #[cfg(target_arch = "x86_64")]
    {
        let (head, lines, tail) = whole_lines(to);
        let (from_head, from) = from.split_at(head.len());
        let (from_lines, from_tail) = from.split_at(lines.len());
        head.copy_from_slice(from_head);
        tail.copy_from_slice(from_tail);
        copy_lines(from_lines, lines);
    }
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// Splits the bytes into the part before the first cache line, whole cache lines, and the rest.
#[cfg(target_arch = "x86_64")]
fn whole_lines(bytes: &mut [u8]) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let head_len = bytes.as_ptr().align_offset(LINE_BYTES).min(bytes.len());
    let (head, rest) = bytes.split_at_mut(head_len);
    let (lines, tail) = rest.split_at_mut(rest.len() / LINE_BYTES * LINE_BYTES);
    (head, lines, tail)
}

#[cfg(target_arch = "x86_64")]
fn copy_lines(from: &[u8], to: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    if to.is_empty() {
        return; // The bytes are too short to contain a whole line.
    }
    assert_eq!(from.len(), to.len(), "cut alike");
    assert!(to.as_ptr().addr().is_multiple_of(LINE_BYTES) && to.len().is_multiple_of(LINE_BYTES));
    // SAFETY: both are of one length, a multiple of a line, which four 16-byte accesses fill; `to`
    // is aligned to lines, as the stores demand. SSE2 is part of x86_64. The fence makes the bytes
    // visible before any later message that names them.
    unsafe {
        for at in (0..to.len()).step_by(LINE_BYTES) {
            let from: *const __m128i = from.as_ptr().add(at).cast();
            let to: *mut __m128i = to.as_mut_ptr().add(at).cast();
            let line: [_; 4] = std::array::from_fn(|part| _mm_loadu_si128(from.add(part)));
            for (part, bytes) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(part), bytes);
            }
        }
        _mm_sfence();
    }
}

// === impl Map ===

/// A shared mapping; unmapped when dropped.
#[derive(Debug)]
struct RingMapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory like any other: it belongs to the process, not to a thread, and the
// slots in it are handed out under a lock, to one owner each.
unsafe impl Send for RingMapping {}
// SAFETY: as above; nothing is written through a shared `RingMapping` but by the owner of a slot.
unsafe impl Sync for RingMapping {}

impl RingMapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // Populated at once; otherwise the first blocks would take the page faults.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses where; nothing of this process is mapped over.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
        let start = NonNull::new(start?.cast()).expect("the kernel maps nothing at zero");
        Ok(Self { start, len })
    }

    /// A mapping private to this process.
    fn private(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: the kernel chooses where; nothing of this process is mapped over.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
        let start = NonNull::new(start?.cast()).expect("the kernel maps nothing at zero");
        Ok(Self { start, len })
    }

    fn area(&self) -> MappedArea {
        MappedArea {
            // The card, and the library that copies in its place, use this address.
            start: self.start.as_ptr().expose_provenance(),
            len: self.len,
        }
    }
}

impl Drop for RingMapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are those of the mapping, and no slice of it outlives this:
        // each borrows from an owner that keeps the map. Failing, it would only stay mapped.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

// === descriptors over a socket ===

/// Sends a descriptor with one byte.
pub(crate) fn send_descriptor(socket: impl AsFd, fd: &OwnedFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    let fits = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    assert!(fits, "there is space for one descriptor");
    let byte = [IoSlice::new(&[0])];
    rustix::net::sendmsg(socket, &byte, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives what [`send_descriptor`] sent.
pub(crate) fn receive_descriptor(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    descriptor.ok_or_else(|| io::Error::other("the peer sent no descriptor of its ring"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: RingShape = RingShape {
        slot_bytes: 100,
        slots_count: 3,
    };

    #[test]
    fn bytes_in_a_slot_are_seen_at_the_other_end_only_there() {
        let (mirror, fd) = ReceiverRing::create(SHAPE).unwrap();
        let ring = SenderRing::open(&fd, SHAPE).unwrap();
        let mut slots: Vec<_> = (0..3).map(|_| ring.take(100)).collect();
        for (value, slot) in slots.iter_mut().enumerate() {
            slot.fill(value as u8 + 1);
        }
        for (value, slot) in slots.into_iter().enumerate() {
            let number = slot.lend_to_receiver();
            let view = mirror.view(number, 100).unwrap();
            assert!(view.iter().all(|byte| *byte == value as u8 + 1));
        }
        assert!(mirror.view(3, 1).is_none());
        assert!(mirror.view(0, 101).is_none());
    }

    #[test]
    fn a_copy_past_the_caches_is_exact_at_any_alignment() {
        let from: Vec<u8> = (0..1000).map(|index| (index * 7) as u8).collect();
        for (start, len) in [(0, 0), (3, 1), (60, 10), (1, 64), (0, 128), (7, 900)] {
            let mut to = vec![0; 1000];
            copy_past_caches(&from[start..start + len], &mut to[start..start + len]);
            assert_eq!(to[start..start + len], from[start..start + len]);
            let outside = to[..start].iter().chain(&to[start + len..]);
            assert!(outside.into_iter().all(|byte| *byte == 0), "{start} {len}");
        }
    }

    // Lesson: 2.
    #[test]
    fn a_slot_is_free_only_after_its_owner_returns_it() {
        let (_mirror, fd) = ReceiverRing::create(SHAPE).unwrap();
        let ring = SenderRing::open(&fd, SHAPE).unwrap();
        let unsent = ring.take(1);
        assert!(!ring.return_slot(unsent.slot), "was never lent");
        drop(unsent);
        let lent = ring.take(1).lend_to_receiver();
        assert_eq!(ring.lock().free.len(), 2, "the receiver has one");
        assert!(ring.return_slot(lent));
        assert!(!ring.return_slot(lent), "given back once");
        assert!(!ring.return_slot(9), "no such slot");
        assert_eq!(ring.lock().free.len(), 3);
    }

    #[test]
    fn an_unsealed_or_short_ring_is_not_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("test", flags).unwrap();
        let error = SenderRing::open(&unsealed, SHAPE).unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
        let (_mirror, fd) = ReceiverRing::create(SHAPE).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "sealed");
        let longer = RingShape {
            slots_count: 4,
            ..SHAPE
        };
        let error = SenderRing::open(&fd, longer).unwrap_err();
        assert!(error.to_string().contains("shorter"), "{error}");
    }
}
