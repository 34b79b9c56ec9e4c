//! Lists of items, as requests, answers and the store have them.
//!
//! Owns: the text of a list, and the place of each item that has an id. Never: judges an item.
//! Invariant: the text of an item is a part of its list's.

use super::{id_of_digits, response_digits};
use cleave_text::json::{Json, JsonShape};
use serde_json::{Map, Value, json};
use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

/// Limit of the length of an id by which an item is found, in bytes. OpenAI's have 64 at most.
const ITEM_ID_BYTES_MAX: usize = 128;

/// A list of items, the text of a JSON array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ItemList {
    text: Arc<str>,
    places: Arc<[ItemPlace]>,
}

/// Places of an item in the list's text.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ItemPlace {
    item: Range<u32>,
    /// Empty for an item without an id.
    id: Range<u32>,
}

impl ItemList {
    /// The items of an array.
    pub(crate) fn of(array: Json<'_>) -> Self {
        let whole = array.text();
        let place = |part: &str| {
            let start = part.as_ptr() as usize - whole.as_ptr() as usize;
            let end = u32::try_from(start + part.len()).ok()?;
            Some(start as u32..end)
        };
        let items = match array.shape() {
            JsonShape::Array(items) => Some(items),
            _ => None,
        };
        // A text of more than 4 GiB has no places behind that.
        let places = items.into_iter().flatten().map_while(|item| {
            let id = item_id(item).unwrap_or_default();
            Some(ItemPlace {
                item: place(item.text())?,
                id: if id.is_empty() { 0..0 } else { place(id)? },
            })
        });
        Self {
            places: places.collect(),
            text: whole.into(),
        }
    }

    /// The text of the whole array.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Memory of the list in bytes, beside the counters of its shared parts.
    pub(crate) fn bytes(&self) -> usize {
        self.text.len() + self.places.len() * size_of::<ItemPlace>()
    }

    /// The ids of its items that have one, with their indices.
    pub(super) fn ids(&self) -> impl Iterator<Item = (usize, &str)> {
        let ids = self.places.iter().map(|place| self.part(&place.id));
        ids.enumerate().filter(|(_, id)| !id.is_empty())
    }

    /// An item by its index, the text of JSON.
    pub(super) fn item(&self, index: usize) -> Option<&str> {
        Some(self.part(&self.places.get(index)?.item))
    }

    fn part(&self, place: &Range<u32>) -> &str {
        &self.text[place.start as usize..place.end as usize]
    }
}

/// The id by which an item is found, without escapes.
fn item_id(item: Json<'_>) -> Option<&str> {
    let JsonShape::String(id) = member(item, "id")?.shape() else {
        return None;
    };
    let quoted = id.json().text();
    Some(&quoted[1..quoted.len() - 1]).filter(|id| is_item_id(id))
}

/// The items of the list as `GET` shows them, for the response of this id.
pub(super) fn shown_items(list: &ItemList, response: &str) -> Vec<Value> {
    let items: Vec<Value> = serde_json::from_str(list.text()).expect("items were checked");
    let items = items.into_iter().enumerate();
    items
        .map(|(index, item)| shown_item(item, response, index))
        .collect()
}

/// An item as lists show it: with an id and its type, and text as a part.
pub(super) fn shown_item(item: Value, response: &str, index: usize) -> Value {
    let Value::Object(given) = item else {
        return item;
    };
    let is_message = given.get("type").is_none_or(|kind| kind == "message");
    let prefix = if is_message { "msg" } else { "item" };
    let mut item = Map::new();
    let number = response_digits(response);
    item.insert(
        "id".into(),
        format!("{prefix}_{number}{INPUT_MARK}{index}").into(),
    );
    item.insert("type".into(), "message".into());
    if is_message {
        item.insert("status".into(), "completed".into());
    }
    let is_answer = given.get("role").is_some_and(|role| role == "assistant");
    item.extend(given.into_iter().filter(|(_, value)| !value.is_null()));
    if is_message && let Some(Value::String(text)) = item.get_mut("content") {
        let text = std::mem::take(text);
        let part = if is_answer {
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        } else {
            json!({"type": "input_text", "text": text})
        };
        item.insert("content".into(), json!([part]));
    }
    Value::Object(item)
}

/// Between the response's digits and the index, in the id of an input that has none of its own.
const INPUT_MARK: &str = "_in";

/// The response and the index of an input by the id that lists show.
pub(super) fn input_place(id: &str) -> Option<(String, usize)> {
    let (_, place) = id.split_once('_')?;
    let (digits, index) = place.split_once(INPUT_MARK)?;
    Some((id_of_digits(digits), index.parse().ok()?))
}

/// Whether items are found by an id of this form.
pub(super) fn is_item_id(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=ITEM_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(is_plain)
}

/// The member of an object that has this name.
pub(crate) fn member<'a>(object: Json<'a>, name: &str) -> Option<Json<'a>> {
    let JsonShape::Object(mut members) = object.shape() else {
        return None;
    };
    members.find_map(|(key, value)| (key.get() == name).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_the_place_of_each_item_with_an_id() {
        let text = r#" [ {"id": "a-1", "x": [1]}, {"x": {"id": "b"}} ,{"y":"é","id":"c"},
            {"id": 4}, {"id": ""}, {"id": "\u0061"}, {"id": "a/b"}, 5 ] "#;
        let list = ItemList::of(Json::check(text).unwrap());
        assert_eq!(list.text(), text.trim());
        assert_eq!(list.ids().collect::<Vec<_>>(), [(0, "a-1"), (2, "c")]);
        assert_eq!(list.item(0), Some(r#"{"id": "a-1", "x": [1]}"#));
        assert_eq!(list.item(2), Some(r#"{"y":"é","id":"c"}"#));
        assert_eq!((list.item(7), list.item(8)), (Some("5"), None));
        assert!(!is_item_id(&"x".repeat(ITEM_ID_BYTES_MAX + 1)));
    }
}
