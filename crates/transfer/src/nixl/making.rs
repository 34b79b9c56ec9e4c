//! Making an agent: on the thread that it stays on, within a time.
//!
//! Owns: those threads, and which of them were not ready in time. Never: ends a thread that the library holds: nobody can.
//! Invariant: while one agent is late no other is begun, whoever waited for it and whether anybody still does; so whoever asks a
//! library that hangs hears at once that there will be none.

use super::Nixl;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

/// Agents that are being made.
#[derive(Debug, Default)]
pub(super) struct Late(Mutex<Vec<Arc<Attempt>>>);

/// One of them.
#[derive(Debug)]
struct Attempt {
    late_at: Instant,
    /// Its thread has said what came of it.
    ended: AtomicBool,
}

impl Late {
    /// One more, unless one is late.
    fn begin(&self, within: Duration) -> Option<Arc<Attempt>> {
        let mut attempts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        attempts.retain(|attempt| !attempt.ended.load(Ordering::Acquire));
        let now = Instant::now();
        if attempts.iter().any(|attempt| attempt.late_at <= now) {
            return None;
        }
        let attempt = Arc::new(Attempt {
            late_at: now + within,
            ended: AtomicBool::new(false),
        });
        attempts.push(Arc::clone(&attempt));
        Some(attempt)
    }
}

/// By which a thread says what came of it. Dropped, it says that nothing will.
#[derive(Debug)]
pub(super) struct Ready<T> {
    attempt: Arc<Attempt>,
    told: Option<oneshot::Sender<Result<T, String>>>,
}

impl<T> Ready<T> {
    /// Whether anybody still wants it.
    pub(super) fn say(mut self, made: Result<T, String>) -> bool {
        self.attempt.ended.store(true, Ordering::Release);
        self.told.take().is_some_and(|told| told.send(made).is_ok())
    }
}

impl<T> Drop for Ready<T> {
    fn drop(&mut self) {
        self.attempt.ended.store(true, Ordering::Release);
    }
}

/// Runs `work` on a thread of this name and waits until it says that it is ready. The thread may live on after that.
///
/// # Errors
/// Why there is no agent.
pub(super) async fn make<T: Send + 'static>(
    nixl: &Nixl,
    (name, within): (&str, Duration),
    work: impl FnOnce(Ready<T>) + Send + 'static,
) -> Result<T, String> {
    let attempt = nixl.late.begin(within);
    let attempt =
        attempt.ok_or("the library has not finished with an agent that was asked for before")?;
    let (told, made) = oneshot::channel();
    let ready = Ready {
        attempt,
        told: Some(told),
    };
    let thread = std::thread::Builder::new().name(name.into());
    let thread = thread.spawn(move || work(ready));
    thread.map_err(|error| error.to_string())?;
    match timeout(within, made).await {
        Ok(made) => made.map_err(|_| "the agent's thread ended".to_owned())?,
        Err(_) => Err(format!("no agent within {within:?}")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn lesson_15_an_agent_that_nobody_waited_for_any_more_was_not_late() {
        let late = Late::default();
        let within = Duration::from_secs(10);
        let hangs = late.begin(within).unwrap();
        let quick = late.begin(within).unwrap();
        quick.ended.store(true, Ordering::Release);
        // Whoever waited for the first one was replaced, or left.
        advance(within).await;
        assert!(late.begin(within).is_none());
        hangs.ended.store(true, Ordering::Release);
        assert!(late.begin(within).is_some());
    }
}
