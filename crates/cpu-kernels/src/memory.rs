//! Large zeroed memory, words of mapped files, and disjoint parts of a slice for several threads.
//!
//! Owns: the only casts between bytes and numbers, and the only sharing of a `&mut` slice.
//! Never: grows an allocation.
//! Invariant: memory starts zeroed and page-aligned, so that it suits any element type and any
//! vector; words of a file are aligned for any vector.

use cleave_engine::EngineError;
use memmap2::{Mmap, MmapMut, MmapRaw};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// Returns memory that the allocator holds after frees, of any thread, to the system: loading a
/// checkpoint frees far more than serving needs.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn trim_allocator() {
    // SAFETY: releases only pages without allocations; the allocator locks itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Other allocators release memory by themselves, or not at all.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn trim_allocator() {}

/// Limits the memory that the allocator holds after frees to a megabyte per arena. Otherwise glibc
/// raises the limit to twice the largest block that was freed, up to 64 MiB, and [`trim_allocator`]
/// leaves the free end of every arena but the main one as it is (mallopt(3), `M_TRIM_THRESHOLD`).
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn limit_allocator_slack() {
    const SLACK_BYTES_MAX: libc::c_int = 1 << 20;
    for limit in [libc::M_TRIM_THRESHOLD, libc::M_MMAP_THRESHOLD] {
        // SAFETY: sets a number that the allocator reads; the allocator locks itself.
        unsafe {
            libc::mallopt(limit, SLACK_BYTES_MAX);
        }
    }
}

/// Other allocators hold little memory, or have no limit to set.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn limit_allocator_slack() {}

/// Element types for which every bit pattern, all zeros included, is valid.
///
/// # Safety
/// Implementors have no padding, no invalid bit pattern and an alignment of at most a page.
pub unsafe trait PlainData: Copy + Default + Send + Sync + 'static {}

// SAFETY: plain numbers.
unsafe impl PlainData for u8 {}
// SAFETY: plain numbers.
unsafe impl PlainData for u16 {}
// SAFETY: plain numbers.
unsafe impl PlainData for u32 {}
// SAFETY: plain numbers.
unsafe impl PlainData for f32 {}

/// A slice in pages that no other slice has: weights, KV pools, activations and scratch.
#[derive(Debug)]
pub struct PageMemory<T> {
    /// Pages of this slice, or of a chunk that others have parts of.
    pages: Arc<MmapRaw>,
    /// First byte in these pages.
    at: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: PlainData> PageMemory<T> {
    /// Allocates `len` zeroed elements. The system provides pages when they are first written.
    ///
    /// # Errors
    /// `Device` if memory is short.
    pub fn zeroed(len: usize) -> Result<Self, EngineError> {
        let bytes = bytes_of_elements::<T>(len)?;
        let pages = map_zeroed(bytes.max(1)).map_err(|error| no_memory::<T>(len, &error))?;
        Ok(Self {
            pages: Arc::new(pages),
            at: 0,
            len,
            element: PhantomData,
        })
    }
}

fn bytes_of_elements<T>(len: usize) -> Result<usize, EngineError> {
    let bytes = len.checked_mul(size_of::<T>());
    bytes.ok_or_else(|| no_memory::<T>(len, &std::io::ErrorKind::OutOfMemory.into()))
}

fn no_memory<T>(len: usize, error: &std::io::Error) -> EngineError {
    let size = size_of::<T>();
    EngineError::Device(format!(
        "cannot allocate {len} elements of {size} bytes: {error}"
    ))
}

fn map_zeroed(bytes: usize) -> std::io::Result<MmapRaw> {
    let pages = MmapMut::map_anon(bytes)?;
    // With small pages, reading weights spends a tenth of the time on page walks. A kernel without
    // huge pages refuses the advice, which is harmless.
    #[cfg(target_os = "linux")]
    let _ = pages.advise(memmap2::Advice::HugePage);
    Ok(pages.into())
}

/// Chunks of memory from which slices are cut, one after the other.
///
/// A slice below two mebibytes fills no huge page, and a core reads small pages more slowly: an
/// expert's matrices of four bits are such slices. A chunk is released with the last of its slices.
#[derive(Debug, Default)]
pub struct PageChunks {
    chunk: Option<Arc<MmapRaw>>,
    /// Bytes of the chunk that slices have, whole pages.
    used: usize,
}

impl PageChunks {
    const CHUNK_BYTES: usize = 32 << 20;
    /// Size above which a slice has its own pages: so little of a chunk's end is left unused.
    const SLICE_BYTES_MAX: usize = Self::CHUNK_BYTES / 4;

    /// As [`PageMemory::zeroed`].
    ///
    /// # Errors
    /// `Device` if memory is short.
    pub fn zeroed<T: PlainData>(&mut self, len: usize) -> Result<PageMemory<T>, EngineError> {
        let bytes = bytes_of_elements::<T>(len)?;
        if bytes > Self::SLICE_BYTES_MAX {
            return PageMemory::zeroed(len);
        }
        let bytes = bytes.next_multiple_of(page_bytes());
        let current = self.chunk.take();
        let pages = match current.filter(|chunk| self.used + bytes <= chunk.len()) {
            Some(chunk) => chunk,
            None => {
                self.used = 0;
                let chunk = map_zeroed(Self::CHUNK_BYTES);
                Arc::new(chunk.map_err(|error| no_memory::<T>(len, &error))?)
            }
        };
        self.chunk = Some(Arc::clone(&pages));
        let at = self.used;
        self.used += bytes;
        Ok(PageMemory {
            pages,
            at,
            len,
            element: PhantomData,
        })
    }
}

/// Size of a page, to which placement among memory nodes is limited.
fn page_bytes() -> usize {
    #[cfg(target_os = "linux")]
    // SAFETY: asks for a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    #[cfg(not(target_os = "linux"))]
    let size = 16 << 10;
    usize::try_from(size).expect("the system knows the size of its pages")
}

impl PageMemory<u8> {
    /// The first `len` elements of another type, in the same memory.
    ///
    /// # Panics
    /// If the memory has fewer.
    pub fn as_mut_slice_of<T: PlainData>(&mut self, len: usize) -> &mut [T] {
        assert!(
            len * size_of::<T>() <= self.len,
            "elements of {} bytes",
            self.len
        );
        // SAFETY: page-aligned, long enough, borrowed mutably, and every bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().add(self.at).cast(), len) }
    }
}

impl<T: PlainData> Deref for PageMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds `len` elements from this page-aligned byte on; they are
        // initialised by the system and this slice's own, and every bit pattern is a `T`.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().add(self.at).cast(), self.len) }
    }
}

impl<T: PlainData> DerefMut for PageMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the slice is borrowed mutably.
        unsafe {
            let start = self.pages.as_mut_ptr().add(self.at);
            std::slice::from_raw_parts_mut(start.cast(), self.len)
        }
    }
}

/// Packed weights in words of 32 bits, never written to once they are loaded.
#[derive(Debug)]
pub enum WeightWords {
    Owned(PageMemory<u32>),
    /// Words of a mapped file.
    Mapped(MappedWords),
}

impl Deref for WeightWords {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        match self {
            Self::Owned(memory) => memory,
            Self::Mapped(mapped) => mapped,
        }
    }
}

/// Words of a file, in this machine's byte order.
#[derive(Debug)]
pub struct MappedWords {
    file: Arc<Mmap>,
    /// First byte in the file.
    at: usize,
    len: usize,
}

impl MappedWords {
    /// Alignment of the first word, in bytes: that of the widest vector.
    const ALIGNMENT: usize = 64;

    /// # Panics
    /// If the range is not within the file, or not aligned for vectors.
    pub fn new(file: &Arc<Mmap>, bytes: Range<usize>) -> Self {
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
        // SAFETY: `new` checked range and alignment, a mapping is page-aligned, and every bit
        // pattern is a `u32`.
        unsafe { std::slice::from_raw_parts(self.file.as_ptr().add(self.at).cast(), self.len) }
    }
}

/// The bytes of numbers in memory.
pub fn bytes_of<T: PlainData>(numbers: &[T]) -> &[u8] {
    // SAFETY: plain numbers have no padding, and every byte is a valid `u8`.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// The same, to be written.
pub fn bytes_of_mut<T: PlainData>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes_of`, borrowed mutably; every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

/// Numbers seen as words.
///
/// # Panics
/// If they are not whole, aligned words.
pub fn words_of<T: PlainData>(numbers: &[T]) -> &[u32] {
    // SAFETY: every bit pattern is a word.
    let (before, words, after) = unsafe { numbers.align_to() };
    assert!(before.is_empty() && after.is_empty(), "whole words");
    words
}

/// The same, to be written.
///
/// # Panics
/// As [`words_of`].
pub fn words_of_mut<T: PlainData>(numbers: &mut [T]) -> &mut [u32] {
    // SAFETY: every bit pattern is a word, and every word is numbers.
    let (before, words, after) = unsafe { numbers.align_to_mut() };
    assert!(before.is_empty() && after.is_empty(), "whole words");
    words
}

/// A mutable slice that several threads write, each in its own parts.
#[derive(Clone, Copy)]
pub struct SliceParts<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: callers of `part` must keep parts disjoint, which makes them plain `&mut` slices of a
// type that may be sent.
unsafe impl<T: Send> Send for SliceParts<'_, T> {}
// SAFETY: as above; the handle itself is never written.
unsafe impl<T: Send> Sync for SliceParts<'_, T> {}

impl<'a, T> SliceParts<'a, T> {
    /// Borrows `slice`, to be accessed in parts.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            borrow: PhantomData,
        }
    }

    /// Elements of all parts.
    pub fn elements_count(&self) -> usize {
        self.len
    }

    /// A range of the slice, to be accessed in parts.
    ///
    /// # Panics
    /// If the range is not within the slice.
    #[must_use]
    pub fn within(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} of {}",
            self.len
        );
        Self {
            start: self.start.wrapping_add(range.start),
            len: range.len(),
            borrow: PhantomData,
        }
    }

    /// Address of an element, which may lie beyond the slice.
    pub fn address(&self, index: usize) -> *const T {
        self.start.wrapping_add(index)
    }

    /// One part.
    ///
    /// # Safety
    /// Parts that are alive at the same time do not overlap.
    pub unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of {}",
            self.len
        );
        // SAFETY: within the borrowed slice, and the caller keeps parts apart.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
