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

/// The bucket for so many rows, where there is one and buffers have its rows.
pub(crate) fn bucket(rows: usize, rows_max: usize) -> Option<usize> {
    let found = BUCKETS.into_iter().find(|bucket| rows <= *bucket)?;
    (found <= rows_max).then_some(found)
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
        for rows in 1..=256 {
            let found = bucket(rows, 256).expect("a bucket for every decode step");
            assert!(found >= rows);
        }
        assert_eq!(bucket(257, 8192), None);
        assert_eq!(bucket(9, 12), None, "buffers of 12 rows have no 16");
        assert_eq!(bucket(9, 16), Some(16));
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
