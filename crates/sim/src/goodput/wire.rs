//! The ways of blocks from worker to worker.
//!
//! Owns: until when each worker's way out and way in are taken. Never: looks inside what travels.
//! Invariant: a worker sends one thing at a time and receives one thing at a time, so a way shared by
//! many is no faster than it is.

use super::Device;
use cleave_domain::{LinkPrice, Time, WorkerId};
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Wire {
    out_until: Vec<Time>,
    in_until: Vec<Time>,
    grain: Duration,
}

impl Wire {
    pub(crate) fn new(workers_count: usize, grain: Duration) -> Self {
        Self {
            out_until: vec![Time::ZERO; workers_count],
            in_until: vec![Time::ZERO; workers_count],
            grain,
        }
    }

    /// One more worker.
    pub(crate) fn enrol(&mut self) {
        self.out_until.push(Time::ZERO);
        self.in_until.push(Time::ZERO);
    }

    /// Takes so many bytes on their way; says when the last has left, and when it is there.
    pub(crate) fn carry(
        &mut self,
        (from, to): (usize, usize),
        (link, bytes): (LinkPrice, u64),
        now: Time,
    ) -> (Time, Time) {
        let takes = u128::from(link.byte_picos) * u128::from(bytes) / 1000;
        let takes = Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
        let takes = whole_grains(takes, self.grain);
        let begins = now.max(self.out_until[from]).max(self.in_until[to]);
        let left = begins + takes;
        self.out_until[from] = left;
        self.in_until[to] = left;
        (left, left + latency(link))
    }
}

/// The way from a device to a worker.
pub(crate) fn link(from: &Device, to: WorkerId) -> LinkPrice {
    let links = &from.real.links;
    let known = links.binary_search_by_key(&to, |(worker, _)| *worker);
    known.map_or(from.real.link, |found| links[found].1)
}

pub(crate) fn latency(link: LinkPrice) -> Duration {
    Duration::from_nanos(link.latency_nanos)
}

/// The span, rounded up to whole multiples of a grain that is not zero.
pub(crate) fn whole_grains(span: Duration, grain: Duration) -> Duration {
    if grain.is_zero() {
        return span;
    }
    let grains = span.as_nanos().div_ceil(grain.as_nanos());
    let nanos = grains * grain.as_nanos();
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::{Wire, whole_grains};
    use cleave_domain::{LinkPrice, Time};
    use std::time::Duration;

    #[test]
    fn two_senders_share_the_receivers_way_in() {
        let link = LinkPrice {
            latency_nanos: 5,
            byte_picos: 1000,
        };
        let at = Time::from_nanos;
        let mut wire = Wire::new(3, Duration::ZERO);
        assert_eq!(wire.carry((0, 2), (link, 100), at(0)), (at(100), at(105)));
        assert_eq!(wire.carry((1, 2), (link, 100), at(0)), (at(200), at(205)));
        assert_eq!(wire.carry((0, 1), (link, 10), at(150)), (at(160), at(165)));
    }

    #[test]
    fn spans_are_rounded_up_to_the_grain() {
        let nanos = Duration::from_nanos;
        assert_eq!(whole_grains(nanos(11), nanos(10)), nanos(20));
        assert_eq!(whole_grains(nanos(10), nanos(10)), nanos(10));
        assert_eq!(whole_grains(nanos(11), Duration::ZERO), nanos(11));
    }
}
