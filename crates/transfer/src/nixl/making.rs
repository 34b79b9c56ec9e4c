//! Making an agent: on the thread that it stays on, within a time.
//!
//! Owns: those threads, and the count of the agents that were not ready in time. Never: ends a thread that the library holds:
//! nobody can.
//! Invariant: while one agent is late no other is begun; so whoever asks a library that hangs hears at once that there
//! will be none, and it holds no more threads than it had when it began to.

use super::Nixl;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Agents that are still being made though nobody waits any more.
#[derive(Debug, Default)]
pub(super) struct Late(AtomicUsize);

const MAKING: u8 = 0;
const MADE: u8 = 1;
const LATE: u8 = 2;

/// One agent that is being made.
#[derive(Debug)]
struct Attempt {
    state: AtomicU8,
    late: Arc<Late>,
}

/// By which a thread says what came of it. Dropped, it says that nothing will.
#[derive(Debug)]
pub(super) struct Ready<T> {
    attempt: Arc<Attempt>,
    told: Option<oneshot::Sender<Result<T, String>>>,
}

impl Attempt {
    /// It is not waited for any longer.
    fn give_up(&self) {
        let before = self
            .state
            .compare_exchange(MAKING, LATE, Ordering::AcqRel, Ordering::Acquire);
        if before.is_ok() {
            self.late.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn end(&self) {
        if self.state.swap(MADE, Ordering::AcqRel) == LATE {
            self.late.0.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl<T> Ready<T> {
    /// Whether anybody still wants it.
    pub(super) fn say(mut self, made: Result<T, String>) -> bool {
        self.attempt.end();
        self.told.take().is_some_and(|told| told.send(made).is_ok())
    }
}

impl<T> Drop for Ready<T> {
    fn drop(&mut self) {
        self.attempt.end();
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
    if nixl.late.0.load(Ordering::Acquire) > 0 {
        return Err("the library has not finished with an agent that was asked for before".into());
    }
    let attempt = Arc::new(Attempt {
        state: AtomicU8::new(MAKING),
        late: Arc::clone(&nixl.late),
    });
    let (told, made) = oneshot::channel();
    let ready = Ready {
        attempt: Arc::clone(&attempt),
        told: Some(told),
    };
    let thread = std::thread::Builder::new().name(name.into());
    let thread = thread.spawn(move || work(ready));
    thread.map_err(|error| error.to_string())?;
    match timeout(within, made).await {
        Ok(made) => made.map_err(|_| "the agent's thread ended".to_owned())?,
        Err(_) => {
            attempt.give_up();
            Err(format!("no agent within {within:?}"))
        }
    }
}
