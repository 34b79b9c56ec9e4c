//! Large zeroed memory, words of mapped files, and handing disjoint parts of a slice to several threads.
//!
//! Owns: the only places where bytes are seen as numbers and where a `&mut` slice is shared.
//! Never: grows; what is allocated keeps its size.
//! Invariant: memory starts zeroed and page-aligned, so any element type and any vector fits; words of a file are as
//! well aligned.

use crate::affinity;
use cleave_engine::EngineError;
use memmap2::{Mmap, MmapMut};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// Gives back to the system what the allocator keeps of memory that was freed, in any thread: reading a checkpoint's files frees
/// far more than serving will ask for.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn give_back_freed() {
    // SAFETY: takes only pages that hold nothing allocated; the allocator locks itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Other allocators give back by themselves, or not at all.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn give_back_freed() {}

/// Element types for which every bit pattern, zeroes among them, is a value.
///
/// # Safety
/// Implementors have no padding, no invalid bit pattern and an alignment of at most a page.
pub(crate) unsafe trait Plain: Copy + Default + Send + Sync + 'static {}

// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}

/// A slice in pages of its own: weights, KV pools, activations and scratch.
#[derive(Debug)]
pub(crate) struct Memory<T> {
    pages: MmapMut,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Memory<T> {
    /// `len` zeroed elements. Pages are touched when they are first written.
    ///
    /// # Errors
    /// `Device` if the system has no such memory to give.
    pub(crate) fn zeroed(len: usize) -> Result<Self, EngineError> {
        let bytes = len.checked_mul(size_of::<T>());
        let pages = bytes
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::OutOfMemory))
            .and_then(|bytes| MmapMut::map_anon(bytes.max(1)))
            .map_err(|error| {
                let size = size_of::<T>();
                EngineError::Device(format!(
                    "cannot allocate {len} elements of {size} bytes: {error}"
                ))
            })?;
        // Streaming weights through small pages spends a tenth of the time on page walks. A kernel
        // without huge pages refuses the advice, and everything still works.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        Ok(Self {
            pages,
            len,
            element: PhantomData,
        })
    }

    /// Asks that pages not touched so far lie on these memory nodes in turn; none leaves it to the system.
    pub(crate) fn spread(&mut self, nodes: &[usize]) {
        if !nodes.is_empty() {
            affinity::spread(&mut self.pages, nodes);
        }
    }
}

impl Memory<u8> {
    /// The first `len` elements of another type.
    ///
    /// # Panics
    /// If there are not so many.
    pub(crate) fn seen_as_mut<T: Plain>(&mut self, len: usize) -> &mut [T] {
        assert!(
            len * size_of::<T>() <= self.len,
            "elements of {} bytes",
            self.len
        );
        // SAFETY: page-aligned, long enough, borrowed mutably, and every bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), len) }
    }
}

impl<T: Plain> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds at least `len` elements, is page-aligned, initialised by the
        // system, and every bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the mapping is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), self.len) }
    }
}

/// Words that are only read.
#[derive(Debug)]
pub(crate) enum Words {
    /// Made here.
    Own(Memory<u32>),
    /// Where a file is mapped.
    Mapped(MappedWords),
}

impl Deref for Words {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::Own(memory) => memory,
            Self::Mapped(mapped) => mapped,
        }
    }
}

/// Words of a file, in this machine's byte order.
#[derive(Debug)]
pub(crate) struct MappedWords {
    file: Arc<Mmap>,
    /// In bytes.
    at: usize,
    len: usize,
}

impl MappedWords {
    /// Alignment of the first word, in bytes: that of the widest vector.
    const ALIGNMENT: usize = 64;

    /// # Panics
    /// If the file has no such bytes, or they begin where no vector may.
    pub(crate) fn new(file: &Arc<Mmap>, bytes: Range<usize>) -> Self {
        assert!(bytes.start <= bytes.end && bytes.end <= file.len());
        assert!(bytes.start.is_multiple_of(Self::ALIGNMENT), "{bytes:?}");
        assert!(bytes.len().is_multiple_of(size_of::<u32>()), "{bytes:?}");
        Self {
            file: Arc::clone(file),
            at: bytes.start,
            len: bytes.len() / size_of::<u32>(),
        }
    }
}

impl Deref for MappedWords {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // SAFETY: `new` looked at range and alignment, a mapping begins with a page, and every bit pattern is a `u32`.
        unsafe { std::slice::from_raw_parts(self.file.as_ptr().add(self.at).cast(), self.len) }
    }
}

/// Numbers as they lie in memory.
pub(crate) fn bytes_of<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: plain numbers have no padding, and any byte is one.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// The same, to be written.
pub(crate) fn bytes_of_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, borrowed mutably; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

/// Numbers as words.
///
/// # Panics
/// If they are no whole words, or begin where none may.
pub(crate) fn words_of<T: Plain>(numbers: &[T]) -> &[u32] {
    // SAFETY: every bit pattern is a word.
    let (before, words, after) = unsafe { numbers.align_to() };
    assert!(before.is_empty() && after.is_empty(), "whole words");
    words
}

/// The same, to be written.
///
/// # Panics
/// As [`words_of`].
pub(crate) fn words_of_mut<T: Plain>(numbers: &mut [T]) -> &mut [u32] {
    // SAFETY: every bit pattern is a word, and every word is numbers.
    let (before, words, after) = unsafe { numbers.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "whole words");
    words
}

/// A mutable slice that several threads write, each its own parts.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: `part` obliges its callers to keep the parts apart, which makes them plain `&mut` slices
// of a type that may be sent.
unsafe impl<T: Send> Send for Parts<'_, T> {}
// SAFETY: as above; the handle itself is never written.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// Gives `slice` out in parts while it is borrowed.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            borrow: PhantomData,
        }
    }

    /// Elements of all parts.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where an element is, or would be if the slice were that long.
    pub(crate) fn address(&self, index: usize) -> *const T {
        self.start.wrapping_add(index)
    }

    /// One part.
    ///
    /// # Safety
    /// Parts that are alive at the same time do not overlap.
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of {}",
            self.len
        );
        // SAFETY: within the borrowed slice, and the caller keeps parts apart.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
