//! Memory that requests share, counted in bytes.
//!
//! Owns: the reservations, the waiting requests, and the limit of their wait. Never: knows a body
//! or a template. Invariant: reservations never exceed the pool, and each ends with its permit.

use crate::body::SHORT_BYTES;
use crate::error::ApiError;
use cleave_text::{ModelText, rendering_bytes_max};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Unit of reservations, in bytes.
const UNIT_BYTES: usize = 1024;
/// Time that a request waits for memory before it is refused.
const RESERVE_WAIT_MAX: Duration = Duration::from_secs(5);
/// Memory that the `tokenizers` library takes per byte of a text: it stores the origin of each
/// byte. Measured: 118. Only models whose tokenizer is not byte-level pass it whole texts.
const ENCODING_BYTES_PER_BYTE: usize = 128;

pub(crate) struct SharedMemoryBudget {
    free: Arc<Semaphore>,
    units_max: u32,
    /// Number of requests that wait for memory.
    waiting: AtomicUsize,
}

impl SharedMemoryBudget {
    pub(crate) fn new(units: u32) -> Self {
        Self {
            free: Arc::new(Semaphore::new(units as usize)),
            units_max: units,
            waiting: AtomicUsize::new(0),
        }
    }

    /// Reserves this many bytes, or the whole pool if it is smaller. Waits in order, up to
    /// [`RESERVE_WAIT_MAX`].
    pub(crate) async fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let units_count = units(bytes).min(self.units_max);
        let free = || Arc::clone(&self.free);
        if let Ok(permit) = free().try_acquire_many_owned(units_count) {
            return Ok(permit);
        }
        let _waiting = BudgetWaiter::begin(&self.waiting);
        let waited =
            tokio::time::timeout(RESERVE_WAIT_MAX, free().acquire_many_owned(units_count)).await;
        waited
            .ok()
            .and_then(Result::ok)
            .ok_or_else(ApiError::bodies_full)
    }

    pub(crate) fn has_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    #[cfg(test)]
    pub(crate) fn free_units(&self) -> usize {
        self.free.available_permits()
    }
}

/// Counts a waiting request while it lives.
struct BudgetWaiter<'a>(&'a AtomicUsize);

impl<'a> BudgetWaiter<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for BudgetWaiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Units that hold this many bytes.
pub(crate) fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// Memory of all renderings and of all texts in the `tokenizers` library. As with bodies, short
/// ones have a quarter of it to themselves.
pub(crate) struct TemplateMemory {
    short: SharedMemoryBudget,
    long: SharedMemoryBudget,
}

impl TemplateMemory {
    /// Creates the pools of `bytes` in all; a body of `body_bytes_max` always fits.
    pub(crate) fn new(bytes: usize, body_bytes_max: usize) -> Self {
        let short_units = units(bytes / 4).max(units(rendering_bytes_max(SHORT_BYTES)));
        let long_units = units(bytes - bytes / 4).max(units(rendering_bytes_max(body_bytes_max)));
        Self {
            short: SharedMemoryBudget::new(short_units),
            long: SharedMemoryBudget::new(long_units),
        }
    }

    /// Reserves the memory for the rendering and tokenization of a body.
    pub(crate) async fn reserve(
        &self,
        body_bytes: usize,
        is_rendered: bool,
        model: &ModelText,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        let rendering = if is_rendered {
            rendering_bytes_max(body_bytes)
        } else {
            0
        };
        let encoding = if model.tokenizer().is_byte_level() {
            0
        } else {
            let text_bytes = body_bytes.min(model.text_bytes_max());
            text_bytes.saturating_mul(ENCODING_BYTES_PER_BYTE)
        };
        let pool = if body_bytes <= SHORT_BYTES {
            &self.short
        } else {
            &self.long
        };
        pool.reserve(rendering.saturating_add(encoding)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_text::ModelFiles;
    use std::path::Path;

    const MIB: usize = 1 << 20;

    fn model(name: &str) -> ModelText {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
        ModelText::new(ModelFiles::read(&root.join(name)).unwrap()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_renderings_share_one_memory_limit() {
        let (bytewise, whole) = (model("qwen3"), model("llama2"));
        let memory = TemplateMemory::new(256 * MIB, 8 * MIB);
        let free = |pool: &SharedMemoryBudget| pool.free_units() * UNIT_BYTES;
        assert_eq!(
            (free(&memory.short), free(&memory.long)),
            (64 * MIB, 192 * MIB)
        );
        let mut held = Vec::new();
        while let Ok(permit) = memory.reserve(1000, true, &bytewise).await {
            held.push(permit);
        }
        assert_eq!(held.len(), 64 * MIB / (8 * MIB + 16_000));
        // Long renderings have their own pool, and the next short one fits when another ends.
        let long = memory.reserve(8 * MIB, true, &bytewise).await.unwrap();
        assert_eq!(free(&memory.long), 192 * MIB - (8 + 128) * MIB);
        held.pop();
        held.push(memory.reserve(1000, true, &bytewise).await.unwrap());
        drop((held, long));
        assert_eq!(
            (free(&memory.short), free(&memory.long)),
            (64 * MIB, 192 * MIB)
        );
        // A text counts where the `tokenizers` library takes it whole, up to the longest that it is
        // given.
        let text = memory.reserve(1000, false, &whole).await.unwrap();
        assert_eq!(
            text.num_permits(),
            1000 * ENCODING_BYTES_PER_BYTE / UNIT_BYTES
        );
        let text = memory.reserve(8 * MIB, false, &whole).await.unwrap();
        let most = whole.text_bytes_max() * ENCODING_BYTES_PER_BYTE;
        assert_eq!(
            text.num_permits(),
            (most.div_ceil(UNIT_BYTES)).min(192 * MIB / UNIT_BYTES)
        );
        let none = memory.reserve(8 * MIB, false, &bytewise).await.unwrap();
        assert_eq!(none.num_permits(), 0);
    }
}
