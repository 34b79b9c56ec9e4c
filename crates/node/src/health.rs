//! Whether a worker makes progress. Health means forward progress, not a process that answers.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// What the engine's thread is doing; read by `/health`.
#[derive(Debug)]
pub(crate) struct Pulse {
    step_limit: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    busy_since: Option<Instant>,
    broken: Option<String>,
}

impl Pulse {
    pub(crate) fn new(step_limit: Duration) -> Self {
        Self {
            step_limit,
            state: Mutex::default(),
        }
    }

    /// The engine took something on.
    pub(crate) fn begin(&self) {
        self.with(|state| state.busy_since = Some(Instant::now()));
    }

    /// The engine is through with it.
    pub(crate) fn end(&self) {
        self.with(|state| state.busy_since = None);
    }

    /// The engine panicked; nothing makes that good but a new process.
    pub(crate) fn broke(&self, reason: &str) {
        self.with(|state| state.broken = Some(reason.to_owned()));
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.with(|state| state.broken.is_some())
    }

    /// `Err` with the reason when there is no forward progress.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.with(|state| {
            if let Some(reason) = &state.broken {
                return Err(format!("the engine broke: {reason}"));
            }
            match state.busy_since {
                Some(since) if since.elapsed() > self.step_limit => Err(format!(
                    "the engine has been busy with one step for {:?}, more than {:?}",
                    since.elapsed(),
                    self.step_limit
                )),
                _ => Ok(()),
            }
        })
    }

    fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lesson_12_a_step_that_never_ends_is_not_healthy() {
        let pulse = Pulse::new(Duration::from_secs(60));
        pulse.begin();
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(pulse.check(), Ok(()));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(pulse.check().is_err());
        pulse.end();
        assert_eq!(pulse.check(), Ok(()));
        pulse.broke("index out of bounds");
        assert!(pulse.check().is_err());
    }
}
