//! Upper bounds for the memory of operators, filters and methods of chat templates.
//!
//! Owns: the cost of each, from its operands or its positional and keyword arguments. Never: runs a
//! filter or method before its cost is charged.

use super::budget::{charge, check_time};
use super::json_value::is_body_value;
use minijinja::value::{ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind, State, tests};
use std::borrow::Cow;
use std::fmt::{self, Write};

/// Limit of the depth of a list or mapping that a template builds.
const DEPTH_MAX: usize = 64;
/// Limit of the values in one, each counted as often as it is reached.
const NODES_MAX: usize = 200_000;
/// Memory of an item of a list.
pub(super) const ITEM_BYTES: usize = size_of::<Value>();
/// Memory of a list without its items: its shared object and its allocation.
const LIST_BYTES: usize = 4 * ITEM_BYTES;
/// Memory of an entry of a mapping: key, value and index.
pub(super) const ENTRY_BYTES: usize = 4 * ITEM_BYTES;
/// First character of the names that only the sandbox uses.
const HIDDEN: char = '\u{1}';

/// Items for which the library reserves memory in an empty batch.
const BATCH_ITEMS_RESERVED: usize = 1024;
/// Limit of the digits of a width in a format.
const WIDTH_DIGITS_MAX: usize = 4;

/// A filter's positional and keyword arguments.
struct FilterArgs<'a>(&'a [Value]);

impl FilterArgs<'_> {
    fn at(&self, at: usize) -> Option<&Value> {
        self.0.get(at).filter(|value| !value.is_undefined())
    }

    /// Returns the argument at this position, or with this keyword if the position has none.
    fn named(&self, at: usize, keyword: &str) -> Option<Value> {
        let given = |value: &Value| !value.is_undefined() && !value.is_none();
        let keywords = self.0.last().filter(|last| last.is_kwargs());
        let placed = self.0.get(at).filter(|value| !value.is_kwargs());
        let placed = placed.filter(|value| given(value)).cloned();
        placed.or_else(|| keywords?.get_attr(keyword).ok().filter(given))
    }

    /// Returns the text that the library makes of the argument at this position.
    fn text(&self, at: usize) -> Result<Cow<'_, str>, Error> {
        self.at(at).map_or(Ok(Cow::Borrowed("")), text_of)
    }
}

/// Returns the text that the library makes of an argument, and charges it.
fn text_of(value: &Value) -> Result<Cow<'_, str>, Error> {
    match value.as_str() {
        Some(text) => Ok(Cow::Borrowed(text)),
        None => {
            charge_text(value)?;
            // The text is made twice: here and in the library.
            charge_text(value)?;
            Ok(Cow::Owned(value.to_string()))
        }
    }
}

/// Charges the most that a filter can make.
pub(super) fn charge_filter(name: &str, args: &[Value]) -> Result<(), Error> {
    let list = args.first();
    let args = FilterArgs(args);
    match name {
        "replace" => charge_replace(&args.text(0)?, &args.text(1)?, &args.text(2)?),
        "join" => {
            let separator = args.named(1, "d").unwrap_or_default();
            let separator = if separator.is_undefined() {
                Cow::Borrowed("")
            } else {
                text_of(&separator)?
            };
            charge_join(list, &separator, args.named(2, "attribute").as_ref())
        }
        "indent" => {
            let width = args.named(1, "width");
            let width = width.and_then(|width| width.as_usize()).unwrap_or(4);
            let text = args.text(0)?;
            let lines = text.matches('\n').count() + 2;
            charge((2 * text.len()).saturating_add(lines.saturating_mul(width)))
        }
        "format" => charge_format(&args.text(0)?, &args.0[1..]),
        "upper" | "lower" | "title" | "capitalize" | "trim" | "escape" | "safe" => {
            // A character may become three, and an entity six.
            charge(6 * args.text(0)?.len())?;
            args.text(1).map(drop)
        }
        "batch" => charge_batch(list, args.at(1)),
        "slice" => {
            let count = args.at(1).and_then(Value::as_usize).unwrap_or(0);
            charge(count.saturating_mul(LIST_BYTES + ITEM_BYTES))?;
            charge_items(list)
        }
        "string" => list.map_or(Ok(()), charge_text),
        "pprint" => {
            list.map_or(Ok(()), check_walkable)?;
            list.map_or(Ok(()), |value| {
                write!(ChargedWriter(&mut DiscardWriter), "{value:#?}").map_err(Error::from)
            })
        }
        "sum" => charge_sum(list, args.0.len()),
        "split" | "lines" => {
            let separator = args.at(1).filter(|separator| !separator.is_none());
            charge_pieces(&args.text(0)?, separator.and_then(Value::as_str))
        }
        "sort" | "unique" | "min" | "max" => {
            charge_items(list)?;
            charge_order(list, args.named(usize::MAX, "attribute").as_ref())
        }
        "groupby" => {
            charge_items(list)?;
            let groups = list.and_then(Value::len).unwrap_or(0);
            charge(groups.saturating_mul(LIST_BYTES + 2 * ITEM_BYTES))?;
            charge_order(list, args.named(1, "attribute").as_ref())
        }
        "dictsort" => {
            list.map_or(Ok(()), charge_members)?;
            list.map_or(Ok(()), charge_text)
        }
        "map" | "select" | "reject" | "selectattr" | "rejectattr" => {
            let mut texts = args.0.iter().filter_map(Value::as_str);
            if texts.any(|text| text.contains(HIDDEN)) {
                let reason = format!("`{name}` names a filter or test that does not exist");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
            args.0.iter().try_for_each(|arg| charge_items(Some(arg)))
        }
        // Templates count the messages once for each message.
        "length" | "count" => check_time(),
        "list" | "zip" | "chain" | "reverse" => {
            args.0.iter().try_for_each(|arg| charge_items(Some(arg)))
        }
        _ => args.0.iter().try_for_each(|arg| charge_list(Some(arg))),
    }
}

/// Charges a list of the items of a value, which takes twice its memory while it grows. The items
/// of a text are its characters.
fn charge_items(value: Option<&Value>) -> Result<(), Error> {
    let text = value.and_then(Value::as_str);
    charge_list(value)?;
    text.map_or(Ok(()), |text| charge(3 * ITEM_BYTES * text.chars().count()))
}

fn charge_batch(list: Option<&Value>, count: Option<&Value>) -> Result<(), Error> {
    let count = count.and_then(Value::as_usize).unwrap_or(1).max(1);
    let items = list.map_or(0, |list| match list.as_str() {
        Some(text) => text.chars().count(),
        None => list.len().unwrap_or(0),
    });
    let batch = LIST_BYTES + ITEM_BYTES * count.min(BATCH_ITEMS_RESERVED);
    charge((items / count + 1).saturating_mul(batch))?;
    charge(count.saturating_mul(ITEM_BYTES))?;
    charge_items(list)
}

fn charge_sum(list: Option<&Value>, args: usize) -> Result<(), Error> {
    let mut items = list.map(Value::try_iter).transpose()?.into_iter().flatten();
    if args == 1 && items.all(|item| item.is_number()) {
        charge_list(list)
    } else {
        Err(Error::new(
            ErrorKind::InvalidOperation,
            "`sum` adds plain numbers only",
        ))
    }
}

/// Charges the texts that sorting compares: without regard to case, the library makes a new text
/// for each comparison.
fn charge_order(list: Option<&Value>, attribute: Option<&Value>) -> Result<(), Error> {
    let Some(list) = list.filter(|list| list.as_object().is_some()) else {
        return Ok(());
    };
    let count = list.len().unwrap_or(0);
    let comparisons = 2 * (count.max(2).ilog2() as usize + 1);
    for item in list.try_iter()? {
        let item = attribute_of(item, attribute);
        match item.as_str() {
            Some(text) => charge(comparisons.saturating_mul(text.len()))?,
            None => charge_text(&item)?,
        }
    }
    Ok(())
}

/// Finds the attribute of an item by its path, as the library does.
fn attribute_of(item: Value, attribute: Option<&Value>) -> Value {
    let Some(path) = attribute.and_then(Value::as_str) else {
        return item;
    };
    path.split('.').fold(item, |value, part| {
        let found = match part.parse::<usize>() {
            Ok(index) => value.get_item_by_index(index),
            Err(_) => value.get_attr(part),
        };
        found.unwrap_or_default()
    })
}

fn charge_list(value: Option<&Value>) -> Result<(), Error> {
    let Some(value) = value else {
        return Ok(());
    };
    match value.as_str() {
        // A character may become three, and an entity six.
        Some(text) => charge(6 * text.len()),
        None if value.as_object().is_some() => {
            check_walkable(value)?;
            charge((2 * ITEM_BYTES).saturating_mul(value.len().unwrap_or(0)))
        }
        None => check_time(),
    }
}

fn charge_replace(text: &str, old: &str, new: &str) -> Result<(), Error> {
    check_time()?;
    let times = if old.is_empty() {
        text.len() + 1
    } else {
        text.matches(old).count()
    };
    charge(text.len().saturating_add(times.saturating_mul(new.len())))
}

fn charge_join(
    values: Option<&Value>,
    separator: &str,
    attribute: Option<&Value>,
) -> Result<(), Error> {
    let Some(values) = values.filter(|values| !values.is_undefined()) else {
        return Ok(());
    };
    if let Some(text) = values.as_str() {
        return charge(text.len().saturating_mul(1 + separator.len()));
    }
    check_walkable(values)?;
    for value in values.try_iter()? {
        charge_text(&attribute_of(value, attribute))?;
        charge(separator.len())?;
    }
    Ok(())
}

fn charge_format(format: &str, args: &[Value]) -> Result<(), Error> {
    let mut digits = 0;
    for letter in format.chars() {
        digits = if letter.is_ascii_digit() {
            digits + 1
        } else {
            0
        };
        if digits > WIDTH_DIGITS_MAX || letter == '*' {
            let reason = "a format with such a width is not supported";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    }
    let places = format.matches(['%', '{']).count();
    charge(format.len().saturating_add(places.saturating_mul(10_000)))?;
    // Each placeholder may show any argument.
    for _ in 0..places {
        args.iter().try_for_each(charge_text)?;
    }
    Ok(())
}

fn charge_pieces(text: &str, separator: Option<&str>) -> Result<(), Error> {
    check_time()?;
    let pieces = match separator {
        Some("") => text.len(),
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    };
    let lines = text.matches('\n').count();
    // Each piece has an allocation of its own, and the list doubles as it grows.
    charge(text.len() + (pieces.max(lines) + 1) * 4 * ITEM_BYTES)
}

/// Calls a method of Python's types.
pub(super) fn call_method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let text = value.as_str();
    let arg = |at: usize| args.get(at).and_then(Value::as_str);
    let arg_text = |at: usize| args.get(at).map_or(Ok(Cow::Borrowed("")), text_of);
    match (text, name) {
        (Some(text), "replace") => charge_replace(text, &arg_text(0)?, &arg_text(1)?)?,
        (Some(separator), "join") => charge_join(args.first(), separator, None)?,
        (Some(format), "format") => charge_format(format, args)?,
        (Some(text), "split" | "splitlines") => charge_pieces(text, arg(0))?,
        (Some(_), "startswith" | "endswith") => check_time()?,
        (Some(text), _) => charge(3 * text.len())?,
        (None, "keys" | "values" | "items") => charge_members(value)?,
        (None, "count") => {
            charge_compared(value)?;
            args.iter().try_for_each(charge_compared)?;
        }
        (None, _) => check_walkable(value)?,
    }
    args.iter().try_for_each(check_walkable)?;
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// A writer that charges each text before it writes it.
pub(super) struct ChargedWriter<'a, W>(&'a mut W);

impl<'a, W> ChargedWriter<'a, W> {
    pub(super) fn new(out: &'a mut W) -> Self {
        Self(out)
    }
}

impl<W: Write> Write for ChargedWriter<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(text.len()).map_err(|_| fmt::Error)?;
        self.0.write_str(text)
    }
}

/// A writer that drops all text.
struct DiscardWriter;

impl Write for DiscardWriter {
    fn write_str(&mut self, _: &str) -> fmt::Result {
        Ok(())
    }
}

/// Charges the text of a value.
pub(super) fn charge_text(value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return charge(text.len());
    }
    check_walkable(value)?;
    write!(ChargedWriter(&mut DiscardWriter), "{value}").map_err(Error::from)
}

/// Charges a copy of a mapping's entries.
pub(super) fn charge_members(mapping: &Value) -> Result<(), Error> {
    check_time()?;
    if mapping.kind() != ValueKind::Map {
        return Ok(());
    }
    check_walkable(mapping)?;
    charge(ENTRY_BYTES.saturating_mul(mapping.len().unwrap_or(0)))
}

/// Charges the text that a comparison may read: a list can contain one long text many times.
pub(super) fn charge_compared(value: &Value) -> Result<(), Error> {
    check_walkable(value)?;
    if value.as_object().is_some() && !is_body_value(value) {
        charge_text(value)
    } else {
        Ok(())
    }
}

pub(super) fn charge_add(a: &Value, b: &Value) -> Result<(), Error> {
    let len = |value: &Value| value.as_str().map_or(0, str::len);
    charge(len(a) + len(b))
}

pub(super) fn charge_repeat(a: &Value, b: &Value) -> Result<(), Error> {
    let size = |value: &Value| match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0) * ITEM_BYTES,
    };
    let times = |value: &Value| value.as_usize().unwrap_or(0);
    charge(size(a).saturating_mul(times(b)))?;
    charge(size(b).saturating_mul(times(a)))
}

/// Checks that iteration over a value ends, and within the limits.
pub(super) fn check_walkable(value: &Value) -> Result<(), Error> {
    walk(value, 0, &mut 0, None)
}

/// Checks a value before it is stored in a namespace: one that contains itself would never be
/// freed.
pub(super) fn check_stored(value: &Value, namespace: &Value) -> Result<(), Error> {
    walk(value, 0, &mut 0, Some(namespace))
}

fn walk(
    value: &Value,
    depth: usize,
    nodes: &mut usize,
    forbidden: Option<&Value>,
) -> Result<(), Error> {
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    // Values of the body have limited depth, and charge what they make.
    if is_body_value(value) {
        return check_time();
    }
    if forbidden.is_some_and(|forbidden| tests::is_sameas(value, forbidden)) {
        let reason = "a namespace cannot hold itself";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    if depth > DEPTH_MAX || *nodes > NODES_MAX {
        let reason = format!(
            "a value is nested more than {DEPTH_MAX} levels deep or holds more than {NODES_MAX} values"
        );
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    match object.repr() {
        ObjectRepr::Plain => Ok(()),
        ObjectRepr::Map => {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                *nodes += 1;
                walk(&key, depth + 1, nodes, forbidden)?;
                walk(&value, depth + 1, nodes, forbidden)?;
            }
            check_time()
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            for value in object.try_iter().into_iter().flatten() {
                *nodes += 1;
                walk(&value, depth + 1, nodes, forbidden)?;
            }
            check_time()
        }
        _ => Ok(()),
    }
}
