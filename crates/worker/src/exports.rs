//! Blocks that wait for credit, per receiver.
//!
//! A block is read out of the pool only when the receiver has room for it: what waits here is a few
//! numbers, not bytes, and delays no other receiver.

use cleave_domain::{HandoffId, WorkerRef};
use cleave_sched::{BlockExport, ExportOutcome, WorkerInput};
use std::collections::{BTreeMap, VecDeque};

/// In the order of the brain's exports, per receiver.
#[derive(Debug, Default)]
pub(crate) struct ExportQueue {
    waiting: BTreeMap<WorkerRef, VecDeque<BlockExport>>,
}

impl ExportQueue {
    pub(crate) fn push(&mut self, export: BlockExport) {
        self.waiting.entry(export.to).or_default().push_back(export);
    }

    /// The next block that waits for this receiver.
    pub(crate) fn next(&self, peer: WorkerRef) -> Option<&BlockExport> {
        self.waiting.get(&peer)?.front()
    }

    /// Takes the next block that waits for this receiver.
    pub(crate) fn pop(&mut self, peer: WorkerRef) -> Option<BlockExport> {
        let queue = self.waiting.get_mut(&peer)?;
        let export = queue.pop_front();
        if queue.is_empty() {
            self.waiting.remove(&peer);
        }
        export
    }

    /// Drops the blocks that wait for an unreachable receiver, and answers them.
    pub(crate) fn drop_peer(&mut self, peer: WorkerRef) -> Vec<WorkerInput> {
        let dropped = self.waiting.remove(&peer).unwrap_or_default();
        let answer = |export: &BlockExport| export.answer(ExportOutcome::Dropped);
        dropped.iter().map(answer).collect()
    }

    /// Drops the waiting blocks of a hand-off, and answers them.
    pub(crate) fn forget(&mut self, handoff: HandoffId) -> Vec<WorkerInput> {
        let mut answers = Vec::new();
        self.waiting.retain(|_, queue| {
            queue.retain(|export| {
                let keep = export.handoff != handoff;
                if !keep {
                    answers.push(export.answer(ExportOutcome::Dropped));
                }
                keep
            });
            !queue.is_empty()
        });
        answers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FlightId, KvPlane, WorkerId};

    fn export(flight: u64, to: u64, ordinal: u32) -> BlockExport {
        BlockExport {
            handoff: HandoffId {
                flight: FlightId(flight),
                attempt: 0,
            },
            to: WorkerRef {
                worker: WorkerId(to),
                ..WorkerRef::default()
            },
            plane: KvPlane::Blocks,
            from: Default::default(),
            ordinal,
            block: Default::default(),
        }
    }

    // Invariant: I3.
    // Lesson: 2.
    #[test]
    fn every_export_is_answered_once_or_handed_out() {
        let mut exports = ExportQueue::default();
        for (flight, to, ordinal) in [(1, 8, 0), (2, 8, 0), (1, 8, 1), (1, 9, 2)] {
            exports.push(export(flight, to, ordinal));
        }
        let forgotten = exports.forget(export(2, 8, 0).handoff);
        assert_eq!(forgotten.len(), 1);
        let first = exports.pop(export(1, 8, 0).to).map(|export| export.ordinal);
        assert_eq!(first, Some(0), "in order");
        assert_eq!(exports.drop_peer(export(1, 8, 0).to).len(), 1);
        assert!(exports.next(export(1, 8, 0).to).is_none());
        assert_eq!(
            exports.pop(export(1, 9, 0).to).map(|export| export.ordinal),
            Some(2)
        );
        assert!(exports.pop(export(1, 9, 0).to).is_none());
    }
}
