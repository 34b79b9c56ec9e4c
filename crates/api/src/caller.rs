//! Who asks.
//!
//! Owns: the one look at key, headers and policy by which a request is let in and counted. Never: reads
//! a body. Invariant: nothing is read or computed for whoever is not let in.

use crate::app::App;
use crate::ask;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::quota::Seat;
use axum::http::{HeaderMap, StatusCode};
use cleave_domain::{Origin, SloPolicy};
use std::sync::Arc;
use tokio::time::Instant;

/// Whoever sent a request, under the policy as it was then.
pub(crate) struct Caller {
    pub(crate) policy: Arc<SloPolicy>,
    pub(crate) origin: Origin,
    pub(crate) tenant: String,
    metrics: Arc<Metrics>,
    seat: Option<Arc<Seat>>,
}

impl Caller {
    /// Who sent these headers.
    ///
    /// # Errors
    /// 401 if only keys are let in and this is none; 400 for a header that cannot be.
    pub(crate) fn of(app: &App, headers: &HeaderMap) -> Result<Self, ApiError> {
        let policy = app.frontend().policy();
        let origin = ask::origin(headers, &policy)?;
        if policy.trust.require_key && policy.key_owner(&origin).is_none() {
            return Err(ApiError::unauthorized(match origin.key_digest {
                Some(_) => "This API key is not known here.",
                None => "An API key is needed here: send `Authorization: Bearer KEY`.",
            }));
        }
        let tenant = policy.tenant_of(&origin);
        let seat = app.quotas().seat(&tenant, policy.quota(&tenant));
        Ok(Self {
            policy,
            origin,
            tenant,
            metrics: Arc::clone(app.metrics()),
            seat,
        })
    }

    /// The request counts from now on.
    ///
    /// # Errors
    /// 429 if its tenant sent too many of late.
    pub(crate) fn enter(&self) -> Result<(), ApiError> {
        let entered = self.seat.as_ref().map(|seat| seat.enter(Instant::now()));
        self.counted(entered)
    }

    /// So many sequences are about to be served, with so many tokens in their prompts.
    ///
    /// # Errors
    /// As [`Seat::begin`].
    pub(crate) fn begin(&self, wanted: (usize, u64)) -> Result<(), ApiError> {
        let seat = self.seat.as_ref();
        self.counted(seat.map(|seat| seat.begin(wanted, Instant::now())))
    }

    fn counted(&self, asked: Option<Result<(), ApiError>>) -> Result<(), ApiError> {
        asked.unwrap_or(Ok(())).inspect_err(|error| {
            if let (StatusCode::TOO_MANY_REQUESTS, Some(code)) = (error.status(), error.code()) {
                self.metrics.over_limit(&self.tenant, code);
            }
        })
    }

    /// Its place among its tenant's, to be held for as long as it is served.
    pub(crate) fn seat(&self) -> Option<Arc<Seat>> {
        self.seat.clone()
    }
}
