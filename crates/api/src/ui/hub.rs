//! One board for all who look.
//!
//! Owns: when a board is made, who is sent it, and for how many. Never: makes one while nobody looks, or
//! one for each. Invariant: everybody is sent a snapshot and then, in order, what changed each second;
//! who falls behind is let go, and comes back to a new snapshot.

use super::board::{Board, Sent};
use crate::frontend::Frontend;
use bytes::{BufMut, Bytes, BytesMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

/// Who may look at once.
pub(crate) const VIEWERS_MAX: usize = 32;

/// Between two boards.
pub(crate) const PERIOD: Duration = Duration::from_secs(1);

/// Events that wait for a viewer; with more it is too slow to be told of every second.
const EVENTS_AHEAD: usize = 8;

/// Why nobody else may look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoView {
    /// As many as may look do.
    Full,
    /// The server shows nothing, or stops.
    Nothing,
}

/// See the module.
pub(crate) struct Hub {
    frontend: Arc<dyn Frontend>,
    seats: Mutex<Seats>,
}

#[derive(Default)]
struct Seats {
    viewers: Vec<mpsc::Sender<Bytes>>,
    /// What everybody there was sent last; none while nobody looks.
    shown: Option<Board>,
}

impl Hub {
    pub(crate) fn new(frontend: Arc<dyn Frontend>) -> Arc<Self> {
        Arc::new(Self {
            frontend,
            seats: Mutex::default(),
        })
    }

    /// Somebody looks; the first event is there already. Must be called within a tokio runtime.
    pub(crate) fn look(self: &Arc<Self>) -> Result<mpsc::Receiver<Bytes>, NoView> {
        let mut seats = self.lock();
        seats.viewers.retain(|viewer| !viewer.is_closed());
        if seats.viewers.len() >= VIEWERS_MAX {
            return Err(NoView::Full);
        }
        if seats.shown.is_none() {
            seats.shown = Some(self.frontend.board().ok_or(NoView::Nothing)?);
            tokio::spawn(Arc::clone(self).run());
        }
        let (viewer, events) = mpsc::channel(EVENTS_AHEAD);
        let shown = seats.shown.as_ref().map(Sent::whole);
        let first = shown.map(|sent| event("snapshot", &sent));
        // A new line has room for its first event.
        let _ = first.map(|first| viewer.try_send(first));
        seats.viewers.push(viewer);
        Ok(events)
    }

    /// Tells everybody what changed, each second, until nobody looks any more.
    async fn run(self: Arc<Self>) {
        let mut seconds = interval(PERIOD);
        seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        seconds.tick().await; // The first is at once, and was sent.
        loop {
            seconds.tick().await;
            if self.rest() {
                return;
            }
            let board = self.frontend.board();
            self.tell(board);
        }
    }

    /// Whether nobody looks; then nothing is kept.
    fn rest(&self) -> bool {
        let mut seats = self.lock();
        seats.viewers.retain(|viewer| !viewer.is_closed());
        if seats.viewers.is_empty() {
            seats.shown = None;
        }
        seats.shown.is_none()
    }

    /// Whoever has not taken the last few is let go; without a board everybody is.
    fn tell(&self, board: Option<Board>) {
        let mut seats = self.lock();
        let (Some(before), Some(board)) = (seats.shown.take(), board) else {
            seats.viewers.clear();
            return;
        };
        let changed = event("delta", &Sent::since(&before, &board));
        seats
            .viewers
            .retain(|viewer| viewer.try_send(changed.clone()).is_ok());
        seats.shown = Some(board);
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server-sent event.
fn event(name: &str, sent: &Sent) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_slice(b"event: ");
    bytes.put_slice(name.as_bytes());
    bytes.put_slice(b"\ndata: ");
    // Plain data has a JSON of its own, in one line.
    let json = serde_json::to_vec(sent).unwrap_or_default();
    bytes.put_slice(&json);
    bytes.put_slice(b"\n\n");
    bytes.freeze()
}
