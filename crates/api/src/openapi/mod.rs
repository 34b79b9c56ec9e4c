//! The OpenAPI document of these routes: `GET /openapi.json`.
//!
//! Owns: the document, made of the routes that are served ([`ServedRoute`], `surface`) and of the
//! declarations of their bodies and headers. Never: takes part in reading a request. Invariant: it
//! names every route that [`serve`] serves and every field that a reader may read, and no other.
//! `/ui` and the routes below it are left out: they serve browsers a page of this version.
//!
//! The schemas of answers are static JSON (`answers.json`). The code that writes answers writes
//! bytes and needs no declaration, so one beside it would be a second text that nothing reads.
//! `scripts/ci/clients/check.py` compares a server's answers with these schemas.

#[cfg(test)]
mod pages;

use crate::admin::ADMIN_ROUTES;
use crate::field::schema::{add_titled, shape_schema};
use crate::field::{ObjectSpec, ValueShape};
use crate::request::{EVERY_HEADER, REQUEST_ID};
use crate::response_store::RESPONSE_ROUTES;
use crate::routes::{CLIENT_ROUTES, PROBE_ROUTES};
use crate::surface::SURFACES;
use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::MethodRouter;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// Schemas of answers, by title.
const ANSWERS: &str = include_str!("answers.json");

/// The document, made at the first request for it.
static DOCUMENT: LazyLock<String> = LazyLock::new(|| document().to_string());

/// A route: its handler, and its place in the document.
pub(crate) struct ServedRoute<S> {
    pub(crate) path: &'static str,
    pub(crate) handler: fn() -> MethodRouter<S>,
    pub(crate) doc: RouteDoc,
}

/// A route as the document shows it.
#[derive(Clone, Copy)]
pub(crate) struct RouteDoc {
    /// Name of the operation, for makers of clients.
    pub(crate) operation: &'static str,
    pub(crate) summary: &'static str,
    /// Method of its requests without a body, in lower case; those with one are sent with POST.
    pub(crate) method: &'static str,
    /// The body of its requests.
    pub(crate) request: Option<&'static ObjectSpec>,
    pub(crate) headers: &'static [HeaderDoc],
    /// Status of an answer without an error.
    pub(crate) status: u16,
    pub(crate) description: &'static str,
    /// Content types of the answer.
    pub(crate) contents: &'static [&'static str],
    /// Title of the schema of the answer in JSON.
    pub(crate) schema: &'static str,
    /// Statuses of answers with an error.
    pub(crate) errors: &'static [u16],
    /// Title of the schema of errors.
    pub(crate) error_schema: &'static str,
    /// The same path with DELETE, if it has that.
    pub(crate) delete: Option<&'static RouteDoc>,
}

/// A header of requests.
#[derive(Clone, Copy)]
pub(crate) struct HeaderDoc {
    /// Name of its entry among the parameters.
    pub(crate) title: &'static str,
    pub(crate) name: &'static str,
    pub(crate) shape: ValueShape,
    pub(crate) doc: &'static str,
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
/// Title of the schema of errors in OpenAI's shape.
const ERROR: &str = "Error";

/// Content types of an answer that may be a stream.
pub(crate) const JSON_OR_EVENTS: &[&str] = &[JSON, EVENTS];

impl RouteDoc {
    /// A route that is asked with GET and answers with JSON.
    pub(crate) const GET: Self = Self {
        operation: "",
        summary: "",
        method: "get",
        request: None,
        headers: EVERY_HEADER,
        status: 200,
        description: "The request succeeded.",
        contents: &[JSON],
        schema: "",
        errors: &[],
        error_schema: ERROR,
        delete: None,
    };

    /// Method of its requests, in lower case.
    pub(crate) fn verb(&self) -> &'static str {
        match self.request {
            Some(_) => "post",
            None => self.method,
        }
    }
}

/// Adds the routes to a router.
pub(crate) fn serve<S>(router: Router<S>, routes: &[ServedRoute<S>]) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let add =
        |router: Router<S>, route: &ServedRoute<S>| router.route(route.path, (route.handler)());
    routes.iter().fold(router, add)
}

pub(crate) async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, JSON)], DOCUMENT.as_str())
}

/// All routes of the document.
pub(crate) fn routes() -> impl Iterator<Item = (&'static str, &'static RouteDoc)> {
    let generating = SURFACES.into_iter();
    let generating = generating.map(|surface| (surface.route(), surface.doc()));
    generating
        .chain(CLIENT_ROUTES.iter().map(|route| (route.path, &route.doc)))
        .chain(RESPONSE_ROUTES.iter().map(|route| (route.path, &route.doc)))
        .chain(PROBE_ROUTES.iter().map(|route| (route.path, &route.doc)))
        .chain(ADMIN_ROUTES.iter().map(|route| (route.path, &route.doc)))
}

fn document() -> Value {
    let mut paths = Map::new();
    let mut schemas = Map::new();
    let mut parameters = Map::new();
    let mut responses = Map::new();
    for (path, doc) in routes() {
        // A path of several segments is one parameter.
        let path = path.replace("{*", "{");
        if let Some(request) = doc.request {
            add_titled(request, &mut schemas);
        }
        let method = doc.verb();
        for header in doc.headers {
            let parameter = json!({
                "name": header.name,
                "in": "header",
                "required": false,
                "schema": shape_schema(&header.shape),
                "description": header.doc,
            });
            parameters.insert(header.title.to_owned(), parameter);
        }
        for status in doc.errors {
            let error = ErrorDoc::of(*status);
            responses.insert(error.title_in(doc), error.answer(doc));
        }
        let mut operations = json!({method: operation(&path, doc)});
        if let Some(doc) = doc.delete {
            operations["delete"] = operation(&path, doc);
        }
        paths.insert(path, operations);
    }
    let answers: Map<String, Value> =
        serde_json::from_str(ANSWERS).expect("answers.json is an object");
    schemas.extend(answers);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Cleave",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "In bodies `null` equals an absent field. Fields that are not named here are ignored, except for fields of other servers that would change the answer: these give a 400.",
        },
        "paths": paths,
        "components": {
            "parameters": parameters,
            "responses": responses,
            "schemas": schemas,
        },
    })
}

fn operation(path: &str, doc: &RouteDoc) -> Value {
    let headers = doc.headers.iter();
    let mut parameters: Vec<Value> = headers
        .map(|header| reference("parameters", header.title))
        .collect();
    let in_path = path
        .split('{')
        .skip(1)
        .filter_map(|rest| rest.split_once('}'));
    parameters.extend(in_path.map(|(name, _)| {
        json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}})
    }));
    let mut operation = json!({
        "operationId": doc.operation,
        "summary": doc.summary,
        "parameters": parameters,
    });
    if let Some(request) = doc.request {
        operation["requestBody"] = json!({
            "required": true,
            "content": {JSON: {"schema": shape_schema(&ValueShape::Object(request))}},
        });
    }
    let contents = doc.contents.iter().map(|content| {
        let schema = match *content {
            JSON => reference("schemas", doc.schema),
            // Some readers take a schema for that of the whole stream, others for that of an event.
            EVENTS => json!({}),
            _ => json!({"type": "string"}),
        };
        ((*content).to_owned(), json!({"schema": schema}))
    });
    let mut responses = Map::new();
    responses.insert(
        doc.status.to_string(),
        json!({
            "description": doc.description,
            "headers": {REQUEST_ID.name: request_id_header()},
            "content": contents.collect::<Map<_, _>>(),
        }),
    );
    for status in doc.errors {
        let title = ErrorDoc::of(*status).title_in(doc);
        responses.insert(status.to_string(), reference("responses", &title));
    }
    operation["responses"] = responses.into();
    operation
}

fn reference(kind: &str, title: &str) -> Value {
    json!({"$ref": format!("#/components/{kind}/{title}")})
}

fn request_id_header() -> Value {
    json!({"description": "The request's own id, or a new one.", "schema": {"type": "string"}})
}

/// An answer with an error object.
struct ErrorDoc {
    status: u16,
    title: &'static str,
    description: &'static str,
    has_retry_after: bool,
}

impl ErrorDoc {
    const fn new(status: u16, title: &'static str, description: &'static str) -> Self {
        Self {
            status,
            title,
            description,
            has_retry_after: matches!(status, 429 | 503 | 529),
        }
    }

    fn of(status: u16) -> &'static Self {
        let error = ERRORS.iter().find(|error| error.status == status);
        error.expect("every status that a route documents is in the list")
    }

    /// Title among the answers; errors of another shape have their own.
    fn title_in(&self, doc: &RouteDoc) -> String {
        let prefix = doc.error_schema.strip_suffix(ERROR).unwrap_or_default();
        format!("{prefix}{}", self.title)
    }

    fn answer(&self, doc: &RouteDoc) -> Value {
        let mut headers = json!({REQUEST_ID.name: request_id_header()});
        if self.has_retry_after {
            headers["Retry-After"] = json!({
                "description": "Seconds until the client should try again.",
                "schema": {"type": "string"},
            });
        }
        json!({
            "description": self.description,
            "headers": headers,
            "content": {JSON: {"schema": reference("schemas", doc.error_schema)}},
        })
    }
}

static ERRORS: [ErrorDoc; 11] = [
    ErrorDoc::new(400, "BadRequest", "A field is invalid; `param` names it."),
    ErrorDoc::new(401, "Unauthorized", "The key is missing or wrong."),
    ErrorDoc::new(
        403,
        "Forbidden",
        "Without a key only requests of the server's own machine are accepted.",
    ),
    ErrorDoc::new(
        404,
        "NotFound",
        "Not found; for a model, `param` is `model`.",
    ),
    ErrorDoc::new(
        409,
        "Conflict",
        "The command conflicts with the state of its target.",
    ),
    ErrorDoc::new(413, "TooLarge", "The body is larger than the limit."),
    ErrorDoc::new(415, "NotJson", "The content type of the body is not JSON."),
    ErrorDoc::new(
        429,
        "Busy",
        "The request would miss its targets, or a limit is reached; `Retry-After` says when to try again.",
    ),
    ErrorDoc::new(500, "Failed", "The server failed on this request."),
    ErrorDoc::new(
        503,
        "Unavailable",
        "No worker can serve the request now; `Retry-After` says when to try again.",
    ),
    ErrorDoc::new(
        529,
        "Overloaded",
        "There is no room for the request now, or it would miss its targets; `Retry-After` says when to try again.",
    ),
];
