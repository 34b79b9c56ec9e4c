//! Buffers for payloads, used again.
//!
//! Fresh memory of this size comes from the kernel page by page and zeroed, which costs more than
//! the copy into it. What comes back last is taken first: it is still in the processor's cache.
//! Invariant: a shelf keeps no more buffers than it was allowed, and frees them when it and the last
//! of them are gone.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The buffers of one link. Clones are the same.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    shelf: Arc<Shelf>,
}

#[derive(Debug)]
struct Shelf {
    free: Mutex<Vec<Box<[u8]>>>,
    buffer_bytes: usize,
    kept_max: usize,
}

/// The first `len` bytes of a buffer; back on the shelf when dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
    len: usize,
    shelf: Arc<Shelf>,
}

impl Buffers {
    /// Buffers of `buffer_bytes`, as many kept as `window_bytes` can fill.
    pub(crate) fn new(buffer_bytes: u32, window_bytes: u32) -> Self {
        let shelf = Shelf {
            free: Mutex::default(),
            buffer_bytes: buffer_bytes as usize,
            kept_max: window_bytes.div_ceil(buffer_bytes) as usize,
        };
        Self {
            shelf: Arc::new(shelf),
        }
    }

    /// A buffer of `len` bytes, with whatever was in it last.
    pub(crate) fn take(&self, len: u32) -> Buffer {
        let (len, buffer_bytes) = (len as usize, self.shelf.buffer_bytes);
        assert!(len <= buffer_bytes, "a frame fits its buffer");
        let kept = self.shelf.lock().pop();
        Buffer {
            bytes: kept.unwrap_or_else(|| vec![0; buffer_bytes].into()),
            len,
            shelf: Arc::clone(&self.shelf),
        }
    }

    /// The longest that can be taken.
    pub(crate) fn buffer_bytes(&self) -> u32 {
        u32::try_from(self.shelf.buffer_bytes).expect("was a u32")
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Vec<Box<[u8]>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.shelf.lock();
        if free.len() < self.shelf.kept_max {
            free.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_is_used_again_and_no_more_than_allowed_is_kept() {
        let buffers = Buffers::new(64, 128);
        let taken = [buffers.take(1), buffers.take(64), buffers.take(7)];
        let last = taken[1].as_ptr();
        drop(taken);
        assert_eq!(buffers.shelf.lock().len(), 2);
        let again = buffers.take(9);
        assert_eq!((again.as_ptr(), again.len()), (last, 9));
    }
}
