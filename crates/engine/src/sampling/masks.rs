//! Masks of a step, on several threads.
//!
//! Owns: how many threads share them. Never: decides what is allowed.
//! Invariant: a mask depends on its own slot alone, so that the threads change no token.

use super::SamplingSlot;
use std::thread;

/// Masks that are worth a thread: some hundred microseconds, several times what it takes to start
/// one.
const MASKS_PER_THREAD: usize = 8;
/// Limit of threads, so that a large machine starts no more than it gains.
const THREADS_MAX: usize = 8;

/// Finds the tokens that these slots' constraints allow next.
pub(crate) fn prepare_masks<'a>(
    slots: impl Iterator<Item = &'a mut SamplingSlot>,
    vocab_size: usize,
) {
    let mut slots: Vec<&mut SamplingSlot> = slots.collect();
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let wanted = slots.len() / MASKS_PER_THREAD;
    let threads = match wanted {
        0 | 1 => 1,
        wanted => wanted.min(THREADS_MAX).min(cores()),
    };
    let each = slots.len().div_ceil(threads).max(1);
    let prepare = |slots: &mut [&mut SamplingSlot]| {
        slots
            .iter_mut()
            .for_each(|slot| slot.prepare_mask(vocab_size));
    };
    thread::scope(|scope| {
        let mut parts = slots.chunks_mut(each);
        let own = parts.next();
        for part in parts {
            scope.spawn(move || prepare(part));
        }
        own.map(prepare);
    });
}
