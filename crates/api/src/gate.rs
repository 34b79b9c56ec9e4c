//! Access control of the operators' routes.
//!
//! Owns: the admin key, and the check for a local request that replaces it where no key is set.
//! Never: reads a command. Invariant: without the key, or from another machine where there is no
//! key, nothing is shown, read or forwarded.
//!
//! These routes may share a port with clients. Without a key, a request must come from this machine
//! itself: a local proxy that forwards requests of others says so in a header, and a page in a
//! local browser sends its origin. A page whose host name resolves to this machine (DNS rebinding)
//! has the same origin as its target, and requests its own host name: therefore the requested host
//! must be a name of this machine, too.

use crate::error::ApiError;
use crate::field::clipped;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use subtle::ConstantTimeEq;

/// Headers of a request that a proxy forwards.
const FORWARDING_HEADERS: [HeaderName; 2] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
];
/// Headers of a forwarded request or of a web page's request.
const FOREIGN_HEADERS: [HeaderName; 3] = [
    header::FORWARDED,
    HeaderName::from_static("x-forwarded-for"),
    header::ORIGIN,
];

/// The key that an operator sends. Only its digest is stored, and digests are compared in constant
/// time.
#[derive(Clone, Copy)]
pub struct AdminKey([u8; 32]);

impl PartialEq for AdminKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for AdminKey {}

impl AdminKey {
    /// Creates the key from its text.
    ///
    /// # Errors
    /// The reason why no header could carry the text.
    pub fn new(letters: &str) -> Result<Self, String> {
        if !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_graphic()) {
            Ok(Self(Sha256::digest(letters.as_bytes()).into()))
        } else {
            Err("a key is visible ASCII without spaces, at least one letter".to_owned())
        }
    }
}

impl fmt::Debug for AdminKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminKey(…)")
    }
}

/// Headers in which a browser marks requests of a page of another site or port. Navigation by the
/// user is not such a request.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Forwards only requests of an operator.
pub(crate) async fn require_operator(
    State(key): State<Option<AdminKey>>,
    request: Request,
    next: Next,
) -> Response {
    let admitted = match key {
        Some(key) => check_key(request.headers(), key),
        None => check_local(&request, &FOREIGN_HEADERS),
    };
    let admitted = admitted.and_then(|()| match *request.method() {
        Method::POST => require_json(request.headers()),
        _ => Ok(()),
    });
    match admitted {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Serves the files of the page. With a key everyone may load the page that asks for it; without
/// one only local requests may. A page that fetches its own scripts sends its origin.
pub(crate) async fn require_local_or_key(
    State(key): State<Option<AdminKey>>,
    request: Request,
    next: Next,
) -> Response {
    match key.map_or_else(|| check_local(&request, &FORWARDING_HEADERS), |_| Ok(())) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

fn check_key(headers: &HeaderMap, key: AdminKey) -> Result<(), ApiError> {
    let Some(shown) = headers.get(header::AUTHORIZATION) else {
        return Err(ApiError::unauthorized(
            "This route needs the admin key: send `Authorization: Bearer KEY`.",
        ));
    };
    let shown = shown.to_str().ok().and_then(|shown| shown.split_once(' '));
    let right = shown.is_some_and(|(scheme, letters)| {
        scheme.eq_ignore_ascii_case("bearer") && AdminKey::new(letters.trim()) == Ok(key)
    });
    if right {
        Ok(())
    } else {
        Err(ApiError::unauthorized("This is not the admin key."))
    }
}

fn check_local(request: &Request, foreign: &[HeaderName]) -> Result<(), ApiError> {
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    let near = peer.is_some_and(|ConnectInfo(peer)| peer.ip().to_canonical().is_loopback());
    let headers = request.headers();
    let foreign = foreign.iter().find(|name| headers.contains_key(*name));
    let reason = match (near, foreign, foreign_page_reason(request)) {
        (true, None, None) => return Ok(()),
        (true, Some(name), _) => format!("this request has the header `{name}`"),
        (true, None, Some(reason)) => reason,
        (false, ..) => "this request comes from another machine".to_owned(),
    };
    Err(ApiError::forbidden(format!(
        "Without a key /admin and /ui answer only requests of this machine itself, and {reason}. Start the \
         server with --admin-key (or CLEAVE_ADMIN_KEY) and send `Authorization: Bearer KEY`."
    )))
}

/// Returns the reason why a local browser's request does not come from its user, if so.
fn foreign_page_reason(request: &Request) -> Option<String> {
    let headers = request.headers();
    let header_bytes = |name: &HeaderName| headers.get(name).map(|value| value.as_bytes());
    let is_from_other_site = matches!(
        header_bytes(&FETCH_SITE),
        Some(b"cross-site" | b"same-site")
    );
    if is_from_other_site && header_bytes(&FETCH_MODE) != Some(b"navigate") {
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

/// Whether `host` or `host:port` is a name that only this machine has.
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

/// Requires JSON: browsers let a page send other content types to other sites without a preflight.
fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = String::from_utf8_lossy(kind.map_or(&[], |kind| kind.as_bytes()));
    if is_json(&kind) {
        require_plain_body(headers)
    } else {
        Err(ApiError::not_json(&kind))
    }
}

/// Refuses a body that is compressed or otherwise encoded, which would be read as it is.
pub(crate) fn require_plain_body(headers: &HeaderMap) -> Result<(), ApiError> {
    let encodings = header_words(headers, &header::CONTENT_ENCODING).map(|it| ("content", it));
    let codings = header_words(headers, &header::TRANSFER_ENCODING).map(|it| ("transfer", it));
    let is_plain = |coding: &str| matches!(coding, "" | "identity" | "chunked");
    match encodings.chain(codings).find(|(_, it)| !is_plain(it)) {
        None => Ok(()),
        Some((kind, coding)) => Err(ApiError::encoded_body(kind, &clipped(&coding))),
    }
}

/// Words of a header that is a list, in lower case.
fn header_words<'a>(
    headers: &'a HeaderMap,
    name: &'a HeaderName,
) -> impl Iterator<Item = String> + 'a {
    let values = headers.get_all(name).iter();
    values.flat_map(|value| {
        let text = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
        let words = text.split(',').map(|word| word.trim().to_owned());
        words.collect::<Vec<String>>()
    })
}

pub(crate) fn is_json(kind: &str) -> bool {
    let essence = kind.split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_rebinding_names_are_not_this_machine() {
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
