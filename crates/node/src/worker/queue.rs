//! What an engine's host has yet to do, in order.
//!
//! Owns: the order, and its one exception: a step that waited for enough writes goes ahead of more of them.
//! Never: does any of it.
//! Invariant: what was pushed is taken once, or taken out by whoever answers it in the engine's place.

use super::engine::Work;
use super::swap::Swap;
use cleave_domain::HandoffId;
use cleave_sched::{Input, SwapOutcome};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// The host's work, between whoever asks and the engine's thread.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) state: Mutex<State>,
    pub(super) changed: Notify,
    pub(super) write_bytes_max: u64,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) work: VecDeque<Work>,
    pub(super) written_bytes: u64,
    pub(super) closed: bool,
}

impl Work {
    /// Whether a step behind it may go ahead of it.
    pub(super) fn is_write(&self) -> bool {
        match self {
            Self::Write(_)
            | Self::Swap(_)
            | Self::Shelve(_)
            | Self::Fetch(_)
            | Self::Bring(_)
            | Self::FetchStop(_) => true,
            Self::Step(_) | Self::Read(..) | Self::SwapDrop(_) => false,
        }
    }
}

impl Queue {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rest of a swap waits for its next turn. If it is to be dropped, it is answered instead.
    pub(super) fn put_back(&self, swap: Swap) -> Option<Input> {
        let mut state = self.lock();
        let dropped = |work: &Work| matches!(work, Work::SwapDrop(of) if *of == swap.handoff);
        if state.work.iter().any(dropped) {
            return Some(swap.answer(SwapOutcome::Dropped));
        }
        state.work.push_back(Work::Swap(swap));
        None
    }

    /// Nothing more of a fetch is written, and it is answered.
    pub(super) fn stop_fetch(&self, handoff: HandoffId) {
        let mut state = self.lock();
        let of_it = |work: &Work| matches!(work, Work::Bring(of) if of.handoff() == handoff);
        state.work.retain(|work| !of_it(work));
        // After the one that may be under way.
        state.work.push_back(Work::FetchStop(handoff));
    }

    /// Waits for work; `None` when the driver is gone.
    pub(super) async fn next(&self) -> Option<Work> {
        loop {
            if let Some(next) = self.look() {
                return next;
            }
            // What changed meanwhile is remembered for the one who waits.
            self.changed.notified().await;
        }
    }

    /// What comes next, if that is known: a piece of work, or the end.
    pub(super) fn look(&self) -> Option<Option<Work>> {
        let mut state = self.lock();
        match state.closed {
            true => Some(None),
            false => state.take(self.write_bytes_max).map(Some),
        }
    }
}

impl State {
    pub(super) fn take(&mut self, write_bytes_max: u64) -> Option<Work> {
        let step = if self.written_bytes >= write_bytes_max {
            let past_writes = |work: &&Work| work.is_write();
            let writes_count = self.work.iter().take_while(past_writes).count();
            let at = self.work.get(writes_count);
            at.filter(|work| matches!(work, Work::Step(_)))
                .map(|_| writes_count)
        } else {
            None
        };
        let work = self.work.remove(step.unwrap_or(0))?;
        match &work {
            Work::Step(_) => self.written_bytes = 0,
            Work::Write(import) => self.written_bytes += u64::from(import.part.len),
            // A go at it is as much as may be written between two steps.
            Work::Swap(_) => {
                self.written_bytes = self.written_bytes.saturating_add(write_bytes_max)
            }
            Work::Shelve(shelving) => self.written_bytes += u64::from(shelving.bytes),
            Work::Bring(brought) => self.written_bytes += brought.bytes(),
            Work::Read(..) | Work::SwapDrop(_) | Work::Fetch(_) | Work::FetchStop(_) => {}
        }
        Some(work)
    }
}
