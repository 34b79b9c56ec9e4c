//! The fleet as a policy sees it.
//!
//! Owns: the snapshot of each worker that a choice is made from, and which groups are asked. Never:
//! changes anything, or ranks workers; policies do.
//! Invariant: what this router promised and a worker has not confirmed counts as taken.

use crate::event::Readiness;
use crate::fleet::{Fleet, Group, Worker};
use crate::policy::{self, Ask, Candidate, Choice, NoPlace};
use crate::prefix::Content;
use cleave_domain::{Fingerprint, Time, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

/// What a placement is asked with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query<'a> {
    pub(crate) ask: Ask,
    pub(crate) content: &'a Content,
    pub(crate) excluded: &'a BTreeSet<WorkerId>,
    /// Weights and arithmetic that drew the tokens its client has: only the same draw the ones that
    /// follow. None while it has none.
    pub(crate) drawn_by: Option<&'a Fingerprint>,
    pub(crate) now: Time,
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
            drawn_by: self.drawn_by,
            now: self.now,
        }
    }

    fn admits(&self, fingerprint: &Fingerprint) -> bool {
        self.drawn_by.is_none_or(|drawn_by| drawn_by == fingerprint)
    }
}

impl Fleet {
    /// Whether the shortest of requests would find a pair, asked as any other is.
    pub(crate) fn readiness(&self, now: Time) -> Readiness {
        let query = Query {
            ask: Ask::SHORTEST,
            content: &Content::default(),
            excluded: &BTreeSet::new(),
            drawn_by: None,
            now,
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

    /// Chooses in each group and takes the cheapest choice.
    pub(crate) fn choose(&self, query: &Query) -> Result<Choice, NoPlace> {
        self.choose_among(query, |worker| !worker.draining)
    }

    fn choose_among(
        &self,
        query: &Query,
        counts: impl Fn(&Worker) -> bool,
    ) -> Result<Choice, NoPlace> {
        let mut best: Result<Choice, NoPlace> = Err(NoPlace::NoWorker);
        let groups = self.groups.iter();
        for (_, group) in groups.filter(|(fingerprint, _)| query.admits(fingerprint)) {
            let candidates = self.candidates(group, query, &counts);
            let choice = policy::choose(&candidates, &query.ask);
            best = match (best, choice) {
                (Ok(old), Ok(new)) => Ok(if new.cost < old.cost { new } else { old }),
                (Ok(old), Err(_)) => Ok(old),
                (Err(_), Ok(new)) => Ok(new),
                (Err(old), Err(new)) => Err(old.max(new)),
            };
        }
        best
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
        self.lives(&group.workers)
            .filter(|worker| counts(worker))
            .map(|worker| {
                let blocks = cached.get(&worker.me.worker).copied().unwrap_or(0);
                self.candidate(worker, query, blocks)
            })
            .collect()
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
        self.at_best(who, query)
            .is_some_and(|candidate| policy::has_room(&candidate, &query.ask))
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
