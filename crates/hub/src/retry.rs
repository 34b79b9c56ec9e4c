//! Retries: how long to wait after a failure, and when to give up.

use std::time::Duration;

/// Limits of a request that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryOptions {
    /// Failures in a row, without a byte between them, after which a file is given up.
    pub failures_max: u32,
    /// Connections in a row that are not made, before the hub has answered once.
    pub contacts_max: u32,
    /// Wait after the first failure; each further one doubles it.
    pub wait_first: Duration,
    /// Longest wait, also where the hub asks for a longer one.
    pub wait_max: Duration,
    /// Longest time without a byte, after which a connection counts as cut.
    pub silence_max: Duration,
}

impl Default for RetryOptions {
    fn default() -> Self {
        Self {
            failures_max: 7,
            contacts_max: 3,
            wait_first: Duration::from_millis(500),
            wait_max: Duration::from_secs(60),
            silence_max: Duration::from_secs(30),
        }
    }
}

/// The failures of one request so far.
#[derive(Debug, Default)]
pub(crate) struct FailureCount(u32);

/// The next thing to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryStep {
    Wait(Duration),
    GiveUp,
}

impl FailureCount {
    pub(crate) fn count(&self) -> u32 {
        self.0
    }

    /// Forgets the failures, because bytes arrived since.
    pub(crate) fn progress(&mut self) {
        self.0 = 0;
    }

    /// Counts a failure. `asked` is the hub's `retry-after`.
    pub(crate) fn fail(&mut self, options: &RetryOptions, asked: Option<Duration>) -> RetryStep {
        self.0 += 1;
        if self.0 >= options.failures_max {
            return RetryStep::GiveUp;
        }
        let doubled = options.wait_first.saturating_mul(1 << (self.0 - 1).min(16));
        let wait = doubled.max(asked.unwrap_or_default());
        RetryStep::Wait(wait.min(options.wait_max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_end() {
        let options = RetryOptions {
            failures_max: 5,
            wait_first: Duration::from_secs(1),
            wait_max: Duration::from_secs(3),
            ..RetryOptions::default()
        };
        let mut failures = FailureCount::default();
        let wait = |seconds| RetryStep::Wait(Duration::from_secs(seconds));
        let steps: Vec<_> = (0..5).map(|_| failures.fail(&options, None)).collect();
        let expected = [wait(1), wait(2), wait(3), wait(3), RetryStep::GiveUp];
        assert_eq!(steps, expected);
        failures.progress();
        let asked = Some(Duration::from_secs(2));
        assert_eq!(failures.fail(&options, asked), wait(2));
        let asked = Some(Duration::from_secs(3600));
        assert_eq!(failures.fail(&options, asked), wait(3));
    }
}
