//! The queued work of an engine's host, in order.
//!
//! Owns: the order, and its one exception: a step that has waited for enough writes goes ahead of
//! further ones. Never does any of the work.
//! Invariant: queued work is taken once, or removed by the caller that answers it instead.

use super::engine::EngineWork;
use super::swap::SwapJob;
use super::tier::OffloadJob;
use cleave_domain::HandoffId;
use cleave_sched::{SwapOutcome, WorkerInput};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use tokio::sync::Notify;

/// The host's work, between the driver and the engine's thread.
#[derive(Debug)]
pub(super) struct EngineQueue {
    pub(super) state: Mutex<EngineQueueState>,
    pub(super) changed: Notify,
    pub(super) write_bytes_max: u64,
}

#[derive(Debug, Default)]
pub(super) struct EngineQueueState {
    pub(super) work: VecDeque<EngineWork>,
    pub(super) written_bytes: u64,
    pub(super) closed: bool,
}

impl EngineWork {
    /// Whether a step behind it may go ahead of it.
    pub(super) fn is_write(&self) -> bool {
        match self {
            Self::Write(_)
            | Self::Swap(_)
            | Self::Offload(_)
            | Self::Fetch(_)
            | Self::Load(_)
            | Self::FetchStop(_) => true,
            Self::Step(_) | Self::Read(..) | Self::SwapDrop(_) => false,
        }
    }
}

impl EngineQueue {
    pub(super) fn lock(&self) -> MutexGuard<'_, EngineQueueState> {
        self.state.lock()
    }

    /// Queues the rest of a swap. If the swap is to be dropped, gives its answer instead.
    pub(super) fn requeue(&self, swap: SwapJob) -> Option<WorkerInput> {
        let mut state = self.lock();
        let dropped =
            |work: &EngineWork| matches!(work, EngineWork::SwapDrop(of) if *of == swap.handoff);
        if state.work.iter().any(dropped) {
            return Some(swap.answer(SwapOutcome::Dropped));
        }
        state.work.push_back(EngineWork::Swap(swap));
        None
    }

    /// Queues the rest of an offload.
    pub(super) fn requeue_offload(&self, job: OffloadJob) {
        self.lock().work.push_back(EngineWork::Offload(job));
    }

    /// Has nothing more of a fetch written, and the fetch answered.
    pub(super) fn stop_fetch(&self, handoff: HandoffId) {
        let mut state = self.lock();
        let of_it =
            |work: &EngineWork| matches!(work, EngineWork::Load(of) if of.handoff() == handoff);
        state.work.retain(|work| !of_it(work));
        // Behind the block that may be under way.
        state.work.push_back(EngineWork::FetchStop(handoff));
    }

    /// Waits for work; `None` when the driver is gone.
    pub(super) async fn next(&self) -> Option<EngineWork> {
        loop {
            if let Some(next) = self.try_next() {
                return next;
            }
            // `Notify` stores a change between the look and this wait.
            self.changed.notified().await;
        }
    }

    /// The next piece of work, or the end, if either is known.
    pub(super) fn try_next(&self) -> Option<Option<EngineWork>> {
        let mut state = self.lock();
        if state.closed {
            Some(None)
        } else {
            state.take(self.write_bytes_max).map(Some)
        }
    }
}

impl EngineQueueState {
    pub(super) fn take(&mut self, write_bytes_max: u64) -> Option<EngineWork> {
        let step = if self.written_bytes >= write_bytes_max {
            let past_writes = |work: &&EngineWork| work.is_write();
            let writes_count = self.work.iter().take_while(past_writes).count();
            let at = self.work.get(writes_count);
            at.filter(|work| matches!(work, EngineWork::Step(_)))
                .map(|_| writes_count)
        } else {
            None
        };
        let work = self.work.remove(step.unwrap_or(0))?;
        match &work {
            EngineWork::Step(_) => self.written_bytes = 0,
            EngineWork::Write(import) => self.written_bytes += u64::from(import.part.len),
            // One pass of a swap is as much as may be written between two steps.
            EngineWork::Swap(_) => {
                self.written_bytes = self.written_bytes.saturating_add(write_bytes_max)
            }
            EngineWork::Offload(offload) => self.written_bytes += offload.next_bytes(),
            EngineWork::Load(loaded) => self.written_bytes += loaded.bytes(),
            EngineWork::Read(..)
            | EngineWork::SwapDrop(_)
            | EngineWork::Fetch(_)
            | EngineWork::FetchStop(_) => {}
        }
        Some(work)
    }
}
