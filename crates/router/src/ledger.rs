//! What a worker was promised and has not released.
//!
//! Owns: the promises of one worker in one life, and their sums. Never: sends anything.
//! Invariant: the sums equal what adding up the promises gives; a promise goes only when the
//! worker said that nothing of it is left, refused it, or is gone.
//!
//! A worker's `Load` is older than the orders still on their way to it. What was promised since is
//! therefore counted on top, or a burst would all go to the worker that was idle a moment ago.

use cleave_domain::{HandoffId, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Entries of a `Backlog`.
pub(crate) const URGENCIES: usize = 27;

/// One hand-off's claim on one worker. A worker that serves both legs has one promise for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Promise {
    /// Prompt tokens to compute here; 0 once they are.
    pub(crate) tokens: u64,
    /// Blocks to hold here as decode leg; 0 on a pure prefill leg.
    pub(crate) blocks: u32,
    /// An order of this hand-off was sent; before that nothing needs to be taken back.
    pub(crate) told: bool,
    /// The worker spoke of it.
    pub(crate) answered: bool,
    /// The worker's last `Load` may not include it.
    pub(crate) fresh: bool,
    /// Its lease is renewed.
    pub(crate) live: bool,
    /// Its stream is known to run here, where times are known.
    pub(crate) runs: bool,
    /// What its prompt adds to the work here, and how urgent that was when it was promised, as an entry
    /// of a `Backlog`, one band after the other; zero where nothing is known of prices.
    pub(crate) work: Duration,
    pub(crate) urgency: usize,
    /// Which of the orders to this worker tells it all of this; none before that was sent.
    pub(crate) order: Option<u64>,
    /// The mean gap between tokens that its client was promised, if it generates here.
    pub(crate) tpot: Option<Duration>,
    /// When it is expected to run here, and with how many tokens; the beginning of time where nothing
    /// is known of prices.
    pub(crate) span: Span,
    /// It was to generate here though the worker's role is another's: that is no reason to move it.
    pub(crate) guest: bool,
}

impl Promise {
    /// One that the worker has yet to hear of.
    pub(crate) const NEW: Self = Self {
        tokens: 0,
        blocks: 0,
        told: false,
        answered: false,
        fresh: true,
        live: true,
        runs: false,
        work: Duration::ZERO,
        urgency: 0,
        order: None,
        tpot: None,
        span: Span::NONE,
        guest: false,
    };

    /// Whether its prompt runs elsewhere, and its stream is still to come from there.
    fn is_away(&self) -> bool {
        self.comes().is_some()
    }

    /// When it comes, if it is away.
    fn comes(&self) -> Option<Time> {
        let streams = self.blocks > 0 && self.tokens == 0;
        let away = streams && !self.runs && self.span != Span::NONE;
        away.then_some(self.span.from)
    }

    /// Whether a load of a worker that had heard so many orders includes it. One that counts no orders
    /// has heard what it answered, and prompts, which are not answered, at once.
    fn is_heard(&self, orders_heard: u64) -> bool {
        match orders_heard {
            0 => self.answered || (self.told && self.blocks == 0),
            heard => self.order.is_some_and(|order| order <= heard),
        }
    }
}

/// When a stream is expected to run, and how long it then is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    pub(crate) from: Time,
    pub(crate) until: Time,
    pub(crate) tokens: u32,
}

impl Span {
    pub(crate) const NONE: Self = Self {
        from: Time::ZERO,
        until: Time::ZERO,
        tokens: 0,
    };

    /// The same, as it is known now: what should have come is about to, and what should have ended goes
    /// on for a while.
    fn now(self, runs: bool, now: Time) -> Self {
        let from = if runs { now } else { self.from.max(now) };
        let lasts = self.until.since(self.from);
        let until = if runs { self.until } else { from + lasts };
        Self {
            from,
            until: until.max(now + lasts / 8),
            ..self
        }
    }
}

/// Sums over a worker's promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) prompts: u32,
    pub(crate) tokens: u64,
    pub(crate) tokens_fresh: u64,
    pub(crate) sequences: u32,
    pub(crate) sequences_fresh: u32,
    /// Of the sequences, those that stay though the worker's role is another's.
    pub(crate) guests: u32,
    pub(crate) blocks: u64,
    pub(crate) blocks_fresh: u32,
    /// Sequences whose prompt has been computed, or is being computed elsewhere.
    pub(crate) streams: u32,
    /// Of these, those that have not come yet: they need a seat only then.
    pub(crate) away: u32,
    /// Sequences without a gap that was promised, their blocks, and those yet to come: they sit out where
    /// others' gaps need the step.
    pub(crate) unpaced: u32,
    pub(crate) unpaced_blocks: u64,
    pub(crate) unpaced_away: u32,
    /// Work of prompts in nanoseconds, by urgency.
    pub(crate) work: [u64; URGENCIES],
    pub(crate) work_fresh: [u64; URGENCIES],
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    promises: BTreeMap<HandoffId, Promise>,
    /// Those with `fresh`, so that a `Load` costs no walk over the others.
    fresh: BTreeSet<HandoffId>,
    totals: Totals,
    tpots: BTreeSet<(Duration, HandoffId)>,
    /// Those that are away, by when they come.
    away: BTreeSet<(Time, HandoffId)>,
    /// The first of them, which the set could tell too: every forecast asks it of every worker, and the way
    /// down a tree to its first leaf costs more than all else that is read of most of them.
    tpot_first: Option<Duration>,
    /// Since when the worker has been at what is promised in `work`: the first of it was promised then,
    /// or one before it was done.
    pub(crate) at_work_since: Time,
}

impl Ledger {
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    pub(crate) fn get(&self, handoff: HandoffId) -> Option<&Promise> {
        self.promises.get(&handoff)
    }

    pub(crate) fn handoffs(&self) -> impl Iterator<Item = (HandoffId, &Promise)> {
        self.promises.iter().map(|(id, promise)| (*id, promise))
    }

    /// The tightest mean gap between tokens promised here, of those no shorter than `step`: one that no
    /// step could keep binds nobody.
    pub(crate) fn tpot_least(&self, step: Duration) -> Option<Duration> {
        if self.tpot_first? >= step {
            return self.tpot_first;
        }
        let mut kept = self.tpots.range((step, HandoffId::default())..);
        kept.next().map(|(tpot, _)| *tpot)
    }

    pub(crate) fn open(&mut self, handoff: HandoffId, promise: Promise, now: Time) {
        let before = self.promises.insert(handoff, promise);
        assert!(before.is_none(), "{handoff} was promised twice");
        if self.totals.work.iter().all(|work| *work == 0) {
            self.at_work_since = now;
        }
        self.totals.add(&promise);
        self.expect(handoff, (None, promise.comes()));
        if promise.fresh {
            self.fresh.insert(handoff);
        }
        if let Some(tpot) = promise.tpot {
            self.tpots.insert((tpot, handoff));
            self.tpot_first = self.tpots.first().map(|(tpot, _)| *tpot);
        }
    }

    pub(crate) fn close(&mut self, handoff: HandoffId, now: Time) -> Option<Promise> {
        let promise = self.promises.remove(&handoff)?;
        self.totals.take(&promise);
        self.expect(handoff, (promise.comes(), None));
        self.fresh.remove(&handoff);
        if let Some(tpot) = promise.tpot {
            self.tpots.remove(&(tpot, handoff));
            self.tpot_first = self.tpots.first().map(|(tpot, _)| *tpot);
        }
        if !promise.work.is_zero() {
            self.at_work_since = now;
        }
        Some(promise)
    }

    /// Its stream runs here now.
    pub(crate) fn began(&mut self, handoff: HandoffId, now: Time) {
        self.change(handoff, |promise| {
            let lasts = promise.span.until.since(promise.span.from);
            if !lasts.is_zero() {
                promise.span.from = now;
                promise.span.until = now + lasts;
                promise.runs = true;
            }
        });
    }

    /// When streams are expected to run here; `paced` leaves out those whose client was promised no gap.
    pub(crate) fn spans(&self, paced: bool, now: Time) -> impl Iterator<Item = Span> {
        let streams = self.promises.values().filter(|p| p.blocks > 0);
        let streams = streams.filter(move |p| !paced || p.tpot.is_some());
        streams.map(move |p| p.span.now(p.runs, now))
    }

    /// Whether so many of those that are away come later than that.
    pub(crate) fn come_after(&self, by: Time, count: u32) -> bool {
        let later = by + Duration::from_nanos(1);
        let later = self.away.range((later, HandoffId::default())..);
        later.take(count as usize).count() == count as usize
    }

    fn expect(&mut self, handoff: HandoffId, (before, after): (Option<Time>, Option<Time>)) {
        if before != after {
            if let Some(before) = before {
                self.away.remove(&(before, handoff));
            }
            self.away.extend(after.map(|after| (after, handoff)));
        }
    }

    /// The prompt was computed.
    pub(crate) fn prompt_done(&mut self, handoff: HandoffId, now: Time) {
        let worked = self.get(handoff).is_some_and(|p| !p.work.is_zero());
        self.change(handoff, |promise| {
            promise.tokens = 0;
            promise.work = Duration::ZERO;
            promise.answered = true;
        });
        if worked {
            self.at_work_since = now;
        }
    }

    /// Changes a promise, if it is there; its `tpot` stays.
    pub(crate) fn change(&mut self, handoff: HandoffId, edit: impl FnOnce(&mut Promise)) {
        let Some(promise) = self.promises.get_mut(&handoff) else {
            return;
        };
        self.totals.take(promise);
        let before = promise.comes();
        edit(promise);
        self.totals.add(promise);
        let after = promise.comes();
        if promise.fresh {
            self.fresh.insert(handoff);
        } else {
            self.fresh.remove(&handoff);
        }
        self.expect(handoff, (before, after));
    }

    /// What generates here was placed for another role.
    pub(crate) fn no_guests(&mut self) {
        for promise in self.promises.values_mut() {
            promise.guest = false;
        }
        self.totals.guests = 0;
    }

    /// The worker reported its load, which includes so many orders. What a report gets wrong is bounded
    /// from below by the promises still open.
    pub(crate) fn settle(&mut self, orders_heard: u64) {
        for handoff in self.settled_by(orders_heard) {
            self.change(handoff, |promise| promise.fresh = false);
        }
    }

    /// What counts on top of the last load and would not on top of one with so many orders.
    pub(crate) fn settled_by(&self, orders_heard: u64) -> Vec<HandoffId> {
        let promise = |id: &&HandoffId| self.promises.get(id);
        let heard = |id: &&HandoffId| promise(id).is_some_and(|p| p.is_heard(orders_heard));
        self.fresh.iter().filter(heard).copied().collect()
    }

    pub(crate) fn check(&self) {
        let mut totals = Totals::default();
        for (handoff, promise) in &self.promises {
            totals.add(promise);
            assert_eq!(promise.fresh, self.fresh.contains(handoff), "{handoff}");
            let entry = promise.tpot.map(|tpot| (tpot, *handoff));
            let kept = entry.is_none_or(|entry| self.tpots.contains(&entry));
            assert!(kept, "{handoff}'s pace is forgotten");
            let comes = promise.comes().map(|comes| (comes, *handoff));
            let kept = comes.is_none_or(|comes| self.away.contains(&comes));
            assert!(kept, "{handoff} is not expected");
        }
        let paced = self.promises.values().filter(|p| p.tpot.is_some());
        assert_eq!(
            paced.count(),
            self.tpots.len(),
            "a pace outlived its flight"
        );
        let away = totals.away as usize;
        assert_eq!(away, self.away.len(), "who is gone is expected");
        let first = self.tpots.first().map(|(tpot, _)| *tpot);
        assert_eq!(first, self.tpot_first, "the tightest pace is another");
        assert_eq!(totals, self.totals, "a worker's sums are off");
    }
}

impl Totals {
    fn add(&mut self, promise: &Promise) {
        let fresh = u32::from(promise.fresh);
        let sequence = u32::from(promise.blocks > 0);
        let work = nanos(promise.work);
        self.prompts += u32::from(promise.tokens > 0);
        self.tokens += promise.tokens;
        self.tokens_fresh += promise.tokens * u64::from(fresh);
        self.sequences += sequence;
        self.sequences_fresh += sequence * fresh;
        self.guests += sequence * u32::from(promise.guest);
        self.blocks += u64::from(promise.blocks);
        self.blocks_fresh += promise.blocks * fresh;
        self.streams += u32::from(promise.blocks > 0 && promise.tokens == 0);
        self.away += u32::from(promise.is_away());
        if promise.tpot.is_none() {
            self.unpaced += sequence;
            self.unpaced_away += u32::from(promise.is_away());
            self.unpaced_blocks += u64::from(promise.blocks);
        }
        self.work[promise.urgency] += work;
        self.work_fresh[promise.urgency] += work * u64::from(fresh);
    }

    fn take(&mut self, promise: &Promise) {
        let fresh = u32::from(promise.fresh);
        let sequence = u32::from(promise.blocks > 0);
        let work = nanos(promise.work);
        self.prompts -= u32::from(promise.tokens > 0);
        self.tokens -= promise.tokens;
        self.tokens_fresh -= promise.tokens * u64::from(fresh);
        self.sequences -= sequence;
        self.sequences_fresh -= sequence * fresh;
        self.guests -= sequence * u32::from(promise.guest);
        self.blocks -= u64::from(promise.blocks);
        self.blocks_fresh -= promise.blocks * fresh;
        self.streams -= u32::from(promise.blocks > 0 && promise.tokens == 0);
        self.away -= u32::from(promise.is_away());
        if promise.tpot.is_none() {
            self.unpaced -= sequence;
            self.unpaced_away -= u32::from(promise.is_away());
            self.unpaced_blocks -= u64::from(promise.blocks);
        }
        self.work[promise.urgency] -= work;
        self.work_fresh[promise.urgency] -= work * u64::from(fresh);
    }
}

/// An hour at most, so that sums do not overflow whatever prices a worker tells.
fn nanos(work: Duration) -> u64 {
    work.min(Duration::from_secs(3600)).as_nanos() as u64
}
