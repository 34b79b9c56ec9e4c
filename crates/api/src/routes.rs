//! Routes, and the layers around all of them.

use crate::access_line::{AccessLine, RequestHead};
use crate::admin::admin_routes;
use crate::app::App;
use crate::body::drain_refused_body;
use crate::body_work::BodyWork;
use crate::caller::AuthenticatedCaller;
use crate::compression::with_compression;
use crate::cross_origin::cross_origin_layer;
use crate::error::ApiError;
use crate::frontend::{ServingProgress, ServingReadiness, StreamCounts};
use crate::generate::{earlier_conversation, generate};
use crate::meant_route::{base_url_rule, meant_route, verb_of};
use crate::metric_registry::prometheus_text;
use crate::model_routes::{max_model_len, model, models};
use crate::openapi::{RouteDoc, ServedRoute, openapi, serve};
use crate::request;
use crate::request_record::RequestMeta;
use crate::response_store::{RESPONSE_ROUTES, peer_routes};
use crate::surface::{self, SURFACES, Surface};
use crate::trace_parent::TraceParent;
use crate::ui::ui_routes;
use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use cleave_text::ModelText;
use cleave_text::json::Document;
use serde_json::{Value, json};
use std::any::Any;
use std::sync::Arc;
use tokio::time::Instant;
use tower_http::catch_panic::CatchPanicLayer;

const REQUEST_ID: HeaderName = HeaderName::from_static(request::REQUEST_ID.name);
/// Content type of OpenMetrics text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Ids of the request, which the outermost layer inserts.
#[derive(Clone)]
struct RequestIds {
    request_id: Arc<str>,
    client: Option<TraceParent>,
    trace: Option<TraceParent>,
    line: AccessLine,
}

impl App {
    /// Router of all routes. It has a fallback, so a router merged with it must have none.
    pub fn router(&self) -> Router {
        self.dressed(client_routes().merge(probe_routes()).merge(self.admin()))
    }

    /// Router of the client routes and probes; operators' routes have a port of their own.
    pub fn client_router(&self) -> Router {
        self.dressed(client_routes().merge(probe_routes()))
    }

    /// Router of the operators' port: `/admin`, `/ui`, probes and metrics.
    pub fn operator_router(&self) -> Router {
        self.dressed(peer_routes(probe_routes().merge(self.admin())))
    }

    /// Router of the routes that peer routers request: readiness, load and stored responses.
    pub fn fellow_router(&self) -> Router {
        self.dressed(peer_routes(serve(Router::new(), &[READY, LOAD])))
    }

    fn admin(&self) -> Router<Self> {
        let key = self.options().admin_key;
        admin_routes(self.operator(), key).merge(ui_routes(self.snapshot_source(), key))
    }

    fn dressed(&self, routes: Router<Self>) -> Router {
        let dressed = routes
            .fallback(unknown)
            .method_not_allowed_fallback(wrong_method)
            // Innermost layer: a panic becomes the answer of its request and is counted as such.
            .layer(CatchPanicLayer::custom(panicked))
            // Outermost layer: every answer gets an id and is counted.
            .layer(from_fn_with_state(self.clone(), identify))
            .with_state(self.clone());
        let dressed = with_compression(dressed);
        // Around everything: a browser asks before it sends, without a key, and reads no answer,
        // not even an error, that does not name its origin.
        match cross_origin_layer(&self.options().allowed_origins) {
            Some(layer) => dressed.layer(layer),
            None => dressed,
        }
    }
}

/// The routes of clients that do not generate.
pub(crate) static CLIENT_ROUTES: &[ServedRoute<App>] = &[
    ServedRoute {
        path: "/v1/models",
        handler: || get(models),
        doc: RouteDoc {
            operation: "models",
            summary: "List the served models.",
            headers: request::MODEL_HEADERS,
            schema: "ModelList",
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/v1/models/{*id}",
        handler: || get(model),
        doc: RouteDoc {
            operation: "model",
            summary: "Describe one model.",
            headers: request::MODEL_HEADERS,
            schema: "Model",
            errors: &[404, 503],
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/tokenize",
        handler: || post(tokenize),
        doc: RouteDoc {
            operation: "tokenize",
            summary: "Tokenize a text or a conversation.",
            request: Some(&surface::tokenize::TOKENIZE_REQUEST),
            schema: "TokenizeAnswer",
            ..TEXT_DOC
        },
    },
    ServedRoute {
        path: "/detokenize",
        handler: || post(detokenize),
        doc: RouteDoc {
            operation: "detokenize",
            summary: "Convert tokens to text.",
            request: Some(&surface::tokenize::DETOKENIZE_REQUEST),
            schema: "DetokenizeAnswer",
            ..TEXT_DOC
        },
    },
    ServedRoute {
        path: "/v1/messages/count_tokens",
        handler: || post(count_tokens),
        doc: RouteDoc {
            operation: "count_message_tokens",
            summary: "Count the tokens of a conversation (Anthropic Messages).",
            request: Some(&surface::anthropic_messages::COUNT_REQUEST),
            schema: "MessageTokens",
            error_schema: "MessagesError",
            ..TEXT_DOC
        },
    },
    ServedRoute {
        path: "/v1/responses/input_tokens",
        handler: || post(count_response_tokens),
        doc: RouteDoc {
            operation: "count_response_tokens",
            summary: "Count the tokens of a conversation (OpenAI Responses).",
            request: Some(&surface::openai_responses::COUNT_REQUEST),
            schema: "ResponseTokens",
            ..TEXT_DOC
        },
    },
    ServedRoute {
        path: "/openapi.json",
        handler: || get(openapi),
        doc: RouteDoc {
            operation: "openapi",
            summary: "This document.",
            schema: "OpenApiDocument",
            ..RouteDoc::GET
        },
    },
];

const TEXT_DOC: RouteDoc = RouteDoc {
    description: "The answer.",
    errors: &[400, 404, 413, 415, 500, 503],
    ..RouteDoc::GET
};

/// Probes, metrics and version.
pub(crate) static PROBE_ROUTES: &[ServedRoute<App>] = &[
    ServedRoute {
        path: "/health",
        handler: || get(health),
        doc: RouteDoc {
            operation: "health",
            summary: "Whether accepted work makes progress.",
            schema: "Healthy",
            errors: &[503],
            ..RouteDoc::GET
        },
    },
    ServedRoute {
        path: "/live",
        handler: || get(live),
        doc: RouteDoc {
            operation: "live",
            ..LIVE_DOC
        },
    },
    ServedRoute {
        path: "/ping",
        handler: || get(live),
        doc: RouteDoc {
            operation: "ping",
            ..LIVE_DOC
        },
    },
    READY,
    ServedRoute {
        path: "/metrics",
        handler: || get(metrics),
        doc: RouteDoc {
            operation: "metrics",
            summary: "Metrics for Prometheus.",
            contents: &["application/openmetrics-text", "text/plain"],
            ..RouteDoc::GET
        },
    },
    LOAD,
    ServedRoute {
        path: "/version",
        handler: || get(version),
        doc: RouteDoc {
            operation: "version",
            summary: "The server's version.",
            schema: "Version",
            ..RouteDoc::GET
        },
    },
];

const LIVE_DOC: RouteDoc = RouteDoc {
    summary: "Whether the process answers.",
    schema: "Healthy",
    ..RouteDoc::GET
};

const READY: ServedRoute<App> = ServedRoute {
    path: "/ready",
    handler: || get(ready),
    doc: RouteDoc {
        operation: "ready",
        summary: "Whether a request would find a worker.",
        schema: "Ready",
        errors: &[503],
        ..RouteDoc::GET
    },
};

const LOAD: ServedRoute<App> = ServedRoute {
    path: "/load",
    handler: || get(load),
    doc: RouteDoc {
        operation: "load",
        summary: "Number of open sequences, and their limit.",
        schema: "Load",
        ..RouteDoc::GET
    },
};

fn client_routes() -> Router<App> {
    let generating = SURFACES.into_iter().fold(Router::new(), |routes, surface| {
        let answer = move |State(app): State<App>, request: Request| async move {
            completion_of(&app, surface, request).await
        };
        routes.route(surface.route(), post(answer))
    });
    peer_routes(serve(serve(generating, CLIENT_ROUTES), RESPONSE_ROUTES))
}

fn probe_routes() -> Router<App> {
    serve(Router::new(), PROBE_ROUTES)
}

async fn identify(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let id = request::request_id(request.headers());
    // The label is the matched route, not the path, because clients must not choose label values.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let client = TraceParent::from_headers(request.headers());
    let trace = app.frontend().begin_span(client);
    let request_id: Arc<str> = id.as_str().into();
    let head = RequestHead {
        method: request.method().clone(),
        path: request.uri().path().to_owned(),
        request_id: Arc::clone(&request_id),
        trace,
    };
    let line = AccessLine::begin(head, app.options().access_log, app.options().prompts);
    request.extensions_mut().insert(RequestIds {
        request_id,
        client,
        trace,
        line: line.clone(),
    });
    let shape = surface::surface_of(request.uri().path(), request.headers());
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<ApiError>() {
        line.set_error(error);
    }
    if let (Some(surface), Some(error)) = (shape, response.extensions_mut().remove::<ApiError>()) {
        response = in_shape(surface, &error, &id, response);
    }
    let route = route.as_ref().map_or("other", MatchedPath::as_str);
    let status = response.status().as_u16();
    app.metrics().count_response(route, status);
    line.set_status(status);
    if let Ok(id) = HeaderValue::from_str(&id) {
        let own = shape.and_then(Surface::request_id_header);
        for name in own.into_iter().chain([REQUEST_ID]) {
            response.headers_mut().insert(name, id.clone());
        }
    }
    response
}

/// Answers a request for this path with 503 while the model is loaded, and ends the connection: the
/// next request finds the server with the model.
pub fn loading_answer(path: &str, headers: &HeaderMap) -> Response {
    let error = ApiError::unavailable("loading", "The model is being loaded.");
    let plain = error.clone().into_response();
    let mut response = match surface::surface_of(path, headers) {
        Some(surface) => in_shape(surface, &error, &request::request_id(headers), plain),
        None => plain,
    };
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(header::CONNECTION, close);
    response
}

/// Gives an error the shape that it has in an API. The headers of the answer stay.
fn in_shape(
    surface: &dyn Surface,
    error: &ApiError,
    request_id: &str,
    response: Response,
) -> Response {
    let body = surface.error(error, request_id).to_string();
    let (mut parts, _) = response.into_parts();
    parts.status = surface.error_status(error);
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(body))
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the layer hands the panic over"
)]
fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    // A formatted panic message may quote what the client sent, so only static messages are logged.
    let reason = panic.downcast_ref::<&'static str>().copied();
    tracing::error!(reason, "a request panicked");
    ApiError::internal("panicked", "The server failed on this request.").into_response()
}

async fn unknown(method: Method, uri: Uri) -> ApiError {
    let hint = meant_route(uri.path())
        .map(|(verb, route)| format!(" Is {verb} {route} meant? {}", base_url_rule(route)));
    // A browser that was given the address alone.
    let at_root = || (uri.path() == "/").then(|| " The page for people is /ui.".to_owned());
    let hint = hint.or_else(at_root);
    ApiError::unknown_route(method.as_str(), uri.path(), &hint.unwrap_or_default())
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let verb = verb_of(uri.path());
    let hint = verb.map_or_else(
        || "; see the Allow header".to_owned(),
        |verb| format!("; send {verb}"),
    );
    ApiError::wrong_method(method.as_str(), uri.path(), &hint)
}

/// Answers a request to generate.
async fn completion_of(app: &App, surface: &'static dyn Surface, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let Some(request_ids) = parts.extensions.remove::<RequestIds>() else {
        return ApiError::internal("unnamed", "The request has no id.").into_response();
    };
    let RequestIds {
        request_id,
        client,
        trace,
        line,
    } = request_ids;
    let meta = RequestMeta {
        request_id,
        surface,
        client,
        trace,
        line,
    };
    let authenticated = authenticate(app, &parts.headers, body).await;
    let (caller, body) = match authenticated {
        Ok(authenticated) => authenticated,
        Err(error) => return error.into_response(),
    };
    let permit = caller.permit();
    let result = generate(app, meta, caller, &parts.headers, body).await;
    let mut response = result.unwrap_or_else(ApiError::into_response);
    if let Some(permit) = permit {
        permit.write_headers(response.headers_mut(), Instant::now());
    }
    response
}

/// Authenticates the request. The body of a refused one is read to its end, so that the client
/// receives the answer.
async fn authenticate(
    app: &App,
    headers: &HeaderMap,
    body: Body,
) -> Result<(AuthenticatedCaller, Body), ApiError> {
    match AuthenticatedCaller::of(app, headers) {
        Ok(caller) => Ok((caller, body)),
        Err(error) => {
            drain_refused_body(headers, body).await;
            Err(error)
        }
    }
}

async fn tokenize(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let frontend = app.frontend_shared();
    let read = move |body: &Document, model: &ModelText| {
        let max_model_len = max_model_len(&*frontend, model);
        surface::tokenize::tokenize(body, model, max_model_len)
    };
    answer_text_request(&app, &headers, body, BodyWork::ListTokens, read).await
}

async fn detokenize(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let read = surface::tokenize::detokenize;
    answer_text_request(&app, &headers, body, BodyWork::JoinTokens, read).await
}

async fn count_tokens(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let read = surface::anthropic_messages::count_tokens;
    answer_text_request(&app, &headers, body, BodyWork::ListConverted, read).await
}

async fn count_response_tokens(
    State(app): State<App>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (caller, body) = authenticate(&app, &headers, body).await?;
    caller.admit_request()?;
    let body = app.read_body(&headers, body).await?;
    let (body, requested) = app.requested_model(body).await?;
    let model = app.wait_for_model(&requested).await?;
    let surface = &surface::openai_responses::RESPONSES;
    let (body, earlier) = earlier_conversation(&app, surface, &caller, &headers, body).await?;
    let read = move |body: &Document, model: &ModelText| {
        surface::openai_responses::count_tokens(body, model, &earlier)
    };
    let answer = app
        .parse(body, model, BodyWork::ListConverted, read)
        .await?;
    Ok(json_answer(answer))
}

/// Answers with the JSON that `read` makes of a body.
async fn answer_text_request(
    app: &App,
    headers: &HeaderMap,
    body: Body,
    work: BodyWork,
    read: impl FnOnce(&Document, &ModelText) -> Result<Vec<u8>, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let (caller, body) = authenticate(app, headers, body).await?;
    caller.admit_request()?;
    let body = app.read_body(headers, body).await?;
    let (body, requested) = app.requested_model(body).await?;
    let model = app.wait_for_model(&requested).await?;
    let answer = app.parse(body, model, work, read).await?;
    Ok(json_answer(answer))
}

fn json_answer(answer: Vec<u8>) -> Response {
    let kind = (header::CONTENT_TYPE, "application/json");
    ([kind], answer).into_response()
}

/// Healthy means that accepted work makes progress (lesson 12); a server without workers is
/// healthy.
async fn health(State(app): State<App>) -> Response {
    match app.progress() {
        ServingProgress::Advancing => axum::Json(json!({"status": "ok"})).into_response(),
        ServingProgress::Stalled(reason) => {
            ApiError::unavailable("stalled", reason).into_response()
        }
    }
}

async fn live() -> axum::Json<Value> {
    axum::Json(json!({"status": "ok"}))
}

async fn ready(State(app): State<App>) -> Response {
    match app.readiness() {
        ServingReadiness::Ready => {
            let models = app.models();
            let states = models.iter().map(|served| {
                let is_ready = app.readiness_for(&served.model) == ServingReadiness::Ready;
                (served.model.name().to_owned(), is_ready.into())
            });
            let models: serde_json::Map<String, Value> = states.collect();
            axum::Json(json!({"status": "ready", "models": models})).into_response()
        }
        ServingReadiness::NotReady(reason) | ServingReadiness::PromptsOnly(reason) => {
            ApiError::unavailable("not_ready", reason).into_response()
        }
        ServingReadiness::Draining => {
            ApiError::from(&cleave_domain::Refusal::Draining).into_response()
        }
    }
}

/// Number of open streams for load balancers; `server_load` is vLLM's name for it.
async fn load(State(app): State<App>) -> axum::Json<Value> {
    let StreamCounts { open, max } = app.frontend().streams();
    let mut models = app.frontend().streams_by_model();
    let mut waiting_total = 0;
    for (model, waiting) in app.first_worker_waits_counts() {
        waiting_total += waiting as usize;
        *models.entry(model).or_default() += waiting as usize;
    }
    let open = open + waiting_total;
    axum::Json(json!({"server_load": open, "server_load_max": max, "models": models}))
}

async fn version() -> axum::Json<Value> {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Answers with metrics in OpenMetrics format if the reader accepts it, as Prometheus does,
/// otherwise in the older text format that every reader knows. `text` is OpenMetrics without the
/// closing `# EOF`.
pub fn metrics_answer(headers: &HeaderMap, mut text: String) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter();
    let open = |value: &HeaderValue| value.to_str().is_ok_and(|a| a.contains("openmetrics-text"));
    let kind = if accepted.into_iter().any(open) {
        text += "# EOF\n";
        OPEN_METRICS
    } else {
        text = prometheus_text(&text);
        PLAIN_METRICS
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
