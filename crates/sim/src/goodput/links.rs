//! Links of blocks between workers.
//!
//! Owns: the times until which each worker's outgoing and incoming link are busy. Never: looks at
//! the content of a transfer. Invariant: a worker sends one transfer at a time and receives one at
//! a time, so a shared link is no faster than its bandwidth.

use super::WorkerDevice;
use cleave_domain::{LinkPrice, Time, WorkerId};
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct WorkerLinks {
    out_until: Vec<Time>,
    in_until: Vec<Time>,
    grain: Duration,
}

impl WorkerLinks {
    pub(crate) fn new(workers_count: usize, grain: Duration) -> Self {
        Self {
            out_until: vec![Time::ZERO; workers_count],
            in_until: vec![Time::ZERO; workers_count],
            grain,
        }
    }

    pub(crate) fn add_worker(&mut self) {
        self.out_until.push(Time::ZERO);
        self.in_until.push(Time::ZERO);
    }

    /// Transfers this many bytes; gives the times at which the last byte leaves and arrives.
    pub(crate) fn transfer(
        &mut self,
        from: usize,
        to: usize,
        link: LinkPrice,
        bytes: u64,
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

/// The price of the link from a device to a worker.
pub(crate) fn link_price(from: &WorkerDevice, to: WorkerId) -> LinkPrice {
    let links = &from.real_prices.links;
    let position = links.binary_search_by_key(&to, |(worker, _)| *worker);
    position.map_or(from.real_prices.link, |found| links[found].1)
}

pub(crate) fn latency(link: LinkPrice) -> Duration {
    Duration::from_nanos(link.latency_nanos)
}

/// A duration rounded up to whole multiples of the grain; unchanged if the grain is zero.
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
    use super::{WorkerLinks, whole_grains};
    use cleave_domain::{LinkPrice, Time};
    use std::time::Duration;

    #[test]
    fn two_senders_share_the_receivers_link() {
        let link = LinkPrice {
            latency_nanos: 5,
            byte_picos: 1000,
        };
        let at = Time::from_nanos;
        let mut wire = WorkerLinks::new(3, Duration::ZERO);
        assert_eq!(wire.transfer(0, 2, link, 100, at(0)), (at(100), at(105)));
        assert_eq!(wire.transfer(1, 2, link, 100, at(0)), (at(200), at(205)));
        assert_eq!(wire.transfer(0, 1, link, 10, at(150)), (at(160), at(165)));
    }

    #[test]
    fn durations_are_rounded_up_to_the_grain() {
        let nanos = Duration::from_nanos;
        assert_eq!(whole_grains(nanos(11), nanos(10)), nanos(20));
        assert_eq!(whole_grains(nanos(10), nanos(10)), nanos(10));
        assert_eq!(whole_grains(nanos(11), Duration::ZERO), nanos(11));
    }
}
