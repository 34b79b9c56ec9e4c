//! Quotas of tenants and their use.
//!
//! Owns: an account for each tenant with a quota, and the rate-limit headers. Never: identifies a
//! tenant, or reads a clock: the time is a parameter. Invariant: a sequence counts exactly once,
//! from its admission until its request drops it, and every served token is charged, if later.
//!
//! Quotas are token buckets that hold one minute's worth and refill continuously. A prompt is
//! charged at admission, an answer as its tokens are drawn. So a request is never refused for a
//! `max_tokens` that it does not use; a tenant that drew more than it had waits until the debt is
//! refilled.

use crate::error::{ApiError, QuotaLimit};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use cleave_domain::TenantQuota;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// Parts of one unit. A limit of n per minute refills n parts per nanosecond, so that no refill is
/// rounded.
const PARTS_PER_UNIT: i128 = 60_000_000_000;

/// The accounts of all tenants of one server.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    accounts: Mutex<BTreeMap<String, Arc<TenantAccount>>>,
}

impl Quotas {
    /// Returns the permit of a request of this tenant; `None` if its quota limits nothing.
    pub(crate) fn permit(&self, tenant: &str, quota: TenantQuota) -> Option<Arc<QuotaPermit>> {
        let TenantQuota {
            requests_per_minute,
            tokens_per_minute,
            streams_max,
            priority_min: _,
        } = quota;
        if (requests_per_minute, tokens_per_minute, streams_max) == (None, None, None) {
            return None;
        }
        let mut accounts = self.accounts.lock();
        let account = match accounts.get(tenant) {
            Some(account) => account,
            None => accounts.entry(tenant.to_owned()).or_default(),
        };
        Some(Arc::new(QuotaPermit {
            account: Arc::clone(account),
            quota,
            streams: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            is_served: AtomicBool::new(false),
        }))
    }
}

/// The use of one tenant's quota.
#[derive(Debug, Default)]
struct TenantAccount {
    state: Mutex<AccountState>,
    /// Output tokens drawn since the last settlement, so that a token costs one atomic addition.
    drawn: AtomicU64,
}

#[derive(Debug, Default)]
struct AccountState {
    requests: RefillBucket,
    tokens: RefillBucket,
    streams: u64,
}

impl TenantAccount {
    fn lock(&self) -> MutexGuard<'_, AccountState> {
        self.state.lock()
    }

    /// Refills the token bucket and charges all tokens that were drawn since.
    fn settle_tokens(&self, state: &mut AccountState, quota: TenantQuota, now: Instant) {
        if let Some(limit) = quota.tokens_per_minute {
            state.tokens.refill(limit, now);
            let drawn = self.drawn.swap(0, Ordering::Relaxed);
            state.tokens.take(drawn);
        }
    }
}

/// An amount that refills continuously up to its limit.
#[derive(Debug, Default)]
struct RefillBucket {
    /// Amount in [`PARTS_PER_UNIT`], negative if owed, and the time of its last refill. `None`
    /// means full.
    level: Option<(i128, Instant)>,
}

impl RefillBucket {
    fn refill(&mut self, per_minute: u32, now: Instant) {
        let full = i128::from(per_minute) * PARTS_PER_UNIT;
        let level = match self.level {
            None => full,
            Some((level, then)) => {
                let nanos = now.saturating_duration_since(then).as_nanos();
                // The elapsed time is capped so that its product with the limit cannot overflow.
                let nanos = i128::try_from(nanos)
                    .unwrap_or(PARTS_PER_UNIT)
                    .min(PARTS_PER_UNIT * PARTS_PER_UNIT);
                level
                    .saturating_add(nanos * i128::from(per_minute))
                    .min(full)
            }
        };
        self.level = Some((level, now));
    }

    fn level(&self) -> i128 {
        self.level.map_or(0, |(level, _)| level)
    }

    fn take(&mut self, units: u64) {
        if let Some((level, _)) = &mut self.level {
            *level -= i128::from(units) * PARTS_PER_UNIT;
        }
    }

    fn refund(&mut self, units: u64) {
        if let Some((level, _)) = &mut self.level {
            *level += i128::from(units) * PARTS_PER_UNIT;
        }
    }

    /// Time until `units` are available; zero if they are. A demand above the limit waits for a
    /// full bucket.
    fn wait_for(&self, units: u64, per_minute: u32) -> Duration {
        let units = i128::from(units.min(u64::from(per_minute)));
        let missing = (units * PARTS_PER_UNIT - self.level()).max(0);
        let nanos = (missing + i128::from(per_minute) - 1) / i128::from(per_minute);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// One request of a tenant with a quota.
#[derive(Debug)]
pub(crate) struct QuotaPermit {
    account: Arc<TenantAccount>,
    quota: TenantQuota,
    /// Sequences that this request holds of the account.
    streams: AtomicU64,
    prompt_tokens: AtomicU64,
    is_served: AtomicBool,
}

impl QuotaPermit {
    /// Admits the request on arrival, before anything of it is read.
    ///
    /// # Errors
    /// 429 if the tenant has sent too many requests in the last minute.
    pub(crate) fn admit_request(&self, now: Instant) -> Result<(), ApiError> {
        let Some(limit) = self.quota.requests_per_minute else {
            return Ok(());
        };
        let mut state = self.account.lock();
        state.requests.refill(limit, now);
        let wait = state.requests.wait_for(1, limit);
        if !wait.is_zero() {
            return Err(ApiError::over_limit(QuotaLimit::Requests(limit), wait));
        }
        state.requests.take(1);
        Ok(())
    }

    /// Admits the sequences of the request, with the tokens of its prompts.
    ///
    /// # Errors
    /// 429 if the tenant has too many streams, or used too many tokens in the last minute; 400 if
    /// the request asks for more streams than the tenant may ever have.
    pub(crate) fn admit_sequences(
        &self,
        sequences_count: usize,
        prompt_tokens: u64,
        now: Instant,
    ) -> Result<(), ApiError> {
        let mut state = self.account.lock();
        self.account.settle_tokens(&mut state, self.quota, now);
        let sequences_count = sequences_count as u64;
        if let Some(limit) = self.quota.streams_max {
            if sequences_count > u64::from(limit) {
                let message = format!(
                    "The request asks for {sequences_count} sequences; this key may have {limit} at once."
                );
                return Err(ApiError::invalid("n", message));
            }
            if state.streams + sequences_count > u64::from(limit) {
                let limit = QuotaLimit::Streams(limit);
                return Err(ApiError::over_limit(limit, crate::error::RETRY_AFTER));
            }
        }
        if let Some(limit) = self.quota.tokens_per_minute {
            let wait = state.tokens.wait_for(prompt_tokens, limit);
            if !wait.is_zero() {
                return Err(ApiError::over_limit(QuotaLimit::Tokens(limit), wait));
            }
        }
        state.tokens.take(prompt_tokens);
        state.streams += sequences_count;
        self.streams.store(sequences_count, Ordering::Relaxed);
        self.prompt_tokens.store(prompt_tokens, Ordering::Relaxed);
        Ok(())
    }

    /// Counts an output token.
    pub(crate) fn count_output_token(&self) {
        self.is_served.store(true, Ordering::Relaxed);
        self.account.drawn.fetch_add(1, Ordering::Relaxed);
    }

    /// Refunds the prompts of a request that was refused before any work.
    pub(crate) fn refund_prompt(&self) {
        if !self.is_served.load(Ordering::Relaxed) {
            let tokens = self.prompt_tokens.swap(0, Ordering::Relaxed);
            self.account.lock().tokens.refund(tokens);
        }
    }

    /// Writes the remaining quota into headers, named as by OpenAI.
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap, now: Instant) {
        let mut state = self.account.lock();
        self.account.settle_tokens(&mut state, self.quota, now);
        if let Some(limit) = self.quota.requests_per_minute {
            state.requests.refill(limit, now);
            write_limit_headers(headers, &REQUEST_HEADERS, &state.requests, limit);
        }
        if let Some(limit) = self.quota.tokens_per_minute {
            write_limit_headers(headers, &TOKEN_HEADERS, &state.tokens, limit);
        }
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        let streams = self.streams.load(Ordering::Relaxed);
        if streams > 0 {
            self.account.lock().streams -= streams;
        }
    }
}

/// Headers for the limit, the remaining amount, and the time until the bucket is full.
const REQUEST_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKEN_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

fn write_limit_headers(
    headers: &mut HeaderMap,
    names: &[HeaderName; 3],
    bucket: &RefillBucket,
    limit: u32,
) {
    let left = (bucket.level() / PARTS_PER_UNIT).max(0);
    let reset = go_duration(bucket.wait_for(u64::from(limit), limit));
    let values = [limit.to_string(), left.to_string(), reset];
    for (name, value) in names.iter().zip(values) {
        let value = HeaderValue::from_str(&value).expect("digits and letters");
        headers.insert(name.clone(), value);
    }
}

/// Formats a duration as Go does (`6m0s`, `1.25s`, `80ms`), rounded up to the millisecond, because
/// readers of these headers parse that form.
fn go_duration(span: Duration) -> String {
    let millis = span.as_nanos().div_ceil(1_000_000);
    let (minutes, millis) = (millis / 60_000, millis % 60_000);
    let seconds = match millis % 1000 {
        0 => format!("{}s", millis / 1000),
        part => {
            let text = format!("{}.{part:03}", millis / 1000);
            format!("{}s", text.trim_end_matches('0'))
        }
    };
    match (minutes, millis) {
        (0, 1..1000) => format!("{millis}ms"),
        (0, _) => seconds,
        (minutes, _) => format!("{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn permit(quotas: &Quotas, quota: TenantQuota) -> Arc<QuotaPermit> {
        quotas.permit("acme", quota).unwrap()
    }

    #[test]
    fn reset_times_are_written_as_go_durations() {
        let of = |millis| go_duration(Duration::from_millis(millis));
        assert_eq!([of(0), of(80), of(1000)], ["0s", "80ms", "1s"]);
        assert_eq!(
            [of(1250), of(60_000), of(361_500)],
            ["1.25s", "1m0s", "6m1.5s"]
        );
        assert_eq!(go_duration(Duration::from_nanos(1)), "1ms");
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_above_the_token_limit_is_admitted_when_full() {
        let quotas = Quotas::default();
        let quota = TenantQuota {
            tokens_per_minute: Some(60),
            ..TenantQuota::default()
        };
        let now = Instant::now();
        permit(&quotas, quota).admit_sequences(1, 600, now).unwrap();
        let later = |seconds| now + Duration::from_secs(seconds);
        // The tenant now owes 540 tokens.
        assert!(
            permit(&quotas, quota)
                .admit_sequences(1, 1, later(540))
                .is_err()
        );
        assert!(
            permit(&quotas, quota)
                .admit_sequences(1, 1, later(541))
                .is_ok()
        );
        // A demand above the limit needs a full bucket again.
        assert!(
            permit(&quotas, quota)
                .admit_sequences(1, 600, later(600))
                .is_err()
        );
        assert!(
            permit(&quotas, quota)
                .admit_sequences(1, 600, later(601))
                .is_ok()
        );
    }

    proptest! {
        // Invariant: I44.
        /// The property: over any span, no more is admitted than a full bucket and what was
        /// refilled since.
        #[test]
        fn admissions_never_exceed_the_limit(
            limit in 1..200_u32,
            steps in proptest::collection::vec((0..20_000_u64, 1..5_u32), 1..80),
        ) {
            let quotas = Quotas::default();
            let quota = TenantQuota { requests_per_minute: Some(limit), ..TenantQuota::default() };
            let start = Instant::now();
            let (mut now, mut admitted) = (start, Vec::new());
            for (millis, count) in steps {
                now += Duration::from_millis(millis);
                for _ in 0..count {
                    if permit(&quotas, quota).admit_request(now).is_ok() {
                        admitted.push(now);
                    }
                }
            }
            for (first, from) in admitted.iter().enumerate() {
                for (last, to) in admitted.iter().enumerate().skip(first) {
                    let had = (last - first + 1) as f64;
                    let may = f64::from(limit) * (1.0 + (*to - *from).as_secs_f64() / 60.0);
                    prop_assert!(had <= may + 1e-6, "{had} of {may}");
                }
            }
        }
    }
}
