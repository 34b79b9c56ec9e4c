//! The OpenAPI document of these routes: `GET /openapi.json`.
//!
//! Owns: the document, maintained by hand in `openapi.json` beside this file, because fields are
//! read by hand, too. Never: takes part in reading a request. Invariant: it names every route and
//! every field that is read, and no other, except for `/ui` and the routes below it, which serve
//! browsers a page of this version. The tests in this file compare it with the sources;
//! `scripts/ci/clients/check.py` generates requests from it and sends them to a server.

use axum::http::header;
use axum::response::IntoResponse;

const DOCUMENT: &str = include_str!("openapi.json");

pub(crate) async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT)
}

#[cfg(test)]
mod tests {
    use super::DOCUMENT;
    use crate::surface::SURFACES;
    use serde_json::Value;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    fn source(path: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let text = fs::read_to_string(root.join(path)).unwrap();
        text.split("#[cfg(test)]").next().unwrap().to_owned()
    }

    /// Returns every quoted text that follows one of `before` directly.
    fn quoted(text: &str, before: &[&str]) -> BTreeSet<String> {
        let after = before.iter().flat_map(|word| text.split(word).skip(1));
        let quoted =
            after.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
        quoted.map(str::to_owned).collect()
    }

    /// Collects the names of all properties in the schemas of request bodies.
    fn properties(value: &Value, document: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => {
                if let Some(Value::Object(properties)) = map.get("properties") {
                    found.extend(properties.keys().cloned());
                }
                if let Some(Value::String(reference)) = map.get("$ref") {
                    let target = document.pointer(reference.trim_start_matches('#')).unwrap();
                    properties(target, document, found);
                }
                map.values()
                    .for_each(|inner| properties(inner, document, found));
            }
            Value::Array(items) => items
                .iter()
                .for_each(|inner| properties(inner, document, found)),
            _ => {}
        }
    }

    #[test]
    fn the_document_names_every_route() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        let served = quoted(&(source("routes.rs") + &source("admin.rs")), &[".route("]);
        let generating = SURFACES.map(|surface| surface.route().to_owned());
        let served = served.into_iter().chain(generating);
        let served: BTreeSet<_> = served.map(|path| path.replace("{*", "{")).collect();
        let named: BTreeSet<_> = document["paths"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        assert_eq!(served, named);
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn the_document_names_every_field() {
        let document: Value = serde_json::from_str(DOCUMENT).unwrap();
        let files = [
            "request/mod.rs",
            "request/sampling.rs",
            "surface/openai_chat.rs",
            "surface/openai_chat/message.rs",
            "surface/openai_completions.rs",
            "surface/tokenize.rs",
        ];
        let request = files.map(source).concat();
        let readers = [
            "text(", "flag(", "integer(", "number(", "object(", "array(", "any(",
        ];
        let read = quoted(&(request.clone() + &source("admin.rs")), &readers);
        let mut named = BTreeSet::new();
        for (_, path) in document["paths"].as_object().unwrap() {
            properties(&path["post"]["requestBody"], &document, &mut named);
        }
        let unnamed: Vec<_> = read.difference(&named).collect();
        assert!(unnamed.is_empty(), "not in openapi.json: {unnamed:?}");
        let words = quoted(
            &(request + &source("admin.rs")),
            &["(", "[", ", ", "| ", "=> "],
        );
        let unread: Vec<_> = named
            .difference(&words)
            .filter(|name| *name != "id")
            .collect();
        assert!(unread.is_empty(), "nobody reads {unread:?}");
    }
}
