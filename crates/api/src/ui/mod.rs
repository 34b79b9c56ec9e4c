//! The page for operators, and the stream that feeds it.
//!
//! Owns: `/ui`, its files and `/ui/events`. Never: decides, commands, or shows what a client wrote.
//! Invariant: what the page shows comes by `/ui/events` alone, which is behind the gate of `/admin`; the
//! files say nothing of the fleet, ask nobody else for anything, and may be put in nobody's frame.

mod board;
mod hub;

pub use board::{
    Board, ClassRow, FlightsNow, HISTORY_SECONDS, Handoffs, Happening, LinkRow, PoolWanted,
    Quantiles, Scaling, ScalingStep, Second, Verdicts, WINDOW, WorkerRow,
};

use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::gate::{AdminKey, guard, guard_page};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use bytes::Bytes;
use futures::stream;
use hub::{Hub, NoView};
use std::convert::Infallible;
use std::sync::Arc;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("page.js");
const WORKERS_SCRIPT: &str = include_str!("workers.js");
const PROMPT_SCRIPT: &str = include_str!("prompt.js");
const WORDS_SCRIPT: &str = include_str!("words.js");

/// Nothing from elsewhere, nothing in line, no frame, no form that leaves.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `/ui` and what belongs to it, for whoever has this key; without one, for this machine alone. The
/// server must say where connections come from.
pub fn ui_routes<S>(frontend: Arc<dyn Frontend>, key: Option<AdminKey>) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let files = Router::new()
        .route("/ui", get(|| file("text/html; charset=utf-8", PAGE)))
        .route("/ui/", get(|| async { Redirect::permanent("../ui") }))
        .route(
            "/ui/style.css",
            get(|| file("text/css; charset=utf-8", STYLE)),
        )
        .route("/ui/page.js", get(|| script(SCRIPT)))
        .route("/ui/workers.js", get(|| script(WORKERS_SCRIPT)))
        .route("/ui/prompt.js", get(|| script(PROMPT_SCRIPT)))
        .route("/ui/words.js", get(|| script(WORDS_SCRIPT)))
        .route_layer(from_fn_with_state(key, guard_page));
    let facts = Router::new()
        .route("/ui/events", get(events))
        .route_layer(from_fn_with_state(key, guard))
        .with_state(Hub::new(frontend));
    files.merge(facts).route_layer(from_fn(harden))
}

async fn script(text: &'static str) -> Response {
    file("text/javascript; charset=utf-8", text).await
}

async fn file(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// A snapshot, then what changes, until the client leaves or falls behind.
async fn events(State(hub): State<Arc<Hub>>) -> Result<Response, ApiError> {
    let events = hub.look().map_err(|why| match why {
        NoView::Full => ApiError::unavailable(
            "viewers_full",
            format!(
                "{} look already; close one and try again.",
                hub::VIEWERS_MAX
            ),
        ),
        NoView::Nothing => ApiError::unavailable("draining", "The server is shutting down."),
    })?;
    let events = stream::unfold(events, |mut events| async {
        let event: Bytes = events.recv().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::from_stream(events)).into_response())
}

/// What each answer says to the browser, refusals included.
async fn harden(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
