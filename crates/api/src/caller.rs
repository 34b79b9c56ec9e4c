//! Authentication of a request.
//!
//! Owns: the only place where key, headers and policy admit and count a request. Never: reads a
//! body. Invariant: nothing is read or computed for a request that is not admitted.

use crate::app::App;
use crate::error::ApiError;
use crate::metrics::HttpMetrics;
use crate::quota::QuotaPermit;
use crate::request;
use axum::http::{HeaderMap, StatusCode};
use cleave_domain::{RequestOrigin, SloPolicy};
use std::sync::Arc;
use tokio::time::Instant;

/// The sender of a request, with the policy in force when the request arrived.
pub(crate) struct AuthenticatedCaller {
    pub(crate) policy: Arc<SloPolicy>,
    pub(crate) origin: RequestOrigin,
    pub(crate) tenant: String,
    metrics: Arc<HttpMetrics>,
    permit: Option<Arc<QuotaPermit>>,
}

impl AuthenticatedCaller {
    /// Identifies the sender of these headers.
    ///
    /// # Errors
    /// 401 if a key is required and this key is unknown; 400 for an invalid header.
    pub(crate) fn of(app: &App, headers: &HeaderMap) -> Result<Self, ApiError> {
        let policy = app.frontend().policy();
        let origin = request::read_origin(headers, &policy)?;
        if policy.trust.require_key && policy.key_owner(&origin).is_none() {
            return Err(ApiError::unauthorized(match origin.key_digest {
                Some(_) => "This API key is not known here.",
                None => "An API key is needed here: send `Authorization: Bearer KEY`.",
            }));
        }
        let tenant = policy.tenant_of(&origin);
        let permit = app.quotas().permit(&tenant, policy.quota(&tenant));
        Ok(Self {
            policy,
            origin,
            tenant,
            metrics: Arc::clone(app.metrics()),
            permit,
        })
    }

    /// Counts the request against its tenant's quota.
    ///
    /// # Errors
    /// 429 if the tenant has sent too many requests in the last minute.
    pub(crate) fn admit_request(&self) -> Result<(), ApiError> {
        let entered = self
            .permit
            .as_ref()
            .map(|permit| permit.admit_request(Instant::now()));
        self.count_refusal(entered)
    }

    /// Counts the sequences of the request, and the tokens of its prompts, against the quota.
    ///
    /// # Errors
    /// As for [`QuotaPermit::admit_sequences`].
    pub(crate) fn admit_sequences(
        &self,
        sequences_count: usize,
        prompt_tokens: u64,
    ) -> Result<(), ApiError> {
        let admitted = self
            .permit
            .as_ref()
            .map(|permit| permit.admit_sequences(sequences_count, prompt_tokens, Instant::now()));
        self.count_refusal(admitted)
    }

    fn count_refusal(&self, admission: Option<Result<(), ApiError>>) -> Result<(), ApiError> {
        admission.unwrap_or(Ok(())).inspect_err(|error| {
            if let (StatusCode::TOO_MANY_REQUESTS, Some(code)) = (error.status(), error.code()) {
                self.metrics.count_quota_refusal(&self.tenant, code);
            }
        })
    }

    /// Returns the quota permit, which the answer holds while it is served.
    pub(crate) fn permit(&self) -> Option<Arc<QuotaPermit>> {
        self.permit.clone()
    }
}
