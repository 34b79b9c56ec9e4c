//! One snapshot for all viewers.
//!
//! Owns: when a snapshot is made, who receives it, and the number of viewers. Never: makes a
//! snapshot without viewers, or one for each viewer. Invariant: each viewer receives a whole
//! snapshot and then, in order, the changes of each second; a viewer that falls behind is
//! disconnected and starts again with a whole snapshot.

use super::fleet_snapshot::{FleetSnapshot, SnapshotUpdate};
use crate::frontend::Frontend;
use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

/// Limit of concurrent viewers.
pub(crate) const VIEWERS_MAX: usize = 32;

pub(crate) const PERIOD: Duration = Duration::from_secs(1);

/// Limit of events that wait for a viewer; a viewer with more is too slow.
const QUEUED_EVENTS_MAX: usize = 8;

/// The reason why a viewer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ViewError {
    /// The limit of viewers is reached.
    TooManyViewers,
    /// The frontend shows nothing, or has stopped.
    NoSnapshot,
}

/// Sends snapshots to all viewers.
pub(crate) struct SnapshotBroadcast {
    frontend: Arc<dyn Frontend>,
    viewer_list: Mutex<ViewerList>,
}

#[derive(Default)]
struct ViewerList {
    viewers: Vec<mpsc::Sender<Bytes>>,
    /// The last snapshot sent; `None` without viewers.
    last_snapshot: Option<FleetSnapshot>,
}

impl SnapshotBroadcast {
    pub(crate) fn new(frontend: Arc<dyn Frontend>) -> Arc<Self> {
        Arc::new(Self {
            frontend,
            viewer_list: Mutex::default(),
        })
    }

    /// Adds a viewer and queues its first event. Must be called within a tokio runtime.
    pub(crate) fn subscribe(self: &Arc<Self>) -> Result<mpsc::Receiver<Bytes>, ViewError> {
        let mut viewer_list = self.lock();
        viewer_list.viewers.retain(|viewer| !viewer.is_closed());
        if viewer_list.viewers.len() >= VIEWERS_MAX {
            return Err(ViewError::TooManyViewers);
        }
        if viewer_list.last_snapshot.is_none() {
            viewer_list.last_snapshot = Some(
                self.frontend
                    .fleet_snapshot()
                    .ok_or(ViewError::NoSnapshot)?,
            );
            tokio::spawn(Arc::clone(self).run());
        }
        let (viewer, events) = mpsc::channel(QUEUED_EVENTS_MAX);
        let shown = viewer_list
            .last_snapshot
            .as_ref()
            .map(SnapshotUpdate::whole);
        let first = shown.map(|sent| event("snapshot", &sent));
        // A new channel has capacity for its first event.
        let _ = first.map(|first| viewer.try_send(first));
        viewer_list.viewers.push(viewer);
        Ok(events)
    }

    /// Sends the changes to all viewers each second, until there are no viewers.
    async fn run(self: Arc<Self>) {
        let mut seconds = interval(PERIOD);
        seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        seconds.tick().await; // The first is at once, and was sent.
        loop {
            seconds.tick().await;
            if self.stop_if_unwatched() {
                return;
            }
            let board = self.frontend.fleet_snapshot();
            self.broadcast(board);
        }
    }

    /// Drops the last snapshot if there are no viewers; returns whether there are none.
    fn stop_if_unwatched(&self) -> bool {
        let mut viewer_list = self.lock();
        viewer_list.viewers.retain(|viewer| !viewer.is_closed());
        if viewer_list.viewers.is_empty() {
            viewer_list.last_snapshot = None;
        }
        viewer_list.last_snapshot.is_none()
    }

    /// Sends the changes to all viewers. A viewer with a full queue is disconnected; without a
    /// snapshot every viewer is.
    fn broadcast(&self, board: Option<FleetSnapshot>) {
        let mut viewer_list = self.lock();
        let (Some(before), Some(board)) = (viewer_list.last_snapshot.take(), board) else {
            viewer_list.viewers.clear();
            return;
        };
        let changed = event("delta", &SnapshotUpdate::changes(&before, &board));
        viewer_list
            .viewers
            .retain(|viewer| viewer.try_send(changed.clone()).is_ok());
        viewer_list.last_snapshot = Some(board);
    }

    fn lock(&self) -> MutexGuard<'_, ViewerList> {
        self.viewer_list.lock()
    }
}

/// Formats a server-sent event.
fn event(name: &str, sent: &SnapshotUpdate) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_slice(b"event: ");
    bytes.put_slice(name.as_bytes());
    bytes.put_slice(b"\ndata: ");
    // Plain data always serializes, to a single line.
    let json = serde_json::to_vec(sent).unwrap_or_default();
    bytes.put_slice(&json);
    bytes.put_slice(b"\n\n");
    bytes.freeze()
}
