//! Reads from a request which router it belongs to.
//!
//! Owns: the key that keeps requests together, and reading the proxy's subset. Never judges a
//! request: a body that is no JSON has no key, and the router reports the error.
//! Invariant: a conversation that grows keeps its key.

use super::proto::{HttpHeaders, Metadata};
use prost_types::value::Kind;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// Headers by which a client names its session.
const SESSION: [&str; 2] = ["x-session-id", "x-dynamo-session-id"];
/// The leading bytes of a prompt that make its key: a system prompt, or the first question.
const KEY_BYTES_MAX: usize = 1024;
/// The metadata with which the proxy limits the endpoints.
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PickRequest {
    /// Requests with the same one go together.
    pub(crate) key: Option<Vec<u8>>,
    /// If given, only one of these may be chosen.
    pub(crate) subset: Option<BTreeSet<SocketAddr>>,
}

/// The session that headers name.
pub(crate) fn session_key(headers: &HttpHeaders) -> Option<Vec<u8>> {
    let headers = &headers.headers.as_ref()?.headers;
    let value = |name: &&str| {
        let header = headers.iter().find(|header| header.key == **name)?;
        let bytes = if header.raw_value.is_empty() {
            header.value.as_bytes()
        } else {
            &header.raw_value
        };
        (!bytes.is_empty()).then(|| bytes.to_vec())
    };
    SESSION.iter().find_map(value)
}

/// The key from a body: its `prompt_cache_key`, or the first part of its messages or prompt.
pub(crate) fn body_key(body: &[u8]) -> Option<Vec<u8>> {
    let body: Value = serde_json::from_slice(body).ok()?;
    if let Some(Value::String(key)) = body.get("prompt_cache_key") {
        return Some(key.clone().into_bytes());
    }
    let mut text = match (body.get("messages"), body.get("prompt")) {
        (Some(Value::Array(messages)), _) => first_of(messages),
        (_, Some(Value::String(prompt))) => prompt.clone().into_bytes(),
        (_, Some(Value::Array(prompts))) => first_of(prompts),
        _ => return None,
    };
    text.truncate(KEY_BYTES_MAX);
    Some(text)
}

/// Items as text, until there is enough for a key.
fn first_of(items: &[Value]) -> Vec<u8> {
    let mut text = Vec::new();
    for item in items {
        if text.len() >= KEY_BYTES_MAX {
            break;
        }
        text.extend_from_slice(item.to_string().as_bytes());
        text.push(b'\n');
    }
    text
}

/// The endpoints that the proxy allows, if it gives any: `ip:port`, in a list or between commas.
pub(crate) fn allowed_endpoints(metadata: Option<&Metadata>) -> Option<BTreeSet<SocketAddr>> {
    let hint = metadata?.filter_metadata.get(SUBSET_NAMESPACE)?;
    let texts: Vec<&str> = match hint.fields.get(SUBSET)?.kind.as_ref()? {
        Kind::StringValue(text) => vec![text],
        Kind::ListValue(list) => list.values.iter().filter_map(text).collect(),
        _ => Vec::new(),
    };
    let addresses = texts.into_iter().flat_map(|text| text.split(','));
    // An address that cannot be parsed is no known endpoint.
    Some(
        addresses
            .filter_map(|one| one.trim().parse().ok())
            .collect(),
    )
}

fn text(value: &prost_types::Value) -> Option<&str> {
    match value.kind.as_ref()? {
        Kind::StringValue(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn key(body: &Value) -> Option<Vec<u8>> {
        body_key(body.to_string().as_bytes())
    }

    #[test]
    fn a_growing_conversation_keeps_its_key() {
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let system = message("system", &"You are terse. ".repeat(100));
        let first = json!({"messages": [system, message("user", "Hi")], "stream": true});
        let next = json!({"messages": [system, message("user", "Hi"), message("assistant", "Hm"), message("user", "?")]});
        assert_eq!(key(&first), key(&next));
        assert!(key(&first).is_some());
        let other = json!({"messages": [message("user", "Another")]});
        assert_ne!(key(&first), key(&other));
        let named = json!({"prompt": "a", "prompt_cache_key": "k"});
        assert_eq!(key(&named), Some(b"k".to_vec()));
        let (long, longer) = ("x".repeat(2000), "x".repeat(3000));
        assert_eq!(
            key(&json!({"prompt": long})),
            key(&json!({"prompt": longer}))
        );
        let tokens = |count: u32| json!({"prompt": (0..count).collect::<Vec<_>>()});
        assert_eq!(key(&tokens(900)), key(&tokens(1000)));
        assert_eq!(key(&json!({"input": "a"})), None);
        assert_eq!(body_key(b"{\"prompt\": "), None);
    }
}
