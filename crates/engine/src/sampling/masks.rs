//! Masks of a step, on several threads.
//!
//! Owns: how many threads share them. Never: decides what is allowed.
//! Invariant: a mask depends on its own slot alone, so that the threads change no token.

use super::SamplingSlot;
use std::sync::LazyLock;
use std::thread;

/// Masks that are worth a thread: some hundred microseconds, several times what it takes to start
/// one.
const MASKS_PER_THREAD: usize = 8;
/// Limit of threads, so that a large machine starts no more than it gains.
const THREADS_MAX: usize = 8;
/// Cores of this process. Asking the system takes as long as several masks.
static CORES: LazyLock<usize> =
    LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));

/// Finds the tokens that these slots' constraints allow next.
pub(crate) fn prepare_masks<'a>(
    slots: impl Iterator<Item = &'a mut SamplingSlot>,
    vocab_size: usize,
) {
    let mut slots: Vec<&mut SamplingSlot> = slots.collect();
    let prepare = |slots: &mut [&mut SamplingSlot]| {
        slots
            .iter_mut()
            .for_each(|slot| slot.prepare_mask(vocab_size));
    };
    let threads = match slots.len() / MASKS_PER_THREAD {
        0 | 1 => 1,
        wanted => wanted.min(THREADS_MAX).min(*CORES),
    };
    // A scope allocates, and most steps have no mask.
    if threads == 1 {
        return prepare(&mut slots);
    }
    let each = slots.len().div_ceil(threads);
    thread::scope(|scope| {
        let mut parts = slots.chunks_mut(each);
        let own = parts.next();
        for part in parts {
            scope.spawn(move || prepare(part));
        }
        own.map(prepare);
    });
}
