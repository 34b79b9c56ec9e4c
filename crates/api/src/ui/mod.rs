//! The pages: the fleet for operators with the stream that feeds it, and a chat.
//!
//! Owns: `/ui`, `/ui/chat`, their files and `/ui/events`. Never: decides, commands, or shows an
//! operator the text of a client; the chat is a client as any other, and nothing of it is kept.
//! Invariant: all data of the fleet comes from `/ui/events`, which is protected like `/admin`; the
//! files contain nothing about the fleet, load nothing from other hosts, and cannot be framed.

mod fleet_snapshot;
mod snapshot_broadcast;

pub use fleet_snapshot::{
    ClassRow, DashboardEvent, DurationQuantiles, FleetSnapshot, FlightStageCounts, HISTORY_SECONDS,
    HandoffTotals, HistorySecond, LinkRow, LostWorker, PoolTarget, ScalingChange, ScalingSummary,
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

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Path, content type and text of each file.
const FILES: [(&str, &str, &str); 16] = [
    ("/ui", HTML, include_str!("page.html")),
    ("/ui/chat", HTML, include_str!("chat.html")),
    ("/ui/style.css", CSS, include_str!("style.css")),
    ("/ui/chat.css", CSS, include_str!("chat.css")),
    ("/ui/page.js", JAVASCRIPT, include_str!("page.js")),
    ("/ui/workers.js", JAVASCRIPT, include_str!("workers.js")),
    ("/ui/prompt.js", JAVASCRIPT, include_str!("prompt.js")),
    ("/ui/chat.js", JAVASCRIPT, include_str!("chat.js")),
    ("/ui/turn_view.js", JAVASCRIPT, include_str!("turn_view.js")),
    (
        "/ui/conversation.js",
        JAVASCRIPT,
        include_str!("conversation.js"),
    ),
    ("/ui/json.js", JAVASCRIPT, include_str!("json.js")),
    ("/ui/events.js", JAVASCRIPT, include_str!("events.js")),
    ("/ui/event_log.js", JAVASCRIPT, include_str!("event_log.js")),
    ("/ui/waterfall.js", JAVASCRIPT, include_str!("waterfall.js")),
    ("/ui/theme.js", JAVASCRIPT, include_str!("theme.js")),
    ("/ui/words.js", JAVASCRIPT, include_str!("words.js")),
];

/// Policy: no foreign resources, no inline code, no frames, no forms to other sites.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Routes `/ui` and below, protected by this key; without a key only for local requests. The server
/// must insert the address of the peer.
pub fn ui_routes<S>(frontend: Arc<dyn Frontend>, key: Option<AdminKey>) -> Router<S>
where
    S: Clone + Send + Sync + 'static,
{
    let pages = Router::new().route("/ui/", get(|| async { Redirect::permanent("../ui") }));
    let pages = FILES.iter().fold(pages, |pages, (path, kind, text)| {
        pages.route(path, get(move || file(kind, text)))
    });
    let pages = pages.route_layer(from_fn_with_state(key, require_local_or_key));
    let facts = Router::new()
        .route("/ui/events", get(events))
        .route_layer(from_fn_with_state(key, require_operator))
        .with_state(SnapshotBroadcast::new(frontend));
    pages
        .merge(facts)
        .route_layer(from_fn(add_security_headers))
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
