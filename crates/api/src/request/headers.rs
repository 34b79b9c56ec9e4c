//! The request headers that the API reads.

use super::GenerateRequest;
use crate::error::ApiError;
use crate::field::{TextShape, ValueShape, clipped};
use crate::openapi::{HeaderDoc, RouteDoc};
use crate::timing::TimingShown;
use crate::trace_parent::TRACE_PARENT_HEADER;
use axum::http::{HeaderMap, HeaderName, header};
use cleave_domain::{RequestOrigin, RequestSlo, SloPolicy};
use cleave_text::{ModelText, NumberBounds};
use sha2::{Digest, Sha256};
use std::ops::{Bound, RangeBounds};
use std::time::Duration;

const ID_BYTES_MAX: usize = 128;
/// Targets in milliseconds: up to a day.
const TARGET_MILLIS: NumberBounds = (Bound::Excluded(0.0), Bound::Included(TARGET_MILLIS_MAX));
const TARGET_MILLIS_MAX: f64 = 86_400_000.0;
/// Name of a class or a tenant.
const NAME: TextShape = TextShape {
    bytes_max: Some(NAME_BYTES_MAX),
    ..TextShape::NOT_EMPTY
};
const NAME_BYTES_MAX: usize = 64;

/// Id of a request, which every answer has, too.
pub(crate) const REQUEST_ID: HeaderDoc = HeaderDoc {
    title: "RequestId",
    name: "x-request-id",
    shape: ValueShape::Text(TextShape::ANY),
    doc: "Returned with the answer if it is 1 to 128 visible ASCII characters; otherwise the server makes a new id.",
};
const TRACE_PARENT: HeaderDoc = HeaderDoc {
    title: "TraceParent",
    name: TRACE_PARENT_HEADER,
    shape: ValueShape::Text(TextShape::ANY),
    doc: "W3C trace context; ignored unless it follows the format.",
};
const SLO_CLASS: HeaderDoc = HeaderDoc {
    title: "SloClass",
    name: "x-slo-class",
    shape: ValueShape::Text(NAME),
    doc: "SLO class of the policy.",
};
const SLO_TTFT: HeaderDoc = HeaderDoc {
    title: "SloTtft",
    name: "x-slo-ttft-ms",
    shape: ValueShape::Number(TARGET_MILLIS),
    doc: "Target for the time to the first token.",
};
const SLO_TPOT: HeaderDoc = HeaderDoc {
    title: "SloTpot",
    name: "x-slo-tpot-ms",
    shape: ValueShape::Number(TARGET_MILLIS),
    doc: "Target for the time per output token.",
};
const SLO_E2E: HeaderDoc = HeaderDoc {
    title: "SloE2e",
    name: "x-slo-e2e-ms",
    shape: ValueShape::Number(TARGET_MILLIS),
    doc: "Target for the end-to-end time.",
};
const TENANT: HeaderDoc = HeaderDoc {
    title: "Tenant",
    name: "x-tenant-id",
    shape: ValueShape::Text(NAME),
    doc: "Tenant of the request, if the policy trusts this header.",
};
/// The header of the tenant, and llm-d's spelling.
const TENANT_NAMES: [&str; 2] = [TENANT.name, "x-llm-d-inference-fairness-id"];
const TIMING: HeaderDoc = HeaderDoc {
    title: "Timing",
    name: "x-cleave-timing",
    shape: ValueShape::Text(TextShape::one_of(&["0", "1", "true", "false"])),
    doc: "1: the answer includes the durations of its stages.",
};

/// The header that every request of Anthropic's clients has.
pub(crate) const ANTHROPIC_VERSION: &str = "anthropic-version";

const VERSION: HeaderDoc = HeaderDoc {
    title: "AnthropicVersion",
    name: ANTHROPIC_VERSION,
    shape: ValueShape::Text(TextShape::ANY),
    doc: "Version of Anthropic's API; any is served the same. `/v1/models` answers in Anthropic's shape with it.",
};

/// Headers of every request.
pub(crate) const EVERY_HEADER: &[HeaderDoc] = &[REQUEST_ID];

/// Headers of requests of Anthropic's API that generate.
pub(crate) const ANTHROPIC_HEADERS: &[HeaderDoc] = &[
    REQUEST_ID,
    TRACE_PARENT,
    SLO_CLASS,
    SLO_TTFT,
    SLO_TPOT,
    SLO_E2E,
    TENANT,
    TIMING,
    VERSION,
];

/// Headers of requests for models.
pub(crate) const MODEL_HEADERS: &[HeaderDoc] = &[REQUEST_ID, VERSION];

/// Headers of the other requests that generate: all but the last.
const GENERATE_HEADERS: &[HeaderDoc] = match ANTHROPIC_HEADERS.split_last() {
    Some((_, others)) => others,
    None => &[],
};

/// The parts of their documentation that all routes share that generate.
pub(crate) const GENERATE_DOC: RouteDoc = RouteDoc {
    headers: GENERATE_HEADERS,
    description: "The answer; with `stream: true` as server-sent events: chunks, comments while there is nothing else to send, and at the end `[DONE]` if the whole answer was sent, otherwise an error object.",
    errors: &[400, 404, 413, 415, 429, 500, 503],
    ..RouteDoc::GET
};

/// Returns `x-request-id`, or a new id if the header is absent or unfit for a log line.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let printable = |id: &&str| id.bytes().all(|byte| byte.is_ascii_graphic());
    let sound = |id: &&str| !id.is_empty() && id.len() <= ID_BYTES_MAX && printable(id);
    let given = headers
        .get(REQUEST_ID.name)
        .and_then(|id| id.to_str().ok())
        .filter(sound);
    given.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

/// Reads the headers that the policy may match. llm-d's spellings count as well; Cleave's take
/// precedence.
pub(crate) fn read_origin(
    headers: &HeaderMap,
    policy: &SloPolicy,
) -> Result<RequestOrigin, ApiError> {
    let matched_headers = policy.headers().flat_map(|name| {
        let values = headers.get_all(name).iter();
        let values = values.filter_map(|value| value.to_str().ok());
        values.map(|value| (name.to_owned(), value.trim().to_owned()))
    });
    Ok(RequestOrigin {
        headers: matched_headers.collect(),
        key_digest: key_digest(headers, policy),
        class: class(headers, policy)?,
        tenant: name_header(headers, TENANT_NAMES)?,
        ttft: milliseconds(headers, [SLO_TTFT.name, "x-llm-d-slo-ttft-ms"])?,
        tpot: milliseconds(headers, [SLO_TPOT.name, "x-llm-d-slo-tpot-ms"])?,
        e2e: milliseconds(headers, [SLO_E2E.name, "x-llm-d-slo-e2e-ms"])?,
    })
}

/// Resolves the SLO of each prompt's requests.
pub(crate) fn resolve_slos(
    policy: &SloPolicy,
    origin: &RequestOrigin,
    ask: &GenerateRequest,
    model: &ModelText,
) -> Result<Vec<RequestSlo>, ApiError> {
    let resolve = |prompt: &super::TokenizedPrompt| {
        let tokens = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
        let slo = policy.resolve(origin, model.base_name(), tokens);
        slo.map_err(|unknown| {
            ApiError::invalid(
                SLO_CLASS.name,
                format!("In the header x-slo-class {unknown}."),
            )
        })
    };
    ask.prompts.iter().map(resolve).collect()
}

/// Limits a request to what its tenant may do: caps its priority, and confines its prefixes to the
/// tenant's part of every worker's cache unless the policy shares prefixes. A client's own salt
/// separates its prefixes in either case.
pub(crate) fn apply_tenant_limits(policy: &SloPolicy, tenant: &str, ask: &mut GenerateRequest) {
    ask.priority = policy.priority_for(tenant, ask.priority);
    if policy.trust.shared_prefixes || tenant.is_empty() {
        return;
    }
    // A derived key, so that no salt that a client chooses can equal a tenant's.
    let mut scope = blake3::Hasher::new_derive_key("cleave 2026-11 prefixes of a tenant");
    scope.update(&ask.cache_salt.to_le_bytes());
    scope.update(tenant.as_bytes());
    let mut salt = [0; 8];
    salt.copy_from_slice(&scope.finalize().as_bytes()[..8]);
    ask.cache_salt = u64::from_le_bytes(salt).max(1);
}

/// Reads the SLO class, which must exist. llm-d's objective is a name of its own and counts only
/// where it equals a class.
fn class(headers: &HeaderMap, policy: &SloPolicy) -> Result<Option<String>, ApiError> {
    let class = name_header(headers, [SLO_CLASS.name, "x-llm-d-slo-class"])?;
    if class.is_some() {
        return Ok(class);
    }
    let objective = headers.get("x-llm-d-inference-objective");
    let objective = objective.and_then(|name| name.to_str().ok());
    let known_objective = objective.filter(|name| policy.may_ask_for(name));
    Ok(known_objective.map(str::to_owned))
}

/// Digest of the key that clients of OpenAI or Anthropic send; not computed where no tenant has a
/// key.
fn key_digest(headers: &HeaderMap, policy: &SloPolicy) -> Option<[u8; 32]> {
    if policy.tenants.iter().all(|one| one.key_digests.is_empty()) {
        return None;
    }
    let text = |name| headers.get(name)?.to_str().ok();
    let bearer = text(header::AUTHORIZATION.as_str()).and_then(|shown| {
        let (scheme, key) = shown.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    let key = bearer.or_else(|| text("x-api-key").map(str::trim))?;
    Some(Sha256::digest(key.as_bytes()).into())
}

/// Returns the headers by which a client's tenant is known, for another router of the fleet.
pub(crate) fn identity_headers(headers: &HeaderMap, policy: &SloPolicy) -> HeaderMap {
    let own = [header::AUTHORIZATION.as_str(), "x-api-key"];
    let names = own.into_iter().chain(TENANT_NAMES).chain(policy.headers());
    let mut identity = HeaderMap::new();
    for name in names {
        let (Ok(known), values) = (HeaderName::try_from(name), headers.get_all(name)) else {
            continue;
        };
        if !identity.contains_key(&known) {
            identity.extend(values.iter().map(|value| (known.clone(), value.clone())));
        }
    }
    identity
}

/// Reads a name that the client chose, if it sent one.
fn name_header(headers: &HeaderMap, names: [&'static str; 2]) -> Result<Option<String>, ApiError> {
    let Some((name, value)) = first_header(headers, names)? else {
        return Ok(None);
    };
    if (1..=NAME_BYTES_MAX).contains(&value.len()) {
        Ok(Some(value.to_owned()))
    } else {
        Err(ApiError::invalid(
            name,
            format!("The header {name} must have 1 to {NAME_BYTES_MAX} characters."),
        ))
    }
}

/// Reads `x-cleave-timing: 1`, with which a client asks for the stages' durations.
pub(crate) fn timing(headers: &HeaderMap) -> Result<TimingShown, ApiError> {
    let name = TIMING.name;
    match headers.get(name).map(|value| value.as_bytes()) {
        None | Some(b"0" | b"false") => Ok(TimingShown::Never),
        Some(b"1" | b"true") => Ok(TimingShown::Asked),
        Some(_) => Err(ApiError::invalid(
            name,
            format!("The header {name} is 1, or left out."),
        )),
    }
}

fn first_header<'a>(
    headers: &'a HeaderMap,
    names: [&'static str; 2],
) -> Result<Option<(&'static str, &'a str)>, ApiError> {
    let found = names
        .into_iter()
        .find_map(|name| Some((name, headers.get(name)?)));
    let Some((name, value)) = found else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(value) => Ok(Some((name, value.trim()))),
        Err(_) => Err(ApiError::invalid(
            name,
            format!("The header {name} is not plain text."),
        )),
    }
}

/// Reads a positive number of milliseconds, at most a day.
fn milliseconds(
    headers: &HeaderMap,
    names: [&'static str; 2],
) -> Result<Option<Duration>, ApiError> {
    let Some((name, value)) = first_header(headers, names)? else {
        return Ok(None);
    };
    match value.parse::<f64>() {
        Ok(millis) if TARGET_MILLIS.contains(&millis) => {
            Ok(Some(Duration::from_secs_f64(millis / 1000.0)))
        }
        _ => Err(ApiError::invalid(
            name,
            format!(
                "The header {name} must be a number of milliseconds above 0 and at most {TARGET_MILLIS_MAX}, not {:?}.",
                clipped(value)
            ),
        )),
    }
}
