//! Requests of web pages of other origins.

use crate::scripted_server::{HttpAnswer, TestServer, files, options, server, server_with};
use axum::body::Body;
use axum::http::{Method, Request, header};
use cleave_api::{AllowedOrigin, ApiOptions};
use cleave_domain::{HeaderTrust, SloPolicy, Tenant, TenantQuota};
use std::sync::Arc;

const PAGE: &str = "https://app.example";

fn open_to(origins: &[&str]) -> TestServer {
    let allowed_origins = origins.iter().map(|text| text.parse::<AllowedOrigin>());
    let options = ApiOptions {
        allowed_origins: allowed_origins.collect::<Result<_, _>>().unwrap(),
        ..options()
    };
    server_with(files("llama3"), options)
}

async fn ask(set: &TestServer, method: Method, path: &str, origin: &str) -> HttpAnswer {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::ORIGIN, origin)
        .header(header::ACCESS_CONTROL_REQUEST_METHOD, "POST")
        .header(
            header::ACCESS_CONTROL_REQUEST_HEADERS,
            "authorization,content-type,x-stainless-os",
        );
    set.send(request.body(Body::empty()).unwrap()).await
}

fn allowed(answer: &HttpAnswer) -> Option<String> {
    let name = header::ACCESS_CONTROL_ALLOW_ORIGIN;
    let value = answer.headers.get(name)?;
    Some(value.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_preflight_of_an_allowed_origin_needs_no_key() {
    let set = open_to(&[PAGE]);
    let policy = SloPolicy {
        tenants: vec![Tenant {
            name: "t".to_owned(),
            key_digests: vec![[7; 32]],
            share: 1,
            quota: TenantQuota::default(),
        }],
        trust: HeaderTrust {
            require_key: true,
            ..HeaderTrust::default()
        },
        ..SloPolicy::default()
    };
    *set.frontend.policy.lock().unwrap() = Arc::new(policy);
    let answer = ask(&set, Method::OPTIONS, "/v1/chat/completions", PAGE).await;
    assert_eq!(answer.status, 200);
    assert_eq!(allowed(&answer).as_deref(), Some(PAGE));
    assert!(
        answer
            .header("access-control-allow-methods")
            .contains("POST")
    );
    let headers = answer.header("access-control-allow-headers");
    assert!(headers.contains("authorization") && headers.contains("x-stainless-os"));
    let refused = ask(&set, Method::GET, "/v1/models", PAGE).await;
    assert_eq!(refused.status, 401);
    assert_eq!(
        allowed(&refused).as_deref(),
        Some(PAGE),
        "a page reads errors"
    );
    assert_eq!(refused.header("access-control-expose-headers"), "*");
    // A cache must not give the answer for one origin to a page of another.
    assert!(refused.header("vary").contains("origin"));
}

#[tokio::test]
async fn other_origins_and_operators_routes_stay_closed() {
    let set = open_to(&[PAGE]);
    let other = ask(&set, Method::GET, "/v1/models", "https://evil.example").await;
    assert_eq!((other.status.as_u16(), allowed(&other)), (200, None));
    let every = open_to(&["*"]);
    let answer = ask(&every, Method::GET, "/v1/models", "https://evil.example").await;
    assert_eq!(allowed(&answer).as_deref(), Some("https://evil.example"));
    for path in ["/admin/workers", "/ui"] {
        let answer = ask(&every, Method::OPTIONS, path, PAGE).await;
        assert_eq!(allowed(&answer), None, "{path}");
        let answer = ask(&every, Method::GET, path, PAGE).await;
        assert_eq!(allowed(&answer), None, "{path}");
    }
    let closed = server("llama3");
    let answer = ask(&closed, Method::OPTIONS, "/v1/models", PAGE).await;
    assert_eq!((answer.status.as_u16(), allowed(&answer)), (405, None));
}
