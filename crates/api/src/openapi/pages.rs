//! Pages that are made of the declarations: docs/openapi.json, and the tables of docs/api.md.

use super::{document, routes};
use crate::field::{
    FieldSpec, IntegerRange, ListShape, MapKeys, MapShape, ObjectSpec, TextShape, ValueShape,
};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::ops::Bound;
use std::path::PathBuf;

/// The command that writes the pages.
const COMMAND: &str = "UPDATE_PAGES=1 cargo test -p cleave-api --lib the_page";
/// Columns of docs/openapi.json: what fits is a line.
const WIDTH: usize = 120;

fn check(name: &str, made: &str) {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs")).join(name);
    if fs::read_to_string(&path).is_ok_and(|text| text == made) {
        return;
    }
    if std::env::var_os("UPDATE_PAGES").is_some() {
        fs::write(&path, made).unwrap();
    } else {
        panic!("docs/{name} is not what the declarations say: {COMMAND}");
    }
}

#[test]
fn the_page_of_openapi_is_the_served_document() {
    let mut text = String::new();
    write_json(&mut text, &document(), 0, 0);
    check("openapi.json", &(text + "\n"));
}

/// Writes a value that begins `used` columns after its indentation.
fn write_json(out: &mut String, value: &Value, indent: usize, used: usize) {
    let line = value.to_string();
    let entries: Vec<(String, &Value)> = match value {
        _ if indent + used + line.len() < WIDTH => Vec::new(),
        Value::Object(map) => {
            let name = |name: &String| format!("{}: ", Value::from(name.as_str()));
            map.iter().map(|(key, value)| (name(key), value)).collect()
        }
        Value::Array(items) => items.iter().map(|item| (String::new(), item)).collect(),
        _ => Vec::new(),
    };
    if entries.is_empty() {
        return out.push_str(&line);
    }
    out.push_str(&line[..1]);
    for (index, (name, value)) in entries.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        out.push_str(&format!("{comma}\n{:1$}{name}", "", indent + 2));
        write_json(out, value, indent + 2, name.len());
    }
    out.push_str(&format!("\n{:indent$}{}", "", &line[line.len() - 1..]));
}

/// Collects the targets of all references.
fn references(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            if let Some(Value::String(target)) = map.get("$ref") {
                found.insert(target.trim_start_matches('#').to_owned());
            }
            map.values().for_each(|inner| references(inner, found));
        }
        Value::Array(items) => items.iter().for_each(|inner| references(inner, found)),
        _ => {}
    }
}

#[test]
fn each_component_is_referenced_and_exists() {
    let document = document();
    let mut referenced = BTreeSet::new();
    references(&document, &mut referenced);
    let kinds = document["components"].as_object().unwrap().iter();
    let components = kinds.flat_map(|(kind, components)| {
        let titles = components.as_object().unwrap().keys();
        titles.map(move |title| format!("/components/{kind}/{title}"))
    });
    assert_eq!(referenced, components.collect());
}

/// A row of a table of fields.
#[derive(Clone, Debug, PartialEq)]
struct FieldRow {
    path: String,
    values: String,
    default: &'static str,
    doc: &'static str,
}

#[test]
fn the_page_of_the_api_lists_the_declared_fields() {
    let [
        chat,
        completions,
        tokenize,
        detokenize,
        messages,
        responses,
        embeddings,
        rerank,
        score,
    ] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/v1/messages",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
    ]
    .map(request_of);
    let (in_chat, in_completions) = (rows(chat), rows(completions));
    let (both, chat_only): (Vec<_>, Vec<_>) = in_chat
        .iter()
        .cloned()
        .partition(|row| in_completions.contains(row));
    let without = |rows: Vec<FieldRow>, others: &[FieldRow]| -> Vec<FieldRow> {
        let rows = rows.into_iter().filter(|row| !others.contains(row));
        rows.collect()
    };
    let lists = without([rows(tokenize), rows(detokenize)].concat(), &in_chat);
    // Both commands take `worker`.
    let commands = rows(request_of("/admin/role"));
    let of_messages = without(rows(messages), &both);
    let of_responses = without(rows(responses), &both);

    let tables = [
        ("both", table(&both)),
        ("chat", table(&chat_only)),
        ("completions", table(&without(in_completions, &both))),
        ("tokens", table(&lists)),
        ("messages", table(&of_messages)),
        ("responses", table(&of_responses)),
        ("embeddings", table(&without(rows(embeddings), &both))),
        ("rerank", table(&without(rows(rerank), &both))),
        ("score", table(&without(rows(score), &both))),
        ("commands", table(&commands)),
        (
            "refused",
            refused_table(&refused(chat), &refused(completions)),
        ),
        ("refused-messages", list_of_refused(messages)),
        ("refused-responses", list_of_refused(responses)),
    ];
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");
    let mut page = fs::read_to_string(path).unwrap();
    for (name, table) in tables {
        let begin = format!("<!-- {name}: begin, by {COMMAND} -->\n");
        let end = format!("<!-- {name}: end -->");
        let (before, rest) = page
            .split_once(&begin)
            .unwrap_or_else(|| panic!("no {begin}"));
        let (_, after) = rest.split_once(&end).unwrap_or_else(|| panic!("no {end}"));
        page = format!("{before}{begin}\n{table}\n{end}{after}");
    }
    check("api.md", &page);
}

fn request_of(path: &str) -> &'static ObjectSpec {
    let found = routes().find(|(route, _)| *route == path);
    let (_, doc) = found.unwrap_or_else(|| panic!("no route {path}"));
    doc.request.expect("the route takes a body")
}

/// Paths and reasons of all fields that an object, and the objects in it, refuse.
fn refused(spec: &ObjectSpec) -> Vec<(String, &'static str)> {
    let mut fields = Vec::new();
    add_refused(spec, "", &mut fields);
    fields
}

fn add_refused(spec: &ObjectSpec, prefix: &str, fields: &mut Vec<(String, &'static str)>) {
    let own = spec.refused.iter().copied().flatten();
    fields.extend(own.map(|field| (format!("{prefix}{}", field.name), field.reason)));
    for field in spec.fields() {
        if let ValueShape::List(ListShape { items, .. }) = field.shape
            && let ValueShape::Object(inner) = items
        {
            add_refused(inner, &format!("{prefix}{}[].", field.name), fields);
        }
    }
}

/// The rows of an object's fields, and of the objects in them.
fn rows(spec: &ObjectSpec) -> Vec<FieldRow> {
    let mut rows = Vec::new();
    add_rows(spec, "", &mut rows);
    rows
}

fn add_rows(spec: &ObjectSpec, prefix: &str, rows: &mut Vec<FieldRow>) {
    for field in spec.fields() {
        let FieldSpec {
            name,
            doc,
            default,
            is_required: _,
            shape,
        } = field;
        if let ValueShape::Absent = shape {
            continue;
        }
        let path = format!("{prefix}{name}");
        let values = words(shape);
        // The forms of an object may share a field, with other values.
        match rows.iter_mut().find(|row| row.path == path) {
            Some(row) if row.values == values => continue,
            Some(row) => {
                row.values = format!("{}, {values}", row.values);
                continue;
            }
            None => rows.push(FieldRow {
                path: path.clone(),
                values,
                default,
                doc,
            }),
        }
        add_nested_rows(shape, &path, rows);
    }
}

fn add_nested_rows(shape: &ValueShape, path: &str, rows: &mut Vec<FieldRow>) {
    match shape {
        ValueShape::Object(spec) => add_rows(spec, &format!("{path}."), rows),
        ValueShape::List(ListShape { items, .. }) => {
            add_nested_rows(items, &format!("{path}[]"), rows);
        }
        ValueShape::OneOf(shapes) => {
            for shape in *shapes {
                add_nested_rows(shape, path, rows);
            }
        }
        _ => {}
    }
}

fn table(rows: &[FieldRow]) -> String {
    let mut table = "| field | values | default | meaning |\n|---|---|---|---|\n".to_owned();
    for row in rows {
        let FieldRow {
            path,
            values,
            default,
            doc,
        } = row;
        let doc = doc.trim_end_matches('.');
        table += &format!("| `{path}` | {values} | {default} | {doc} |\n");
    }
    table
}

/// The fields that the two generating routes refuse, those of one reason in a row.
fn refused_table(
    chat: &[(String, &'static str)],
    completions: &[(String, &'static str)],
) -> String {
    let others = completions.iter().filter(|field| !chat.contains(field));
    let mut rows: Vec<(&str, &str, Vec<String>)> = Vec::new();
    for field in chat.iter().chain(others) {
        let route = match (chat.contains(field), completions.contains(field)) {
            (true, true) => "both",
            (true, false) => "chat",
            (false, _) => "completions",
        };
        let (path, reason) = field;
        let name = format!("`{path}`");
        let same = rows.iter_mut();
        let mut same = same.filter(|row| (row.0, row.1) == (route, *reason));
        match same.next() {
            Some((_, _, names)) => names.push(name),
            None => rows.push((route, reason, vec![name])),
        }
    }
    let mut table = "| field | refused by | reason |\n|---|---|---|\n".to_owned();
    for (route, reason, names) in rows {
        table += &format!("| {} | {route} | {reason} |\n", names.join(", "));
    }
    table
}

/// The fields that one route refuses.
fn list_of_refused(spec: &ObjectSpec) -> String {
    let mut table = "| field | reason |\n|---|---|\n".to_owned();
    for (path, reason) in refused(spec) {
        table += &format!("| `{path}` | {reason} |\n");
    }
    table
}

/// The values of a shape in words.
fn words(shape: &ValueShape) -> String {
    match shape {
        ValueShape::Any => "any value".to_owned(),
        ValueShape::Absent => "none".to_owned(),
        ValueShape::Flag => "boolean".to_owned(),
        ValueShape::Text(shape) => text_words(shape, "text"),
        ValueShape::Integer(range) => match *range {
            IntegerRange {
                low: i64::MIN,
                high: i64::MAX,
            } => "signed 64-bit integer".to_owned(),
            IntegerRange { low, high }
                if low == i64::from(i32::MIN) && high == i64::from(i32::MAX) =>
            {
                "signed 32-bit integer".to_owned()
            }
            IntegerRange { low, high } if high == i64::from(u32::MAX) => {
                format!("integer, {low} and up")
            }
            IntegerRange { low, high } => format!("integer, {low} to {high}"),
        },
        ValueShape::Number((low, high)) => {
            let low = match low {
                Bound::Included(low) => low.to_string(),
                Bound::Excluded(low) => format!("above {low}"),
                Bound::Unbounded => "any".to_owned(),
            };
            match high {
                Bound::Included(high) => format!("number, {low} to {high}"),
                Bound::Excluded(high) => format!("number, {low} to below {high}"),
                Bound::Unbounded => format!("number, {low} and up"),
            }
        }
        ValueShape::TokenId => "token id".to_owned(),
        ValueShape::List(list) => match list.count_max {
            Some(count_max) => format!("up to {} {}", grouped(count_max), plural(list.items)),
            None => format!("list of {}", plural(list.items)),
        },
        ValueShape::Map(MapShape {
            keys: MapKeys::TokenIds,
            values,
            count_max,
        }) => {
            let limit = count_max.map_or(String::new(), |max| format!("up to {} ", grouped(max)));
            format!("{limit}token ids, each with a {}", words(values))
        }
        ValueShape::Map(_) | ValueShape::Object(_) => "object".to_owned(),
        ValueShape::OneOf(shapes) => alternatives(shapes, words),
    }
}

fn alternatives(shapes: &[ValueShape], words: fn(&ValueShape) -> String) -> String {
    let mut shapes: Vec<String> = shapes.iter().map(words).collect();
    // Objects of several shapes have the same words.
    shapes.dedup();
    let last = shapes.pop().expect("there are several shapes");
    if shapes.is_empty() {
        last
    } else {
        format!("{}, or {last}", shapes.join(", "))
    }
}

fn text_words(shape: &TextShape, noun: &str) -> String {
    let TextShape {
        is_empty_allowed,
        bytes_max,
        choices,
        is_json,
    } = shape;
    if !choices.is_empty() {
        let choices: Vec<String> = choices.iter().map(|choice| format!("`{choice}`")).collect();
        return choices.join(", ");
    }
    let limit = match (bytes_max, is_empty_allowed) {
        (Some(bytes_max), true) => format!(" of up to {} bytes", grouped(*bytes_max)),
        (Some(bytes_max), false) => format!(" of 1 to {} bytes", grouped(*bytes_max)),
        (None, true) => String::new(),
        (None, false) => " of at least 1 byte".to_owned(),
    };
    let kind = if *is_json { " of JSON" } else { "" };
    format!("{noun}{kind}{limit}")
}

fn plural(shape: &ValueShape) -> String {
    match shape {
        ValueShape::Text(shape) => text_words(shape, "texts"),
        ValueShape::TokenId => "token ids".to_owned(),
        ValueShape::List(list) => format!("lists of {}", plural(list.items)),
        ValueShape::Object(_) => "objects".to_owned(),
        ValueShape::Any => "values".to_owned(),
        ValueShape::OneOf(shapes) => alternatives(shapes, plural),
        other => words(other),
    }
}

/// A number with a comma between thousands.
fn grouped(number: usize) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1000), number % 1000),
    }
}
