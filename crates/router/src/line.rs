//! The line of flights that wait for a place.
//!
//! Owns: their order. Never: decides who is placed.
//! Invariant: who comes anew finds room for at most `max`; a flight that comes back after a failed
//! attempt is let in whatever the length: its client has been promised an answer, and the number of
//! flights bounds it.
//!
//! Streams that were broken off go before whoever is new, by urgency and arrival. Then urgency, smaller
//! before greater. Then between classes the one whose first has to begin earliest; classes without
//! targets come last, and among themselves by what they were served for their weight. Within a class
//! between tenants by what they were served for their share, and within a tenant by the requests' own
//! priority and whoever has to begin earliest.

use crate::tally::Tally;
use cleave_domain::{FlightId, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A place in the line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) queue: Queue,
    /// Its own wish: smaller goes first among its tenant's of its class.
    pub(crate) urgency: i32,
    /// When its prompt has to begin; the end of time without a target.
    pub(crate) latest: Time,
    pub(crate) arrival: u64,
    pub(crate) flight: FlightId,
}

/// Flights that are served one after the other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Queue {
    pub(crate) kind: Kind,
    pub(crate) priority: i32,
    pub(crate) class: Arc<str>,
    pub(crate) tenant: Arc<str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// Its client waits for the rest of an answer, or for the retry of a failed attempt. All of them
    /// are in one queue, whatever their class.
    Resumed,
    New,
}

impl Place {
    fn key(&self) -> Key {
        match self.queue.kind {
            Kind::Resumed => (self.urgency, Time::ZERO, self.arrival, self.flight),
            Kind::New => (self.urgency, self.latest, self.arrival, self.flight),
        }
    }

    /// The name of the queue in which it stands.
    pub(crate) fn stands_in(&self) -> Queue {
        match self.queue.kind {
            Kind::Resumed => Queue {
                class: Arc::from(""),
                tenant: Arc::from(""),
                ..self.queue
            },
            Kind::New => self.queue.clone(),
        }
    }
}

type Key = (i32, Time, u64, FlightId);

#[derive(Clone, Debug)]
pub(crate) struct Line {
    queues: BTreeMap<Queue, BTreeSet<Key>>,
    /// How many wait of each class.
    classes: BTreeMap<Arc<str>, u32>,
    len: u32,
    max: u32,
}

impl Line {
    pub(crate) fn new(max: u32) -> Self {
        Self {
            queues: BTreeMap::new(),
            classes: BTreeMap::new(),
            len: 0,
            max,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len >= self.max
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// How many of a class wait.
    pub(crate) fn len_of(&self, class: &str) -> u32 {
        self.classes.get(class).copied().unwrap_or(0)
    }

    pub(crate) fn contains(&self, place: &Place) -> bool {
        self.len > 0
            && self
                .queues
                .get(&place.stands_in())
                .is_some_and(|queue| queue.contains(&place.key()))
    }

    /// Who is next; `closed` are queues that are not asked, `passed` says of a flight that it is not.
    pub(crate) fn first(
        &self,
        tally: &Tally,
        closed: &BTreeSet<Queue>,
        passed: impl Fn(FlightId) -> bool,
    ) -> Option<FlightId> {
        let mut queues = self
            .queues
            .iter()
            .filter(|(name, _)| !closed.contains(name))
            .filter_map(|(name, keys)| Some((name, keys.iter().find(|key| !passed(key.3))?)))
            .peekable();
        while let Some((first, head)) = queues.next() {
            if first.kind == Kind::Resumed {
                return Some(head.3);
            }
            let mut best = None;
            let mut here = Some((first, head));
            // One class after the other; of each the tenant that was served least.
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
                    let weighed = match *latest == Time::END {
                        true => tally.served_class(&name.class),
                        false => 0,
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

    /// The last of all that are new, if `place` goes before it: the one to let go of where the line is
    /// full.
    pub(crate) fn displaced_by(&self, place: &Place) -> Option<FlightId> {
        let new = |(name, _): &(&Queue, _)| name.kind == Kind::New;
        let last = || self.queues.iter().rev().take_while(new);
        let priority = last().next()?.0.priority;
        let last = last().take_while(|(name, _)| name.priority == priority);
        let key = last.filter_map(|(_, keys)| keys.last()).max()?;
        ((place.queue.priority, place.key()) < (priority, *key)).then_some(key.3)
    }

    /// For a new flight the caller has asked whether there is room.
    pub(crate) fn join(&mut self, place: &Place) {
        let queue = self.queues.entry(place.stands_in()).or_default();
        assert!(queue.insert(place.key()), "{} waits twice", place.flight);
        *self
            .classes
            .entry(Arc::clone(&place.queue.class))
            .or_default() += 1;
        self.len += 1;
    }

    pub(crate) fn leave(&mut self, place: &Place) {
        if self.len == 0 {
            return;
        }
        let name = place.stands_in();
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
        assert_eq!(waiting, self.len as usize, "the line is miscounted");
        let classes: u32 = self.classes.values().sum();
        assert_eq!(classes, self.len, "the line's classes are miscounted");
    }
}
