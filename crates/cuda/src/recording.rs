//! Recordings of decode steps.
//!
//! Owns: the numbers of rows that have a recording, and whether each is still valid.
//! Never: queues anything.
//! Invariant: a recording is used only while every address in it is valid: it is dropped when a
//! place of the messages or a workspace has moved.

use crate::driver::CudaGraph;
use std::collections::BTreeMap;

/// The numbers of rows that recordings are made for: a step takes the next larger one, and its
/// other rows are padding. Small numbers are close together, because one row more is a large part
/// of them; larger ones are multiples of eight, as products take rows in eights.
const BUCKETS: [usize; 16] = [
    1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 160, 192, 224, 256,
];
/// Beyond those, each doubling has this many buckets, so that padding is at most an eighth of a
/// step.
const STEPS_OF_OCTAVE: usize = 8;

/// The recordings of one engine.
#[derive(Debug, Default)]
pub(crate) struct StepRecordings {
    made: BTreeMap<RecordedStep, StepRecording>,
    /// The kinds whose operations have run once, so that workspaces have their sizes, each with
    /// the number of moves at that time.
    warmed_up: BTreeMap<RecordedStep, u64>,
}

/// A kind of decode steps that one recording serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RecordedStep {
    /// Rows that are launched.
    pub(crate) bucket: usize,
    /// Whether products of adapters are launched; of which adapters plays no part.
    pub(crate) has_adapters: bool,
}

#[derive(Debug)]
struct StepRecording {
    graph: CudaGraph,
    reallocations_count: u64,
}

/// The handling of a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GraphUse {
    /// Run it, so that workspaces grow.
    RunUnrecorded,
    /// Record it, then replay the recording.
    Record,
    /// Replay the recording made earlier.
    Replay,
}

/// Returns the bucket for so many rows. It is no larger than `rows_max`, the rows of the buffers
/// (`max_num_seqs`, or the step's tokens); `None` if `rows` exceeds that.
pub(crate) fn bucket(rows: usize, rows_max: usize) -> Option<usize> {
    let listed = BUCKETS.into_iter().find(|bucket| rows <= *bucket);
    let found = listed.unwrap_or_else(|| {
        let octave = rows.next_power_of_two() / 2;
        rows.next_multiple_of(octave / STEPS_OF_OCTAVE)
    });
    (rows <= rows_max).then_some(found.min(rows_max))
}

impl StepRecordings {
    /// Decides how the next step of this kind is handled; `moves_count` counts the moves of
    /// everything that may move.
    pub(crate) fn next_use(&mut self, step: RecordedStep, moves_count: u64) -> GraphUse {
        if self
            .made
            .get(&step)
            .is_some_and(|made| made.reallocations_count == moves_count)
        {
            return GraphUse::Replay;
        }
        self.made.remove(&step);
        match self.warmed_up.insert(step, moves_count) {
            Some(before) if before == moves_count => GraphUse::Record,
            _ => GraphUse::RunUnrecorded,
        }
    }

    pub(crate) fn keep(&mut self, step: RecordedStep, graph: CudaGraph, moves_count: u64) {
        self.made.insert(
            step,
            StepRecording {
                graph,
                reallocations_count: moves_count,
            },
        );
    }

    /// Returns the recording of a kind for which [`StepRecordings::next_use`] returned a replay.
    pub(crate) fn graph(&self, step: RecordedStep) -> &CudaGraph {
        &self.made[&step].graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_rows_and_fits_the_buffers() {
        for rows in 1..=8192 {
            let found = bucket(rows, 8192).expect("a bucket for every decode step");
            assert!(found >= rows && found <= 8192);
            assert!(
                rows <= 256 || (found - rows) * 8 <= rows,
                "{found} for {rows}"
            );
        }
        assert_eq!(bucket(8193, 8192), None);
        assert_eq!(bucket(9, 16), Some(16));
    }

    #[test]
    fn the_last_bucket_is_the_buffer_size() {
        assert_eq!(bucket(9, 12), Some(12));
        assert_eq!(bucket(300, 300), Some(300));
        assert_eq!(bucket(257, 1000), Some(288));
    }

    #[test]
    fn there_are_at_most_56_buckets() {
        let all: std::collections::BTreeSet<_> =
            (1..=8192).filter_map(|rows| bucket(rows, 8192)).collect();
        assert!(all.len() <= 16 + 5 * STEPS_OF_OCTAVE, "{}", all.len());
    }

    /// The first step after a move may move more; only after a step that moved nothing is one
    /// recorded.
    #[test]
    fn a_step_is_recorded_only_after_one_without_reallocation() {
        let of = |bucket, has_adapters| RecordedStep {
            bucket,
            has_adapters,
        };
        let mut recordings = StepRecordings::default();
        assert_eq!(
            recordings.next_use(of(8, false), 3),
            GraphUse::RunUnrecorded
        );
        assert_eq!(
            recordings.next_use(of(8, false), 5),
            GraphUse::RunUnrecorded
        );
        assert_eq!(recordings.next_use(of(8, false), 5), GraphUse::Record);
        assert_eq!(
            recordings.next_use(of(16, false), 5),
            GraphUse::RunUnrecorded
        );
        assert_eq!(recordings.next_use(of(8, true), 5), GraphUse::RunUnrecorded);
    }
}
