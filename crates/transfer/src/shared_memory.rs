//! A ring of payload slots that two processes of one host have mapped; or of which each has its own, and the sender's
//! network card writes its slots into the receiver's (`nixl`).
//!
//! Owns: the memory and its mapping, which slot is whose, and the passing of its descriptor. The
//! receiver makes the memory, so what a peer can take of it is what it was granted; the sender fills
//! slots in place; which slot holds what is said on the socket beside it.
//!
//! Never: reads or writes outside a slot; is touched by a SIGBUS: the memory is set aside before it
//! is used and sealed against shrinking before it is given away, and the sender maps nothing that is
//! not.
//!
//! What is trusted: the peer runs under the same user (`host` checks it) and is meant to be this
//! program. A defect that writes into a slot before it is verified is found by the checksum (`payload`
//! says when, and what a peer that means harm could do), and one that sends a slot twice by the account.
//!
//! Invariant: a slot is written by whoever holds its [`Slot`], read by whoever holds its [`SlotView`],
//! and never both at once; the memory is unmapped when link, slots and views are gone.

#![allow(unsafe_code)]

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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a slot is rounded up to, so that none shares a page with another.
const PAGE_BYTES: u64 = 4096;
/// Of a processor's cache.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;
/// Without this one the memory could shrink under a mapping, and reading it would kill the reader.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// How a ring is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) slot_bytes: u32,
    pub(crate) slots_count: u32,
}

/// The receiver's end of a ring, for reading.
#[derive(Clone, Debug)]
pub(crate) struct Mirror {
    map: Arc<Map>,
    shape: Shape,
}

/// Bytes of a slot at the receiver.
#[derive(Debug)]
pub(crate) struct SlotView {
    map: Arc<Map>,
    start: usize,
    len: usize,
}

/// The sender's end of a ring, for writing.
#[derive(Debug)]
pub(crate) struct Ring {
    map: Map,
    shape: Shape,
    book: Mutex<Book>,
}

#[derive(Debug)]
struct Book {
    /// The one that came back last is used next: it is still in the processor's cache.
    free: Vec<u32>,
    owners: Vec<Owner>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Free,
    /// It is being filled, or waits to be sent.
    Here,
    Receiver,
}

/// A slot that is being filled. Dropped, it is free again, unless it was lent.
#[derive(Debug)]
pub(crate) struct Slot {
    ring: Arc<Ring>,
    slot: u32,
    len: usize,
}

/// Memory that is mapped, by its address: nothing is read or written by it here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Area {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Book {
    fn of(shape: Shape) -> Self {
        Self {
            free: (0..shape.slots_count).rev().collect(),
            owners: vec![Owner::Free; shape.slots_count as usize],
        }
    }
}

impl Shape {
    fn stride(self) -> u64 {
        u64::from(self.slot_bytes).next_multiple_of(PAGE_BYTES)
    }

    /// Memory that a ring takes; both factors are of 32 bits, or one more.
    pub(crate) fn bytes(self) -> u64 {
        self.stride() * u64::from(self.slots_count)
    }

    /// The same, where it can be mapped at all.
    fn len(self) -> io::Result<usize> {
        let too_long = |_| io::Error::other("the ring is longer than memory can be");
        usize::try_from(self.bytes()).map_err(too_long)
    }

    /// Where a slot of a ring that is mapped begins.
    pub(crate) fn start(self, slot: u32) -> usize {
        usize::try_from(self.stride() * u64::from(slot)).expect("inside a mapping")
    }

    /// The same, where it was made from credit.
    pub(crate) fn credit(self) -> u32 {
        u32::try_from(self.window()).unwrap_or(u32::MAX)
    }

    /// Credit that a whole ring stands for.
    pub(crate) fn window(self) -> u64 {
        u64::from(self.slot_bytes) * u64::from(self.slots_count)
    }
}

// === impl Mirror ===

impl Mirror {
    /// Makes a ring; the descriptor is for the sender.
    pub(crate) fn create(shape: Shape) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("cleave-ring", flags)?;
        // Memory that is short is an error now, and no signal later.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, shape.bytes())?;
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)?;
        let map = Map::new(fd.as_fd(), shape.len()?, ProtFlags::READ)?;
        let map = Arc::new(map);
        Ok((Self { map, shape }, fd))
    }

    /// Makes a ring that no other process maps, for a network card to write to.
    pub(crate) fn private(shape: Shape) -> io::Result<Self> {
        let map = Arc::new(Map::private(shape.len()?)?);
        Ok(Self { map, shape })
    }

    /// The whole ring, as it is handed to a network card.
    pub(crate) fn area(&self) -> Area {
        self.map.area()
    }

    /// The longest frame.
    pub(crate) fn slot_bytes(&self) -> u32 {
        self.shape.slot_bytes
    }

    /// The first `len` bytes of a slot that the account says is held.
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

impl Ring {
    /// Maps a ring that a receiver made.
    pub(crate) fn open(fd: &OwnedFd, shape: Shape) -> io::Result<Arc<Self>> {
        if !rustix::fs::fcntl_get_seals(fd)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::other("the peer's ring is not sealed"));
        }
        let size = rustix::fs::fstat(fd)?.st_size;
        if !u64::try_from(size).is_ok_and(|size| size >= shape.bytes()) {
            return Err(io::Error::other("the peer's ring is shorter than it said"));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        Ok(Arc::new(Self {
            map: Map::new(fd.as_fd(), shape.len()?, protection)?,
            shape,
            book: Mutex::new(Book::of(shape)),
        }))
    }

    /// A ring that no other process maps, for a network card to read from.
    pub(crate) fn private(shape: Shape) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            map: Map::private(shape.len()?)?,
            shape,
            book: Mutex::new(Book::of(shape)),
        }))
    }

    /// The whole ring, as it is handed to a network card.
    pub(crate) fn area(&self) -> Area {
        self.map.area()
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// A free slot's first `len` bytes. Whoever has credit for a slot finds one.
    pub(crate) fn take(self: &Arc<Self>, len: u32) -> Slot {
        assert!(len <= self.shape.slot_bytes, "a frame fits its slot");
        let mut book = self.lock();
        let slot = book.free.pop().expect("credit covers a slot");
        book.owners[slot as usize] = Owner::Here;
        Slot {
            ring: Arc::clone(self),
            slot,
            len: len as usize,
        }
    }

    /// The receiver is done with a slot; `false` if it never had it.
    pub(crate) fn give_back(&self, slot: u32) -> bool {
        let mut book = self.lock();
        let lent = book.owners.get(slot as usize) == Some(&Owner::Receiver);
        if lent {
            book.owners[slot as usize] = Owner::Free;
            book.free.push(slot);
        }
        lent
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// From now on the receiver's; said before the receiver hears of it.
    pub(crate) fn lend(self) -> u32 {
        self.ring.lock().owners[self.slot as usize] = Owner::Receiver;
        self.slot
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut book = self.ring.lock();
        let owner = &mut book.owners[self.slot as usize];
        if *owner == Owner::Here {
            *owner = Owner::Free;
            book.free.push(self.slot);
        }
    }
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.ring.shape.start(self.slot);
        // SAFETY: the slot's number and `len` were checked by `take`; the ring keeps the mapping,
        // whose memory cannot shrink. This slot has one owner, and the receiver reads it only once
        // it was lent, which consumes this.
        unsafe { std::slice::from_raw_parts(self.ring.map.start.as_ptr().add(start), self.len) }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.ring.shape.start(self.slot);
        // SAFETY: as for `deref`; `&mut self` is the only way to this slot in this process, and the
        // mapping is writable.
        unsafe { std::slice::from_raw_parts_mut(self.ring.map.start.as_ptr().add(start), self.len) }
    }
}

// === copies between cores ===

/// Copies into memory that another core reads next and has read last. Ordinary stores would first
/// fetch each line back from that core's cache, which costs three times the copy itself; these go
/// past the caches.
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

/// What of it begins and ends with a cache line.
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
        return; // It was too short to reach the beginning of a line.
    }
    assert_eq!(from.len(), to.len(), "cut alike");
    assert!(to.as_ptr().addr().is_multiple_of(LINE_BYTES) && to.len().is_multiple_of(LINE_BYTES));
    // SAFETY: both are of one length, a multiple of a line, which four 16-byte accesses fill; `to`
    // is aligned to lines, as the stores demand. SSE2 is part of x86_64. The fence makes the bytes
    // visible before whatever is said of them afterwards.
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
struct Map {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory like any other: it belongs to the process, not to a thread, and the
// slots in it are handed out under a lock, to one owner each.
unsafe impl Send for Map {}
// SAFETY: as above; nothing is written through a shared `Map` but by the owner of a slot.
unsafe impl Sync for Map {}

impl Map {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // Populated at once: the first blocks would pay for the page faults otherwise.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the kernel chooses where; nothing of this process is mapped over.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, fd, 0) };
        let start = NonNull::new(start?.cast()).expect("the kernel maps nothing at zero");
        Ok(Self { start, len })
    }

    /// Of this process alone.
    fn private(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: the kernel chooses where; nothing of this process is mapped over.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) };
        let start = NonNull::new(start?.cast()).expect("the kernel maps nothing at zero");
        Ok(Self { start, len })
    }

    fn area(&self) -> Area {
        Area {
            // Others come by it: the card, and the library that copies in its place.
            start: self.start.as_ptr().expose_provenance(),
            len: self.len,
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are those of the mapping, and no slice of it outlives this: each
        // borrows from an owner that keeps the map. Failing, it would only stay mapped.
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

    const SHAPE: Shape = Shape {
        slot_bytes: 100,
        slots_count: 3,
    };

    #[test]
    fn what_is_put_into_a_slot_is_seen_at_the_other_end_and_nowhere_else() {
        let (mirror, fd) = Mirror::create(SHAPE).unwrap();
        let ring = Ring::open(&fd, SHAPE).unwrap();
        let mut slots: Vec<_> = (0..3).map(|_| ring.take(100)).collect();
        for (value, slot) in slots.iter_mut().enumerate() {
            slot.fill(value as u8 + 1);
        }
        for (value, slot) in slots.into_iter().enumerate() {
            let number = slot.lend();
            let view = mirror.view(number, 100).unwrap();
            assert!(view.iter().all(|byte| *byte == value as u8 + 1));
        }
        assert!(mirror.view(3, 1).is_none());
        assert!(mirror.view(0, 101).is_none());
    }

    #[test]
    fn a_copy_past_the_caches_is_a_copy_wherever_it_begins_and_ends() {
        let from: Vec<u8> = (0..1000).map(|index| (index * 7) as u8).collect();
        for (start, len) in [(0, 0), (3, 1), (60, 10), (1, 64), (0, 128), (7, 900)] {
            let mut to = vec![0; 1000];
            copy_past_caches(&from[start..start + len], &mut to[start..start + len]);
            assert_eq!(to[start..start + len], from[start..start + len]);
            let outside = to[..start].iter().chain(&to[start + len..]);
            assert!(outside.into_iter().all(|byte| *byte == 0), "{start} {len}");
        }
    }

    #[test]
    fn lesson_02_a_slot_is_free_only_when_its_last_owner_says_so() {
        let (_mirror, fd) = Mirror::create(SHAPE).unwrap();
        let ring = Ring::open(&fd, SHAPE).unwrap();
        let unsent = ring.take(1);
        assert!(!ring.give_back(unsent.slot), "was never lent");
        drop(unsent);
        let lent = ring.take(1).lend();
        assert_eq!(ring.lock().free.len(), 2, "the receiver has one");
        assert!(ring.give_back(lent));
        assert!(!ring.give_back(lent), "given back once");
        assert!(!ring.give_back(9), "no such slot");
        assert_eq!(ring.lock().free.len(), 3);
    }

    #[test]
    fn a_ring_that_could_shrink_or_is_too_short_is_not_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let unsealed = rustix::fs::memfd_create("test", flags).unwrap();
        let error = Ring::open(&unsealed, SHAPE).unwrap_err();
        assert!(error.to_string().contains("not sealed"), "{error}");
        let (_mirror, fd) = Mirror::create(SHAPE).unwrap();
        assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "sealed");
        let longer = Shape {
            slots_count: 4,
            ..SHAPE
        };
        let error = Ring::open(&fd, longer).unwrap_err();
        assert!(error.to_string().contains("shorter"), "{error}");
    }
}
