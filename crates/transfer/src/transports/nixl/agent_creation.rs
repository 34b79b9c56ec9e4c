//! Creates an agent on the thread that it stays on, within a time limit.
//!
//! Owns: those threads, and the list of late creations. Never: ends a thread that hangs in the
//! library; that is impossible.
//! Invariant: while one creation is late no other begins, even if no task waits for the late one
//! any more; so a request to a hung library fails at once.

use super::Nixl;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

/// The agents that are being created.
#[derive(Debug, Default)]
pub(super) struct AgentCreations(Mutex<Vec<Arc<AgentCreation>>>);

/// One creation in progress.
#[derive(Debug)]
struct AgentCreation {
    late_at: Instant,
    /// Set once its thread has reported the result.
    ended: AtomicBool,
}

impl AgentCreations {
    /// Registers a creation, unless one is late.
    fn begin(&self, within: Duration) -> Option<Arc<AgentCreation>> {
        let mut attempts = self.0.lock();
        attempts.retain(|attempt| !attempt.ended.load(Ordering::Acquire));
        let now = Instant::now();
        if attempts.iter().any(|attempt| attempt.late_at <= now) {
            return None;
        }
        let attempt = Arc::new(AgentCreation {
            late_at: now + within,
            ended: AtomicBool::new(false),
        });
        attempts.push(Arc::clone(&attempt));
        Some(attempt)
    }
}

/// Reports the result of a creation. Dropping it reports a failure.
#[derive(Debug)]
pub(super) struct CreationReport<T> {
    attempt: Arc<AgentCreation>,
    result_sender: Option<oneshot::Sender<Result<T, String>>>,
}

impl<T> CreationReport<T> {
    /// Reports the result; returns whether it is still wanted.
    pub(super) fn report(mut self, made: Result<T, String>) -> bool {
        self.attempt.ended.store(true, Ordering::Release);
        self.result_sender
            .take()
            .is_some_and(|sender| sender.send(made).is_ok())
    }
}

impl<T> Drop for CreationReport<T> {
    fn drop(&mut self) {
        self.attempt.ended.store(true, Ordering::Release);
    }
}

/// Runs `work` on a thread of this name and waits for its result. The thread may live on after
/// that.
///
/// # Errors
/// The reason for which no agent was created.
pub(super) async fn create_agent<T: Send + 'static>(
    nixl: &Nixl,
    name: &str,
    time_max: Duration,
    work: impl FnOnce(CreationReport<T>) + Send + 'static,
) -> Result<T, String> {
    let attempt = nixl.agent_creations.begin(time_max);
    let attempt =
        attempt.ok_or("the library has not finished with an agent that was requested before")?;
    let (result_sender, made) = oneshot::channel();
    let ready = CreationReport {
        attempt,
        result_sender: Some(result_sender),
    };
    let thread = std::thread::Builder::new().name(name.into());
    let thread = thread.spawn(move || work(ready));
    thread.map_err(|error| error.to_string())?;
    match timeout(time_max, made).await {
        Ok(made) => made.map_err(|_| "the agent's thread ended".to_owned())?,
        Err(_) => Err(format!("no agent within {time_max:?}")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tokio::time::advance;

    // Lesson: 15.
    #[tokio::test(start_paused = true)]
    async fn an_abandoned_agent_creation_still_counts_as_late() {
        let late = AgentCreations::default();
        let within = Duration::from_secs(10);
        let hangs = late.begin(within).unwrap();
        let quick = late.begin(within).unwrap();
        quick.ended.store(true, Ordering::Release);
        // The task that waited for the first creation was replaced, or left.
        advance(within).await;
        assert!(late.begin(within).is_none());
        hangs.ended.store(true, Ordering::Release);
        assert!(late.begin(within).is_some());
    }
}
