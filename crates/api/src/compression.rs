//! Compression of long answers, for clients that accept gzip.
//!
//! Owns: which answers are compressed. Never: compresses a stream of events, whose events would
//! wait for each other.

use axum::Router;
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{NotForContentType, Predicate, SizeAbove};

/// Shorter answers fit one packet of a network anyway.
const BYTES_MIN: u64 = 1024;

/// Compresses the long answers of these routes: metrics, lists, pages, vectors.
pub fn with_compression(routes: Router) -> Router {
    let is_long = SizeAbove::new(BYTES_MIN)
        .and(NotForContentType::SSE)
        .and(NotForContentType::GRPC)
        .and(NotForContentType::IMAGES);
    // A page of metrics shrinks to a tenth at the fastest level, and hardly more at others.
    let layer = CompressionLayer::new().quality(CompressionLevel::Fastest);
    routes.layer(layer.compress_when(is_long))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, to_bytes};
    use axum::http::{HeaderMap, Request, header};
    use axum::routing::get;
    use tower::ServiceExt;

    const TEXT: &str = "cleave_http_requests_total{route=\"/metrics\",status=\"200\"} 17\n";

    async fn answer(path: &str, accepted: &[&str]) -> (HeaderMap, Vec<u8>) {
        let events = (
            [(header::CONTENT_TYPE, "text/event-stream")],
            TEXT.repeat(99),
        );
        let routes = Router::new()
            .route("/long", get(async || TEXT.repeat(99)))
            .route("/short", get(async || TEXT))
            .route("/events", get(async || events));
        let mut request = Request::get(path);
        for value in accepted {
            request = request.header(header::ACCEPT_ENCODING, *value);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = with_compression(routes).oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        (parts.headers, body.to_vec())
    }

    #[tokio::test]
    async fn long_answers_are_compressed_where_gzip_is_accepted() {
        let gzip = [0x1f, 0x8b];
        for (accepted, is_compressed) in [
            (&["gzip"][..], true),
            (&["br;q=1.0, gzip;q=0.2, *;q=0"], true),
            (&["deflate", "GZIP"], true),
            (&["*"], true),
            (&[], false),
            (&["identity"], false),
            (&["gzip;q=0"], false),
            (&["gzip;q=0.1, identity"], false),
            (&["br, zstd"], false),
        ] {
            let (headers, body) = answer("/long", accepted).await;
            let encoding = headers.get(header::CONTENT_ENCODING);
            assert_eq!(encoding.is_some(), is_compressed, "{accepted:?}");
            assert_eq!(body.starts_with(&gzip), is_compressed, "{accepted:?}");
            assert_eq!(body.len() < 999, is_compressed, "{accepted:?}");
            assert_eq!(headers[header::VARY], "accept-encoding");
        }
    }

    #[tokio::test]
    async fn short_answers_and_streams_are_not_compressed() {
        for path in ["/short", "/events"] {
            let (headers, body) = answer(path, &["gzip"]).await;
            assert!(!headers.contains_key(header::CONTENT_ENCODING), "{path}");
            assert!(body.starts_with(TEXT.as_bytes()), "{path}");
        }
    }
}
