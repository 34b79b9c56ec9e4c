//! The time that a router adds to the time to first token.
//!
//! Owns: the clock of one flight, which runs while the router works on it, until its client takes
//! the first token. Never decides, or counts a worker's time. Invariant: a flight is observed at
//! most once, and one without a token never.
//!
//! The clock runs from the submission to the first placement, from the report that a decode worker
//! has reserved blocks to the order for the prompt on another, and from the first token to the
//! client's stream. Waiting for a place, later placements, placements after a failure, and sockets
//! do not count.

use parking_lot::Mutex;
use prometheus_client::metrics::histogram::Histogram;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct RouterOverhead {
    seconds: Histogram,
    clock: Mutex<OverheadClock>,
}

#[derive(Debug)]
struct OverheadClock {
    since: Option<Instant>,
    total: Duration,
    observed: bool,
}

impl RouterOverhead {
    /// Starts the clock of a flight at its submission.
    pub fn start(seconds: Histogram) -> Arc<Self> {
        Arc::new(Self {
            seconds,
            clock: Mutex::new(OverheadClock {
                since: Some(Instant::now()),
                total: Duration::ZERO,
                observed: false,
            }),
        })
    }

    /// Starts the clock again: the first token is on its way to the client.
    pub fn resume(&self) {
        self.locked(|turns| {
            turns.since.get_or_insert_with(Instant::now);
        });
    }

    /// Adds a span for which the router worked on the flight.
    pub fn add(&self, turn: Duration) {
        self.locked(|turns| turns.total += turn);
    }

    /// Stops the clock: the flight waits for a worker or a place.
    pub fn pause(&self) {
        self.locked(OverheadClock::pause);
    }

    /// Observes the overhead, once, when the client takes a token.
    pub fn observe_once(&self) {
        self.locked(|turns| {
            if !std::mem::replace(&mut turns.observed, true) {
                turns.pause();
                self.seconds.observe(turns.total.as_secs_f64());
            }
        });
    }

    fn locked(&self, act: impl FnOnce(&mut OverheadClock)) {
        act(&mut self.clock.lock());
    }
}

impl OverheadClock {
    fn pause(&mut self) {
        let turn = self.since.take().map(|since| since.elapsed());
        self.total += turn.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode_registry;
    use prometheus_client::registry::Registry;

    #[test]
    fn router_overhead_excludes_worker_time() {
        let seconds = Histogram::new([1.0]);
        let mut registry = Registry::default();
        registry.register("added", "", seconds.clone());
        let added = RouterOverhead::start(seconds);
        added.pause();
        assert!(added.clock.lock().since.is_none());
        added.add(Duration::from_secs(3600));
        added.resume();
        assert!(added.clock.lock().since.is_some());
        added.observe_once();
        added.observe_once();
        let mut text = String::new();
        encode_registry(&mut text, &registry).expect("text");
        assert!(
            text.contains("added_count 1") && text.contains("added_sum 36"),
            "{text}"
        );
    }
}
