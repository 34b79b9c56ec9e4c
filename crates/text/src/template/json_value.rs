//! Values of a request's JSON as templates read them.
//!
//! Owns: lists and mappings that stay text until a template reads them. Never: checks anything; the
//! body was checked before. Invariant: a value costs memory only for what a template reads of it,
//! plus an index of four bytes for each item of a list, which has at least two bytes of text; the
//! rendering's budget counts both.

use super::budget::{charge, check_time};
use crate::json::{Json, JsonMembers, JsonPart, JsonShape, JsonString};
use minijinja::Error;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A value that a template reads.
#[derive(Clone, Debug)]
pub struct TemplateValue(pub(crate) Value);

impl TemplateValue {
    /// Makes the value of `json`, which lies in `part`.
    pub fn of_json(part: &JsonPart, json: Json<'_>) -> Self {
        Self(value_of(part, json))
    }

    /// Makes a value of a text, which is copied.
    pub fn of_text(text: &str) -> Self {
        Self(Value::from(text))
    }

    /// Makes the list of an array. `item_of` converts its items.
    ///
    /// # Panics
    /// If `part` is no array.
    pub fn list(part: JsonPart, item_of: ItemReader) -> Self {
        Self(list_of(part, item_of))
    }

    /// Makes the mapping of an object in which one member is replaced or added.
    pub fn with_member(part: JsonPart, name: &'static str, value: Self) -> Self {
        Self(Value::from_object(BodyDict::new(
            part,
            Some((name, value.0)),
        )))
    }

    /// Makes a mapping of an object whose members, of these names, `member` converts.
    pub fn record(part: JsonPart, names: &'static [&'static str], member: MemberReader) -> Self {
        Self(Value::from_object(BodyRecord {
            part,
            names,
            member,
            cache: names.iter().map(|_| OnceLock::new()).collect(),
        }))
    }
}

/// Converts an item of an array.
type ItemReader = fn(&JsonPart, Json<'_>) -> TemplateValue;

/// Converts a member of an object, by its name.
type MemberReader = fn(&JsonPart, &str) -> Option<TemplateValue>;

/// Makes the template's value of a value of the JSON.
pub(super) fn value_of(part: &JsonPart, json: Json<'_>) -> Value {
    match json.shape() {
        JsonShape::Null => Value::from(()),
        JsonShape::Bool(flag) => Value::from(flag),
        JsonShape::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(whole), _) => Value::from(whole),
            (None, Some(whole)) => Value::from(whole),
            (None, None) => Value::from(number.as_f64().unwrap_or_default()),
        },
        JsonShape::String(text) => match charge(json.text().len()) {
            Ok(()) => Value::from(&*text.get()),
            Err(error) => Value::from(error),
        },
        JsonShape::Array(_) => list_of(part.part(json), TemplateValue::of_json),
        JsonShape::Object(_) => Value::from_object(BodyDict::new(part.part(json), None)),
    }
}

fn list_of(part: JsonPart, item_of: ItemReader) -> Value {
    if let Err(error) = check_time() {
        return Value::from(error);
    }
    let items = || match part.json().shape() {
        JsonShape::Array(items) => items,
        _ => unreachable!("the caller has an array"),
    };
    // The items are counted first: a growing list would take twice the memory, and so would a
    // copied one.
    let count = items().count();
    if let Err(error) = charge(count * size_of::<u32>()) {
        return Value::from(error);
    }
    let mut starts = Vec::with_capacity(count);
    starts.extend(items().map(|item| part.offset(item) as u32));
    let list = BodyList {
        part: Arc::new(part),
        view: SliceView::whole(starts.len()),
        starts: Arc::new(starts.into_boxed_slice()),
        item_of,
    };
    Value::from_object(list)
}

#[derive(Clone, Debug)]
pub(super) struct BodyList {
    part: Arc<JsonPart>,
    /// Offsets of the items in the text.
    starts: Arc<Box<[u32]>>,
    view: SliceView,
    item_of: ItemReader,
}

/// The items of an array that a list includes. A slice costs no memory for its items.
#[derive(Clone, Copy, Debug)]
struct SliceView {
    first: usize,
    step: isize,
    count: usize,
}

impl SliceView {
    fn whole(count: usize) -> Self {
        Self {
            first: 0,
            step: 1,
            count,
        }
    }

    fn index(self, at: usize) -> Option<usize> {
        let from_first = isize::try_from(at).ok()?.checked_mul(self.step)?;
        (at < self.count).then(|| self.first.checked_add_signed(from_first))?
    }
}

impl BodyList {
    /// Slices as Python's `list[start:stop:step]`; `start` and `stop` are `None` or integers.
    pub(super) fn slice(&self, start: Option<i64>, stop: Option<i64>, step: i64) -> Value {
        let indices = slice_indices(self.view.count, start, stop, step);
        let first = indices.first.and_then(|first| self.view.index(first));
        let view = SliceView {
            first: first.unwrap_or(0),
            step: self.view.step.saturating_mul(step as isize),
            count: if first.is_some() { indices.count } else { 0 },
        };
        Value::from_object(Self {
            view,
            ..self.clone()
        })
    }
}

/// The indices of a slice; see [`slice_indices`].
pub(super) struct SliceIndices {
    /// Index of the first item; `None` for an empty slice.
    pub(super) first: Option<usize>,
    pub(super) count: usize,
}

/// Returns the items that Python's slice of a list of `len` items has.
pub(super) fn slice_indices(
    len: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> SliceIndices {
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamped = |index: i64| {
        let index = if index < 0 {
            index.saturating_add(len)
        } else {
            index
        };
        index.clamp(low, high)
    };
    let (from, to) = if step > 0 { (low, high) } else { (high, low) };
    let (start, stop) = (start.map_or(from, clamped), stop.map_or(to, clamped));
    let distance = if step > 0 { stop - start } else { start - stop };
    let step_size = step.unsigned_abs().max(1);
    let count = match u64::try_from(distance) {
        Ok(distance) => usize::try_from(distance.div_ceil(step_size)).unwrap_or(usize::MAX),
        Err(_) => 0,
    };
    SliceIndices {
        first: usize::try_from(start).ok().filter(|_| count > 0),
        count,
    }
}

impl Object for BodyList {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = self.view.index(key.as_usize()?)?;
        let item = self.part.json_from(*self.starts.get(index)? as usize);
        Some((self.item_of)(&self.part, item).0)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.view.count)
    }
}

#[derive(Debug)]
struct BodyDict {
    part: JsonPart,
    replaced: Option<(&'static str, Value)>,
    /// Whether a member was looked up before: the second lookup builds the index.
    was_looked_up: AtomicBool,
    /// Offsets of the members' names, ordered by name and, for equal names, by position.
    index: OnceLock<Box<[u32]>>,
}

/// Longest text that is cached after it was read; longer ones would be in memory twice.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// A mapping with converted members; see [`TemplateValue::record`].
#[derive(Debug)]
pub(super) struct BodyRecord {
    part: JsonPart,
    names: &'static [&'static str],
    member: MemberReader,
    cache: Box<[OnceLock<Option<Value>>]>,
}

impl Object for BodyRecord {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let at = self.names.iter().position(|name| *name == key)?;
        if let Some(value) = self.cache[at].get() {
            return value.clone();
        }
        if let Err(error) = check_time() {
            return Some(Value::from(error));
        }
        let member = (self.member)(&self.part, key).map(|TemplateValue(value)| value);
        let text_bytes = member.as_ref().and_then(Value::as_str).map_or(0, str::len);
        if text_bytes <= KEPT_BYTES_MAX {
            self.cache[at].get_or_init(|| member).clone()
        } else {
            member
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let given = self.names.iter();
        let given = given.filter(|name| self.get_value_by_str(name).is_some());
        Enumerator::Values(given.map(|name| Value::from(*name)).collect())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// Whether the value lies in a body, which limits its depth and excludes cycles.
pub(super) fn is_body_value(value: &Value) -> bool {
    value.downcast_object_ref::<BodyList>().is_some()
        || value.downcast_object_ref::<BodyDict>().is_some()
        || value.downcast_object_ref::<BodyRecord>().is_some()
}

/// Offsets of a member's name and of the last member with that name, whose value counts.
#[derive(Clone, Copy)]
struct DictEntry {
    key: u32,
    last: u32,
}

impl BodyDict {
    fn new(part: JsonPart, replaced: Option<(&'static str, Value)>) -> Self {
        Self {
            part,
            replaced,
            was_looked_up: AtomicBool::new(false),
            index: OnceLock::new(),
        }
    }

    fn index(&self) -> Result<&[u32], Error> {
        if let Some(index) = self.index.get() {
            return Ok(index);
        }
        let count = self.members().count();
        charge(count * size_of::<u32>())?;
        let mut index = Vec::with_capacity(count);
        for (key, _) in self.members() {
            index.push(self.part.offset(key.json()) as u32);
        }
        index.sort_unstable_by(|a, b| self.name_at(*a).cmp(&self.name_at(*b)).then(a.cmp(b)));
        check_time()?;
        Ok(self.index.get_or_init(|| index.into_boxed_slice()))
    }

    /// Returns the offsets of the members with this name; the last one has the value that counts.
    fn positions_of_name<'a>(&self, index: &'a [u32], name: &str) -> &'a [u32] {
        let first = index.partition_point(|at| *self.name_at(*at) < *name);
        let count = index[first..].partition_point(|at| *self.name_at(*at) == *name);
        &index[first..first + count]
    }

    fn name_at(&self, at: u32) -> Cow<'_, str> {
        self.key_at(at).get()
    }

    fn members(&self) -> JsonMembers<'_> {
        match self.part.json().shape() {
            JsonShape::Object(members) => members,
            _ => unreachable!("made of an object"),
        }
    }

    fn key_at(&self, at: u32) -> JsonString<'_> {
        match self.part.json_from(at as usize).shape() {
            JsonShape::String(key) => key,
            _ => unreachable!("a member's name"),
        }
    }

    fn member_at(&self, at: u32) -> Json<'_> {
        let key = self.key_at(at).json().text().len();
        let rest = &self.part.json().text()[at as usize + key..];
        let blanks = rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r', ':']).len();
        self.part.json_from(at as usize + key + blanks)
    }

    /// Returns the members in the order in which their names first appear.
    fn entries(&self) -> Result<Vec<DictEntry>, Error> {
        let index = self.index()?;
        charge(index.len() * size_of::<DictEntry>())?;
        let mut entries = Vec::with_capacity(index.len());
        for (name, _) in self.members() {
            check_time()?;
            let key = self.part.offset(name.json()) as u32;
            let named = self.positions_of_name(index, &name.get());
            if named.first() == Some(&key)
                && let Some(last) = named.last()
            {
                entries.push(DictEntry { key, last: *last });
            }
        }
        Ok(entries)
    }
}

impl Object for BodyDict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if let Some((_, value)) = self.replaced.as_ref().filter(|(name, _)| *name == key) {
            return Some(value.clone());
        }
        if let Err(error) = check_time() {
            return Some(Value::from(error));
        }
        if !self.was_looked_up.swap(true, Ordering::Relaxed) {
            let named = self.members().filter(|(name, _)| name.get() == key);
            let (_, value) = named.last()?;
            return Some(value_of(&self.part, value));
        }
        match self.index() {
            Ok(index) => {
                let last = *self.positions_of_name(index, key).last()?;
                Some(value_of(&self.part, self.member_at(last)))
            }
            Err(error) => Some(Value::from(error)),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        if let Err(error) = check_time() {
            return Enumerator::Values(vec![Value::from(error)]);
        }
        let entries = match self.entries() {
            Ok(entries) => entries,
            Err(error) => return Enumerator::Values(vec![Value::from(error)]),
        };
        let own = Arc::clone(self);
        let added = self.replaced.as_ref().filter(|(name, _)| {
            let mut names = entries.iter().map(|entry| self.key_at(entry.key).get());
            !names.any(|member_name| member_name == *name)
        });
        let added = added.map(|(name, value)| (Value::from(*name), value.clone()));
        let member = move |entry: DictEntry| {
            let key = own.key_at(entry.key).get();
            let replaced = own.replaced.as_ref().filter(|(name, _)| *name == key);
            let value = match replaced {
                Some((_, value)) => value.clone(),
                None => value_of(&own.part, own.member_at(entry.last)),
            };
            (Value::from(&*key), value)
        };
        // Only the positions of the members are collected; the values are made one by one.
        let members = DictMembers {
            entries: entries.into_iter(),
            added,
            member: Box::new(member),
        };
        Enumerator::KeyValueIter(Box::new(members))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        let added = self.replaced.as_ref().filter(|(name, _)| {
            let mut names = self.members().map(|(key, _)| key.get());
            !names.any(|member_name| member_name == *name)
        });
        Some(self.entries().ok()?.len() + usize::from(added.is_some()))
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.replaced.is_some() || self.members().next().is_some()
    }
}

struct DictMembers {
    entries: std::vec::IntoIter<DictEntry>,
    added: Option<(Value, Value)>,
    member: Box<dyn Fn(DictEntry) -> (Value, Value) + Send + Sync>,
}

impl Iterator for DictMembers {
    type Item = (Value, Value);

    fn next(&mut self) -> Option<(Value, Value)> {
        match self.entries.next() {
            Some(entry) => Some((self.member)(entry)),
            None => self.added.take(),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let count = self.entries.len() + usize::from(self.added.is_some());
        (count, Some(count))
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::{BudgetLimit, with_budget};
    use super::*;
    use crate::json::Document;
    use std::time::Duration;

    fn value(text: &str) -> Value {
        let document = Document::check(text.to_owned()).unwrap();
        value_of(&document.part(document.root()), document.root())
    }

    fn spends(bytes_max: usize, work: impl FnOnce()) -> Option<BudgetLimit> {
        with_budget(bytes_max, Duration::from_secs(3600), work).1
    }

    #[test]
    fn a_list_index_is_charged_to_the_budget() {
        let text = format!("[{}0]", "0,".repeat(999));
        assert_eq!(
            spends(3999, || drop(value(&text))),
            Some(BudgetLimit::Bytes)
        );
        assert_eq!(spends(4000, || drop(value(&text))), None);
    }

    #[test]
    fn a_mapping_index_is_charged_to_the_budget() {
        let members: Vec<String> = (0..1000).map(|n| format!("\"k{n}\":{n}")).collect();
        let text = format!("{{{}}}", members.join(","));
        let map = value(&text);
        assert_eq!(
            spends(3_999, || assert!(map.len() != Some(0))),
            Some(BudgetLimit::Bytes)
        );
        let map = value(&text);
        assert_eq!(
            spends(11_999, || assert!(map.len() != Some(0))),
            Some(BudgetLimit::Bytes)
        );
        let map = value(&text);
        let read_twice = || {
            assert_eq!(map.get_attr("k7").unwrap().as_usize(), Some(7));
            let _ = map.get_attr("k8");
        };
        assert_eq!(spends(3_999, read_twice), Some(BudgetLimit::Bytes));
        assert_eq!(map.get_attr("k999").unwrap().as_usize(), Some(999));
    }

    #[test]
    fn duplicate_keys_keep_first_position_and_last_value() {
        let map = value(r#"{"a":1,"b":2,"\u0061":3}"#);
        for _ in 0..3 {
            assert_eq!(map.get_attr("a").unwrap().as_usize(), Some(3));
        }
        assert_eq!(map.to_string(), "{'a': 3, 'b': 2}");
        assert_eq!(map.len(), Some(2));
    }

    #[test]
    fn a_short_member_of_a_long_record_is_read_once() {
        use std::sync::atomic::AtomicUsize;
        static READS: AtomicUsize = AtomicUsize::new(0);
        let text = format!(r#"{{"content":"{}","role":"user"}}"#, "x".repeat(1 << 20));
        let document = Document::check(text).unwrap();
        let member: MemberReader = |_, _| {
            READS.fetch_add(1, Ordering::Relaxed);
            Some(TemplateValue::of_text("user"))
        };
        let TemplateValue(record) =
            TemplateValue::record(document.part(document.root()), &["role"], member);
        for _ in 0..5 {
            assert_eq!(record.get_attr("role").unwrap().as_str(), Some("user"));
        }
        assert_eq!(READS.load(Ordering::Relaxed), 1);
    }
}
