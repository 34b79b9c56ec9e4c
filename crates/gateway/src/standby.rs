//! Connections of workers whose name another worker has.
//!
//! Owns: the connections that were turned away, so that their workers stay connected and are
//! notified at once when the name is free. Never: sends anything on one; a connection that is
//! dropped ends, and its worker dials again. Invariant: at most [`CONNECTIONS_MAX_PER_NAME`] wait
//! for one name, and a free name is offered to one of them at a time, the latest start first: all
//! at once would take it from one another.

use cleave_domain::{Time, WorkerId, WorkerRef};
use cleave_fleet::WorkerConnection;
use std::collections::BTreeMap;
use std::time::Duration;

/// Lines that wait for one name. Two processes with one name are a mistake, and more than a few a
/// larger one: further ones are cut off, and dial again after a while.
const CONNECTIONS_MAX_PER_NAME: usize = 4;
/// How long a worker whose line was ended may take to come back; twice its longest pause between
/// two dials.
const OFFER_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(crate) struct NameStandby {
    lines: BTreeMap<WorkerId, Vec<WorkerConnection>>,
    /// Names that nobody has, and when the next line is ended.
    offers: BTreeMap<WorkerId, Time>,
}

impl NameStandby {
    /// A worker was turned away; its line waits, if not too many do.
    pub(crate) fn add(&mut self, line: WorkerConnection) {
        let id = line.registration.worker.worker;
        let lines = self.lines.entry(id).or_default();
        lines.retain(|other| other.registration.worker != line.registration.worker);
        if lines.len() < CONNECTIONS_MAX_PER_NAME {
            line.waits_for_name.send_replace(true);
            lines.push(line);
        }
    }

    /// A connection is over.
    pub(crate) fn connection_lost(&mut self, worker: WorkerRef, serial: u64) {
        if let Some(lines) = self.lines.get_mut(&worker.worker) {
            lines.retain(|line| line.serial != serial);
            if lines.is_empty() {
                self.lines.remove(&worker.worker);
                self.offers.remove(&worker.worker);
            }
        }
    }

    /// Nobody has the name any more: of those that wait for it the latest start dials again.
    pub(crate) fn name_freed(&mut self, name: WorkerId, now: Time) {
        self.offers.remove(&name);
        let Some(lines) = self.lines.get_mut(&name) else {
            return;
        };
        let incarnation = |index: &usize| lines[*index].registration.worker.incarnation;
        if let Some(latest) = (0..lines.len()).max_by_key(incarnation) {
            lines.remove(latest);
        }
        if lines.is_empty() {
            self.lines.remove(&name);
        } else {
            self.offers.insert(name, now + OFFER_MAX);
        }
    }

    /// A worker has the name.
    pub(crate) fn name_taken(&mut self, name: WorkerId) {
        self.offers.remove(&name);
    }

    /// When a worker has taken too long to come back.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.offers.values().min().copied()
    }

    /// Offers each name that was not taken in time to the next that waits for it.
    pub(crate) fn wake(&mut self, now: Time) {
        let due = self.offers.iter().filter(|(_, at)| **at <= now);
        let due: Vec<WorkerId> = due.map(|(name, _)| *name).collect();
        for name in due {
            self.name_freed(name, now);
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.lines.values().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::{CONNECTIONS_MAX_PER_NAME, NameStandby, OFFER_MAX};
    use cleave_domain::{Incarnation, Time, WorkerId, WorkerRef};
    use cleave_fleet::{Registration, ToWorker, WorkerConnection, sample};
    use std::sync::Arc;
    use tokio::sync::{mpsc, watch};

    const NAME: WorkerId = WorkerId(7);

    fn life(incarnation: u64) -> WorkerRef {
        WorkerRef {
            worker: NAME,
            incarnation: Incarnation(incarnation),
        }
    }

    fn line(incarnation: u64) -> (WorkerConnection, mpsc::Receiver<ToWorker>) {
        let (out, receiver) = mpsc::channel(1);
        let line = WorkerConnection {
            registration: Registration {
                worker: life(incarnation),
                ..sample::registration()
            },
            serial: incarnation,
            out,
            activity: Arc::default(),
            waits_for_name: watch::channel(false).0,
        };
        (line, receiver)
    }

    /// Lines of these lives wait; gives their other ends.
    fn standby<const N: usize>(
        incarnations: [u64; N],
    ) -> (NameStandby, [mpsc::Receiver<ToWorker>; N]) {
        let mut standby = NameStandby::default();
        let receivers = incarnations.map(|incarnation| {
            let (line, receiver) = line(incarnation);
            standby.add(line);
            receiver
        });
        (standby, receivers)
    }

    #[test]
    fn a_freed_name_ends_the_line_of_the_latest_start() {
        let (mut standby, receivers) = standby([2, 3, 1]);
        let closed = || receivers.each_ref().map(mpsc::Receiver::is_closed);
        standby.name_freed(WorkerId(8), Time::ZERO);
        assert_eq!((closed(), standby.deadline()), ([false; 3], None));
        standby.name_freed(NAME, Time::ZERO);
        assert_eq!(closed(), [false, true, false]);
        // It came back; what waits waits on.
        standby.name_taken(NAME);
        assert_eq!((standby.deadline(), standby.count()), (None, 2));
    }

    #[test]
    fn a_name_not_taken_in_time_is_offered_to_the_next() {
        let (mut standby, receivers) = standby([1, 2, 3]);
        let closed = || receivers.each_ref().map(mpsc::Receiver::is_closed);
        standby.name_freed(NAME, Time::ZERO);
        let at = standby.deadline().unwrap();
        assert_eq!(at, Time::ZERO + OFFER_MAX);
        standby.wake(Time::ZERO);
        assert_eq!(closed(), [false, false, true], "not before its time");
        standby.wake(at);
        assert_eq!(closed(), [false, true, true]);
        let at = standby.deadline().unwrap();
        standby.wake(at);
        assert_eq!((closed(), standby.deadline()), ([true; 3], None));
        assert_eq!(standby.count(), 0);
    }

    #[test]
    fn a_lost_line_is_offered_nothing() {
        let (mut standby, receivers) = standby([1, 2]);
        standby.name_freed(NAME, Time::ZERO);
        standby.connection_lost(life(1), 1);
        assert!(receivers[0].is_closed());
        assert_eq!((standby.deadline(), standby.count()), (None, 0));
    }

    #[test]
    fn a_waiting_connection_is_marked_as_standing_by() {
        let mut standby = NameStandby::default();
        let (line, _words) = line(1);
        let stands_by = line.waits_for_name.subscribe();
        standby.add(line);
        assert!(*stands_by.borrow());
    }

    #[test]
    fn lines_that_wait_for_one_name_are_bounded() {
        let mut standby = NameStandby::default();
        let mut receivers = Vec::new();
        for incarnation in 0..10 {
            let (line, receiver) = line(incarnation);
            standby.add(line);
            receivers.push(receiver);
        }
        let waiting = receivers
            .iter()
            .filter(|receiver| !receiver.is_closed())
            .count();
        assert_eq!(waiting, CONNECTIONS_MAX_PER_NAME);
        // A worker that dials twice waits once.
        let (again, again_receiver) = line(0);
        standby.add(again);
        assert!(receivers[0].is_closed() && !again_receiver.is_closed());
    }
}
