//! What a router adds to the time to first token.
//!
//! Owns: whose turn it is, of one flight, until its client takes the first token. Never: decides, or
//! counts a worker's time. Invariant: a flight is told once at most, and one without a token never.
//!
//! A router has its turn from the submission to the first placement, from the word that blocks are reserved
//! to the prompt's order, and from the first token to the client's stream. Waiting for a place, being
//! placed anew after that or after a failure, and sockets are not in it.

use prometheus_client::metrics::histogram::Histogram;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Added {
    seconds: Histogram,
    turns: Mutex<Turns>,
}

#[derive(Debug)]
struct Turns {
    since: Option<Instant>,
    before: Duration,
    told: bool,
}

impl Added {
    /// A flight is submitted.
    pub(crate) fn begin(seconds: Histogram) -> Arc<Self> {
        Arc::new(Self {
            seconds,
            turns: Mutex::new(Turns {
                since: Some(Instant::now()),
                before: Duration::ZERO,
                told: false,
            }),
        })
    }

    /// The first token is on its way to the client.
    pub(crate) fn pass_on(&self) {
        self.locked(|turns| {
            turns.since.get_or_insert_with(Instant::now);
        });
    }

    /// It had a turn that took so long.
    pub(crate) fn add(&self, turn: Duration) {
        self.locked(|turns| turns.before += turn);
    }

    /// It is somebody else's.
    pub(crate) fn rest(&self) {
        self.locked(Turns::rest);
    }

    /// The client takes a token.
    pub(crate) fn tell(&self) {
        self.locked(|turns| {
            if !std::mem::replace(&mut turns.told, true) {
                turns.rest();
                self.seconds.observe(turns.before.as_secs_f64());
            }
        });
    }

    fn locked(&self, act: impl FnOnce(&mut Turns)) {
        act(&mut self.turns.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Turns {
    fn rest(&mut self) {
        let turn = self.since.take().map(|since| since.elapsed());
        self.before += turn.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode_registry;
    use prometheus_client::registry::Registry;

    #[test]
    fn the_time_of_workers_was_counted_as_the_routers() {
        let seconds = Histogram::new([1.0]);
        let mut registry = Registry::default();
        registry.register("added", "", seconds.clone());
        let added = Added::begin(seconds);
        added.rest();
        assert!(added.turns.lock().expect("no panic").since.is_none());
        added.add(Duration::from_secs(3600));
        added.pass_on();
        assert!(added.turns.lock().expect("no panic").since.is_some());
        added.tell();
        added.tell();
        let mut text = String::new();
        encode_registry(&mut text, &registry).expect("text");
        assert!(
            text.contains("added_count 1") && text.contains("added_sum 36"),
            "{text}"
        );
    }
}
