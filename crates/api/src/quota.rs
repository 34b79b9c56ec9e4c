//! What tenants may ask for, and what they have had of it.
//!
//! Owns: an account for each tenant that has a quota, and what a request is told of it. Never: knows
//! who a tenant is, or reads a clock: the time is handed in. Invariant: a sequence is counted from its
//! admission until its request has let go of it, once; what was served is paid for, if later.
//!
//! A minute's worth is there at once and comes back evenly. A prompt is paid when it is admitted, an
//! answer as it is drawn: so nobody is refused for a `max_tokens` that he does not use, and whoever drew
//! more than he had waits until that is made good.

use crate::error::{ApiError, Limit};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use cleave_domain::Quota;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// One unit of what is limited, in the parts in which it comes back: a limit of n per minute brings n
/// parts in a nanosecond.
const PARTS: i128 = 60_000_000_000;

/// All accounts of one server.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    accounts: Mutex<BTreeMap<String, Arc<Account>>>,
}

impl Quotas {
    /// A request of this tenant; none if nothing is limited for it.
    pub(crate) fn seat(&self, tenant: &str, quota: Quota) -> Option<Arc<Seat>> {
        let Quota {
            requests_per_minute,
            tokens_per_minute,
            streams_max,
            priority_min: _,
        } = quota;
        if (requests_per_minute, tokens_per_minute, streams_max) == (None, None, None) {
            return None;
        }
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let account = match accounts.get(tenant) {
            Some(account) => account,
            None => accounts.entry(tenant.to_owned()).or_default(),
        };
        Some(Arc::new(Seat {
            account: Arc::clone(account),
            quota,
            streams: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            is_served: AtomicBool::new(false),
        }))
    }
}

/// What one tenant has had.
#[derive(Debug, Default)]
struct Account {
    state: Mutex<State>,
    /// Tokens drawn that the bucket does not know of yet: each is one addition.
    drawn: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    requests: Bucket,
    tokens: Bucket,
    streams: u64,
}

impl Account {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tokens that are left, after all that was drawn.
    fn settle(&self, state: &mut State, quota: Quota, now: Instant) {
        if let Some(limit) = quota.tokens_per_minute {
            state.tokens.refill(limit, now);
            let drawn = self.drawn.swap(0, Ordering::Relaxed);
            state.tokens.take(drawn);
        }
    }
}

/// A limited amount that comes back.
#[derive(Debug, Default)]
struct Bucket {
    /// What is there, in [`PARTS`]; below zero it is owed. Full before it was ever asked.
    level: Option<(i128, Instant)>,
}

impl Bucket {
    fn refill(&mut self, per_minute: u32, now: Instant) {
        let full = i128::from(per_minute) * PARTS;
        let level = match self.level {
            None => full,
            Some((level, then)) => {
                let nanos = now.saturating_duration_since(then).as_nanos();
                let nanos = i128::try_from(nanos).unwrap_or(PARTS).min(PARTS * PARTS);
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
            *level -= i128::from(units) * PARTS;
        }
    }

    fn give_back(&mut self, units: u64) {
        if let Some((level, _)) = &mut self.level {
            *level += i128::from(units) * PARTS;
        }
    }

    /// How long until so much is there; zero if it is. More than ever is there counts as all of it.
    fn wait(&self, units: u64, per_minute: u32) -> Duration {
        let units = i128::from(units.min(u64::from(per_minute)));
        let missing = (units * PARTS - self.level()).max(0);
        let nanos = (missing + i128::from(per_minute) - 1) / i128::from(per_minute);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// One request of a tenant that has a quota.
#[derive(Debug)]
pub(crate) struct Seat {
    account: Arc<Account>,
    quota: Quota,
    /// What it has taken of the account.
    streams: AtomicU64,
    prompt_tokens: AtomicU64,
    is_served: AtomicBool,
}

impl Seat {
    /// It has come, and nothing of it was read yet.
    ///
    /// # Errors
    /// 429 if there were too many of late.
    pub(crate) fn enter(&self, now: Instant) -> Result<(), ApiError> {
        let Some(limit) = self.quota.requests_per_minute else {
            return Ok(());
        };
        let mut state = self.account.lock();
        state.requests.refill(limit, now);
        let wait = state.requests.wait(1, limit);
        if !wait.is_zero() {
            return Err(ApiError::over_limit(Limit::Requests(limit), wait));
        }
        state.requests.take(1);
        Ok(())
    }

    /// It is read: so many sequences, with so many tokens in their prompts.
    ///
    /// # Errors
    /// 429 if the tenant has too many streams, or used too many tokens of late; 400 if it asks for more
    /// streams than it may ever have.
    pub(crate) fn begin(
        &self,
        (streams, prompt_tokens): (usize, u64),
        now: Instant,
    ) -> Result<(), ApiError> {
        let mut state = self.account.lock();
        self.account.settle(&mut state, self.quota, now);
        let streams = streams as u64;
        if let Some(limit) = self.quota.streams_max {
            if streams > u64::from(limit) {
                let message = format!(
                    "These are {streams} sequences, and this key may have {limit} at once."
                );
                return Err(ApiError::invalid("n", message));
            }
            if state.streams + streams > u64::from(limit) {
                let limit = Limit::Streams(limit);
                return Err(ApiError::over_limit(limit, crate::RETRY_AFTER));
            }
        }
        if let Some(limit) = self.quota.tokens_per_minute {
            let wait = state.tokens.wait(prompt_tokens, limit);
            if !wait.is_zero() {
                return Err(ApiError::over_limit(Limit::Tokens(limit), wait));
            }
        }
        state.tokens.take(prompt_tokens);
        state.streams += streams;
        self.streams.store(streams, Ordering::Relaxed);
        self.prompt_tokens.store(prompt_tokens, Ordering::Relaxed);
        Ok(())
    }

    /// A token of an answer was drawn.
    pub(crate) fn drew(&self) {
        self.is_served.store(true, Ordering::Relaxed);
        self.account.drawn.fetch_add(1, Ordering::Relaxed);
    }

    /// Nothing of it was served: its prompts cost nothing.
    pub(crate) fn turned_away(&self) {
        if !self.is_served.load(Ordering::Relaxed) {
            let tokens = self.prompt_tokens.swap(0, Ordering::Relaxed);
            self.account.lock().tokens.give_back(tokens);
        }
    }

    /// Says what is left, in the words of OpenAI's clients.
    pub(crate) fn show(&self, headers: &mut HeaderMap, now: Instant) {
        let mut state = self.account.lock();
        self.account.settle(&mut state, self.quota, now);
        if let Some(limit) = self.quota.requests_per_minute {
            state.requests.refill(limit, now);
            show(headers, &REQUESTS, (&state.requests, limit));
        }
        if let Some(limit) = self.quota.tokens_per_minute {
            show(headers, &TOKENS, (&state.tokens, limit));
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let streams = self.streams.load(Ordering::Relaxed);
        if streams > 0 {
            self.account.lock().streams -= streams;
        }
    }
}

/// Limit, what is left of it, and when all of it is back.
const REQUESTS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKENS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

fn show(headers: &mut HeaderMap, names: &[HeaderName; 3], (bucket, limit): (&Bucket, u32)) {
    let left = (bucket.level() / PARTS).max(0);
    let reset = span(bucket.wait(u64::from(limit), limit));
    let values = [limit.to_string(), left.to_string(), reset];
    for (name, value) in names.iter().zip(values) {
        let value = HeaderValue::from_str(&value).expect("digits and letters");
        headers.insert(name.clone(), value);
    }
}

/// `6m0s`, `1.25s`, `80ms`, rounded up to the millisecond: as Go writes times, which is what these
/// headers' readers parse.
fn span(span: Duration) -> String {
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

    fn seat(quotas: &Quotas, quota: Quota) -> Arc<Seat> {
        quotas.seat("acme", quota).unwrap()
    }

    #[test]
    fn times_are_spelt_as_clients_read_them() {
        let of = |millis| span(Duration::from_millis(millis));
        assert_eq!([of(0), of(80), of(1000)], ["0s", "80ms", "1s"]);
        assert_eq!(
            [of(1250), of(60_000), of(361_500)],
            ["1.25s", "1m0s", "6m1.5s"]
        );
        assert_eq!(span(Duration::from_nanos(1)), "1ms");
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_longer_than_a_minutes_tokens_could_never_be_sent() {
        let quotas = Quotas::default();
        let quota = Quota {
            tokens_per_minute: Some(60),
            ..Quota::default()
        };
        let now = Instant::now();
        seat(&quotas, quota).begin((1, 600), now).unwrap();
        let later = |seconds| now + Duration::from_secs(seconds);
        // 540 are owed.
        assert!(seat(&quotas, quota).begin((1, 1), later(540)).is_err());
        assert!(seat(&quotas, quota).begin((1, 1), later(541)).is_ok());
        // And a whole minute's worth is to be there again.
        assert!(seat(&quotas, quota).begin((1, 600), later(600)).is_err());
        assert!(seat(&quotas, quota).begin((1, 600), later(601)).is_ok());
    }

    proptest! {
        /// Against the plain definition: over any span no more is admitted than a full bucket and what
        /// has come back since.
        #[test]
        fn no_more_is_had_than_the_limit_says(
            limit in 1..200_u32,
            steps in proptest::collection::vec((0..20_000_u64, 1..5_u32), 1..80),
        ) {
            let quotas = Quotas::default();
            let quota = Quota { requests_per_minute: Some(limit), ..Quota::default() };
            let start = Instant::now();
            let (mut now, mut admitted) = (start, Vec::new());
            for (millis, count) in steps {
                now += Duration::from_millis(millis);
                for _ in 0..count {
                    if seat(&quotas, quota).enter(now).is_ok() {
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
