//! What happens next.
//!
//! Owns: planned events, in the order of time, then of being planned. Never: looks inside one.
//! Invariant: nothing is planned before what was taken last.

use cleave_domain::Time;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Events wait in a slab, so that the heap moves three words each. What comes after one fixed span, most of
/// all events, comes in the order in which it was planned, and needs no heap.
#[derive(Debug)]
pub(crate) struct Agenda<E> {
    heap: BinaryHeap<Reverse<(Time, u64, usize)>>,
    slab: Vec<Option<E>>,
    free: Vec<usize>,
    line: VecDeque<(Time, u64, E)>,
    planned: u64,
}

impl<E> Default for Agenda<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            slab: Vec::new(),
            free: Vec::new(),
            line: VecDeque::new(),
            planned: 0,
        }
    }
}

impl<E> Agenda<E> {
    /// Plans an event for any time to come.
    pub(crate) fn plan(&mut self, at: Time, event: E) {
        self.planned += 1;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slab.push(None);
                self.slab.len() - 1
            }
        };
        self.slab[slot] = Some(event);
        self.heap.push(Reverse((at, self.planned, slot)));
    }

    /// Plans an event that comes no earlier than all others planned this way; any other is planned as
    /// [`Self::plan`] does.
    pub(crate) fn plan_in_line(&mut self, at: Time, event: E) {
        if self.line.back().is_some_and(|(last, _, _)| *last > at) {
            return self.plan(at, event);
        }
        self.planned += 1;
        self.line.push_back((at, self.planned, event));
    }

    pub(crate) fn next(&mut self) -> Option<(Time, E)> {
        let in_line = self.line.front().map(|(at, order, _)| (*at, *order));
        let in_heap = self
            .heap
            .peek()
            .map(|Reverse((at, order, _))| (*at, *order));
        let from_heap = match (in_line, in_heap) {
            (Some(line), Some(heap)) => heap < line,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        if !from_heap {
            let (at, _, event) = self.line.pop_front()?;
            return Some((at, event));
        }
        let Reverse((at, _, slot)) = self.heap.pop()?;
        self.free.push(slot);
        let event = self.slab[slot].take().expect("a planned event is there");
        Some((at, event))
    }
}

#[cfg(test)]
mod tests {
    use super::Agenda;
    use cleave_domain::Time;

    #[test]
    fn events_come_in_the_order_of_time_then_of_being_planned() {
        let at = Time::from_nanos;
        let mut agenda = Agenda::default();
        agenda.plan(at(5), "b");
        agenda.plan_in_line(at(3), "a");
        agenda.plan_in_line(at(5), "c");
        agenda.plan_in_line(at(4), "between");
        agenda.plan(at(5), "d");
        let mut order = Vec::new();
        while let Some((_, event)) = agenda.next() {
            order.push(event);
        }
        assert_eq!(order, ["a", "between", "b", "c", "d"]);
    }
}
