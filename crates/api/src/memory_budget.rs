//! Memory that requests share, counted in bytes.
//!
//! Owns: the reservations, the waiting requests, and the limit of their wait. Never: knows a body
//! or a template. Invariant: reservations never exceed the pool, and each ends with its permit.

use crate::body_work::{BodyWork, SHORT_BYTES};
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
/// Memory that the `tokenizers` library takes per byte of a text that it gets at once. Measured:
/// 118 where it gets whole texts, because it stores the origin of each byte; 121 where it merges a
/// piece.
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

/// Limit of the tokens that `/tokenize` lists and `/detokenize` takes, unless the context is
/// longer.
pub(crate) const LISTED_TOKENS_MAX: usize = 1 << 20;
/// Length of a chat request in bytes, per byte of the body that it is made of: a tool without a
/// description grows most. Long texts do not grow.
const CONVERTED_BYTES_PER_BYTE: usize = 2;
/// Memory that `/tokenize` takes per token of its answer, besides the tokens' texts: ids, their
/// digits, quotes, and buffers that double.
const LISTED_BYTES_PER_TOKEN: usize = 28;
/// Memory of the tokens' texts in the answer, per byte of the body.
const LISTED_BYTES_PER_BYTE: usize = 4;
/// Memory that `/detokenize` takes per token: the library makes a string of each before it joins
/// them.
const JOINED_BYTES_PER_TOKEN: usize = 96;

/// Memory of all renderings, of all texts in the `tokenizers` library, and of the tokens that
/// `/tokenize` and `/detokenize` list. As with bodies, short ones have a quarter of it to
/// themselves.
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

    /// Reserves the memory for the work on a body.
    pub(crate) async fn reserve(
        &self,
        body_bytes: usize,
        work: BodyWork,
        model: &ModelText,
    ) -> Result<OwnedSemaphorePermit, ApiError> {
        let given_bytes = body_bytes;
        let (body_bytes, copied_bytes) = match work {
            BodyWork::RenderConverted | BodyWork::ListConverted => {
                let converted = body_bytes.saturating_mul(CONVERTED_BYTES_PER_BYTE);
                (converted, converted)
            }
            BodyWork::ParseOnly
            | BodyWork::RenderTemplate
            | BodyWork::ListTokens
            | BodyWork::JoinTokens => (body_bytes, 0),
        };
        let encoded_bytes = body_bytes.min(model.library_bytes_max());
        let encoding = encoded_bytes.saturating_mul(ENCODING_BYTES_PER_BYTE);
        let listed = |tokens: usize| tokens.min(listed_tokens_max(model));
        let bytes = match work {
            BodyWork::ParseOnly => encoding,
            BodyWork::RenderTemplate | BodyWork::RenderConverted => {
                rendering_bytes_max(body_bytes).saturating_add(encoding)
            }
            BodyWork::ListTokens | BodyWork::ListConverted => {
                let list = listed(body_bytes).saturating_mul(LISTED_BYTES_PER_TOKEN);
                let texts = body_bytes.saturating_mul(LISTED_BYTES_PER_BYTE);
                let answer = list.saturating_add(texts);
                let rendering = rendering_bytes_max(body_bytes);
                rendering.saturating_add(encoding).saturating_add(answer)
            }
            // A token is a digit and a comma, or more.
            BodyWork::JoinTokens => listed(body_bytes / 2).saturating_mul(JOINED_BYTES_PER_TOKEN),
        };
        let pool = if given_bytes <= SHORT_BYTES {
            &self.short
        } else {
            &self.long
        };
        pool.reserve(bytes.saturating_add(copied_bytes)).await
    }
}

/// Limit of the tokens that `/tokenize` lists and `/detokenize` takes.
pub(crate) fn listed_tokens_max(model: &ModelText) -> usize {
    LISTED_TOKENS_MAX.max(model.context_tokens_max() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_text::{ModelFiles, PIECE_BYTES_MAX};
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
        let rendered = BodyWork::RenderTemplate;
        while let Ok(permit) = memory.reserve(1000, rendered, &bytewise).await {
            held.push(permit);
        }
        assert_eq!(held.len(), 64 * MIB / (8 * MIB + 16_000 + 128_000));
        // Long renderings have their own pool, and the next short one fits when another ends.
        let long = memory.reserve(8 * MIB, rendered, &bytewise).await.unwrap();
        let piece = PIECE_BYTES_MAX * ENCODING_BYTES_PER_BYTE;
        assert_eq!(free(&memory.long), (192 - 8 - 128) * MIB - piece);
        held.pop();
        held.push(memory.reserve(1000, rendered, &bytewise).await.unwrap());
        drop((held, long));
        assert_eq!(
            (free(&memory.short), free(&memory.long)),
            (64 * MIB, 192 * MIB)
        );
        // A text counts up to the longest that the `tokenizers` library is given.
        let parsed = BodyWork::ParseOnly;
        let text = memory.reserve(1000, parsed, &whole).await.unwrap();
        assert_eq!(
            text.num_permits(),
            1000 * ENCODING_BYTES_PER_BYTE / UNIT_BYTES
        );
        let text = memory.reserve(8 * MIB, parsed, &whole).await.unwrap();
        let most = whole.library_bytes_max() * ENCODING_BYTES_PER_BYTE;
        assert_eq!(
            text.num_permits(),
            (most.div_ceil(UNIT_BYTES)).min(192 * MIB / UNIT_BYTES)
        );
        drop(text);
        let text = memory.reserve(8 * MIB, parsed, &bytewise).await.unwrap();
        assert_eq!(text.num_permits(), piece / UNIT_BYTES);
    }
}
