//! The fleet as a policy sees it.
//!
//! Owns: the snapshot of each worker that a choice is made from, and which groups are asked. Never:
//! changes anything, or ranks workers; policies do.
//! Invariant: what this router promised and a worker has not confirmed counts as taken.

use crate::event::{Forecast, Mode, Placement, Readiness};
use crate::fleet::{Fleet, Group, Worker};
use crate::forecast::{Manners, Need, Outlook, Prospect, nanos};
use crate::judge::judge;
use crate::ledger::URGENCIES;
use crate::policy::{self, Ask, Candidate, Choice, NoPlace, Terms};
use crate::prefix::Content;
use cleave_domain::{Backlog, Fingerprint, Prices, Role, Time, WorkerId, WorkerRef};
use cleave_planner::Predict;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A request without targets leaves one of so many seats and blocks of a worker to those that have
/// some, where the policy has such.
const LEFT_FREE: u32 = 2;
/// Nor is its prompt sent where others wait for longer than this: it would hold a seat and blocks for
/// nothing.
const QUEUE_BEHIND: Duration = Duration::from_millis(100);

/// What a placement is asked with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query<'a> {
    pub(crate) ask: Ask,
    pub(crate) content: &'a Content,
    pub(crate) excluded: &'a BTreeSet<WorkerId>,
    /// Attempts of it that failed: then some of these failed it, and else they only refused.
    pub(crate) failures: u32,
    /// Weights and arithmetic that drew the tokens its client has: only the same draw the ones that
    /// follow. None while it has none.
    pub(crate) drawn_by: Option<&'a Fingerprint>,
    pub(crate) now: Time,
    pub(crate) terms: Terms,
    /// What it needs in time; none where times do not decide.
    pub(crate) need: Option<&'a Need>,
}

/// A place for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placing {
    pub(crate) choice: Choice,
    /// What was predicted of it.
    pub(crate) outlook: Option<Outlook>,
    /// The best placements that were judged, this one first.
    pub(crate) considered: Vec<Forecast>,
    /// The mean gap between tokens that its client was promised.
    pub(crate) tpot: Option<Duration>,
}

/// What a sequence that moves takes and was promised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burden {
    pub(crate) ask: Ask,
    pub(crate) tpot: Option<Duration>,
}

impl Query<'_> {
    /// The same content elsewhere.
    pub(crate) fn asking<'a>(&self, ask: Ask, excluded: &'a BTreeSet<WorkerId>) -> Query<'a>
    where
        Self: 'a,
    {
        Query {
            ask,
            content: self.content,
            excluded,
            failures: self.failures,
            drawn_by: self.drawn_by,
            now: self.now,
            terms: self.terms,
            need: self.need,
        }
    }

    fn admits(&self, fingerprint: &Fingerprint) -> bool {
        self.drawn_by.is_none_or(|drawn_by| drawn_by == fingerprint)
    }
}

impl Placing {
    fn by_load(choice: Choice) -> Self {
        let forecast = Forecast {
            prefill: choice.prefill,
            decode: choice.decode,
            cached_tokens: choice.cached_tokens,
            ttft: Duration::ZERO,
            tpot: Duration::ZERO,
            e2e: Duration::ZERO,
            output_tokens: 0,
        };
        Self {
            choice,
            outlook: None,
            considered: vec![forecast],
            tpot: None,
        }
    }

    /// None of no outlooks.
    fn by_prices(outlooks: &[Outlook]) -> Option<Self> {
        let best = outlooks.first()?;
        let choice = Choice {
            prefill: best.forecast.prefill,
            decode: best.forecast.decode,
            cached_tokens: best.forecast.cached_tokens,
            cost: 0,
            reason: best.reason,
        };
        Some(Self {
            choice,
            outlook: Some(*best),
            considered: outlooks.iter().map(|outlook| outlook.forecast).collect(),
            tpot: None,
        })
    }

    /// Of two groups' choices the better: one that is known to meet its targets, one that is known,
    /// the sooner.
    fn better(self, other: Self) -> Self {
        let rank = |placing: &Self| match &placing.outlook {
            Some(outlook) => (outlook.miss.is_some(), false, outlook.forecast.e2e, 0),
            None => (false, true, Duration::ZERO, placing.choice.cost),
        };
        if rank(&other) < rank(&self) {
            other
        } else {
            self
        }
    }
}

impl Fleet {
    /// Whether the shortest of requests would find a pair, asked as any other is.
    pub(crate) fn readiness(&self, now: Time, terms: Terms) -> Readiness {
        let alone = terms.mode == Mode::Slo && terms.placement == Placement::Auto;
        let alone = alone && self.workers().any(|w| w.accepts() && w.priced());
        let placement = match terms.placement {
            Placement::Auto if alone => Placement::Whole,
            other => other,
        };
        let query = Query {
            ask: Ask::SHORTEST,
            content: &Content::default(),
            excluded: &BTreeSet::new(),
            failures: 0,
            drawn_by: None,
            now,
            terms: Terms { placement, ..terms },
            need: None,
        };
        match self.choose_among(&query, Worker::accepts) {
            Ok(_) | Err(NoPlace::Busy) => Readiness::Ready,
            Err(NoPlace::NoWorker | NoPlace::TooLong { .. }) => {
                let accepting = || self.workers().filter(|worker| worker.accepts());
                let roles = || accepting().map(|worker| worker.description.role);
                Readiness::NoPair {
                    prefill: roles().filter(|role| role.prefills()).count() as u32,
                    decode: roles().filter(|role| role.decodes()).count() as u32,
                }
            }
        }
    }

    /// Chooses in each group and takes the best choice.
    pub(crate) fn choose(&self, query: &Query) -> Result<Placing, NoPlace> {
        self.choose_among(query, |worker| !worker.draining)
    }

    fn choose_among(
        &self,
        query: &Query,
        counts: impl Fn(&Worker) -> bool,
    ) -> Result<Placing, NoPlace> {
        let mut best: Result<Placing, NoPlace> = Err(NoPlace::NoWorker);
        let groups = self.groups.iter();
        for (_, group) in groups.filter(|(fingerprint, _)| query.admits(fingerprint)) {
            let found = match self.choose_by_prices(group, query, &counts) {
                Some(found) => found,
                None => {
                    let candidates = self.candidates(group, query, &counts);
                    policy::choose(&candidates, &query.ask, query.terms).map(Placing::by_load)
                }
            };
            best = match (best, found) {
                (Ok(old), Ok(new)) => Ok(old.better(new)),
                (Ok(old), Err(_)) => Ok(old),
                (Err(_), Ok(new)) => Ok(new),
                (Err(old), Err(new)) => Err(old.max(new)),
            };
        }
        best
    }

    /// None where too little is known of what work costs.
    fn choose_by_prices(
        &self,
        group: &Group,
        query: &Query,
        counts: &impl Fn(&Worker) -> bool,
    ) -> Option<Result<Placing, NoPlace>> {
        let need = query.need?;
        let prospects = self.asked(group, query, need, counts);
        let seats = prospects.iter().map(|prospect| &prospect.seat);
        policy::exists(seats, &query.ask, query.terms.placement).ok()?;
        let outlooks = judge(&prospects, need, query.terms.placement);
        let placing = outlooks.map(|outlooks| Placing::by_prices(&outlooks));
        match placing {
            Ok(placing) => placing.map(Ok),
            Err(no_place) => Some(Err(no_place)),
        }
    }

    /// How soon a worker is likely to have room again, where none has: the soonest anybody leaves.
    pub(crate) fn relief(&self, query: &Query) -> Option<Duration> {
        let need = query.need?;
        let groups = self.groups.iter();
        let able = groups.filter(|(fingerprint, _)| query.admits(fingerprint));
        let reliefs = able.flat_map(|(_, group)| {
            let counts = |w: &Worker| !w.draining && w.description.role.decodes();
            let prospects = self.asked(group, query, need, &counts);
            prospects.iter().map(|p| p.relief(need)).min()
        });
        reliefs.min()
    }

    /// How long a prompt takes a worker on which nothing else runs and nothing of it is cached: a first
    /// guess, by any worker's prices.
    pub(crate) fn prompt_alone(&self, tokens: u32) -> Duration {
        let priced = || self.workers().filter(|worker| worker.priced());
        let prefills = |worker: &&Worker| worker.description.role.prefills();
        let any = priced().find(prefills).or_else(|| priced().next());
        any.map_or(Duration::ZERO, |worker| {
            let chunk = worker.description.capacity.step_tokens_max;
            worker.prices.prefill(0, tokens, chunk)
        })
    }

    /// How long the prompt takes whichever worker would be done with it first if all were idle.
    pub(crate) fn alone_least(&self, query: &Query) -> Duration {
        let Some(need) = query.need else {
            return Duration::ZERO;
        };
        let groups = self.groups.iter();
        let able = groups.filter(|(fingerprint, _)| query.admits(fingerprint));
        let alone = able.flat_map(|(_, group)| {
            let prospects = self.asked(group, query, need, &|w: &Worker| !w.draining);
            prospects.iter().map(|p| p.alone).min()
        });
        alone.min().unwrap_or_default()
    }

    /// Chooses where a sequence that runs on `source` could go on.
    pub(crate) fn choose_target(
        &self,
        source: WorkerRef,
        query: &Query,
    ) -> Result<WorkerRef, NoPlace> {
        let worker = self.get(source).ok_or(NoPlace::NoWorker)?;
        let group = self.groups.get(&worker.description.fingerprint);
        let group = group.ok_or(NoPlace::NoWorker)?;
        let other = |worker: &Worker| !worker.draining && worker.me != source;
        policy::choose_target(&self.candidates(group, query, &other), &query.ask)
    }

    fn candidates(
        &self,
        group: &Group,
        query: &Query,
        counts: &impl Fn(&Worker) -> bool,
    ) -> Vec<Candidate> {
        let cached = self.cached(group, query);
        self.members(group)
            .filter(|worker| counts(worker))
            .map(|worker| {
                let blocks = cached.get(&worker.me.worker).copied().unwrap_or(0);
                self.candidate(worker, query, blocks)
            })
            .collect()
    }

    /// Those among which the request is placed; none without anybody's prices.
    fn asked<'a>(
        &'a self,
        group: &'a Group,
        query: &Query,
        need: &Need,
        counts: &impl Fn(&Worker) -> bool,
    ) -> Vec<Prospect<'a>> {
        let mut prospects = Vec::with_capacity(group.workers.len());
        // Not `extend`: it moves each through the whole chain of iterators.
        let all = self.prospects(group, query, need, counts);
        all.for_each(|prospect| prospects.push(prospect));
        if query.terms.placement != Placement::Split {
            let stuck = |worker| self.is_at_a_stand(worker);
            self.devices
                .leave_one_each(&mut prospects, (query, need), stuck);
        }
        prospects
    }

    fn prospects<'a>(
        &'a self,
        group: &'a Group,
        query: &Query,
        need: &Need,
        counts: &impl Fn(&Worker) -> bool,
    ) -> impl Iterator<Item = Prospect<'a>> {
        // Whoever has not said its prices yet is taken to be like the first that did.
        let known = self.members(group).find(|worker| worker.priced());
        let cached = known.map(|_| self.cached(group, query));
        let known = known.map(|worker| (&worker.prices, cached.unwrap_or_default()));
        known.into_iter().flat_map(move |(known, cached)| {
            let counting = self.members(group).filter(|worker| counts(worker));
            counting.map(move |worker| {
                let blocks = cached.get(&worker.me.worker).copied().unwrap_or(0);
                let prices = match worker.priced() {
                    true => &worker.prices,
                    false => known,
                };
                let seat = self.candidate(worker, query, blocks);
                prospect((worker, prices), seat, need)
            })
        })
    }

    fn cached(&self, group: &Group, query: &Query) -> BTreeMap<WorkerId, u32> {
        let Some(block_tokens) = self.block_tokens(group) else {
            return BTreeMap::new();
        };
        let found = group.prefixes.longest(query.content.hashes(block_tokens));
        found
            .into_iter()
            .map(|(who, blocks)| (who.worker, blocks))
            .collect()
    }

    /// Whether news of this worker could give `query` a place.
    pub(crate) fn could_help(&self, who: WorkerRef, query: &Query) -> bool {
        self.at_best(who, query).is_some_and(|candidate| {
            let whole = query.need.is_some() || query.terms.placement == Placement::Whole;
            let placement = match whole {
                true => query.terms.placement,
                false => Placement::Split,
            };
            policy::has_room(&candidate, &query.ask, placement)
        })
    }

    /// Whether news of this worker could give a running sequence a place to move to.
    pub(crate) fn could_take(&self, who: WorkerRef, query: &Query) -> bool {
        self.at_best(who, query)
            .is_some_and(|candidate| policy::choose_target(&[candidate], &query.ask).is_ok())
    }

    /// Cached blocks only make room; suppose that all are.
    fn at_best(&self, who: WorkerRef, query: &Query) -> Option<Candidate> {
        let fits = |w: &&Worker| !w.draining && query.admits(&w.description.fingerprint);
        let worker = self.get(who).filter(fits)?;
        let block_tokens = worker.description.capacity.block_tokens;
        let blocks = query.ask.prompt_tokens.div_ceil(block_tokens);
        Some(self.candidate(worker, query, blocks))
    }

    /// A worker's last report with what was promised since on top. What this router promised and
    /// still counts is a lower bound, whatever the report says; and whatever numbers it says, sums
    /// stop at the largest: a worker that claims too much looks full, never empty.
    fn candidate(&self, worker: &Worker, query: &Query, cached_blocks: u32) -> Candidate {
        let about = &worker.description;
        let load = &worker.load;
        let totals = worker.ledger.totals();
        let busy = load
            .sequences_running
            .saturating_add(load.sequences_waiting)
            .saturating_add(totals.sequences_fresh);
        let queue_tokens = load.queue_tokens.saturating_add(totals.tokens_fresh);
        Candidate {
            worker: worker.me,
            role: about.role,
            crowded: self.wishes.contains_key(&worker.me.worker),
            shut: worker.stuck()
                || worker.shut_until > query.now
                || query.excluded.contains(&worker.me.worker),
            capacity: about.capacity,
            blocks_free: load.blocks_free.saturating_sub(totals.blocks_fresh),
            sequences: busy.max(totals.sequences),
            queue_max: about.queue_max,
            prompts_open: totals.prompts,
            queue_tokens: queue_tokens.max(totals.tokens),
            cached_blocks,
            chosen: worker.chosen,
        }
    }
}

/// What a worker has to do for prompts.
struct Ahead {
    /// Of all that is at least as urgent as each urgency, in nanoseconds.
    backlog: [u64; URGENCIES],
    /// Of the step under way.
    step_left: Duration,
}

impl Ahead {
    /// Between two loads its own prompts get done at the speed of time; what other routers sent it in the
    /// meantime is not known, and is taken to make up for what it does of theirs. What this router promised
    /// and the worker has not done is a lower bound.
    fn of(worker: &Worker, now: Time) -> Self {
        let totals = worker.ledger.totals();
        let load = &worker.load;
        let told = load.backlog.micros.as_flattened();
        let mut backlog = [0; URGENCIES];
        // Most of those who generate have no prompts to run.
        if told.iter().any(|micros| *micros > 0) || totals.work.iter().any(|work| *work > 0) {
            let at_work_since = worker.ledger.at_work_since;
            let at_work = nanos(now.since(at_work_since));
            let since_told = nanos(now.since(at_work_since.max(worker.heard)));
            let (mut own, mut fresh, mut reported) = (0, 0, 0);
            for (urgency, ahead) in backlog.iter_mut().enumerate() {
                own += totals.work[urgency];
                fresh += totals.work_fresh[urgency];
                reported += 1000 * u64::from(told.get(urgency).copied().unwrap_or(0));
                let expected = (reported + fresh).saturating_sub(since_told.min(own));
                *ahead = expected.max(own.saturating_sub(at_work));
            }
        }
        Self {
            backlog,
            step_left: load.step_left.saturating_sub(now.since(worker.heard)),
        }
    }

    fn all(&self) -> Duration {
        Duration::from_nanos(self.backlog[URGENCIES - 1])
    }

    /// What is ahead is in the step under way, as far as anything is; if nothing is ahead, that step is.
    fn wait(&self, urgency: usize) -> Duration {
        Duration::from_nanos(self.backlog[urgency]).max(self.step_left)
    }

    /// By how much others come too late if so much work of that urgency goes before them: what has to
    /// begin later must still be able to.
    fn crowds(&self, urgency: usize, work: Duration) -> Duration {
        let mut crowds = Duration::ZERO;
        for later in urgency + 1..URGENCIES {
            let waits = self.backlog[later] > self.backlog[later - 1];
            let bound = Backlog::BOUNDS.get(later % (URGENCIES / 3));
            if let Some(bound) = bound.filter(|_| waits) {
                let begins = self.wait(later) + work;
                crowds = crowds.max(begins.saturating_sub(*bound));
            }
        }
        crowds
    }
}

/// Sequences that generate on a worker.
struct Streaming {
    /// In its steps now.
    running: u32,
    /// And those yet to come.
    sequences: u32,
    context_tokens: u64,
}

impl Streaming {
    /// On a worker that has so many sequences of any kind: where prompts run for others, some leave.
    fn of(worker: &Worker, busy: u32) -> Self {
        let totals = worker.ledger.totals();
        let load = &worker.load;
        let block_tokens = worker.description.capacity.block_tokens;
        let own_tokens = totals.blocks * u64::from(block_tokens);
        // Tokens of nobody are those of a worker of an older release, which does not count who stays.
        let told = match load.streams {
            0 if load.context_tokens > 0 => load.sequences_running.max(1),
            streams => streams,
        };
        let stay = told.saturating_add(totals.sequences_fresh);
        let sequences = match worker.description.role {
            Role::Prefill | Role::Both => stay.max(totals.sequences),
            Role::Decode => busy,
        };
        Self {
            running: told.min(load.sequences_running).max(totals.streams),
            sequences,
            // Those that it has not heard of are taken to be as long as the others.
            context_tokens: match told {
                0 => own_tokens,
                some => load.context_tokens.saturating_mul(u64::from(sequences)) / u64::from(some),
            },
        }
    }
}

/// The worker with what is known of its prices.
fn prospect<'a>(
    (worker, prices): (&'a Worker, &'a Prices),
    mut seat: Candidate,
    need: &Need,
) -> Prospect<'a> {
    let capacity = &worker.description.capacity;
    let totals = worker.ledger.totals();
    let cached = seat.cached_tokens(&need.ask);
    let tokens = need.ask.prompt_tokens - cached;
    let chunk = capacity.step_tokens_max;
    let alone = prices.prefill(cached, tokens, chunk);
    let work = prices.adds(cached, tokens, chunk).min(alone);
    let place = Backlog::place(need.slack(alone));
    let urgency = Backlog::band(need.priority) * (URGENCIES / 3) + place;
    let ahead = Ahead::of(worker, need.now);
    let streaming = Streaming::of(worker, seat.sequences);
    if need.manners == Manners::GivesWay {
        let seats = capacity.slots_count / LEFT_FREE;
        let blocks = capacity.blocks_count / LEFT_FREE;
        seat.sequences = seat.sequences.saturating_add(seats);
        seat.blocks_free = seat.blocks_free.saturating_sub(blocks);
        if ahead.all() > QUEUE_BEHIND {
            seat.prompts_open = u32::MAX;
        }
    }
    // Those without a gap of their own make room for one that has.
    let unpaced = need.tpot.map_or(0, |_| totals.unpaced);
    let blocks = need.tpot.map_or(0, |_| totals.unpaced_blocks);
    let unpaced_tokens = blocks * u64::from(capacity.block_tokens);
    let shortest = prices.decode(1, 1);
    let gaps = [worker.load.tpot_least, worker.ledger.tpot_least(shortest)];
    Prospect {
        seat,
        prices,
        alone,
        work,
        urgency,
        wait: ahead.wait(urgency),
        backlog: ahead.all(),
        streams: streaming.running,
        sequences: streaming.sequences.saturating_sub(unpaced),
        context_tokens: streaming.context_tokens.saturating_sub(unpaced_tokens),
        strangers: streaming.sequences.saturating_sub(totals.sequences),
        away: totals.away - need.tpot.map_or(0, |_| totals.unpaced_away),
        ledger: &worker.ledger,
        tpot_least: gaps.into_iter().flatten().min(),
        crowds: match need.manners {
            Manners::Resumed => Duration::ZERO,
            Manners::New | Manners::GivesWay => ahead.crowds(urgency, work),
        },
    }
}
