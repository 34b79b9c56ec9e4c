//! Reuses buffers for payloads.
//!
//! The kernel provides fresh memory page by page and zeroed, which costs more than the copy into
//! it. The buffer returned last is reused first, because it is still in the processor's cache.
//! Invariant: no more free buffers are kept than the limit, and they are freed when the pool and
//! its last buffer are dropped.

use parking_lot::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The buffers of one link. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct BufferPool {
    free_buffers: Arc<FreeBuffers>,
}

#[derive(Debug)]
struct FreeBuffers {
    free: Mutex<Vec<Box<[u8]>>>,
    buffer_bytes: usize,
    free_max: usize,
}

/// The first `len` bytes of a buffer; returned to the free buffers when dropped.
#[derive(Debug)]
pub(crate) struct PooledBuffer {
    bytes: Box<[u8]>,
    len: usize,
    free_buffers: Arc<FreeBuffers>,
}

impl BufferPool {
    /// A set of buffers of `buffer_bytes`; at most as many free ones are kept as `window_bytes` can
    /// fill.
    pub(crate) fn new(buffer_bytes: u32, window_bytes: u32) -> Self {
        let free_buffers = FreeBuffers {
            free: Mutex::default(),
            buffer_bytes: buffer_bytes as usize,
            free_max: window_bytes.div_ceil(buffer_bytes) as usize,
        };
        Self {
            free_buffers: Arc::new(free_buffers),
        }
    }

    /// A buffer of `len` bytes with arbitrary contents.
    pub(crate) fn take(&self, len: u32) -> PooledBuffer {
        let (len, buffer_bytes) = (len as usize, self.free_buffers.buffer_bytes);
        assert!(len <= buffer_bytes, "a frame fits its buffer");
        let free_buffer = self.free_buffers.lock().pop();
        PooledBuffer {
            bytes: free_buffer.unwrap_or_else(|| vec![0; buffer_bytes].into()),
            len,
            free_buffers: Arc::clone(&self.free_buffers),
        }
    }

    /// The length of the longest buffer.
    pub(crate) fn buffer_bytes(&self) -> u32 {
        u32::try_from(self.free_buffers.buffer_bytes).expect("was a u32")
    }
}

impl FreeBuffers {
    fn lock(&self) -> MutexGuard<'_, Vec<Box<[u8]>>> {
        self.free.lock()
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut free = self.free_buffers.lock();
        if free.len() < self.free_buffers.free_max {
            free.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_buffers_are_reused_up_to_the_limit() {
        let buffers = BufferPool::new(64, 128);
        let borrowed = [buffers.take(1), buffers.take(64), buffers.take(7)];
        let last = borrowed[1].as_ptr();
        drop(borrowed);
        assert_eq!(buffers.free_buffers.lock().len(), 2);
        let again = buffers.take(9);
        assert_eq!((again.as_ptr(), again.len()), (last, 9));
    }
}
