//! The page for operators and the stream that feeds it.
//!
//! Owns: `/ui`, its files and `/ui/events`. Never: decides, commands, or shows text of a client.
//! Invariant: all data of the page comes from `/ui/events`, which is protected like `/admin`; the
//! files contain nothing about the fleet, load nothing from other hosts, and cannot be framed.

mod fleet_snapshot;
mod snapshot_broadcast;

pub use fleet_snapshot::{
    ClassRow, DashboardEvent, DurationQuantiles, FleetSnapshot, FlightStageCounts, HISTORY_SECONDS,
    HandoffTotals, HistorySecond, LinkRow, PoolTarget, ScalingChange, ScalingSummary,
    VerdictCounts, WINDOW, WorkerRow,
};

use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::gate::{AdminKey, require_local_or_key, require_operator};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use bytes::Bytes;
use futures::stream;
use snapshot_broadcast::{SnapshotBroadcast, ViewError};
use std::convert::Infallible;
use std::sync::Arc;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("page.js");
const WORKERS_SCRIPT: &str = include_str!("workers.js");
const PROMPT_SCRIPT: &str = include_str!("prompt.js");
const WORDS_SCRIPT: &str = include_str!("words.js");

/// Policy: no foreign resources, no inline code, no frames, no forms to other sites.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Routes `/ui` and below, protected by this key; without a key only for local requests. The server
/// must insert the address of the peer.
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
        .route_layer(from_fn_with_state(key, require_local_or_key));
    let facts = Router::new()
        .route("/ui/events", get(events))
        .route_layer(from_fn_with_state(key, require_operator))
        .with_state(SnapshotBroadcast::new(frontend));
    files
        .merge(facts)
        .route_layer(from_fn(add_security_headers))
}

async fn script(text: &'static str) -> Response {
    file("text/javascript; charset=utf-8", text).await
}

async fn file(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Streams a snapshot and then the changes, until the client leaves or falls behind.
async fn events(State(hub): State<Arc<SnapshotBroadcast>>) -> Result<Response, ApiError> {
    let events = hub.subscribe().map_err(|why| match why {
        ViewError::TooManyViewers => ApiError::unavailable(
            "viewers_full",
            format!(
                "{} viewers are connected already, which is the limit; close one and try again.",
                snapshot_broadcast::VIEWERS_MAX
            ),
        ),
        ViewError::NoSnapshot => ApiError::unavailable("draining", "The server is shutting down."),
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

/// Adds security headers to every answer, refusals included.
async fn add_security_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
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
