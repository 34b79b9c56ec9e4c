//! Scheduled events of a goodput run.
//!
//! Owns: events in the order of time, then of insertion. Never: looks inside one. Invariant: no
//! event is scheduled before the last one taken.

use cleave_domain::Time;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Events wait in a slab, so that the heap moves three words each. Messages, most of all events,
/// take one fixed span, so they are inserted in order and need no heap.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Reverse<(Time, u64, usize)>>,
    slab: Vec<Option<E>>,
    free: Vec<usize>,
    in_order: VecDeque<(Time, u64, E)>,
    inserted_count: u64,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self {
            heap: BinaryHeap::new(),
            slab: Vec::new(),
            free: Vec::new(),
            in_order: VecDeque::new(),
            inserted_count: 0,
        }
    }
}

impl<E> EventQueue<E> {
    /// Schedules an event at any later time.
    pub fn push(&mut self, at: Time, event: E) {
        self.inserted_count += 1;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slab.push(None);
                self.slab.len() - 1
            }
        };
        self.slab[slot] = Some(event);
        self.heap.push(Reverse((at, self.inserted_count, slot)));
    }

    /// Schedules an event that is no earlier than all others scheduled this way; falls back to
    /// [`Self::plan`] otherwise.
    pub fn push_in_order(&mut self, at: Time, event: E) {
        if self.in_order.back().is_some_and(|(last, _, _)| *last > at) {
            return self.push(at, event);
        }
        self.inserted_count += 1;
        self.in_order.push_back((at, self.inserted_count, event));
    }

    /// The time of the event that comes next.
    pub fn next_at(&self) -> Option<Time> {
        let front = self.in_order.front().map(|(at, _, _)| *at);
        let in_heap = self.heap.peek().map(|Reverse((at, _, _))| *at);
        front.into_iter().chain(in_heap).min()
    }

    pub fn pop(&mut self) -> Option<(Time, E)> {
        let front = self.in_order.front().map(|(at, order, _)| (*at, *order));
        let in_heap = self
            .heap
            .peek()
            .map(|Reverse((at, order, _))| (*at, *order));
        let from_heap = match (front, in_heap) {
            (Some(line), Some(heap)) => heap < line,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        if !from_heap {
            let (at, _, event) = self.in_order.pop_front()?;
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
    use super::EventQueue;
    use cleave_domain::Time;

    #[test]
    fn events_are_ordered_by_time_then_insertion() {
        let at = Time::from_nanos;
        let mut event_queue = EventQueue::default();
        event_queue.push(at(5), "b");
        event_queue.push_in_order(at(3), "a");
        event_queue.push_in_order(at(5), "c");
        event_queue.push_in_order(at(4), "between");
        event_queue.push(at(5), "d");
        let mut order = Vec::new();
        while let Some((_, event)) = event_queue.pop() {
            order.push(event);
        }
        assert_eq!(order, ["a", "between", "b", "c", "d"]);
    }
}
