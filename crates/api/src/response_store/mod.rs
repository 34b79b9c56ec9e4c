//! Stored responses: what `GET /v1/responses/{id}` gives and `previous_response_id` goes on from.
//!
//! Owns: the responses of this router, in memory, with limits of their bytes and age; the search at
//! the fleet's other routers for those that were stored there. Never: renders a response, or stores
//! one that failed. Invariant: a response is stored before its client learns that it is complete,
//! and only requests of its own tenant find it or an item of it.

mod background;
mod items;
mod named_items;
mod peers;
mod routes;
mod table;

pub(crate) use items::{ItemList, member};
pub(crate) use named_items::NamedItems;
pub use peers::{PeerReply, ResponsePeers};
pub(crate) use peers::{RequestPlace, whole_response};
pub(crate) use routes::{RESPONSE_ROUTES, peer_routes};

use crate::error::ApiError;
use crate::metrics::StoreMetrics;
use crate::request::AnswerFacts;
use background::RunningResponses;
use cleave_text::json::Json;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use table::{NewResponse, ResponseTable};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

/// Conversations that are fetched from other routers at once; each is as long as a body at most.
const FETCHES_MAX: usize = 4;

/// Limits of stored responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseStoreLimits {
    /// Memory for all of them, in bytes, with their inputs and keys; 0 stores none. Default 256
    /// MiB.
    pub bytes_max: usize,
    /// Memory for those of one tenant, in bytes. Default 64 MiB.
    pub tenant_bytes_max: usize,
    /// Time for which one is stored. Default an hour.
    pub age_max: Duration,
}

impl Default for ResponseStoreLimits {
    fn default() -> Self {
        Self {
            bytes_max: 256 << 20,
            tenant_bytes_max: 64 << 20,
            age_max: Duration::from_secs(3600),
        }
    }
}

/// The input and the output of one response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConversationTurn {
    /// Id of the response.
    pub(crate) id: Arc<str>,
    /// The items of the request.
    pub(crate) input: ItemList,
    /// The items of the response.
    pub(crate) output: ItemList,
}

/// Why a response is stored no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EvictionReason {
    Age,
    /// A newer one of its tenant needed room, and all memory was taken.
    Bytes,
    /// A newer one of its tenant needed room, and the tenant's share was taken.
    TenantBytes,
    Deleted,
}

impl EvictionReason {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Bytes => "bytes",
            Self::TenantBytes => "tenant_bytes",
            Self::Deleted => "deleted",
        }
    }
}

/// Why a response is not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotKept {
    /// Its conversation is longer than the tenant's share.
    TooLong,
    /// Other tenants' responses take the room.
    Full,
}

/// The stored responses of one router. Clones share them.
#[derive(Clone)]
pub(crate) struct ResponseStore {
    shared: Arc<StoreShared>,
}

struct StoreShared {
    limits: ResponseStoreLimits,
    state: Mutex<StoreState>,
    metrics: StoreMetrics,
    peers: OnceLock<Arc<dyn ResponsePeers>>,
    fetches: Arc<Semaphore>,
    /// Locked before `state`, where both are.
    running: Mutex<RunningResponses>,
}

struct StoreState {
    table: ResponseTable,
    /// Whether a task waits for the age of the oldest response.
    is_swept: bool,
}

impl ResponseStore {
    pub(crate) fn new(limits: ResponseStoreLimits, metrics: StoreMetrics) -> Self {
        let state = StoreState {
            table: ResponseTable::new(limits),
            is_swept: false,
        };
        let shared = StoreShared {
            limits,
            state: Mutex::new(state),
            metrics,
            peers: OnceLock::new(),
            fetches: Arc::new(Semaphore::new(FETCHES_MAX)),
            running: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Whether any response is stored.
    pub(crate) fn is_on(&self) -> bool {
        self.shared.limits.bytes_max > 0
    }

    /// Asks these routers for responses that other routers stored. Counts once.
    pub(crate) fn ask_peers(&self, peers: Arc<dyn ResponsePeers>) {
        let _ = self.shared.peers.set(peers);
    }

    /// Finds the conversation that ends with the response `id`, which a request goes on with.
    ///
    /// # Errors
    /// 400 if it is not there, or nothing is stored.
    pub(crate) async fn previous(
        &self,
        place: RequestPlace<'_>,
        id: &str,
    ) -> Result<EarlierConversation, ApiError> {
        if !self.is_on() {
            return Err(ApiError::unsupported(
                "previous_response_id",
                "`previous_response_id`: no response is stored here (--response-store-memory is 0); send the whole conversation as `input`.",
            ));
        }
        let found = self.conversation(place, id).await;
        found.map_err(ApiError::previous_not_found)
    }

    /// Completes the facts of an answer that has items: its id, and the storing, if it is to be
    /// stored.
    pub(crate) fn prepare(
        &self,
        facts: &mut AnswerFacts,
        tenant: &str,
        earlier: EarlierConversation,
        router: u32,
    ) {
        if facts.repeated.is_none() {
            return;
        }
        facts.response_id = Some(response_id(router));
        let input = facts.input.take().filter(|_| self.is_on());
        facts.recorder = input.map(|input| ResponseRecorder {
            store: self.clone(),
            tenant: tenant.into(),
            input,
            earlier,
            is_background: facts.is_background,
        });
    }

    /// Stores a response. Must be called within a tokio runtime, whose clock counts.
    fn insert(&self, new: &NewResponse) -> Result<(), NotKept> {
        let starts_sweep = {
            let mut state = self.shared.state.lock();
            state.table.insert(Instant::now(), new).inspect_err(|_| {
                self.shared.metrics.not_kept.inc();
            })?;
            !std::mem::replace(&mut state.is_swept, true)
        };
        self.shared.count();
        if starts_sweep {
            tokio::spawn(sweep(Arc::downgrade(&self.shared)));
        }
        Ok(())
    }

    fn with_table<T>(&self, use_it: impl FnOnce(&mut ResponseTable, Instant) -> T) -> T {
        let found = use_it(&mut self.shared.state.lock().table, Instant::now());
        self.shared.count();
        found
    }
}

impl StoreShared {
    /// Brings the series up to date.
    fn count(&self) {
        let mut state = self.state.lock();
        let evictions = state.table.take_evictions();
        self.metrics
            .set(state.table.count(), state.table.bytes(), &evictions);
    }
}

/// Removes responses at their age, until none is left.
async fn sweep(store: Weak<StoreShared>) {
    loop {
        let deadline = {
            let Some(store) = store.upgrade() else {
                return;
            };
            let mut state = store.state.lock();
            state.table.expire(Instant::now());
            let deadline = state.table.deadline();
            state.is_swept = deadline.is_some();
            drop(state);
            store.count();
            deadline
        };
        match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => return,
        }
    }
}

/// Ids of stored responses and items in a body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredNames {
    /// Id of the response with whose conversation it goes on.
    pub(crate) previous: Option<String>,
    /// Ids of items that it has by reference, in its order.
    pub(crate) items: Vec<String>,
}

/// The stored parts of a request's conversation, fetched whole.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlierConversation {
    /// Turns before it, the oldest first; empty if the request goes on from nothing.
    pub(crate) turns: Arc<[ConversationTurn]>,
    /// Items that it has by reference.
    pub(crate) items: NamedItems,
}

impl EarlierConversation {
    /// Length of its items in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let turns = self.turns.iter();
        let turns = turns.map(|turn| turn.input.text().len() + turn.output.text().len());
        turns.sum::<usize>() + self.items.bytes()
    }
}

/// Stores one response when it is complete.
#[derive(Clone)]
pub(crate) struct ResponseRecorder {
    pub(crate) store: ResponseStore,
    pub(crate) tenant: Arc<str>,
    /// The items of the request.
    pub(crate) input: ItemList,
    pub(crate) earlier: EarlierConversation,
    /// Whether it was answered before it was made.
    pub(crate) is_background: bool,
}

impl std::fmt::Debug for ResponseRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResponseRecorder").finish_non_exhaustive()
    }
}

impl ResponseRecorder {
    /// Stores the response `id`. `members` is the text of a JSON object, the response without
    /// `output`; `output` that of an array.
    pub(crate) fn keep(&self, id: Arc<str>, members: &str, output: &str) -> Result<(), NotKept> {
        let output = Json::check(output).expect("items are JSON");
        let new = NewResponse {
            tenant: Arc::clone(&self.tenant),
            members: members.into(),
            turn: ConversationTurn {
                id,
                input: self.input.clone(),
                output: ItemList::of(output),
            },
            earlier: Arc::clone(&self.earlier.turns),
        };
        if self.is_background {
            self.store.end(&new)
        } else {
            self.store.insert(&new)
        }
    }
}

const ID_PREFIX: &str = "resp_";
/// Bits of an id's number that no router's number takes.
const RANDOM_BITS: u32 = 104;
/// Digits of a response's number, those of its router first.
const ID_DIGITS: usize = 32;
const ROUTER_DIGITS: usize = 6;

/// Draws the id of a response. It has the number of its router, of 24 bits.
pub(crate) fn response_id(router: u32) -> Arc<str> {
    let number = rand::random::<u128>() >> (u128::BITS - RANDOM_BITS);
    format!("{ID_PREFIX}{}{number:026x}", router_digits(router)).into()
}

/// The digits that stand for a router, by its number.
pub(crate) fn router_digits(router: u32) -> String {
    format!("{:0ROUTER_DIGITS$x}", router & 0xff_ffff)
}

/// The digits of a response's id.
pub(crate) fn response_digits(id: &str) -> &str {
    id.trim_start_matches(ID_PREFIX)
}

/// The id of the response that has these digits.
fn id_of_digits(digits: &str) -> String {
    format!("{ID_PREFIX}{digits}")
}

/// The digits in an id that stand for its router; `None` for an id that no router draws.
fn router_of(id: &str) -> Option<&str> {
    router_in(id.strip_prefix(ID_PREFIX)?)
}

/// The digits in an item's id that stand for the router of its response.
fn router_of_item(id: &str) -> Option<&str> {
    let (_, place) = id.split_once('_')?;
    let (digits, _) = place.split_once('_')?;
    router_in(digits)
}

fn router_in(digits: &str) -> Option<&str> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_sound = digits.len() == ID_DIGITS && digits.bytes().all(is_digit);
    is_sound.then(|| &digits[..ROUTER_DIGITS])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_names_its_router() {
        let id = response_id(0x00ab_cdef);
        assert_eq!(router_of(&id), Some("abcdef"));
        assert_ne!(id, response_id(0x00ab_cdef));
        assert_eq!(router_of(&response_id(7)), Some("000007"));
        for odd in [
            "",
            "resp_",
            "resp_1",
            "msg_0123",
            &id[..36],
            &id.to_uppercase(),
        ] {
            assert_eq!(router_of(odd), None, "{odd}");
        }
        let digits = response_digits(&id);
        assert_eq!(router_of_item(&format!("msg_{digits}_in3")), Some("abcdef"));
        assert_eq!(router_of_item(&format!("msg_{digits}")), None);
        assert_eq!(id_of_digits(digits), *id);
        assert_eq!(router_of(&format!("{id}0")), None);
        assert_eq!(router_of(&id.replace('a', "/")), None);
    }
}
