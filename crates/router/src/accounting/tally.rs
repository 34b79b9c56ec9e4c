//! Service received by classes and tenants, and the accuracy of predictions.
//!
//! Owns: each class's account and correction factors, and its tenants' accounts. Never: orders the
//! queue, or judges; `line` and `admit` read it. Invariant: an account is kept while a flight of it
//! is open, a class's factors while the policy has the class; a new account starts at the least of
//! the others, so that no service is owed for a time without demand (virtual token counters, Sheng
//! et al., arXiv:2401.00588).

use crate::flight::state::FlightRecord;
use crate::placement::policy::AttemptSize;
use cleave_domain::{SloPolicy, Time};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// Charge of one token to an account with a share or weight of 1.
const TOKEN: u64 = 1 << 20;
/// One observation moves a factor by one part in this many.
const GAIN: u64 = 16;
/// Range of a factor, in millionths: predictions are never reduced.
const FACTOR: (u32, u32) = (1_000_000, 3_000_000);
/// Half-life of a factor's excess over 1 without observations: a factor that leads to the refusal
/// of every request would otherwise never be corrected.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// Observations from which on a class's own factor is used; the fleet's is used before.
const ENOUGH: u32 = 20;
/// Recent answers whose lengths are kept.
const ANSWERS: usize = 32;
/// Differences up to about this are due to messages and clocks, and are not learned from.
pub(crate) const NOISE_FLOOR: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceTally {
    accounts: BTreeMap<Arc<str>, ClassAccount>,
    scores: BTreeMap<String, PredictionScore>,
    /// Score over all classes together.
    fleet: PredictionScore,
}

#[derive(Clone, Debug, Default)]
struct ClassAccount {
    account: ServedAccount,
    tenants: BTreeMap<Arc<str>, ServedAccount>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ServedAccount {
    open: u32,
    served: u64,
}

/// The accounts to which a flight is charged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccountKey<'a> {
    pub(crate) class: &'a Arc<str>,
    pub(crate) tenant: &'a Arc<str>,
}

/// Accuracy of the predictions about a class.
#[derive(Clone, Debug, Default)]
struct PredictionScore {
    ttft: CorrectionFactor,
    tpot: CorrectionFactor,
    /// Lengths of its recent answers, in the order in which they ended.
    answers: VecDeque<u32>,
}

/// Factor for predictions, in millionths, with which the share of kept targets is the class's goal,
/// plus half of the remainder up to all of them. Each target that was missed because its prediction
/// was exceeded raises it, every other outcome lowers it, in the proportion that balances both at
/// that share (Gibbs and Candès, arXiv:2106.00170). A prediction that was exceeded without a miss
/// does not count; otherwise requests would be refused on a fleet that serves them all in time.
#[derive(Clone, Copy, Debug)]
struct CorrectionFactor {
    micros: u32,
    samples: u32,
    at: Time,
}

/// The present factor of predictions, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PredictionStretch(u32);

#[derive(Clone, Copy, Debug)]
pub(crate) struct PredictionSample {
    pub(crate) real: Duration,
    pub(crate) predicted: Duration,
    /// The target, if any.
    pub(crate) target: Option<Duration>,
    /// Thousandths of the targets that are to be kept.
    pub(crate) goal_permille: u32,
    pub(crate) at: Time,
}

impl Default for CorrectionFactor {
    fn default() -> Self {
        let (least, _) = FACTOR;
        Self {
            micros: least,
            samples: 0,
            at: Time::ZERO,
        }
    }
}

impl PredictionStretch {
    pub(crate) const NONE: Self = Self(FACTOR.0);

    pub(crate) fn permille(self) -> u32 {
        self.0 / 1000
    }

    /// The prediction, corrected by this factor.
    pub(crate) fn stretch(self, predicted: Duration) -> Duration {
        scale(predicted + NOISE_FLOOR, self.0, FACTOR.0).saturating_sub(NOISE_FLOOR)
    }

    /// The prediction whose correction is `target`.
    pub(crate) fn shrink(self, target: Duration) -> Duration {
        scale(target + NOISE_FLOOR, FACTOR.0, self.0).saturating_sub(NOISE_FLOOR)
    }

    /// The same for one step of many.
    pub(crate) fn stretch_step(self, step: Duration) -> Duration {
        scale(step, self.0, FACTOR.0)
    }

    pub(crate) fn shrink_step(self, gap: Duration) -> Duration {
        scale(gap, FACTOR.0, self.0)
    }
}

impl CorrectionFactor {
    fn now(&self, now: Time) -> PredictionStretch {
        let (least, _) = FACTOR;
        let halvings = now.since(self.at).as_nanos() / HALF_LIFE.as_nanos();
        let above = (self.micros - least).checked_shr(halvings.min(32) as u32);
        PredictionStretch(least + above.unwrap_or(0))
    }

    fn learn(&mut self, sample: &PredictionSample) {
        let stretch = self.now(sample.at);
        let goal = u64::from((1000 + sample.goal_permille.min(998)) / 2);
        let micros = u64::from(stretch.0);
        let allowed = stretch.stretch(sample.predicted);
        // An exceeded prediction counts only if the target was missed too.
        let micros = if sample.real <= allowed.max(sample.target.unwrap_or_default()) {
            micros - micros * (1000 - goal) / 1000 / GAIN
        } else {
            micros + micros * goal / 1000 / GAIN
        };
        let (least, most) = FACTOR;
        self.micros = u32::try_from(micros).unwrap_or(most).clamp(least, most);
        self.samples = self.samples.saturating_add(1);
        self.at = sample.at;
    }

    fn state(&self, now: Time) -> Option<(u32, u32, u128)> {
        let age = now.since(self.at).as_nanos();
        (self.samples > 0).then_some((self.micros, self.samples.min(ENOUGH), age))
    }
}

fn scale(span: Duration, by: u32, of: u32) -> Duration {
    if by == of {
        return span;
    }
    let nanos = span.as_nanos() * u128::from(by) / u128::from(of.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl FlightRecord {
    pub(crate) fn payer(&self) -> AccountKey<'_> {
        AccountKey {
            class: &self.place.queue.class,
            tenant: &self.place.queue.tenant,
        }
    }
}

/// An account's name, and its service above the least account's.
pub(crate) type AccountLead = (Arc<str>, u64);

impl ServiceTally {
    /// Correction of a class's predictions of the time to the first token.
    pub(crate) fn ttft(&self, class: &str, now: Time) -> PredictionStretch {
        self.factor(class, |score| score.ttft).now(now)
    }

    /// The same for the gaps between tokens.
    pub(crate) fn tpot(&self, class: &str, now: Time) -> PredictionStretch {
        self.factor(class, |score| score.tpot).now(now)
    }

    fn factor(
        &self,
        class: &str,
        aim: fn(&PredictionScore) -> CorrectionFactor,
    ) -> CorrectionFactor {
        let own = self.scores.get(class).map(aim);
        own.filter(|factor| factor.samples >= ENOUGH)
            .unwrap_or_else(|| aim(&self.fleet))
    }

    /// The largest correction of gaps between tokens, of any class.
    pub(crate) fn tpot_worst(&self, now: Time) -> PredictionStretch {
        let sampled = self.scores.values().filter(|s| s.tpot.samples >= ENOUGH);
        let all = sampled.map(|score| score.tpot).chain([self.fleet.tpot]);
        let all = all.map(|factor| factor.now(now));
        all.max_by_key(|stretch| stretch.0)
            .unwrap_or(PredictionStretch::NONE)
    }

    pub(crate) fn learn_ttft(&mut self, class: &str, sample: &PredictionSample) {
        self.fleet.ttft.learn(sample);
        self.score_mut(class).ttft.learn(sample);
    }

    pub(crate) fn learn_tpot(&mut self, class: &str, sample: &PredictionSample) {
        self.fleet.tpot.learn(sample);
        self.score_mut(class).tpot.learn(sample);
    }

    /// Records the length of an answer.
    pub(crate) fn answered(&mut self, class: &str, output_tokens: u32) {
        let answers = &mut self.score_mut(class).answers;
        answers.push_back(output_tokens);
        if answers.len() > ANSWERS {
            answers.pop_front();
        }
    }

    /// Quantile of the class's answer lengths, in tokens.
    pub(crate) fn answer_tokens(&self, class: &str, permille: usize) -> Option<u32> {
        let answers = &self.scores.get(class)?.answers;
        let mut lengths: Vec<u32> = answers.iter().copied().collect();
        let place = lengths.len() * permille / 1000;
        let place = place.min(lengths.len().checked_sub(1)?);
        let (_, length, _) = lengths.select_nth_unstable(place);
        Some(*length)
    }

    fn score_mut(&mut self, class: &str) -> &mut PredictionScore {
        if !self.scores.contains_key(class) {
            self.scores
                .insert(class.to_owned(), PredictionScore::default());
        }
        self.scores.get_mut(class).expect("is there now")
    }

    /// Forgets the factors of classes that no longer exist.
    pub(crate) fn retain_classes(&mut self, policy: &SloPolicy) {
        self.scores
            .retain(|name, _| policy.classes.iter().any(|class| class.name == *name));
    }

    pub(crate) fn open(&mut self, payer: AccountKey) {
        if !self.accounts.contains_key(payer.class) {
            let least = self.accounts.values().map(|c| c.account.served).min();
            let account = ServedAccount {
                open: 0,
                served: least.unwrap_or(0),
            };
            let tenants = BTreeMap::new();
            let class = ClassAccount { account, tenants };
            self.accounts.insert(Arc::clone(payer.class), class);
        }
        let class = self.accounts.get_mut(payer.class).expect("is there now");
        class.account.open += 1;
        if let Some(account) = class.tenants.get_mut(payer.tenant) {
            account.open += 1;
            return;
        }
        let served = class.tenants.values().map(|a| a.served).min().unwrap_or(0);
        let account = ServedAccount { open: 1, served };
        class.tenants.insert(Arc::clone(payer.tenant), account);
    }

    pub(crate) fn close(&mut self, payer: AccountKey) {
        let Some(class) = self.accounts.get_mut(payer.class) else {
            return;
        };
        class.account.open -= 1;
        if let Some(account) = class.tenants.get_mut(payer.tenant) {
            account.open -= 1;
            if account.open == 0 {
                class.tenants.remove(payer.tenant);
            }
        }
        if class.account.open == 0 {
            self.accounts.remove(payer.class);
        }
    }

    /// Charges served tokens; a negative number refunds tokens that were charged and not served.
    pub(crate) fn charge(&mut self, payer: AccountKey, tokens: i64, policy: &SloPolicy) {
        let Some(class) = self.accounts.get_mut(payer.class) else {
            return;
        };
        let add = |account: &mut ServedAccount, share: u32| {
            let each = (TOKEN / u64::from(share.max(1))).max(1) as i64;
            let sum = tokens.saturating_mul(each);
            account.served = account.served.saturating_add_signed(sum);
        };
        add(&mut class.account, policy.class(payer.class).weight);
        if let Some(account) = class.tenants.get_mut(payer.tenant) {
            add(account, policy.share(payer.tenant));
        }
    }

    /// Charges a flight that is placed with its expected tokens, once.
    pub(crate) fn charge_expected(
        &mut self,
        flight: &mut FlightRecord,
        ask: &AttemptSize,
        policy: &SloPolicy,
    ) {
        if flight.charged == 0 {
            let tokens = i64::from(ask.tokens_expected);
            self.charge(flight.payer(), tokens, policy);
            flight.charged = tokens;
        }
    }

    /// Closes the account of a flight that was served so many tokens, and corrects its charge.
    pub(crate) fn settle(&mut self, flight: &FlightRecord, served: i64, policy: &SloPolicy) {
        if flight.charged > 0 {
            self.charge(flight.payer(), served - flight.charged, policy);
        }
        self.close(flight.payer());
    }

    /// Service that a tenant received in a class, by its share.
    pub(crate) fn served(&self, class: &str, tenant: &str) -> u64 {
        let class = self.accounts.get(class);
        let account = class.and_then(|class| class.tenants.get(tenant));
        account.map_or(0, |account| account.served)
    }

    /// Service that a class received, by its weight.
    pub(crate) fn served_class(&self, class: &str) -> u64 {
        self.accounts.get(class).map_or(0, |c| c.account.served)
    }

    pub(crate) fn hash_scores(&self, now: Time, hasher: &mut impl Hasher) {
        for (name, score) in &self.scores {
            (name, score.ttft.state(now), score.tpot.state(now)).hash(hasher);
            score.answers.hash(hasher);
        }
        let fleet = (self.fleet.ttft.state(now), self.fleet.tpot.state(now));
        fleet.hash(hasher);
    }

    /// The state that decides an order: the accounts, and how far each is ahead of the least. For
    /// [`crate::RouterBrain::fingerprint`].
    pub(crate) fn leads(&self) -> Vec<(AccountLead, Vec<AccountLead>)> {
        let least = self.accounts.values().map(|c| c.account.served).min();
        let lead = |(name, class): (&Arc<str>, &ClassAccount)| {
            let floor = class.tenants.values().map(|a| a.served).min().unwrap_or(0);
            let tenants = class.tenants.iter();
            let tenants = tenants.map(|(name, a)| (Arc::clone(name), a.served - floor));
            let ahead = class.account.served - least.unwrap_or(0);
            ((Arc::clone(name), ahead), tenants.collect())
        };
        self.accounts.iter().map(lead).collect()
    }

    pub(crate) fn check(&self, flights: usize) {
        let open: u32 = self.accounts.values().map(|c| c.account.open).sum();
        assert_eq!(open as usize, flights, "accounts and flights differ");
        for (name, class) in &self.accounts {
            let tenants: u32 = class.tenants.values().map(|a| a.open).sum();
            assert_eq!(tenants, class.account.open, "{name}'s tenants");
        }
    }
}
