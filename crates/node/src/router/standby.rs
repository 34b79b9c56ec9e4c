//! Connections of workers whose name another worker has.
//!
//! Owns: the lines that were turned away, so that their workers stay connected and hear of it at once when
//! the name is free. Never: sends anything on one; a line that is dropped ends, and its worker dials again.
//! Invariant: at most [`LINES_MAX`] lines wait for one name.

use crate::line::WorkerLine;
use cleave_domain::{WorkerId, WorkerRef};
use std::collections::BTreeMap;

/// Lines that wait for one name. Two processes with one name are a mistake, and more than a few a larger one:
/// further ones are cut off, and dial again after a while.
const LINES_MAX: usize = 4;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Standby {
    lines: BTreeMap<WorkerId, Vec<WorkerLine>>,
}

impl Standby {
    /// A worker was turned away; its line waits, if not too many do.
    pub(crate) fn add(&mut self, line: WorkerLine) {
        let id = line.introduction.worker.worker;
        let lines = self.lines.entry(id).or_default();
        lines.retain(|other| other.introduction.worker != line.introduction.worker);
        if lines.len() < LINES_MAX {
            lines.push(line);
        }
    }

    /// A connection is over.
    pub(crate) fn lost(&mut self, worker: WorkerRef, serial: u64) {
        if let Some(lines) = self.lines.get_mut(&worker.worker) {
            lines.retain(|line| line.serial != serial);
            if lines.is_empty() {
                self.lines.remove(&worker.worker);
            }
        }
    }

    /// Nobody has the name any more: all that wait for it dial again, and the latest start has it.
    pub(crate) fn free(&mut self, name: WorkerId) {
        self.lines.remove(&name);
    }
}

#[cfg(test)]
mod tests {
    use super::{LINES_MAX, Standby};
    use crate::line::{Downward, Introduction, WorkerLine};
    use crate::wire::sample;
    use cleave_domain::{Incarnation, WorkerId, WorkerRef};
    use std::sync::Arc;
    use tokio::sync::mpsc;

    fn life(incarnation: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(7),
            incarnation: Incarnation(incarnation),
        }
    }

    fn line(incarnation: u64) -> (WorkerLine, mpsc::Receiver<Downward>) {
        let (out, words) = mpsc::channel(1);
        let line = WorkerLine {
            introduction: Introduction {
                worker: life(incarnation),
                ..sample::introduction()
            },
            serial: incarnation,
            out,
            activity: Arc::default(),
        };
        (line, words)
    }

    #[test]
    fn a_freed_name_ends_the_lines_that_wait_for_it() {
        let mut standby = Standby::default();
        let (first, first_words) = line(1);
        let (second, second_words) = line(2);
        standby.add(first);
        standby.add(second);
        standby.free(WorkerId(8));
        assert!(!first_words.is_closed() && !second_words.is_closed());
        standby.lost(life(1), 1);
        assert!(first_words.is_closed() && !second_words.is_closed());
        standby.free(WorkerId(7));
        assert!(second_words.is_closed() && standby.lines.is_empty());
    }

    #[test]
    fn lines_that_wait_for_one_name_are_bounded() {
        let mut standby = Standby::default();
        let mut words = Vec::new();
        for incarnation in 0..10 {
            let (line, line_words) = line(incarnation);
            standby.add(line);
            words.push(line_words);
        }
        let waiting = words.iter().filter(|words| !words.is_closed()).count();
        assert_eq!(waiting, LINES_MAX);
        // A worker that dials twice waits once.
        let (again, again_words) = line(0);
        standby.add(again);
        assert!(words[0].is_closed() && !again_words.is_closed());
    }
}
