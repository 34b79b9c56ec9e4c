//! Errors as clients see them.
//!
//! Owns: the OpenAI error object, and the HTTP status of each refusal and failure. Never: decides
//! that something is wrong. Invariant: every request ends with an answer or with one of these
//! errors.

use crate::field::clipped;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cleave_domain::{Ending, Failure, Refusal, SloMetric};
use serde_json::{Value, json};
use std::time::Duration;

/// Value of `Retry-After` where the real delay is unknown.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Header with the reason of a refusal; the error object's `code` is the same word.
pub(crate) const REFUSAL_REASON: HeaderName = HeaderName::from_static("x-cleave-refused-reason");

/// `Retry-After` in milliseconds, which OpenAI's clients prefer.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// llm-d's header for the reason of a refusal.
const DROP_REASON: HeaderName = HeaderName::from_static("x-llm-d-request-dropped-reason");

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
    retry_after: Option<Duration>,
    refused: bool,
    /// Value of llm-d's header, if the refusal has one.
    drop_reason: Option<&'static str>,
}

/// The limit of a tenant's quota that a request exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuotaLimit {
    Requests(u32),
    Tokens(u32),
    Streams(u32),
}

/// Names of fields in two APIs: the beginning of a path in one, and in the other. The first that
/// fits counts.
pub(crate) type FieldNames = &'static [(&'static str, &'static str)];

/// Returns the path of a field as another API names it.
pub(crate) fn renamed_path(path: String, names: FieldNames) -> String {
    let renamed = names.iter().find_map(|(name, other)| {
        let rest = path.strip_prefix(name)?;
        Some(format!("{other}{rest}"))
    });
    renamed.unwrap_or(path)
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
            refused: false,
            drop_reason: None,
        }
    }

    /// A field has a value that cannot be served.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, message).with_code("invalid_value");
        Self {
            param: Some(param.into()),
            ..error
        }
    }

    /// A field asks for something that Cleave does not do and that must not be ignored silently.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(param, message).with_code("unsupported_parameter")
    }

    /// The request as a whole is invalid, with no field to name.
    pub(crate) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message).with_code(code)
    }

    /// The prompt, or prompt and output together, exceed the context; the message has both numbers.
    /// Libraries tell this error by its code or by the words "maximum context length".
    pub(crate) fn context_exceeded(param: &str, message: impl Into<String>) -> Self {
        Self::invalid(param, message).with_code("context_length_exceeded")
    }

    pub(crate) fn body_too_large(bytes_max: usize) -> Self {
        let message = format!("The request body is larger than the limit of {bytes_max} bytes.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("body_too_large")
    }

    /// Other requests hold all the memory for bodies.
    pub(crate) fn bodies_full() -> Self {
        let message = "The memory for request bodies is taken by other requests; try again.";
        Self::busy("bodies_full", message, RETRY_AFTER)
    }

    /// Other requests hold all the memory for vectors.
    pub(crate) fn vectors_full() -> Self {
        let message = "The memory for vectors is taken by other requests; try again.";
        Self::busy("vectors_full", message, RETRY_AFTER)
    }

    pub(crate) fn body_too_slow(wait_max: Duration) -> Self {
        let seconds = wait_max.as_secs_f64();
        let message = format!("The request body did not arrive within {seconds} s.");
        Self::new(StatusCode::REQUEST_TIMEOUT, message).with_code("body_too_slow")
    }

    pub(crate) fn body_stalled() -> Self {
        let message = "The request body stopped while other requests waited for memory; send it without pauses.";
        Self::new(StatusCode::REQUEST_TIMEOUT, message.to_owned()).with_code("body_stalled")
    }

    pub(crate) fn not_json(content_type: &str) -> Self {
        let message = format!(
            "The content type is {content_type:?}; send JSON with `Content-Type: application/json`."
        );
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).with_code("unsupported_media_type")
    }

    /// The body is encoded in a way that the server does not decode; `kind` is `content` or
    /// `transfer`.
    pub(crate) fn encoded_body(kind: &str, coding: &str) -> Self {
        let message = format!(
            "The body has the {kind} encoding {coding:?}, which the server does not decode; send it unencoded."
        );
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).with_code("unsupported_encoding")
    }

    /// There is no such model; `served` names those that are, in backquotes.
    pub(crate) fn model_not_found(requested: &str, served: &str) -> Self {
        let message =
            format!("The model `{requested}` does not exist here; this server has {served}.");
        let error = Self::new(StatusCode::NOT_FOUND, message).with_code("model_not_found");
        Self {
            param: Some("model".into()),
            ..error
        }
    }

    /// The request lacks a valid key.
    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key")
    }

    /// The request is not allowed from its origin.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message).with_code("forbidden")
    }

    /// The command conflicts with the state of its target.
    pub(crate) fn conflict(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message).with_code(code)
    }

    /// A request names a stored response that is not there, for this reason.
    pub(crate) fn response_not_found(reason: String) -> Self {
        let error = Self::new(StatusCode::NOT_FOUND, reason).with_code("response_not_found");
        Self {
            param: Some("response_id".into()),
            ..error
        }
    }

    /// A request goes on from a response that is not there, for this reason.
    pub(crate) fn previous_not_found(reason: String) -> Self {
        Self::invalid("previous_response_id", reason).with_code("previous_response_not_found")
    }

    /// A request has an item by reference that is not stored.
    pub(crate) fn item_not_found(id: &str) -> Self {
        let id = clipped(id);
        let message = format!(
            "Item with id '{id}' not found: no stored response of yours has it here. It may never have been stored (`store: false`), its response was deleted or is gone because of its age or for want of memory, or the router that has it cannot be asked. Send the item itself."
        );
        let error = Self::new(StatusCode::NOT_FOUND, message).with_code("item_not_found");
        Self {
            param: Some("input".into()),
            ..error
        }
    }

    pub(crate) fn worker_not_found(name: &str) -> Self {
        let message =
            format!("No worker `{name}` is connected; GET /admin/workers lists those that are.");
        let error = Self::new(StatusCode::NOT_FOUND, message).with_code("worker_not_found");
        Self {
            param: Some("worker".into()),
            ..error
        }
    }

    /// There is no such route; `hint` names the one that is meant, or is empty.
    pub(crate) fn unknown_route(method: &str, path: &str, hint: &str) -> Self {
        let message = format!("There is no route {method} {}.{hint}", clipped(path));
        Self::new(StatusCode::NOT_FOUND, message).with_code("unknown_url")
    }

    /// The route has other methods; `hint` names them.
    pub(crate) fn wrong_method(method: &str, path: &str, hint: &str) -> Self {
        let message = format!("{} does not take {method}{hint}.", clipped(path));
        Self::new(StatusCode::METHOD_NOT_ALLOWED, message).with_code("method_not_allowed")
    }

    /// No worker can serve the request for now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(code);
        Self {
            retry_after: Some(RETRY_AFTER),
            refused: true,
            ..error
        }
    }

    /// The server itself failed.
    pub(crate) fn internal(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message).with_code(code)
    }

    fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    fn busy(code: &'static str, message: &str, retry_after: Duration) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, message).with_code(code);
        Self {
            retry_after: Some(retry_after),
            refused: true,
            drop_reason: Some("rejected-saturated"),
            ..error
        }
    }

    /// A tenant has exhausted its quota, for the given time.
    pub(crate) fn over_limit(limit: QuotaLimit, retry_after: Duration) -> Self {
        let (code, message) = match limit {
            QuotaLimit::Requests(limit) => (
                "tenant_rate",
                format!("This key may send {limit} requests per minute."),
            ),
            QuotaLimit::Tokens(limit) => (
                "tenant_tokens",
                format!(
                    "This key may use {limit} tokens per minute, prompts and answers together."
                ),
            ),
            QuotaLimit::Streams(limit) => (
                "tenant_concurrency",
                format!("This key may have {limit} sequences at once."),
            ),
        };
        // The server has capacity, so llm-d's header for saturation is left out.
        Self {
            drop_reason: None,
            ..Self::busy(code, &message, retry_after)
        }
    }

    /// A target that the prediction misses.
    fn target_unreachable(metric: SloMetric, predicted: Duration, retry_after: Duration) -> Self {
        let (code, metric_name) = match metric {
            SloMetric::Ttft => ("slo_ttft_unreachable", "Time to first token"),
            SloMetric::Tpot => ("slo_tpot_unreachable", "Time per output token"),
            SloMetric::EndToEnd => ("slo_e2e_unreachable", "End-to-end time"),
        };
        let millis = predicted.as_secs_f64() * 1e3;
        let message = format!(
            "{metric_name} is predicted to be {millis:.1} ms, which misses this request's target; try again \
             later, or ask for less."
        );
        Self::busy(code, &message, retry_after)
    }

    /// Converts the ending of a flight; `None` for a successful one. `constraint` is the path of
    /// the field that constrains the output, if there is one.
    pub(crate) fn from_ending(ending: &Ending, constraint: Option<&str>) -> Option<Self> {
        match ending {
            Ending::Done { .. } => None,
            Ending::Refused(refusal) => Some(refusal.into()),
            Ending::Failed(failure) => Some(Self::of_failure(failure, constraint)),
            Ending::Cancelled => Some(Self::unavailable(
                "cancelled",
                "The request was cancelled by the server.",
            )),
        }
    }

    /// Whether the request was refused before any work was done.
    pub(crate) fn is_refusal(&self) -> bool {
        self.refused
    }

    /// Whether the client caused the error.
    pub(crate) fn is_client_fault(&self) -> bool {
        self.status.is_client_error() && !self.refused
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn code(&self) -> Option<&'static str> {
        self.code
    }

    pub(crate) fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Time after which the request may be sent again, if the error tells one.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Whether the request was refused because there is no room for it now.
    pub(crate) fn is_saturation(&self) -> bool {
        self.drop_reason.is_some()
    }

    /// Names fields as another API does.
    pub(crate) fn renamed(mut self, names: FieldNames) -> Self {
        for (name, other) in names {
            let quoted = format!("`{name}");
            self.message = self.message.replace(&quoted, &format!("`{other}"));
        }
        self.param = self.param.map(|path| renamed_path(path, names));
        self
    }

    /// The OpenAI error object.
    pub(crate) fn object(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        json!({"error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl From<&Refusal> for ApiError {
    fn from(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::QueueFull { retry_after } => Self::busy(
                "queue_full",
                "The router's queue is full, or this request waited in it as long as it may \
                     (--queue-wait).",
                *retry_after,
            ),
            Refusal::NoBlocks { retry_after } => Self::busy(
                "no_blocks",
                "No worker has free KV blocks for this sequence now.",
                *retry_after,
            ),
            Refusal::Late {
                aim,
                predicted,
                retry_after,
            } => Self::target_unreachable(*aim, *predicted, *retry_after),
            Refusal::TooLong { tokens_max } => Self::bad_request(
                "context_length_exceeded",
                format!(
                    "The workers' maximum context length is {tokens_max} tokens, which prompt and output together \
                     would exceed; shorten the prompt, or lower max_tokens or min_tokens."
                ),
            ),
            Refusal::OutOfVocabulary { vocab_size } => Self::bad_request(
                "out_of_vocabulary",
                format!(
                    "A token of the prompt or of a parameter is not in the model's vocabulary, \
                     whose ids are below {vocab_size}."
                ),
            ),
            Refusal::NoWorker => Self::unavailable("no_worker", "No worker is connected."),
            Refusal::Draining => Self::unavailable("draining", "The server is shutting down."),
            Refusal::WrongWorker => {
                Self::unavailable("worker_restarted", "The worker restarted; try again.")
            }
            Refusal::NoAdapter { reason } => Self {
                // A repetition helps only once an operator has done something.
                retry_after: None,
                ..Self::unavailable(
                    "no_adapter",
                    format!("No worker can serve this adapter: {reason}."),
                )
            },
        }
    }
}

impl ApiError {
    fn of_failure(failure: &Failure, constraint: Option<&str>) -> Self {
        let (code, message) = match failure {
            Failure::WorkerLost => ("worker_lost", "The worker serving this request was lost."),
            Failure::WorkerStuck => (
                "worker_stuck",
                "The worker serving this request makes no progress.",
            ),
            Failure::SlowReader => (
                "slow_reader",
                "The client did not read its stream for too long.",
            ),
            Failure::LinkLost => ("link_lost", "The link between two workers broke."),
            Failure::LeaseExpired => ("lease_expired", "A worker's lease was not renewed in time."),
            Failure::Corrupt => ("transfer_corrupt", "KV blocks arrived damaged."),
            Failure::Rejected => (
                "transfer_rejected",
                "A worker rejected the KV blocks of another worker.",
            ),
            Failure::Engine(reason) => {
                let message = format!("The engine could not run the step: {reason}.");
                return Self::internal("engine_failed", message);
            }
            Failure::OutOfBlocks => (
                "out_of_blocks",
                "The sequence outgrew the KV pool of the worker serving it.",
            ),
            Failure::Draining => ("draining", "The server is shutting down."),
            Failure::RetriesSpent(last) => {
                let last = Self::of_failure(last, constraint);
                let message = format!("{} Retries are used up.", last.message);
                return Self { message, ..last };
            }
            Failure::Constraint(reason) => {
                let field = constraint.unwrap_or("the constraint");
                let message = format!("`{field}` cannot be enforced any further: {reason}.");
                return Self::invalid(field, message);
            }
        };
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code(code);
        Self {
            retry_after: Some(RETRY_AFTER),
            ..error
        }
    }
}

impl IntoResponse for ApiError {
    /// Answers in OpenAI's shape. The error itself goes along, so that the layer around all routes
    /// can give it the shape of the path's API.
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.object())).into_response();
        let headers = response.headers_mut();
        if self.status == StatusCode::REQUEST_TIMEOUT {
            // The connection is closed, because the rest of the body was not read.
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        if let Some(span) = self.retry_after {
            let seconds = span.as_secs() + u64::from(span.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
            if self.status == StatusCode::TOO_MANY_REQUESTS {
                let millis = span.as_nanos().div_ceil(1_000_000);
                let millis = u64::try_from(millis).unwrap_or(u64::MAX).max(1);
                headers.insert(RETRY_AFTER_MS, HeaderValue::from(millis));
            }
        }
        if let Some(reason) = self.drop_reason {
            headers.insert(DROP_REASON, HeaderValue::from_static(reason));
        }
        if let (true, Some(code)) = (self.refused, self.code) {
            headers.insert(REFUSAL_REASON, HeaderValue::from_static(code));
        }
        response.extensions_mut().insert(self);
        response
    }
}
