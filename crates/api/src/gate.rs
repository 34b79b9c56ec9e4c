//! Who may use the routes for operators.
//!
//! Owns: the key to `/admin`, and what stands in for one where none is set: being on this machine.
//! Never: reads a command. Invariant: without the key, or from another machine where there is none,
//! nothing is shown, read or passed on.
//!
//! These routes share a port with clients. Without a key a request must come from this machine
//! itself: a proxy here that hands on strangers' requests says so in a header, and a page in a
//! browser here says where it is from. A page whose name was made to mean this machine (DNS
//! rebinding) is of one origin with what it asks, and asks for its own name: so the name that is asked
//! for must be this machine's too.

use crate::error::ApiError;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use subtle::ConstantTimeEq;

/// Headers of a request that is handed on for somebody else.
const HANDED_ON: [HeaderName; 2] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
];
/// The same, or a web page's.
const FOREIGN: [HeaderName; 3] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    header::ORIGIN,
];

/// What an operator must show. Only its digest is kept, and two are compared in constant time.
#[derive(Clone, Copy)]
pub struct AdminKey([u8; 32]);

impl PartialEq for AdminKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for AdminKey {}

impl AdminKey {
    /// The key of these letters.
    ///
    /// # Errors
    /// What is wrong with them, if no header could carry them.
    pub fn new(letters: &str) -> Result<Self, String> {
        match !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(Sha256::digest(letters.as_bytes()).into())),
            false => Err("a key is visible ASCII without spaces, at least one letter".to_owned()),
        }
    }
}

impl fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminKey(…)")
    }
}

/// What a browser says of a request that a page of another site or port made. Where it says that a
/// person goes there, it is no page's.
const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Lets a request of an operator through, and nothing else.
pub(crate) async fn guard(
    State(key): State<Option<AdminKey>>,
    request: Request,
    next: Next,
) -> Response {
    let admitted = match key {
        Some(key) => shows(request.headers(), key),
        None => is_of_here(&request, &FOREIGN),
    };
    let admitted = admitted.and_then(|()| match *request.method() {
        Method::POST => says_json(request.headers()),
        _ => Ok(()),
    });
    match admitted {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Lets a browser have what asks for the key: where there is one, everybody may be asked for it. A page
/// that fetches its own scripts says where it is from.
pub(crate) async fn guard_page(
    State(key): State<Option<AdminKey>>,
    request: Request,
    next: Next,
) -> Response {
    match key.map_or_else(|| is_of_here(&request, &HANDED_ON), |_| Ok(())) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

fn shows(headers: &HeaderMap, key: AdminKey) -> Result<(), ApiError> {
    let Some(shown) = headers.get(header::AUTHORIZATION) else {
        return Err(ApiError::unauthorized(
            "This route needs the admin key: send `Authorization: Bearer KEY`.",
        ));
    };
    let shown = shown.to_str().ok().and_then(|shown| shown.split_once(' '));
    let right = shown.is_some_and(|(scheme, letters)| {
        scheme.eq_ignore_ascii_case("bearer") && AdminKey::new(letters.trim()) == Ok(key)
    });
    match right {
        true => Ok(()),
        false => Err(ApiError::unauthorized("This is not the admin key.")),
    }
}

fn is_of_here(request: &Request, foreign: &[HeaderName]) -> Result<(), ApiError> {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    let near = peer.is_some_and(|ConnectInfo(peer)| peer.ip().to_canonical().is_loopback());
    let headers = request.headers();
    let foreign = foreign.iter().find(|name| headers.contains_key(*name));
    let reason = match (near, foreign, stranger(request)) {
        (true, None, None) => return Ok(()),
        (true, Some(name), _) => format!("this request has the header `{name}`"),
        (true, None, Some(reason)) => reason,
        (false, ..) => "this request comes from another one".to_owned(),
    };
    Err(ApiError::forbidden(format!(
        "Without a key /admin and /ui answer only requests of this machine itself, and {reason}. Start the \
         server with --admin-key (or CLEAVE_ADMIN_KEY) and send `Authorization: Bearer KEY`."
    )))
}

/// Why a request that a browser here made is not its user's, if it is not.
fn stranger(request: &Request) -> Option<String> {
    let headers = request.headers();
    let says = |name: &HeaderName| headers.get(name).map(|value| value.as_bytes());
    let elsewhere = matches!(says(&SITE), Some(b"cross-site" | b"same-site"));
    if elsewhere && says(&MODE) != Some(b"navigate") {
        return Some("this request was made by a page of another site".to_owned());
    }
    let named = headers.get(header::HOST);
    let named = named.map(|host| String::from_utf8_lossy(host.as_bytes()));
    let authority = request.uri().authority().map(Authority::as_str);
    let name = authority.or(named.as_deref())?;
    (!is_this_machine(name)).then(|| {
        let short: String = name.chars().take(80).collect();
        format!("this request asks for `{short}`: ask for localhost or 127.0.0.1")
    })
}

/// Whether `host` or `host:port` is what only this machine is called.
fn is_this_machine(name: &str) -> bool {
    let bare = name.parse::<Authority>();
    let Ok(host) = bare.as_ref().map(Authority::host) else {
        return false;
    };
    let address = host.trim_start_matches('[').trim_end_matches(']');
    match address.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => {
            let host = host.to_ascii_lowercase();
            let host = host.strip_suffix('.').unwrap_or(&host);
            host == "localhost" || host.ends_with(".localhost")
        }
    }
}

/// Browsers let a page send anything else to other sites without asking them.
fn says_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = String::from_utf8_lossy(kind.map_or(&[], |kind| kind.as_bytes()));
    match is_json(&kind) {
        true => Ok(()),
        false => Err(ApiError::not_json(&kind)),
    }
}

/// Whether a content type is JSON's.
pub(crate) fn is_json(kind: &str) -> bool {
    let essence = kind.split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_whose_name_was_made_to_mean_this_machine_was_its_user() {
        for here in [
            "localhost",
            "LOCALHOST:8000",
            "ui.localhost:80",
            "127.0.0.1:8000",
            "127.9.9.9",
            "[::1]:8000",
            "[::ffff:127.0.0.1]",
        ] {
            assert!(is_this_machine(here), "{here}");
        }
        for strange in [
            "rebound.example:8000",
            "localhost.example",
            "127.0.0.1.example",
            "10.0.0.1:8000",
            "[2001:db8::1]",
            "notlocalhost",
            "",
        ] {
            assert!(!is_this_machine(strange), "{strange}");
        }
    }
}
