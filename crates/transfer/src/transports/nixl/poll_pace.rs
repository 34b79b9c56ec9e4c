//! The polling rate of the thread of an agent.
//!
//! Never: polls. Invariant: while nothing is awaited the pauses grow up to one heartbeat interval;
//! these rare polls serve events of the devices, such as a lost connection.

use std::time::{Duration, Instant};

/// A write in progress is polled without pause for this long; most writes complete sooner.
const BUSY_POLL_MAX: Duration = Duration::from_millis(5);
/// The shortest pause: for longer writes, and the first one of an idle thread.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// The longest pause while something is awaited.
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// The polling rate of one thread.
#[derive(Debug)]
pub(super) struct PollPace {
    beat: Duration,
    since: Instant,
    pause: Duration,
}

impl PollPace {
    /// Idle threads poll once per `beat`.
    pub(super) fn new(beat: Duration) -> Self {
        Self {
            beat,
            since: Instant::now(),
            pause: PAUSE_MIN,
        }
    }

    /// Returns to the highest rate: there is work.
    pub(super) fn reset(&mut self) {
        self.since = Instant::now();
        self.pause = PAUSE_MIN;
    }

    /// Pauses while a result is awaited and nothing has completed.
    pub(super) fn pause_while_awaited(&mut self) {
        if self.since.elapsed() < BUSY_POLL_MAX {
            // The other end may need this core.
            return std::thread::yield_now();
        }
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// The pause until the next poll while nothing is awaited.
    pub(super) fn idle_pause(&mut self) -> Duration {
        let rest = self.pause;
        self.pause = (self.pause * 2).min(self.beat);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_agent_thread_polls_once_per_beat() {
        let beat = Duration::from_secs(1);
        let mut pace = PollPace::new(beat);
        let rests: Vec<_> = (0..20).map(|_| pace.idle_pause()).collect();
        assert_eq!(rests[0], PAUSE_MIN);
        assert!(rests.is_sorted());
        assert_eq!(rests[19], beat);
        pace.reset();
        assert_eq!(pace.idle_pause(), PAUSE_MIN);
    }
}
