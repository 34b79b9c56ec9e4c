//! How often an agent's thread looks.
//!
//! Never: looks. Invariant: while nothing is awaited, it looks ever more rarely, down to once in a beat; that is for what
//! devices say of themselves, such as a connection that is gone.

use std::time::{Duration, Instant};

/// For so long a write that goes on is looked after without a pause: usual writes are over by then.
const EAGER: Duration = Duration::from_millis(5);
/// The pauses of one that takes longer, and the first of a thread with nothing to do.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// The longest pause while something is awaited.
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    beat: Duration,
    since: Instant,
    pause: Duration,
}

impl Pace {
    /// Idle threads look once in a `beat`.
    pub(super) fn new(beat: Duration) -> Self {
        Self {
            beat,
            since: Instant::now(),
            pause: PAUSE_MIN,
        }
    }

    /// Something was done, or is to be done.
    pub(super) fn moved(&mut self) {
        self.since = Instant::now();
        self.pause = PAUSE_MIN;
    }

    /// Nothing has moved, and something is awaited.
    pub(super) fn wait(&mut self) {
        if self.since.elapsed() < EAGER {
            // The other end may need this core.
            return std::thread::yield_now();
        }
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Nothing is awaited: how long until the next look.
    pub(super) fn rest(&mut self) -> Duration {
        let rest = self.pause;
        self.pause = (self.pause * 2).min(self.beat);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_work_woke_a_thousand_times_a_second() {
        let beat = Duration::from_secs(1);
        let mut pace = Pace::new(beat);
        let rests: Vec<_> = (0..20).map(|_| pace.rest()).collect();
        assert_eq!(rests[0], PAUSE_MIN);
        assert!(rests.is_sorted());
        assert_eq!(rests[19], beat);
        pace.moved();
        assert_eq!(pace.rest(), PAUSE_MIN);
    }
}
