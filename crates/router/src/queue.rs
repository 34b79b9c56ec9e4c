//! The queue of flights that wait for a place.
//!
//! Owns: their order, and the pace at which they find places. Never: decides which flight is
//! placed.
//! Invariant: at most `max` new flights wait; a flight that comes back after a failed attempt joins
//! whatever the length: its client has been promised an answer, and the number of flights bounds
//! it.
//!
//! Resumed flights go before all new ones, by request priority and arrival. New ones are ordered by
//! the class's priority, smaller first. Between classes of one priority, the flight with the
//! earliest latest start goes first; classes without targets come last, ordered among themselves by
//! service received per weight. Within a class, tenants are ordered by service received per share,
//! and within a tenant the request's own priority and latest start decide.

pub(crate) mod passes;
mod serve;
mod waiting;

use crate::accounting::tally::ServiceTally;
use cleave_domain::{FlightId, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Smallest and largest value of `retry_after`.
pub(crate) const RETRY_AFTER: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(30));

/// A place in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueuePlace {
    pub(crate) queue: QueueId,
    /// Priority of the request: smaller goes first among those of its tenant and class.
    pub(crate) request_priority: i32,
    /// Latest start of its prompt; the end of time without a target.
    pub(crate) latest_start: Time,
    pub(crate) arrival: u64,
    pub(crate) flight: FlightId,
}

/// Identifies a queue: flights that are served one after the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct QueueId {
    pub(crate) kind: QueueKind,
    pub(crate) priority: i32,
    pub(crate) class: Arc<str>,
    pub(crate) tenant: Arc<str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum QueueKind {
    /// The client waits for the rest of an answer, or for the retry of a failed attempt. All such
    /// flights are in one queue, whatever their class.
    Resumed,
    New,
}

impl QueuePlace {
    fn key(&self) -> QueueOrder {
        match self.queue.kind {
            QueueKind::Resumed => (self.request_priority, Time::ZERO, self.arrival, self.flight),
            QueueKind::New => (
                self.request_priority,
                self.latest_start,
                self.arrival,
                self.flight,
            ),
        }
    }

    /// The queue in which it stands.
    pub(crate) fn queue_id(&self) -> QueueId {
        match self.queue.kind {
            QueueKind::Resumed => QueueId {
                class: Arc::from(""),
                tenant: Arc::from(""),
                ..self.queue
            },
            QueueKind::New => self.queue.clone(),
        }
    }
}

type QueueOrder = (i32, Time, u64, FlightId);

#[derive(Clone, Debug)]
pub(crate) struct FlightQueue {
    queues: BTreeMap<QueueId, BTreeSet<QueueOrder>>,
    /// Number of waiting flights of each class.
    classes: BTreeMap<Arc<str>, u32>,
    len: u32,
    max: u32,
    rate: PlacementRate,
}

/// Mean interval between placements, the basis of `retry_after`.
#[derive(Clone, Copy, Debug, Default)]
struct PlacementRate {
    last: Option<Time>,
    gap: Duration,
}

impl FlightQueue {
    pub(crate) fn new(max: u32) -> Self {
        Self {
            queues: BTreeMap::new(),
            classes: BTreeMap::new(),
            len: 0,
            max,
            rate: PlacementRate::default(),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len >= self.max
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Counts a placement: a running mean over about eight.
    pub(crate) fn count_placement(&mut self, now: Time) {
        let rate = &mut self.rate;
        if let Some(last) = rate.last {
            rate.gap = (rate.gap * 7 + now.since(last)) / 8;
        }
        rate.last = Some(now);
    }

    /// The time in which all waiting flights and one more are placed, at the present pace.
    pub(crate) fn retry_after(&self) -> Duration {
        let (least, most) = RETRY_AFTER;
        (self.rate.gap * (self.len + 1)).clamp(least, most)
    }

    /// Number of waiting flights of a class.
    pub(crate) fn len_of(&self, class: &str) -> u32 {
        self.classes.get(class).copied().unwrap_or(0)
    }

    pub(crate) fn contains(&self, place: &QueuePlace) -> bool {
        self.len > 0
            && self
                .queues
                .get(&place.queue_id())
                .is_some_and(|queue| queue.contains(&place.key()))
    }

    /// The next flight; queues in `closed` are skipped, and so are flights for which `passed`
    /// holds.
    pub(crate) fn first(
        &self,
        tally: &ServiceTally,
        closed: &BTreeSet<QueueId>,
        passed: impl Fn(FlightId) -> bool,
    ) -> Option<FlightId> {
        let mut queues = self
            .queues
            .iter()
            .filter(|(name, _)| !closed.contains(name))
            .filter_map(|(name, keys)| Some((name, keys.iter().find(|key| !passed(key.3))?)))
            .peekable();
        while let Some((first, head)) = queues.next() {
            if first.kind == QueueKind::Resumed {
                return Some(head.3);
            }
            let mut best = None;
            let mut here = Some((first, head));
            // For each class, the tenant that was served least; then the best class of this
            // priority.
            while let Some((name, _)) = here {
                let mut of_class = None;
                while let Some((tenant, head)) = here.filter(|(n, _)| n.class == name.class) {
                    let served = tally.served(&tenant.class, &tenant.tenant);
                    let better = of_class.is_none_or(|(least, _)| served < least);
                    of_class = if better {
                        Some((served, head))
                    } else {
                        of_class
                    };
                    here = queues.next_if(|(n, _)| n.priority == first.priority);
                }
                if let Some((_, (_, latest, arrival, flight))) = of_class {
                    // A flight without a target has no latest start: service received per weight
                    // orders its class.
                    let weighed = if *latest == Time::END {
                        tally.served_class(&name.class)
                    } else {
                        0
                    };
                    let rank = (*latest, weighed, *arrival, *flight);
                    best = Some(best.map_or(rank, |b: (Time, u64, u64, FlightId)| b.min(rank)));
                }
            }
            if let Some((.., flight)) = best {
                return Some(flight);
            }
        }
        None
    }

    /// The last of all new flights, if `place` goes before it: the one to drop where the queue is
    /// full.
    pub(crate) fn last_behind(&self, place: &QueuePlace) -> Option<FlightId> {
        let new = |(name, _): &(&QueueId, _)| name.kind == QueueKind::New;
        let last = || self.queues.iter().rev().take_while(new);
        let priority = last().next()?.0.priority;
        let last = last().take_while(|(name, _)| name.priority == priority);
        let key = last.filter_map(|(_, keys)| keys.last()).max()?;
        ((place.queue.priority, place.key()) < (priority, *key)).then_some(key.3)
    }

    /// Adds a flight; for a new one the caller has checked that there is room.
    pub(crate) fn join(&mut self, place: &QueuePlace) {
        let queue = self.queues.entry(place.queue_id()).or_default();
        assert!(queue.insert(place.key()), "{} waits twice", place.flight);
        *self
            .classes
            .entry(Arc::clone(&place.queue.class))
            .or_default() += 1;
        self.len += 1;
    }

    pub(crate) fn leave(&mut self, place: &QueuePlace) {
        if self.len == 0 {
            return;
        }
        let name = place.queue_id();
        let Some(queue) = self.queues.get_mut(&name) else {
            return;
        };
        if !queue.remove(&place.key()) {
            return;
        }
        if queue.is_empty() {
            self.queues.remove(&name);
        }
        self.len -= 1;
        if let Some(count) = self.classes.get_mut(&place.queue.class) {
            *count -= 1;
            if *count == 0 {
                self.classes.remove(&place.queue.class);
            }
        }
    }

    pub(crate) fn check(&self) {
        let waiting: usize = self.queues.values().map(BTreeSet::len).sum();
        assert_eq!(
            waiting, self.len as usize,
            "the length of the queue is wrong"
        );
        let classes: u32 = self.classes.values().sum();
        assert_eq!(classes, self.len, "the lengths by class are wrong");
    }
}
