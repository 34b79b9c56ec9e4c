//! Routes, and the layers around all of them.

use crate::admin::admin_routes;
use crate::answer::Kind;
use crate::app::{App, PromptLog, Work};
use crate::ask;
use crate::body::turn_away;
use crate::book::plain_metrics;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::frontend::{Progress, Readiness, Streams};
use crate::generate::generate;
use crate::json::Document;
use crate::model::ModelText;
use crate::openapi::openapi;
use crate::record::Asked;
use crate::trace_parent::TraceParent;
use crate::ui::ui_routes;
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use serde_json::{Value, json};
use std::any::Any;
use std::sync::Arc;
use tokio::time::Instant;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::field::display;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The content type of OpenMetrics, and that of the older text for scrapers that ask for it only.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How the request is known, put there by the outermost layer.
#[derive(Clone)]
struct Known {
    request_id: Arc<str>,
    client: Option<TraceParent>,
    trace: Option<TraceParent>,
}

impl App {
    /// All routes. It has a fallback, as the others have: a router merged with it must have none.
    pub fn router(&self) -> Router {
        self.dressed(served().merge(probes()).merge(self.admin()))
    }

    /// All routes but those of operators, which have a port of their own.
    pub fn client_router(&self) -> Router {
        self.dressed(served().merge(probes()))
    }

    /// The port of operators: theirs, and what probes and scrapers ask for.
    pub fn operator_router(&self) -> Router {
        self.dressed(probes().merge(self.admin()))
    }

    /// What the fleet's other routers ask: whether this one would serve a request, and how much it has.
    pub fn fellow_router(&self) -> Router {
        let routes = Router::new().route("/ready", get(ready));
        self.dressed(routes.route("/load", get(load)))
    }

    fn admin(&self) -> Router<Self> {
        let key = self.options().admin_key;
        admin_routes(self.operator(), key).merge(ui_routes(self.shown(), key))
    }

    fn dressed(&self, routes: Router<Self>) -> Router {
        routes
            .fallback(unknown)
            .method_not_allowed_fallback(wrong_method)
            // Innermost: a panic is that request's answer, and is counted as one.
            .layer(CatchPanicLayer::custom(panicked))
            // Outermost: whatever is answered has an id and is counted.
            .layer(from_fn_with_state(self.clone(), identify))
            .with_state(self.clone())
    }
}

/// What clients ask for.
fn served() -> Router<App> {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/openapi.json", get(openapi))
}

/// How the server does.
fn probes() -> Router<App> {
    Router::new()
        .route("/health", get(health))
        .route("/live", get(live))
        .route("/ping", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/load", get(load))
        .route("/version", get(version))
}

async fn identify(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let id = ask::request_id(request.headers());
    // The route, not the path: a label must not be a client's choice.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let client = TraceParent::of(request.headers());
    let trace = app.frontend().begin_span(client);
    request.extensions_mut().insert(Known {
        request_id: id.as_str().into(),
        client,
        trace,
    });
    let mut response = next.run(request).await;
    let route = route.as_ref().map_or("other", MatchedPath::as_str);
    let status = response.status().as_u16();
    app.metrics().answered(route, status);
    let trace_id = trace.map(display);
    tracing::debug!(request_id = id, trace_id, route, status, "answered");
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the layer hands the panic over"
)]
fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    // A message that was put together may quote what the client sent.
    let reason = panic.downcast_ref::<&'static str>().copied();
    tracing::error!(reason, "a request panicked");
    ApiError::internal("panicked", "The server failed on this request.").into_response()
}

async fn unknown(method: Method, uri: Uri) -> ApiError {
    ApiError::unknown_route(method.as_str(), uri.path())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}

async fn chat(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    completion_of(&app, Kind::Chat, request).await
}

async fn completions(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    completion_of(&app, Kind::Completion, request).await
}

async fn completion_of(app: &App, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let known = parts.extensions.remove::<Known>();
    let known = known.ok_or_else(|| ApiError::internal("unnamed", "The request has no id."))?;
    let Known {
        request_id,
        client,
        trace,
    } = known;
    let asked = Asked {
        request_id: Arc::clone(&request_id),
        kind,
        client,
        trace,
    };
    let told = |error: &ApiError| {
        // The message may quote what the client sent.
        let shown = app.options().prompts == PromptLog::Shown;
        let message = shown.then(|| error.object().to_string());
        let trace_id = trace.map(display);
        tracing::debug!(%request_id, trace_id, param = error.param(), code = error.code(), message, "request ended in an error");
    };
    let (caller, body) = let_in(app, &parts.headers, body).await.inspect_err(told)?;
    let seat = caller.seat();
    let result = generate(app, asked, (caller, &parts.headers, body)).await;
    let mut response = result.inspect_err(told).into_response();
    if let Some(seat) = seat {
        seat.show(response.headers_mut(), Instant::now());
    }
    Ok(response)
}

/// Who sent this; what is not let in is read to its end, so that the answer is heard.
async fn let_in(app: &App, headers: &HeaderMap, body: Body) -> Result<(Caller, Body), ApiError> {
    match Caller::of(app, headers) {
        Ok(caller) => Ok((caller, body)),
        Err(error) => {
            turn_away(headers, body).await;
            Err(error)
        }
    }
}

async fn tokenize(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<axum::Json<impl Serialize>, ApiError> {
    text_of(&app, (&headers, body), ask::tokenize).await
}

async fn detokenize(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<axum::Json<impl Serialize>, ApiError> {
    text_of(&app, (&headers, body), ask::detokenize).await
}

async fn text_of<T: Serialize + Send + 'static>(
    app: &App,
    (headers, body): (&HeaderMap, Body),
    read: fn(&Document, &ModelText) -> Result<T, ApiError>,
) -> Result<axum::Json<T>, ApiError> {
    let (caller, body) = let_in(app, headers, body).await?;
    caller.enter()?;
    let body = app.read_body(headers, body).await?;
    let model = app.wait_for_model().await?;
    let parsed = app.parse(body, model, Work::Renders, read).await;
    parsed.map(axum::Json)
}

async fn models(State(app): State<App>, headers: HeaderMap) -> Result<axum::Json<Value>, ApiError> {
    Caller::of(&app, &headers)?;
    let data: Vec<Value> = app.served().iter().map(card).collect();
    Ok(axum::Json(json!({"object": "list", "data": data})))
}

async fn model(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<axum::Json<Value>, ApiError> {
    Caller::of(&app, &headers)?;
    match app.served() {
        Some(served) if served.model.name() == id => Ok(axum::Json(card(&served))),
        Some(served) => Err(ApiError::model_not_found(&id, served.model.name())),
        None => Err(ApiError::unavailable(
            "no_worker",
            "No worker has brought a model yet.",
        )),
    }
}

fn card(served: &crate::app::Served) -> Value {
    json!({
        "id": served.model.name(),
        "object": "model",
        "created": served.since,
        "owned_by": "cleave",
        "root": served.model.name(),
        "parent": null,
        "max_model_len": served.model.context_tokens_max(),
    })
}

/// Health means forward progress (lesson 12); being without workers is not ill.
async fn health(State(app): State<App>) -> Response {
    match app.progress() {
        Progress::Moving => axum::Json(json!({"status": "ok"})).into_response(),
        Progress::Stalled(reason) => ApiError::unavailable("stalled", reason).into_response(),
    }
}

async fn live() -> axum::Json<Value> {
    axum::Json(json!({"status": "ok"}))
}

async fn ready(State(app): State<App>) -> Response {
    match app.readiness() {
        Readiness::Ready => axum::Json(json!({"status": "ready"})).into_response(),
        Readiness::NotReady(reason) => ApiError::unavailable("not_ready", reason).into_response(),
        Readiness::Draining => ApiError::from(&cleave_domain::Refusal::Draining).into_response(),
    }
}

/// For those who choose between several routers; vLLM's name for the number.
async fn load(State(app): State<App>) -> axum::Json<Value> {
    let Streams { open, max } = app.frontend().streams();
    let open = open + app.outside_count();
    axum::Json(json!({"server_load": open, "server_load_max": max}))
}

async fn version() -> axum::Json<Value> {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Metrics in the format that their reader asks for: OpenMetrics if it says so, as Prometheus does, else the
/// older text that every reader knows. `text` is OpenMetrics without the closing `# EOF`.
pub fn metrics_answer(headers: &HeaderMap, mut text: String) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter();
    let open = |value: &HeaderValue| value.to_str().is_ok_and(|a| a.contains("openmetrics-text"));
    let kind = match accepted.into_iter().any(open) {
        true => {
            text += "# EOF\n";
            OPEN_METRICS
        }
        false => {
            text = plain_metrics(&text);
            PLAIN_METRICS
        }
    };
    (StatusCode::OK, [(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn metrics(State(app): State<App>, headers: HeaderMap) -> Response {
    let mut text = app.metrics().encode();
    text += &app.frontend().metrics();
    if !text.ends_with('\n') {
        text.push('\n');
    }
    metrics_answer(&headers, text)
}
