//! Responses that are made without a connection: `background` in a request.
//!
//! Owns: those that run, and their ends. Never: renders one. Invariant: a running response is
//! stored once, by its own end or by its cancellation, whichever comes first; one that is cancelled
//! keeps no worker busy.

use super::peers::FoundResponse;
use super::whole_response;
use super::{ConversationTurn, ItemList, NewResponse, NotKept, ResponseRecorder, ResponseStore};
use axum::body::Body;
use cleave_text::json::Json;
use futures::future::{AbortHandle, Abortable};
use http_body_util::BodyExt;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The status that the members of a queued response have.
const QUEUED: &str = r#""status":"queued""#;

/// Running responses by their ids.
pub(super) type RunningResponses = BTreeMap<Arc<str>, RunningResponse>;

/// A response that was answered before it was made.
pub(super) struct RunningResponse {
    recorder: ResponseRecorder,
    /// The members of the queued response but `output`, the text of a JSON object.
    members: Arc<str>,
    /// Whether it has its first token.
    has_begun: bool,
    task: AbortHandle,
}

/// Forgets a running response when its task ends, however it does.
struct RunningGuard {
    store: ResponseStore,
    id: Arc<str>,
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.store.shared.running.lock().remove(&self.id);
    }
}

impl RunningResponse {
    fn found(&self, status: &str) -> FoundResponse {
        FoundResponse {
            response: whole_response(&self.members_in(status), "[]").into(),
            input: self.recorder.input.clone(),
        }
    }

    /// The members with another status. It stands before all that a client chose.
    fn members_in(&self, status: &str) -> String {
        self.members
            .replacen(QUEUED, &format!(r#""status":"{status}""#), 1)
    }
}

impl ResponseRecorder {
    /// Makes the response `id` in a task, by reading its stream. `members` are those of the queued
    /// response.
    pub(crate) fn run(self, id: Arc<str>, members: Arc<str>, mut stream: Body) {
        let (task, registration) = AbortHandle::new_pair();
        let store = self.store.clone();
        let running = RunningResponse {
            recorder: self,
            members,
            has_begun: false,
            task,
        };
        store.shared.running.lock().insert(Arc::clone(&id), running);
        let guard = RunningGuard { store, id };
        let reading = async move {
            // The first events are sent before the first token.
            let mut is_first = true;
            while let Some(Ok(_)) = stream.frame().await {
                if !std::mem::replace(&mut is_first, false) {
                    guard.begin();
                }
            }
        };
        // The task ends by itself, or is aborted; nobody waits for it.
        drop(tokio::spawn(Abortable::new(reading, registration)));
    }
}

impl RunningGuard {
    fn begin(&self) {
        if let Some(running) = self.store.shared.running.lock().get_mut(&self.id) {
            running.has_begun = true;
        }
    }
}

impl ResponseStore {
    /// Stores the end of a response that runs; nothing, if it was cancelled.
    pub(super) fn end(&self, new: &NewResponse) -> Result<(), NotKept> {
        let mut running = self.shared.running.lock();
        match running.remove(&new.turn.id) {
            Some(_) => self.insert(new),
            None => Ok(()),
        }
    }

    /// A running response of a tenant.
    pub(super) fn running(&self, tenant: &str, id: &str) -> Option<FoundResponse> {
        let running = self.shared.running.lock();
        let found = running
            .get(id)
            .filter(|found| *found.recorder.tenant == *tenant)?;
        Some(found.found(if found.has_begun {
            "in_progress"
        } else {
            "queued"
        }))
    }

    /// Ends a running response of a tenant, and forgets it.
    pub(super) fn forget(&self, tenant: &str, id: &str) -> bool {
        let mut running = self.shared.running.lock();
        let is_own = |found: &RunningResponse| *found.recorder.tenant == *tenant;
        let is_there = running.get(id).is_some_and(is_own);
        if is_there && let Some(found) = running.remove(id) {
            found.task.abort();
        }
        is_there
    }

    /// Cancels a response of a tenant that runs here; one that has ended stays as it is. Returns
    /// the response.
    pub(super) fn cancel_here(&self, tenant: &str, id: &str) -> Option<FoundResponse> {
        let mut running = self.shared.running.lock();
        let is_own = |found: &RunningResponse| *found.recorder.tenant == *tenant;
        if running.get(id).is_none_or(|found| !is_own(found)) {
            drop(running);
            return self.find_here(tenant, id);
        }
        let (id, found) = running.remove_entry(id)?;
        found.task.abort();
        let cancelled = found.found("cancelled");
        let recorder = &found.recorder;
        let output = Json::check("[]").expect("an empty list is JSON");
        let new = NewResponse {
            tenant: Arc::clone(&recorder.tenant),
            members: found.members_in("cancelled").into(),
            turn: ConversationTurn {
                id,
                input: recorder.input.clone(),
                output: ItemList::of(output),
            },
            earlier: Arc::clone(&recorder.earlier.turns),
        };
        // Without room it is only answered.
        if self.insert(&new).is_err() {
            tracing::debug!("a cancelled response is not stored");
        }
        Some(cancelled)
    }
}
