//! Values of a request's body as templates read them.
//!
//! Owns: lists and mappings that stay text until a template looks into them. Never: checks anything; that was
//! done before. Invariant: a value costs memory for what a template reads of it, and an index of four bytes for
//! an item of a list, which has at least two bytes of text; the rendering's budget counts both.

use super::budget::{charge, look};
use crate::json::{Json, Part, Quoted, Shape};
use minijinja::Error;
use minijinja::value::{Enumerator, Object, ObjectRepr, Value};
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The value of a template for a value of a body.
pub(crate) fn value_of(part: &Part, json: Json<'_>) -> Value {
    match json.shape() {
        Shape::Null => Value::from(()),
        Shape::Bool(flag) => Value::from(flag),
        Shape::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(whole), _) => Value::from(whole),
            (None, Some(whole)) => Value::from(whole),
            (None, None) => Value::from(number.as_f64().unwrap_or_default()),
        },
        Shape::String(text) => match charge(json.text().len()) {
            Ok(()) => Value::from(&*text.get()),
            Err(error) => Value::from(error),
        },
        Shape::Array(_) => list_of(part.part(json), None),
        Shape::Object(_) => Value::from_object(Dict::new(part.part(json), None)),
    }
}

/// The mapping of an object, but for this member, which is replaced or added.
pub(crate) fn value_with(part: Part, name: &'static str, value: Value) -> Value {
    Value::from_object(Dict::new(part, Some((name, value))))
}

/// The list of an array whose items `item_of` makes values of.
pub(crate) fn list_of(part: Part, item_of: Option<fn(&Part, Json<'_>) -> Value>) -> Value {
    if let Err(error) = look() {
        return Value::from(error);
    }
    let items = || match part.json().shape() {
        Shape::Array(items) => items,
        _ => unreachable!("the caller has an array"),
    };
    // Counted first: a list that grows would take twice the memory, and so would one that is copied.
    let count = items().count();
    if let Err(error) = charge(count * size_of::<u32>()) {
        return Value::from(error);
    }
    let mut starts = Vec::with_capacity(count);
    starts.extend(items().map(|item| part.offset(item) as u32));
    let item_of = item_of.unwrap_or(value_of);
    let list = List {
        part: Arc::new(part),
        view: View::whole(starts.len()),
        starts: Arc::new(starts.into_boxed_slice()),
        item_of,
    };
    Value::from_object(list)
}

/// An array.
#[derive(Clone, Debug)]
pub(crate) struct List {
    part: Arc<Part>,
    /// Where the items begin.
    starts: Arc<Box<[u32]>>,
    view: View,
    item_of: fn(&Part, Json<'_>) -> Value,
}

/// The items of an array that a list has: a slice costs no memory for its items.
#[derive(Clone, Copy, Debug)]
struct View {
    first: usize,
    step: isize,
    count: usize,
}

impl View {
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

impl List {
    /// `list[start:stop:step]` as Python has it, where `start` and `stop` are none or whole numbers.
    pub(crate) fn slice(&self, start: Option<i64>, stop: Option<i64>, step: i64) -> Value {
        let indices = slice_indices(self.view.count, start, stop, step);
        let first = indices.first.and_then(|first| self.view.index(first));
        let view = View {
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

/// See [`slice_indices`].
pub(crate) struct SliceIndices {
    /// The index of the first item; none where there is no item.
    pub(crate) first: Option<usize>,
    /// Items.
    pub(crate) count: usize,
}

/// The items that Python's slice of a list of `len` items has.
pub(crate) fn slice_indices(
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

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = self.view.index(key.as_usize()?)?;
        let item = self.part.json_from(*self.starts.get(index)? as usize);
        Some((self.item_of)(&self.part, item))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.view.count)
    }
}

/// An object.
#[derive(Debug)]
struct Dict {
    part: Part,
    replaced: Option<(&'static str, Value)>,
    /// Whether a member was looked up: from the second time on there is an index.
    was_read: AtomicBool,
    /// Where the members' names begin, in the order of the names, equal ones in the order of the text.
    index: OnceLock<Box<[u32]>>,
}

/// The mapping of an object whose members are read in a way of their own.
pub(crate) fn record_of(part: Part, names: &'static [&'static str], member: Member) -> Value {
    Value::from_object(Record {
        part,
        names,
        member,
        kept: names.iter().map(|_| OnceLock::new()).collect(),
    })
}

/// A member of an object by its name.
pub(crate) type Member = fn(&Part, &str) -> Option<Value>;

/// Members are kept once they were read, but for longer texts: those would be there twice.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// See [`record_of`].
#[derive(Debug)]
pub(crate) struct Record {
    part: Part,
    names: &'static [&'static str],
    member: Member,
    kept: Box<[OnceLock<Option<Value>>]>,
}

impl Object for Record {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let at = self.names.iter().position(|name| *name == key)?;
        if let Some(kept) = self.kept[at].get() {
            return kept.clone();
        }
        if let Err(error) = look() {
            return Some(Value::from(error));
        }
        let member = (self.member)(&self.part, key);
        let text_bytes = member.as_ref().and_then(Value::as_str).map_or(0, str::len);
        match text_bytes <= KEPT_BYTES_MAX {
            true => self.kept[at].get_or_init(|| member).clone(),
            false => member,
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

/// Whether it stands in a body: no deeper than bodies are, and without circles.
pub(crate) fn is_of_body(value: &Value) -> bool {
    value.downcast_object_ref::<List>().is_some()
        || value.downcast_object_ref::<Dict>().is_some()
        || value.downcast_object_ref::<Record>().is_some()
}

/// Where a member's name is, and the name whose value counts: that which is given last.
#[derive(Clone, Copy)]
struct Entry {
    key: u32,
    last: u32,
}

impl Dict {
    fn new(part: Part, replaced: Option<(&'static str, Value)>) -> Self {
        Self {
            part,
            replaced,
            was_read: AtomicBool::new(false),
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
        look()?;
        Ok(self.index.get_or_init(|| index.into_boxed_slice()))
    }

    /// Where the members of this name stand: at the last of them is the value that counts.
    fn named<'a>(&self, index: &'a [u32], name: &str) -> &'a [u32] {
        let first = index.partition_point(|at| *self.name_at(*at) < *name);
        let count = index[first..].partition_point(|at| *self.name_at(*at) == *name);
        &index[first..first + count]
    }

    fn name_at(&self, at: u32) -> Cow<'_, str> {
        self.key_at(at).get()
    }

    fn members(&self) -> crate::json::Members<'_> {
        match self.part.json().shape() {
            Shape::Object(members) => members,
            _ => unreachable!("made of an object"),
        }
    }

    fn key_at(&self, at: u32) -> Quoted<'_> {
        match self.part.json_from(at as usize).shape() {
            Shape::String(key) => key,
            _ => unreachable!("a member's name"),
        }
    }

    fn member_at(&self, at: u32) -> Json<'_> {
        let key = self.key_at(at).json().text().len();
        let rest = &self.part.json().text()[at as usize + key..];
        let blanks = rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r', ':']).len();
        self.part.json_from(at as usize + key + blanks)
    }

    /// The members in the order of their names' first appearance.
    fn entries(&self) -> Result<Vec<Entry>, Error> {
        let index = self.index()?;
        charge(index.len() * size_of::<Entry>())?;
        let mut entries = Vec::with_capacity(index.len());
        for (name, _) in self.members() {
            look()?;
            let key = self.part.offset(name.json()) as u32;
            let named = self.named(index, &name.get());
            if named.first() == Some(&key)
                && let Some(last) = named.last()
            {
                entries.push(Entry { key, last: *last });
            }
        }
        Ok(entries)
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if let Some((_, value)) = self.replaced.as_ref().filter(|(name, _)| *name == key) {
            return Some(value.clone());
        }
        if let Err(error) = look() {
            return Some(Value::from(error));
        }
        if !self.was_read.swap(true, Ordering::Relaxed) {
            let named = self.members().filter(|(name, _)| name.get() == key);
            let (_, value) = named.last()?;
            return Some(value_of(&self.part, value));
        }
        match self.index() {
            Ok(index) => {
                let last = *self.named(index, key).last()?;
                Some(value_of(&self.part, self.member_at(last)))
            }
            Err(error) => Some(Value::from(error)),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        if let Err(error) = look() {
            return Enumerator::Values(vec![Value::from(error)]);
        }
        let entries = match self.entries() {
            Ok(entries) => entries,
            Err(error) => return Enumerator::Values(vec![Value::from(error)]),
        };
        let own = Arc::clone(self);
        let added = self.replaced.as_ref().filter(|(name, _)| {
            let mut names = entries.iter().map(|entry| self.key_at(entry.key).get());
            !names.any(|known| known == *name)
        });
        let added = added.map(|(name, value)| (Value::from(*name), value.clone()));
        let member = move |entry: Entry| {
            let key = own.key_at(entry.key).get();
            let replaced = own.replaced.as_ref().filter(|(name, _)| *name == key);
            let value = match replaced {
                Some((_, value)) => value.clone(),
                None => value_of(&own.part, own.member_at(entry.last)),
            };
            (Value::from(&*key), value)
        };
        // Of all members at once their places only; the values come one by one.
        let members = Members {
            entries: entries.into_iter(),
            added,
            member: Box::new(member),
        };
        Enumerator::KeyValueIter(Box::new(members))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        let added = self.replaced.as_ref().filter(|(name, _)| {
            let mut names = self.members().map(|(key, _)| key.get());
            !names.any(|known| known == *name)
        });
        Some(self.entries().ok()?.len() + usize::from(added.is_some()))
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.replaced.is_some() || self.members().next().is_some()
    }
}

/// Walks over a mapping.
struct Members {
    entries: std::vec::IntoIter<Entry>,
    added: Option<(Value, Value)>,
    member: Box<dyn Fn(Entry) -> (Value, Value) + Send + Sync>,
}

impl Iterator for Members {
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
    use super::super::budget::{Spent, within};
    use super::*;
    use crate::json::Document;
    use std::time::Duration;

    fn value(text: &str) -> Value {
        let document = Document::check(text.to_owned()).unwrap();
        value_of(&document.part(document.root()), document.root())
    }

    fn spends(bytes_max: usize, work: impl FnOnce()) -> Option<Spent> {
        within(bytes_max, Duration::from_secs(3600), work).1
    }

    #[test]
    fn the_index_of_a_list_is_charged() {
        let text = format!("[{}0]", "0,".repeat(999));
        assert_eq!(spends(3999, || drop(value(&text))), Some(Spent::Bytes));
        assert_eq!(spends(4000, || drop(value(&text))), None);
    }

    #[test]
    fn entries_and_the_index_of_a_mapping_are_charged() {
        let members: Vec<String> = (0..1000).map(|n| format!("\"k{n}\":{n}")).collect();
        let text = format!("{{{}}}", members.join(","));
        let map = value(&text);
        assert_eq!(
            spends(3_999, || assert!(map.len() != Some(0))),
            Some(Spent::Bytes)
        );
        let map = value(&text);
        assert_eq!(
            spends(11_999, || assert!(map.len() != Some(0))),
            Some(Spent::Bytes)
        );
        let map = value(&text);
        let read_twice = || {
            assert_eq!(map.get_attr("k7").unwrap().as_usize(), Some(7));
            let _ = map.get_attr("k8");
        };
        assert_eq!(spends(3_999, read_twice), Some(Spent::Bytes));
        assert_eq!(map.get_attr("k999").unwrap().as_usize(), Some(999));
    }

    #[test]
    fn the_last_of_equal_names_counts_at_the_place_of_the_first() {
        let map = value(r#"{"a":1,"b":2,"\u0061":3}"#);
        for _ in 0..3 {
            assert_eq!(map.get_attr("a").unwrap().as_usize(), Some(3));
        }
        assert_eq!(map.to_string(), "{'a': 3, 'b': 2}");
        assert_eq!(map.len(), Some(2));
    }

    #[test]
    fn a_long_record_is_read_once_for_a_short_member() {
        use std::sync::atomic::AtomicUsize;
        static READS: AtomicUsize = AtomicUsize::new(0);
        let text = format!(r#"{{"content":"{}","role":"user"}}"#, "x".repeat(1 << 20));
        let document = Document::check(text).unwrap();
        let member: Member = |_, _| {
            READS.fetch_add(1, Ordering::Relaxed);
            Some(Value::from("user"))
        };
        let record = record_of(document.part(document.root()), &["role"], member);
        for _ in 0..5 {
            assert_eq!(record.get_attr("role").unwrap().as_str(), Some("user"));
        }
        assert_eq!(READS.load(Ordering::Relaxed), 1);
    }
}
