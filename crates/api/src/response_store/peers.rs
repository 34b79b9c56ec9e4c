//! Responses that another router of the fleet stored.
//!
//! Owns: the question to the other routers, and what their answers mean. Never: knows an address.
//! Invariant: a router answers for its own responses only, and asks nobody in turn.
//!
//! A question has the headers by which its client identified itself, so that the router asked finds
//! the tenant by its own policy, and nothing that one router says about a client is believed.

use super::items::{ItemList, member};
use super::{ConversationTurn, EarlierConversation, ResponseStore, router_of};
use crate::caller::AuthenticatedCaller;
use crate::request::identity_headers;
use axum::http::{HeaderMap, Method, StatusCode};
use bytes::Bytes;
use cleave_text::json::{Document, JsonShape};
use futures::future::BoxFuture;
use serde_json::Value;
use std::sync::Arc;

/// Path of the route that other routers ask.
pub(super) const PEER_ROUTE: &str = "/fleet/responses/{id}";
/// Path of the same for the cancellation of a response.
pub(super) const PEER_CANCEL: &str = "/fleet/responses/{id}/cancel";
/// Path of the same for the whole conversation that ends with a response.
pub(super) const PEER_CONVERSATION: &str = "/fleet/responses/{id}/conversation";
/// Bytes of an answer beside the items of a conversation.
const FRAME_BYTES: usize = 64 << 10;

/// The fleet's other routers, which may have stored a response.
pub trait ResponsePeers: Send + Sync {
    /// Sends a request without a body to each of them, and collects the answers. `path` and
    /// `headers` are sent as they are; an answer of more than `bytes_max` bytes counts as none.
    fn ask(
        &self,
        method: Method,
        path: String,
        headers: HeaderMap,
        bytes_max: usize,
    ) -> BoxFuture<'static, Vec<PeerReply>>;
}

/// The answer of one router.
#[derive(Clone, Debug)]
pub enum PeerReply {
    Answered(StatusCode, Bytes),
    /// It could not be asked, for this reason.
    Silent(String),
}

/// A response as `GET` shows it, and its input.
#[derive(Clone, Debug)]
pub(super) struct FoundResponse {
    pub(super) response: Bytes,
    /// The items of the request.
    pub(super) input: ItemList,
}

/// Purpose of a question for a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponsePurpose {
    Response,
    Conversation,
    Removal,
    Cancellation,
}

/// The response as a client sees it: its members with the output.
pub(crate) fn whole_response(members: &str, output: &str) -> String {
    let open = members.strip_suffix('}').expect("members are an object");
    format!("{open},\"output\":{output}}}")
}

impl ResponseStore {
    /// Finds a response of the caller's tenant, here or at another router.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn find(
        &self,
        place: RequestPlace<'_>,
        id: &str,
    ) -> Result<FoundResponse, String> {
        if let Some(found) = self.find_here(&place.caller.tenant, id) {
            return Ok(found);
        }
        self.found_there(place, id, ResponsePurpose::Response).await
    }

    /// Cancels a response that runs, here or at another router; returns it, or one that has ended.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn cancel(
        &self,
        place: RequestPlace<'_>,
        id: &str,
    ) -> Result<FoundResponse, String> {
        if let Some(found) = self.cancel_here(&place.caller.tenant, id) {
            return Ok(found);
        }
        self.found_there(place, id, ResponsePurpose::Cancellation)
            .await
    }

    async fn found_there(
        &self,
        place: RequestPlace<'_>,
        id: &str,
        wanted: ResponsePurpose,
    ) -> Result<FoundResponse, String> {
        let body = self.ask(place, id, wanted).await?;
        let unreadable = || format!("The router that stored `{id}` gave no readable answer.");
        let text = String::from_utf8(body.to_vec()).map_err(|_| unreadable())?;
        let document = Document::check(text).map_err(|_| unreadable())?;
        let member = |name| member(document.root(), name).ok_or_else(unreadable);
        Ok(FoundResponse {
            response: Bytes::copy_from_slice(member("response")?.text().as_bytes()),
            input: ItemList::of(member("input")?),
        })
    }

    /// Finds a response that this router stored, or that runs here.
    pub(super) fn find_here(&self, tenant: &str, id: &str) -> Option<FoundResponse> {
        if let Some(running) = self.running(tenant, id) {
            return Some(running);
        }
        let found = self.with_table(|table, now| table.response(now, tenant, id));
        let (members, turn) = found?;
        Some(FoundResponse {
            response: whole_response(&members, turn.output.text()).into(),
            input: turn.input,
        })
    }

    /// Finds the conversation that ends with a response.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) async fn conversation(
        &self,
        place: RequestPlace<'_>,
        id: &str,
    ) -> Result<EarlierConversation, String> {
        if let Some(turns) = self.conversation_here(&place.caller.tenant, id) {
            return Ok(EarlierConversation {
                turns: turns.into(),
                ..EarlierConversation::default()
            });
        }
        let _turn = self.shared.fetches.acquire().await;
        let body = self.ask(place, id, ResponsePurpose::Conversation).await?;
        let turns = turns_of(&body);
        let turns = turns.filter(|turns| turns.last().is_some_and(|last| *last.id == *id));
        let turns = turns.ok_or_else(|| {
            format!("The router that stored `{id}` gave no readable conversation.")
        })?;
        Ok(EarlierConversation {
            turns: turns.into(),
            ..EarlierConversation::default()
        })
    }

    /// Removes a response of the caller's tenant, wherever it is.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) async fn delete(&self, place: RequestPlace<'_>, id: &str) -> Result<(), String> {
        if self.delete_here(&place.caller.tenant, id) {
            return Ok(());
        }
        self.ask(place, id, ResponsePurpose::Removal)
            .await
            .map(drop)
    }

    pub(super) fn conversation_here(
        &self,
        tenant: &str,
        id: &str,
    ) -> Option<Vec<ConversationTurn>> {
        self.with_table(|table, now| table.conversation(now, tenant, id))
    }

    pub(super) fn delete_here(&self, tenant: &str, id: &str) -> bool {
        self.forget(tenant, id) || self.with_table(|table, now| table.delete(now, tenant, id))
    }

    async fn ask(
        &self,
        place: RequestPlace<'_>,
        id: &str,
        wanted: ResponsePurpose,
    ) -> Result<Bytes, String> {
        let unknown = || {
            format!(
                "Response with id '{id}' not found: it was never complete, was deleted, or was removed because of its age or for want of memory."
            )
        };
        let Some(router) = router_of(id) else {
            return Err(unknown());
        };
        if router == place.router {
            return Err(unknown());
        }
        let Some(peers) = self.shared.peers.get() else {
            return Err(format!(
                "Response with id '{id}' not found: another router stored it, which this one does not ask (--fellow-routers, and --peer-tls where clients use TLS)."
            ));
        };
        let (method, path) = match wanted {
            ResponsePurpose::Response => (Method::GET, PEER_ROUTE),
            ResponsePurpose::Conversation => (Method::GET, PEER_CONVERSATION),
            ResponsePurpose::Removal => (Method::DELETE, PEER_ROUTE),
            ResponsePurpose::Cancellation => (Method::POST, PEER_CANCEL),
        };
        let headers = identity_headers(place.headers, &place.caller.policy);
        let bytes_max = place.bytes_max.saturating_add(FRAME_BYTES);
        let path = path.replace("{id}", id);
        let replies = peers.ask(method, path, headers, bytes_max).await;
        let mut is_owner_there = false;
        for reply in replies {
            match reply {
                PeerReply::Answered(StatusCode::OK, body) => return Ok(body),
                PeerReply::Answered(_, body) => {
                    let answer: Option<Value> = serde_json::from_slice(&body).ok();
                    is_owner_there |= answer.is_some_and(|answer| answer["router"] == router);
                }
                PeerReply::Silent(reason) => {
                    tracing::debug!(reason, "a router was not asked for a stored response");
                }
            }
        }
        if is_owner_there {
            return Err(unknown());
        }
        Err(format!(
            "Response with id '{id}' not found: the router that stored it cannot be reached or was restarted, and responses are in its memory only."
        ))
    }
}

/// Where a question for a response comes from.
#[derive(Clone, Copy)]
pub(crate) struct RequestPlace<'a> {
    pub(crate) caller: &'a AuthenticatedCaller,
    pub(crate) headers: &'a HeaderMap,
    /// The digits of this router in ids.
    pub(crate) router: &'a str,
    /// Limit of the items of a conversation, in bytes.
    pub(crate) bytes_max: usize,
}

/// Writes a conversation for another router.
pub(super) fn conversation_json(turns: &[ConversationTurn]) -> String {
    let turn = |turn: &ConversationTurn| {
        let ConversationTurn { id, input, output } = turn;
        let (input, output) = (input.text(), output.text());
        format!(r#"{{"id":"{id}","input":{input},"output":{output}}}"#)
    };
    let turns: Vec<String> = turns.iter().map(turn).collect();
    format!(r#"{{"turns":[{}]}}"#, turns.join(","))
}

fn turns_of(body: &[u8]) -> Option<Vec<ConversationTurn>> {
    let document = Document::check(std::str::from_utf8(body).ok()?.to_owned()).ok()?;
    let JsonShape::Array(turns) = member(document.root(), "turns")?.shape() else {
        return None;
    };
    let items = |turn, name| {
        let items = member(turn, name)?;
        matches!(items.shape(), JsonShape::Array(_)).then(|| ItemList::of(items))
    };
    let turn = |turn| {
        let JsonShape::String(id) = member(turn, "id")?.shape() else {
            return None;
        };
        let id = id.get();
        router_of(&id)?;
        Some(ConversationTurn {
            id: Arc::from(&*id),
            input: items(turn, "input")?,
            output: items(turn, "output")?,
        })
    };
    turns.map(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::response_store::response_id;
    use cleave_text::json::Json;

    #[test]
    fn a_conversation_crosses_routers_unchanged() {
        let turn = |input: &str, output: &str| ConversationTurn {
            id: response_id(1),
            input: ItemList::of(Json::check(input).unwrap()),
            output: ItemList::of(Json::check(output).unwrap()),
        };
        let turns = vec![turn(r#"[{"a": "é\n"}]"#, "[]"), turn("[1, 2 ]", r#"["]"]"#)];
        let body = conversation_json(&turns);
        assert_eq!(turns_of(body.as_bytes()), Some(turns));
        for damaged in [
            "",
            "{}",
            r#"{"turns":{}}"#,
            r#"{"turns":[{"id":"resp_1","input":[],"output":[]}]}"#,
            &body.replace("[]", "{}"),
            &body[1..],
        ] {
            assert_eq!(turns_of(damaged.as_bytes()), None, "{damaged}");
        }
    }
}
