//! Decode steps as recordings.
//!
//! Owns: which numbers of rows have one, and whether it still holds.
//! Never: queues anything.
//! Invariant: a recording is used only while every address in it is where it was: it is dropped when a place of
//! the inbox or a workspace has moved.

use crate::driver::Graph;
use std::collections::BTreeMap;

/// Rows that recordings are made for: a step takes the next larger one, and what is more is padding. Small ones
/// are close together, because there a row more is a large part; products take rows in eights.
const BUCKETS: [usize; 16] = [
    1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 160, 192, 224, 256,
];
/// Beyond those, a multiple of one in so many of the rows: padding is an eighth of a step at most.
const STEPS_OF_OCTAVE: usize = 8;

/// Recordings of one engine.
#[derive(Debug, Default)]
pub(crate) struct Recordings {
    made: BTreeMap<usize, Recording>,
    /// Buckets whose operations have run once, so that workspaces have their sizes, with the moves so far.
    warm: BTreeMap<usize, u64>,
}

#[derive(Debug)]
struct Recording {
    graph: Graph,
    moves_count: u64,
}

/// What to do with a decode step of some bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Run it, to warm up.
    Run,
    /// Run it into a recording.
    Record,
    /// There is one.
    Replay,
}

/// The bucket for so many rows, no larger than `rows_max`, the rows that buffers have (`max_num_seqs`, or the step's
/// tokens); `None` where rows are more than that.
pub(crate) fn bucket(rows: usize, rows_max: usize) -> Option<usize> {
    let listed = BUCKETS.into_iter().find(|bucket| rows <= *bucket);
    let found = listed.unwrap_or_else(|| {
        let octave = rows.next_power_of_two() / 2;
        rows.next_multiple_of(octave / STEPS_OF_OCTAVE)
    });
    (rows <= rows_max).then_some(found.min(rows_max))
}

impl Recordings {
    /// What comes next for a bucket; `moves_count` of everything that may move.
    pub(crate) fn way(&mut self, bucket: usize, moves_count: u64) -> Way {
        if self
            .made
            .get(&bucket)
            .is_some_and(|made| made.moves_count == moves_count)
        {
            return Way::Replay;
        }
        self.made.remove(&bucket);
        match self.warm.insert(bucket, moves_count) {
            Some(before) if before == moves_count => Way::Record,
            _ => Way::Run,
        }
    }

    /// Keeps a recording.
    pub(crate) fn keep(&mut self, bucket: usize, graph: Graph, moves_count: u64) {
        self.made.insert(bucket, Recording { graph, moves_count });
    }

    /// The recording of a bucket that [`Recordings::way`] said to replay.
    pub(crate) fn graph(&self, bucket: usize) -> &Graph {
        &self.made[&bucket].graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_their_rows_and_are_in_the_buffers() {
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
    fn the_last_bucket_is_as_large_as_the_buffers() {
        assert_eq!(bucket(9, 12), Some(12));
        assert_eq!(bucket(300, 300), Some(300));
        assert_eq!(bucket(257, 1000), Some(288));
    }

    #[test]
    fn buckets_are_few() {
        let all: std::collections::BTreeSet<_> =
            (1..=8192).filter_map(|rows| bucket(rows, 8192)).collect();
        assert!(all.len() <= 16 + 5 * STEPS_OF_OCTAVE, "{}", all.len());
    }

    /// A step that runs for the first time after a move may move more; only one that moved nothing is recorded.
    #[test]
    fn nothing_is_recorded_before_a_step_that_moved_nothing() {
        let mut recordings = Recordings::default();
        assert_eq!(recordings.way(8, 3), Way::Run);
        assert_eq!(recordings.way(8, 5), Way::Run);
        assert_eq!(recordings.way(8, 5), Way::Record);
        assert_eq!(recordings.way(16, 5), Way::Run);
    }
}
