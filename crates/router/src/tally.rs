//! What was served to whom, and how far predictions about whom came true.
//!
//! Owns: each class's account and factors, and its tenants' accounts. Never: orders the line, or judges;
//! `line` and `admit` read it. Invariant: an account is kept while a flight of it is open, a class's
//! factors while the policy has the class; whoever opens one begins where the least of the others
//! stands, so that nobody is owed for a time in which he wanted nothing (virtual token counters, Sheng
//! et al., arXiv:2401.00588).

use cleave_domain::{SloPolicy, Time};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

/// What a token counts on the account of one whose share or weight is 1.
const TOKEN: u64 = 1 << 20;
/// How far one observation moves a factor, as a share of it.
const GAIN: u64 = 16;
/// A factor's limits, in millionths: predictions are never made smaller.
const FACTOR: (u32, u32) = (1_000_000, 3_000_000);
/// In this time without an observation half of what a factor is above 1 is forgotten: where it refuses
/// everybody it would never learn otherwise.
const FORGET: Duration = Duration::from_secs(10);
/// Observations from which on a class's own factor counts; until then the fleet's does.
const ENOUGH: u32 = 20;
/// Answers of late whose lengths are kept.
const ANSWERS: usize = 32;
/// Differences of about this much are the messages' and the clock's, and not what is learnt from.
pub(crate) const GRAIN: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    accounts: BTreeMap<Arc<str>, ClassAccount>,
    scores: BTreeMap<String, Score>,
    /// Of all classes together.
    fleet: Score,
}

#[derive(Clone, Debug, Default)]
struct ClassAccount {
    account: Account,
    tenants: BTreeMap<Arc<str>, Account>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    open: u32,
    served: u64,
}

/// On whose accounts a flight is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payer<'a> {
    pub(crate) class: &'a Arc<str>,
    pub(crate) tenant: &'a Arc<str>,
}

/// How predictions about a class came true.
#[derive(Clone, Debug, Default)]
struct Score {
    ttft: Factor,
    tpot: Factor,
    /// Lengths of its answers of late, in the order in which they ended.
    answers: VecDeque<u32>,
}

/// What predictions must be multiplied with, in millionths, so that the share of promises that are kept is
/// what the class says, and half of what is missing to all of them beside. Each promise that was broken
/// because its prediction was exceeded raises it, each other one lowers it, in the proportion that
/// makes both balance at that share (Gibbs and Candès, arXiv:2106.00170). A prediction that was exceeded
/// and broke no promise costs nobody anything; were it counted, requests would be refused on a fleet
/// that serves them all in time.
#[derive(Clone, Copy, Debug)]
struct Factor {
    micros: u32,
    samples: u32,
    at: Time,
}

/// What predictions are multiplied with now, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stretch(u32);

/// What was observed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) real: Duration,
    pub(crate) predicted: Duration,
    /// What was promised of it.
    pub(crate) target: Option<Duration>,
    /// How many thousandths are to come true.
    pub(crate) goal_permille: u32,
    pub(crate) at: Time,
}

impl Default for Factor {
    fn default() -> Self {
        let (least, _) = FACTOR;
        Self {
            micros: least,
            samples: 0,
            at: Time::ZERO,
        }
    }
}

impl Stretch {
    pub(crate) const NONE: Self = Self(FACTOR.0);

    pub(crate) fn permille(self) -> u32 {
        self.0 / 1000
    }

    /// What a prediction becomes.
    pub(crate) fn stretch(self, predicted: Duration) -> Duration {
        scale(predicted + GRAIN, self.0, FACTOR.0).saturating_sub(GRAIN)
    }

    /// The prediction that would become `target`.
    pub(crate) fn shrink(self, target: Duration) -> Duration {
        scale(target + GRAIN, FACTOR.0, self.0).saturating_sub(GRAIN)
    }

    /// The same for one step of many.
    pub(crate) fn stretch_step(self, step: Duration) -> Duration {
        scale(step, self.0, FACTOR.0)
    }

    /// See [`Stretch::shrink`].
    pub(crate) fn shrink_step(self, gap: Duration) -> Duration {
        scale(gap, FACTOR.0, self.0)
    }
}

impl Factor {
    fn now(&self, now: Time) -> Stretch {
        let (least, _) = FACTOR;
        let halvings = now.since(self.at).as_nanos() / FORGET.as_nanos();
        let above = (self.micros - least).checked_shr(halvings.min(32) as u32);
        Stretch(least + above.unwrap_or(0))
    }

    fn learn(&mut self, sample: &Sample) {
        let stretch = self.now(sample.at);
        let goal = u64::from((1000 + sample.goal_permille.min(998)) / 2);
        let micros = u64::from(stretch.0);
        let allowed = stretch.stretch(sample.predicted);
        let micros = match sample.real <= allowed.max(sample.target.unwrap_or_default()) {
            true => micros - micros * (1000 - goal) / 1000 / GAIN,
            false => micros + micros * goal / 1000 / GAIN,
        };
        let (least, most) = FACTOR;
        self.micros = u32::try_from(micros).unwrap_or(most).clamp(least, most);
        self.samples = self.samples.saturating_add(1);
        self.at = sample.at;
    }

    /// See [`crate::Brain::fingerprint`].
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

/// Whose account it is, and how much more was served on it than on the least.
pub(crate) type Lead = (Arc<str>, u64);

impl Tally {
    /// What a class's predictions of the time to the first token are multiplied with.
    pub(crate) fn ttft(&self, class: &str, now: Time) -> Stretch {
        self.factor(class, |score| score.ttft).now(now)
    }

    /// The same for the gaps between tokens.
    pub(crate) fn tpot(&self, class: &str, now: Time) -> Stretch {
        self.factor(class, |score| score.tpot).now(now)
    }

    fn factor(&self, class: &str, aim: fn(&Score) -> Factor) -> Factor {
        let own = self.scores.get(class).map(aim);
        own.filter(|factor| factor.samples >= ENOUGH)
            .unwrap_or_else(|| aim(&self.fleet))
    }

    /// The greatest factor of gaps between tokens, of any class.
    pub(crate) fn tpot_worst(&self, now: Time) -> Stretch {
        let known = self.scores.values().filter(|s| s.tpot.samples >= ENOUGH);
        let all = known.map(|score| score.tpot).chain([self.fleet.tpot]);
        let all = all.map(|factor| factor.now(now));
        all.max_by_key(|stretch| stretch.0).unwrap_or(Stretch::NONE)
    }

    pub(crate) fn learn_ttft(&mut self, class: &str, sample: &Sample) {
        self.fleet.ttft.learn(sample);
        self.score_mut(class).ttft.learn(sample);
    }

    pub(crate) fn learn_tpot(&mut self, class: &str, sample: &Sample) {
        self.fleet.tpot.learn(sample);
        self.score_mut(class).tpot.learn(sample);
    }

    /// An answer had so many tokens.
    pub(crate) fn answered(&mut self, class: &str, output_tokens: u32) {
        let answers = &mut self.score_mut(class).answers;
        answers.push_back(output_tokens);
        if answers.len() > ANSWERS {
            answers.pop_front();
        }
    }

    /// How many tokens an answer of the class has that is longer than so many thousandths of them.
    pub(crate) fn answer_tokens(&self, class: &str, permille: usize) -> Option<u32> {
        let answers = &self.scores.get(class)?.answers;
        let mut lengths: Vec<u32> = answers.iter().copied().collect();
        let place = lengths.len() * permille / 1000;
        let place = place.min(lengths.len().checked_sub(1)?);
        let (_, length, _) = lengths.select_nth_unstable(place);
        Some(*length)
    }

    fn score_mut(&mut self, class: &str) -> &mut Score {
        if !self.scores.contains_key(class) {
            self.scores.insert(class.to_owned(), Score::default());
        }
        self.scores.get_mut(class).expect("is there now")
    }

    /// Forgets the factors of classes that are no more.
    pub(crate) fn keep(&mut self, policy: &SloPolicy) {
        self.scores
            .retain(|name, _| policy.classes.iter().any(|class| class.name == *name));
    }

    /// A flight begins.
    pub(crate) fn open(&mut self, payer: Payer) {
        if !self.accounts.contains_key(payer.class) {
            let least = self.accounts.values().map(|c| c.account.served).min();
            let account = Account {
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
        let account = Account { open: 1, served };
        class.tenants.insert(Arc::clone(payer.tenant), account);
    }

    /// A flight ended.
    pub(crate) fn close(&mut self, payer: Payer) {
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

    /// So many tokens were served, or, below zero, were counted on and not served.
    pub(crate) fn charge(&mut self, payer: Payer, tokens: i64, policy: &SloPolicy) {
        let Some(class) = self.accounts.get_mut(payer.class) else {
            return;
        };
        let add = |account: &mut Account, share: u32| {
            let each = (TOKEN / u64::from(share.max(1))).max(1) as i64;
            let sum = tokens.saturating_mul(each);
            account.served = account.served.saturating_add_signed(sum);
        };
        add(&mut class.account, policy.class(payer.class).weight);
        if let Some(account) = class.tenants.get_mut(payer.tenant) {
            add(account, policy.share(payer.tenant));
        }
    }

    /// What a tenant was served of a class, for its share.
    pub(crate) fn served(&self, class: &str, tenant: &str) -> u64 {
        let class = self.accounts.get(class);
        let account = class.and_then(|class| class.tenants.get(tenant));
        account.map_or(0, |account| account.served)
    }

    /// What a class was served, for its weight.
    pub(crate) fn served_class(&self, class: &str) -> u64 {
        self.accounts.get(class).map_or(0, |c| c.account.served)
    }

    /// See [`crate::Brain::fingerprint`].
    pub(crate) fn hash_scores(&self, now: Time, hasher: &mut impl Hasher) {
        for (name, score) in &self.scores {
            (name, score.ttft.state(now), score.tpot.state(now)).hash(hasher);
            score.answers.hash(hasher);
        }
        let fleet = (self.fleet.ttft.state(now), self.fleet.tpot.state(now));
        fleet.hash(hasher);
    }

    /// All that decides an order: who has an account, and how far each is ahead of the least. For
    /// [`crate::Brain::fingerprint`].
    pub(crate) fn leads(&self) -> Vec<(Lead, Vec<Lead>)> {
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
