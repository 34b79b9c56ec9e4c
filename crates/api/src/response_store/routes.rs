//! `/v1/responses/{id}`, the input items below it, and the routes that other routers ask.

use super::items::shown_items;
use super::named_items::{PEER_ITEMS, QUESTION_IDS_MAX, items_json};
use super::peers::{
    FoundResponse, PEER_CANCEL, PEER_CONVERSATION, PEER_ROUTE, RequestPlace, conversation_json,
};
use crate::app::App;
use crate::caller::AuthenticatedCaller;
use crate::error::ApiError;
use crate::openapi::{RouteDoc, ServedRoute};
use axum::Router;
use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

/// Input items of a page.
const ITEMS_DEFAULT: usize = 20;
const ITEMS_MAX: usize = 100;

/// The routes of stored responses.
pub(crate) static RESPONSE_ROUTES: &[ServedRoute<App>] = &[
    ServedRoute {
        path: "/v1/responses/{id}",
        handler: || get(response).delete(delete),
        doc: RouteDoc {
            operation: "response",
            summary: "A stored response (OpenAI Responses).",
            schema: "ResponseAnswer",
            errors: &[400, 401, 404],
            delete: Some(&DELETE_DOC),
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/v1/responses/{id}/input_items",
        handler: || get(input_items),
        doc: RouteDoc {
            operation: "response_input_items",
            summary: "The input items of a stored response (OpenAI Responses).",
            schema: "ResponseInputItems",
            errors: &[400, 401, 404],
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/v1/responses/{id}/cancel",
        handler: || post(cancel),
        doc: RouteDoc {
            operation: "cancel_response",
            summary: "Cancels a response that runs in the background (OpenAI Responses).",
            method: "post",
            schema: "ResponseAnswer",
            errors: &[400, 401, 404],
            ..RouteDoc::GET
        },
    },
];

const DELETE_DOC: RouteDoc = RouteDoc {
    operation: "delete_response",
    summary: "Removes a stored response (OpenAI Responses).",
    schema: "ResponseDeleted",
    errors: &[400, 401, 404],
    ..RouteDoc::GET
};

/// Adds the routes that other routers ask. A client gets no more from them than from the others.
pub(crate) fn peer_routes(router: Router<App>) -> Router<App> {
    router
        .route(PEER_ROUTE, get(peer_response).delete(peer_delete))
        .route(PEER_CONVERSATION, get(peer_conversation))
        .route(PEER_CANCEL, post(peer_cancel))
        .route(PEER_ITEMS, get(peer_items))
}

/// A stored response that a request names.
struct NamedResponse {
    app: App,
    caller: AuthenticatedCaller,
    headers: HeaderMap,
    id: String,
    router: String,
}

impl FromRequestParts<App> for NamedResponse {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let caller = AuthenticatedCaller::of(app, &parts.headers)?;
        let id = Path::<String>::from_request_parts(parts, app).await;
        let Path(id) = id.map_err(|_| {
            ApiError::invalid("response_id", "The id in the path is not UTF-8 text.")
        })?;
        Ok(Self {
            app: app.clone(),
            caller,
            headers: parts.headers.clone(),
            id,
            router: app.router_digits(),
        })
    }
}

impl NamedResponse {
    /// The answer to a router whose question is for a response that is not here.
    fn not_here(&self) -> Response {
        let router = json!({"router": self.router});
        (StatusCode::NOT_FOUND, axum::Json(router)).into_response()
    }

    /// The answer to a router that asks for a response.
    fn record(&self, found: Option<FoundResponse>) -> Response {
        let Some(found) = found else {
            return self.not_here();
        };
        let response = String::from_utf8_lossy(&found.response);
        let input = found.input.text();
        let record = format!(r#"{{"response":{response},"input":{input}}}"#);
        ([JSON], record).into_response()
    }

    fn place(&self) -> RequestPlace<'_> {
        RequestPlace {
            caller: &self.caller,
            headers: &self.headers,
            router: &self.router,
            bytes_max: self.app.options().body_bytes_max,
        }
    }
}

async fn response(named: NamedResponse, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let query = query.unwrap_or_default();
    if query_values(&query, "stream").any(|value| value == "true") {
        let message = "`stream`: a stored response is sent whole.";
        return Err(ApiError::unsupported("stream", message));
    }
    let found = named.app.responses().find(named.place(), &named.id).await;
    let found = found.map_err(ApiError::response_not_found)?;
    Ok(([JSON], found.response).into_response())
}

const JSON: (header::HeaderName, &str) = (header::CONTENT_TYPE, "application/json");

async fn delete(named: NamedResponse) -> Result<axum::Json<Value>, ApiError> {
    let removed = named.app.responses().delete(named.place(), &named.id);
    removed.await.map_err(ApiError::response_not_found)?;
    Ok(axum::Json(
        json!({"id": named.id, "object": "response", "deleted": true}),
    ))
}

async fn input_items(
    named: NamedResponse,
    RawQuery(query): RawQuery,
) -> Result<axum::Json<Value>, ApiError> {
    let query = query.unwrap_or_default();
    let wanted = ItemsQuery::of(&query)?;
    let found = named.app.responses().find(named.place(), &named.id).await;
    let found = found.map_err(ApiError::response_not_found)?;
    let items = shown_items(&found.input, &named.id);
    wanted.page(items).map(axum::Json)
}

/// The query of a list.
struct ItemsQuery<'a> {
    after: Option<&'a str>,
    limit: usize,
    is_ascending: bool,
}

/// Values of a name in a query. Ids and numbers have no escapes.
fn query_values<'a>(query: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter_map(move |(key, value)| (key == name).then_some(value))
}

impl<'a> ItemsQuery<'a> {
    fn of(query: &'a str) -> Result<Self, ApiError> {
        let one = |name| query_values(query, name).last();
        let limit = match one("limit") {
            None => ITEMS_DEFAULT,
            Some(limit) => limit
                .parse()
                .ok()
                .filter(|limit| (1..=ITEMS_MAX).contains(limit))
                .ok_or_else(|| {
                    let message = format!("`limit` must be between 1 and {ITEMS_MAX}.");
                    ApiError::invalid("limit", message)
                })?,
        };
        let is_ascending = match one("order") {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => return Err(ApiError::invalid("order", "`order` is `asc` or `desc`.")),
        };
        Ok(Self {
            after: one("after"),
            limit,
            is_ascending,
        })
    }

    /// The page of items that the query asks for.
    fn page(&self, mut items: Vec<Value>) -> Result<Value, ApiError> {
        if !self.is_ascending {
            items.reverse();
        }
        if let Some(after) = self.after {
            let place = items.iter().position(|item| item["id"] == after);
            let Some(place) = place else {
                let message = "`after` is the id of no input item of this response.";
                return Err(ApiError::invalid("after", message));
            };
            items.drain(..=place);
        }
        let has_more = items.len() > self.limit;
        items.truncate(self.limit);
        let id = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
        Ok(json!({
            "object": "list",
            "first_id": id(items.first()),
            "last_id": id(items.last()),
            "has_more": has_more,
            "data": items,
        }))
    }
}

async fn cancel(named: NamedResponse) -> Result<Response, ApiError> {
    let cancelled = named.app.responses().cancel(named.place(), &named.id);
    let found = cancelled.await.map_err(ApiError::response_not_found)?;
    let response: Value = serde_json::from_slice(&found.response).unwrap_or_default();
    if response["background"] != true {
        let message = "Only a response with `background` can be cancelled.";
        return Err(ApiError::invalid("response_id", message));
    }
    Ok(([JSON], found.response).into_response())
}

async fn peer_cancel(named: NamedResponse) -> Response {
    let store = named.app.responses();
    named.record(store.cancel_here(&named.caller.tenant, &named.id))
}

async fn peer_response(named: NamedResponse) -> Response {
    let store = named.app.responses();
    named.record(store.find_here(&named.caller.tenant, &named.id))
}

async fn peer_conversation(named: NamedResponse) -> Response {
    let store = named.app.responses();
    match store.conversation_here(&named.caller.tenant, &named.id) {
        None => named.not_here(),
        Some(turns) => ([JSON], conversation_json(&turns)).into_response(),
    }
}

async fn peer_items(
    State(app): State<App>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let caller = AuthenticatedCaller::of(&app, &headers)?;
    let query = query.unwrap_or_default();
    let ids: Vec<&str> = query_values(&query, "id").take(QUESTION_IDS_MAX).collect();
    let bytes_max = app.options().body_bytes_max;
    let named = ids.iter().copied();
    let found = app.responses().items_here(&caller.tenant, named, bytes_max);
    // The first answer of this status counts for all routers.
    let status = if ids.iter().all(|id| found.contains_key(*id)) {
        StatusCode::OK
    } else {
        StatusCode::NOT_FOUND
    };
    Ok((status, [JSON], items_json(&found)).into_response())
}

async fn peer_delete(named: NamedResponse) -> Response {
    let store = named.app.responses();
    if store.delete_here(&named.caller.tenant, &named.id) {
        axum::Json(json!({})).into_response()
    } else {
        named.not_here()
    }
}
