//! Requests of web pages of other origins (CORS).
//!
//! Owns: which origins may call the API from a browser, and the answer to a browser's preflight.
//! Never: lets such a page reach operators' routes: those see a page's origin and decide for
//! themselves.

use axum::http::request::Parts;
use axum::http::{HeaderValue, Method};
use std::str::FromStr;
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer, ExposeHeaders};

/// Time for which a browser remembers the answer to a preflight.
const PREFLIGHT_AGE: Duration = Duration::from_secs(3600);
/// Routes of operators, which no other origin may read.
const OPERATOR_ROUTES: [&str; 2] = ["/admin", "/ui"];

/// An origin that may call the API: `*` for all, or one such as `https://app.example`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedOrigin {
    /// `*`: a page of any site.
    Any,
    /// This scheme, host and port.
    One(HeaderValue),
}

impl FromStr for AllowedOrigin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        let wrong = || {
            format!(
                "`{text}` is no origin: give *, or scheme://host[:port] without a path, such as https://app.example"
            )
        };
        let (scheme, host) = text.split_once("://").ok_or_else(wrong)?;
        let fits = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
        let is_origin = !host.is_empty()
            && host.chars().all(fits)
            && !scheme.is_empty()
            && scheme
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
        let value = HeaderValue::from_str(&text.to_ascii_lowercase()).map_err(|_| wrong())?;
        is_origin.then_some(Self::One(value)).ok_or_else(wrong)
    }
}

/// The layer that answers preflights and names the origin in answers; none where no origin may.
pub(crate) fn cross_origin_layer(allowed: &[AllowedOrigin]) -> Option<CorsLayer> {
    if allowed.is_empty() {
        return None;
    }
    let allowed = allowed.to_vec();
    let is_allowed = move |origin: &HeaderValue, parts: &Parts| {
        let path = parts.uri.path();
        let is_operators = OPERATOR_ROUTES.iter().any(|route| path.starts_with(route));
        !is_operators
            && allowed.iter().any(|known| match known {
                AllowedOrigin::Any => true,
                AllowedOrigin::One(known) => known == origin,
            })
    };
    let layer = CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(is_allowed))
        .allow_methods(AllowMethods::list([
            Method::GET,
            Method::POST,
            Method::DELETE,
        ]))
        // Clients of OpenAI send headers of their own, which differ from version to version.
        .allow_headers(AllowHeaders::mirror_request())
        // Ids of requests, and times after which to try again.
        .expose_headers(ExposeHeaders::any())
        .max_age(PREFLIGHT_AGE);
    Some(layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_scheme_and_no_path() {
        assert_eq!("*".parse(), Ok(AllowedOrigin::Any));
        for good in [
            "https://app.example",
            "http://localhost:3000",
            "http://[::1]:80",
        ] {
            let one = HeaderValue::from_str(good).unwrap();
            assert_eq!(good.parse(), Ok(AllowedOrigin::One(one)), "{good}");
        }
        for wrong in [
            "app.example",
            "https://",
            "https://a/",
            "https://a/b",
            "",
            "https://*.a",
        ] {
            assert!(wrong.parse::<AllowedOrigin>().is_err(), "{wrong}");
        }
    }
}
