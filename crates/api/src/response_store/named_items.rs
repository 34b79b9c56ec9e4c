//! Stored items that a request has by reference, here or at another router.
//!
//! Owns: the search for them, and the question to the other routers. Never: decides where in a
//! conversation they stand. Invariant: an item is given to its own tenant only, and those of one
//! request together are no longer than a body may be.

use super::items::{is_item_id, member, shown_item};
use super::table::FoundItem;
use super::{PeerReply, RequestPlace, ResponseStore, router_of_item};
use crate::error::ApiError;
use crate::request::identity_headers;
use axum::http::Method;
use cleave_text::json::{Json, JsonShape};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Path of the route that other routers ask.
pub(super) const PEER_ITEMS: &str = "/fleet/response_items";
/// Ids in one question.
pub(super) const QUESTION_IDS_MAX: usize = 32;
/// Bytes of an answer beside the items.
const FRAME_BYTES: usize = 64 << 10;

/// Items by their ids, each the text of a JSON object.
pub(super) type ItemTexts = BTreeMap<String, Arc<str>>;

/// The items that a request has by reference.
#[derive(Clone, Debug, Default)]
pub(crate) struct NamedItems {
    texts: Arc<ItemTexts>,
    bytes: usize,
}

impl NamedItems {
    /// The texts of the items, by their ids.
    pub(crate) fn texts(&self) -> &BTreeMap<String, Arc<str>> {
        &self.texts
    }

    /// Length of the items in bytes; one that is named twice counts twice.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl ResponseStore {
    /// Finds the items of these ids.
    ///
    /// # Errors
    /// 404 if one is not there; 400 if nothing is stored, or together they are too long.
    pub(crate) async fn items(
        &self,
        place: RequestPlace<'_>,
        ids: &[String],
    ) -> Result<NamedItems, ApiError> {
        if ids.is_empty() {
            return Ok(NamedItems::default());
        }
        if !self.is_on() {
            return Err(ApiError::unsupported(
                "input",
                "`input`: no item is stored here (--response-store-memory is 0); send the items themselves.",
            ));
        }
        let distinct: BTreeSet<&str> = ids.iter().map(String::as_str).collect();
        let tenant = &place.caller.tenant;
        let mut texts = self.items_here(tenant, distinct.iter().copied(), place.bytes_max);
        let missing = distinct.into_iter();
        let missing: Vec<&str> = missing.filter(|id| !texts.contains_key(*id)).collect();
        let bytes = |texts: &ItemTexts| {
            let named = ids.iter().filter_map(|id| texts.get(id));
            named.map(|text| text.len()).sum::<usize>()
        };
        if bytes(&texts) <= place.bytes_max {
            let foreign = missing.iter().find(|id| router_of_item(id).is_none());
            if let Some(id) = foreign {
                return Err(ApiError::item_not_found(id));
            }
            let _turn = self.shared.fetches.acquire().await;
            for asked in missing.chunks(QUESTION_IDS_MAX) {
                texts.extend(self.ask_items(place, asked).await);
                if asked.iter().any(|id| !texts.contains_key(*id)) {
                    let is_lost =
                        |id: &&String| asked.contains(&&***id) && !texts.contains_key(*id);
                    let lost = ids.iter().find(is_lost);
                    return Err(ApiError::item_not_found(lost.map_or("", String::as_str)));
                }
            }
        }
        let bytes = bytes(&texts);
        if bytes > place.bytes_max {
            return Err(ApiError::context_exceeded(
                "input",
                "The stored items and the body together are longer than a body may be.",
            ));
        }
        let texts = Arc::new(texts);
        Ok(NamedItems { texts, bytes })
    }

    /// Finds items that this router has stored; the rest is left out once they are longer than
    /// `bytes_max` together.
    pub(super) fn items_here<'a>(
        &self,
        tenant: &str,
        ids: impl Iterator<Item = &'a str>,
        bytes_max: usize,
    ) -> ItemTexts {
        let mut texts = ItemTexts::new();
        let mut bytes = 0;
        for id in ids.filter(|id| is_item_id(id)) {
            let found = self.with_table(|table, now| table.item(now, tenant, id));
            let Some(text) = found.and_then(|found| text_of(found, id)) else {
                continue;
            };
            bytes += text.len();
            texts.insert(id.to_owned(), text);
            if bytes > bytes_max {
                break;
            }
        }
        texts
    }

    /// Asks the other routers for items.
    async fn ask_items(&self, place: RequestPlace<'_>, ids: &[&str]) -> ItemTexts {
        let Some(peers) = self.shared.peers.get() else {
            return ItemTexts::new();
        };
        let names: Vec<String> = ids.iter().map(|id| format!("id={id}")).collect();
        let path = format!("{PEER_ITEMS}?{}", names.join("&"));
        let headers = identity_headers(place.headers, &place.caller.policy);
        let bytes_max = place.bytes_max.saturating_add(FRAME_BYTES);
        let mut texts = ItemTexts::new();
        for reply in peers.ask(Method::GET, path, headers, bytes_max).await {
            match reply {
                // A router that has only some of them answers 404 with these.
                PeerReply::Answered(_, body) => {
                    let found = items_of(&body).unwrap_or_default().into_iter();
                    texts.extend(found.filter(|(id, _)| ids.contains(&&**id)));
                }
                PeerReply::Silent(reason) => {
                    tracing::debug!(reason, "a router was not asked for stored items");
                }
            }
        }
        texts
    }
}

fn text_of(found: FoundItem, id: &str) -> Option<Arc<str>> {
    match found {
        FoundItem::Whole(text) => Some(text),
        FoundItem::OfInput {
            text,
            response,
            index,
        } => {
            let item = serde_json::from_str(&text).ok()?;
            let shown = shown_item(item, &response, index);
            (shown["id"] == id).then(|| shown.to_string().into())
        }
    }
}

/// Writes items for another router.
pub(super) fn items_json(texts: &ItemTexts) -> String {
    let item = |(id, text): (&String, &Arc<str>)| format!(r#"{{"id":"{id}","item":{text}}}"#);
    let items: Vec<String> = texts.iter().map(item).collect();
    format!(r#"{{"items":[{}]}}"#, items.join(","))
}

/// Reads the items of another router; `None` if the answer is not as it should be.
fn items_of(body: &[u8]) -> Option<ItemTexts> {
    let answer = Json::check(std::str::from_utf8(body).ok()?).ok()?;
    let JsonShape::Array(items) = member(answer, "items")?.shape() else {
        return None;
    };
    let item = |item| {
        let JsonShape::String(id) = member(item, "id")?.shape() else {
            return None;
        };
        let text = member(item, "item")?;
        matches!(text.shape(), JsonShape::Object(_)).then_some(())?;
        Some((id.get().into_owned(), text.text().into()))
    };
    items.map(item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_cross_routers_unchanged() {
        let texts = [("msg_1", r#"{"a": "é\n"}"#), ("fc-2", "{}")];
        let texts = texts.map(|(id, text)| (id.to_owned(), Arc::from(text)));
        let texts = ItemTexts::from(texts);
        let body = items_json(&texts);
        assert_eq!(items_of(body.as_bytes()), Some(texts));
        for damaged in [
            "",
            "{}",
            r#"{"items":{}}"#,
            &body.replace("{}", "[]"),
            &body[1..],
        ] {
            assert_eq!(items_of(damaged.as_bytes()), None, "{damaged}");
        }
    }
}
