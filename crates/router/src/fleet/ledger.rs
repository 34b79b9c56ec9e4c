//! Claims on a worker that it has not released.
//!
//! Owns: the claims on one worker in one incarnation, and their sums. Never: sends anything.
//! Invariant: the sums equal the sum over the claims; a claim is removed only when the worker
//! reported that nothing of it is left, refused it, or is gone.
//!
//! A worker's `Load` is older than the orders still on their way to it. Later claims are therefore
//! added to it, or a burst would all go to the worker that was idle a moment ago.

use cleave_domain::{HandoffId, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const URGENCIES: usize = 27;

/// One hand-off's claim on one worker. A worker that serves both legs has one claim for both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct LegClaim {
    /// Prompt tokens to compute here; 0 once they are.
    pub(crate) tokens: u64,
    /// Blocks to hold here as decode leg; 0 on a pure prefill leg.
    pub(crate) blocks: u32,
    /// An order of this hand-off was sent; before that nothing needs to be cancelled.
    pub(crate) ordered: bool,
    /// The worker has answered it.
    pub(crate) answered: bool,
    /// The worker's last `Load` may not include it.
    pub(crate) unreported: bool,
    pub(crate) renewed: bool,
    /// Its stream is known to run here, where times are known.
    pub(crate) runs: bool,
    /// Time that its prompt adds to the work here, and its urgency at placement, as an entry of a
    /// `PrefillBacklog`, one band after the other; zero where prices are unknown.
    pub(crate) work: Duration,
    pub(crate) urgency: usize,
    /// Number of the last order that this claim needs; none before that was sent.
    pub(crate) order: Option<u64>,
    /// The mean gap between tokens that its client was promised, if it decodes here.
    pub(crate) tpot: Option<Duration>,
    /// When its stream is expected to run here, and with how many tokens; [`StreamSpan::NONE`]
    /// where prices are unknown.
    pub(crate) span: StreamSpan,
    /// It was placed to decode here against the worker's role: the role alone is no reason to move
    /// it.
    pub(crate) guest: bool,
}

impl LegClaim {
    /// A claim that the worker has not received yet.
    pub(crate) const NEW: Self = Self {
        tokens: 0,
        blocks: 0,
        ordered: false,
        answered: false,
        unreported: true,
        renewed: true,
        runs: false,
        work: Duration::ZERO,
        urgency: 0,
        order: None,
        tpot: None,
        span: StreamSpan::NONE,
        guest: false,
    };

    /// Whether its prompt runs elsewhere, and its stream has yet to arrive.
    fn is_arriving(&self) -> bool {
        self.arrives_at().is_some()
    }

    /// When its stream arrives, if it is still to come.
    fn arrives_at(&self) -> Option<Time> {
        let streams = self.blocks > 0 && self.tokens == 0;
        let arriving = streams && !self.runs && self.span != StreamSpan::NONE;
        arriving.then_some(self.span.from)
    }

    /// Whether a load of a worker that had received so many orders includes it. A worker that
    /// counts no orders is assumed to include what it has answered, and prompts, which are not
    /// answered, at once.
    fn is_in_load(&self, orders_received: u64) -> bool {
        match orders_received {
            0 => self.answered || (self.ordered && self.blocks == 0),
            received => self.order.is_some_and(|order| order <= received),
        }
    }
}

/// When a stream is expected to run, and its mean length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct StreamSpan {
    pub(crate) from: Time,
    pub(crate) until: Time,
    pub(crate) tokens: u32,
}

impl StreamSpan {
    pub(crate) const NONE: Self = Self {
        from: Time::ZERO,
        until: Time::ZERO,
        tokens: 0,
    };

    /// The span as it is known now: a late arrival is imminent, and an overdue end is an eighth of
    /// its length ahead.
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

/// Sums over the claims on a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LedgerTotals {
    /// Claims that the worker's load does not include yet; each takes a state slot, where the model
    /// has states.
    pub(crate) claims_fresh: u32,
    pub(crate) prompts: u32,
    pub(crate) tokens: u64,
    pub(crate) tokens_fresh: u64,
    pub(crate) sequences: u32,
    pub(crate) sequences_fresh: u32,
    /// The part of the sequences that stays although the worker's role is another.
    pub(crate) guests: u32,
    pub(crate) blocks: u64,
    pub(crate) blocks_fresh: u32,
    /// Sequences whose prompt has been computed, or is being computed elsewhere.
    pub(crate) streams: u32,
    /// The part of these still to arrive: they need a slot only then.
    pub(crate) arriving: u32,
    /// Sequences without a target for their gap, their blocks, and those of them still to arrive:
    /// they are deferred where others' gaps need the step.
    pub(crate) without_tpot: u32,
    pub(crate) unpaced_blocks: u64,
    pub(crate) unpaced_arriving: u32,
    /// Work of prompts in nanoseconds, by urgency.
    pub(crate) work: [u64; URGENCIES],
    pub(crate) work_fresh: [u64; URGENCIES],
}

#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerLedger {
    claims: BTreeMap<HandoffId, LegClaim>,
    /// Claims that are `fresh`, so that a `Load` costs no walk over the others.
    fresh: BTreeSet<HandoffId>,
    totals: LedgerTotals,
    tpots: BTreeSet<(Duration, HandoffId)>,
    /// Streams still to arrive, by time.
    arriving: BTreeSet<(Time, HandoffId)>,
    /// The first entry of `tpots`, stored separately: every forecast reads it of every worker, and
    /// the descent in a tree to its first leaf costs more than all other reads of most workers.
    tpot_first: Option<Duration>,
    /// Since when the worker has been working on `work`: its first prompt was claimed then, or the
    /// previous one was done.
    pub(crate) at_work_since: Time,
}

impl WorkerLedger {
    pub(crate) fn totals(&self) -> &LedgerTotals {
        &self.totals
    }

    pub(crate) fn get(&self, handoff: HandoffId) -> Option<&LegClaim> {
        self.claims.get(&handoff)
    }

    pub(crate) fn handoffs(&self) -> impl Iterator<Item = (HandoffId, &LegClaim)> {
        self.claims.iter().map(|(id, claim)| (*id, claim))
    }

    /// The tightest mean gap promised here that is no shorter than `step`: a gap that no step can
    /// keep binds nothing.
    pub(crate) fn tpot_least(&self, step: Duration) -> Option<Duration> {
        if self.tpot_first? >= step {
            return self.tpot_first;
        }
        let mut keepable = self.tpots.range((step, HandoffId::default())..);
        keepable.next().map(|(tpot, _)| *tpot)
    }

    pub(crate) fn open(&mut self, handoff: HandoffId, claim: LegClaim, now: Time) {
        let before = self.claims.insert(handoff, claim);
        assert!(before.is_none(), "{handoff} was claimed twice");
        if self.totals.work.iter().all(|work| *work == 0) {
            self.at_work_since = now;
        }
        self.totals.add(&claim);
        self.index_arrival(handoff, None, claim.arrives_at());
        if claim.unreported {
            self.fresh.insert(handoff);
        }
        if let Some(tpot) = claim.tpot {
            self.tpots.insert((tpot, handoff));
            self.tpot_first = self.tpots.first().map(|(tpot, _)| *tpot);
        }
    }

    pub(crate) fn close(&mut self, handoff: HandoffId, now: Time) -> Option<LegClaim> {
        let claim = self.claims.remove(&handoff)?;
        self.totals.take(&claim);
        self.index_arrival(handoff, claim.arrives_at(), None);
        self.fresh.remove(&handoff);
        if let Some(tpot) = claim.tpot {
            self.tpots.remove(&(tpot, handoff));
            self.tpot_first = self.tpots.first().map(|(tpot, _)| *tpot);
        }
        if !claim.work.is_zero() {
            self.at_work_since = now;
        }
        Some(claim)
    }

    /// Records that its stream runs here now.
    pub(crate) fn began(&mut self, handoff: HandoffId, now: Time) {
        self.change(handoff, |claim| {
            let lasts = claim.span.until.since(claim.span.from);
            if !lasts.is_zero() {
                claim.span.from = now;
                claim.span.until = now + lasts;
                claim.runs = true;
            }
        });
    }

    /// Expected spans of the streams here; `paced` leaves out those without a target for their gap.
    pub(crate) fn spans(&self, paced: bool, now: Time) -> impl Iterator<Item = StreamSpan> {
        let streams = self.claims.values().filter(|p| p.blocks > 0);
        let streams = streams.filter(move |p| !paced || p.tpot.is_some());
        streams.map(move |p| p.span.now(p.runs, now))
    }

    /// Whether at least `count` of the streams still to come arrive later than `by`.
    pub(crate) fn arrive_after(&self, by: Time, count: u32) -> bool {
        let later = by + Duration::from_nanos(1);
        let later = self.arriving.range((later, HandoffId::default())..);
        later.take(count as usize).count() == count as usize
    }

    fn index_arrival(&mut self, handoff: HandoffId, before: Option<Time>, after: Option<Time>) {
        if before != after {
            if let Some(before) = before {
                self.arriving.remove(&(before, handoff));
            }
            self.arriving.extend(after.map(|after| (after, handoff)));
        }
    }

    /// Records that the prompt was computed.
    pub(crate) fn prompt_done(&mut self, handoff: HandoffId, now: Time) {
        let worked = self.get(handoff).is_some_and(|p| !p.work.is_zero());
        self.change(handoff, |claim| {
            claim.tokens = 0;
            claim.work = Duration::ZERO;
            claim.answered = true;
        });
        if worked {
            self.at_work_since = now;
        }
    }

    /// Changes a claim, if there is one; its `tpot` must stay.
    pub(crate) fn change(&mut self, handoff: HandoffId, edit: impl FnOnce(&mut LegClaim)) {
        let Some(claim) = self.claims.get_mut(&handoff) else {
            return;
        };
        self.totals.take(claim);
        let before = claim.arrives_at();
        edit(claim);
        self.totals.add(claim);
        let after = claim.arrives_at();
        if claim.unreported {
            self.fresh.insert(handoff);
        } else {
            self.fresh.remove(&handoff);
        }
        self.index_arrival(handoff, before, after);
    }

    /// Clears the mark of guests after a change of role: they were placed for another role.
    pub(crate) fn clear_guests(&mut self) {
        for claim in self.claims.values_mut() {
            claim.guest = false;
        }
        self.totals.guests = 0;
    }

    /// Handles a load that includes so many orders: claims of these need not be added any more.
    /// Open claims still bound the load from below.
    pub(crate) fn settle(&mut self, orders_received: u64) {
        for handoff in self.settled_by(orders_received) {
            self.change(handoff, |claim| claim.unreported = false);
        }
    }

    /// The claims that a load with this many orders would include.
    pub(crate) fn settled_by(&self, orders_received: u64) -> Vec<HandoffId> {
        let claim = |id: &&HandoffId| self.claims.get(id);
        let received = |id: &&HandoffId| claim(id).is_some_and(|p| p.is_in_load(orders_received));
        self.fresh.iter().filter(received).copied().collect()
    }

    pub(crate) fn check(&self) {
        let mut totals = LedgerTotals::default();
        for (handoff, claim) in &self.claims {
            totals.add(claim);
            assert_eq!(claim.unreported, self.fresh.contains(handoff), "{handoff}");
            let entry = claim.tpot.map(|tpot| (tpot, *handoff));
            let indexed = entry.is_none_or(|entry| self.tpots.contains(&entry));
            assert!(indexed, "the target gap of {handoff} is not indexed");
            let arrival = claim.arrives_at().map(|arrival| (arrival, *handoff));
            let indexed = arrival.is_none_or(|arrival| self.arriving.contains(&arrival));
            assert!(indexed, "the arrival of {handoff} is not indexed");
        }
        let paced = self.claims.values().filter(|p| p.tpot.is_some());
        assert_eq!(
            paced.count(),
            self.tpots.len(),
            "a target gap outlived its flight"
        );
        let arriving = totals.arriving as usize;
        assert_eq!(
            arriving,
            self.arriving.len(),
            "an arrival is indexed without a claim"
        );
        let first = self.tpots.first().map(|(tpot, _)| *tpot);
        assert_eq!(first, self.tpot_first, "the stored tightest gap is wrong");
        assert_eq!(totals, self.totals, "a worker's sums are wrong");
    }
}

impl LedgerTotals {
    fn add(&mut self, claim: &LegClaim) {
        let fresh = u32::from(claim.unreported);
        let sequence = u32::from(claim.blocks > 0);
        let work = nanos(claim.work);
        self.claims_fresh += fresh;
        self.prompts += u32::from(claim.tokens > 0);
        self.tokens += claim.tokens;
        self.tokens_fresh += claim.tokens * u64::from(fresh);
        self.sequences += sequence;
        self.sequences_fresh += sequence * fresh;
        self.guests += sequence * u32::from(claim.guest);
        self.blocks += u64::from(claim.blocks);
        self.blocks_fresh += claim.blocks * fresh;
        self.streams += u32::from(claim.blocks > 0 && claim.tokens == 0);
        self.arriving += u32::from(claim.is_arriving());
        if claim.tpot.is_none() {
            self.without_tpot += sequence;
            self.unpaced_arriving += u32::from(claim.is_arriving());
            self.unpaced_blocks += u64::from(claim.blocks);
        }
        self.work[claim.urgency] += work;
        self.work_fresh[claim.urgency] += work * u64::from(fresh);
    }

    fn take(&mut self, claim: &LegClaim) {
        let fresh = u32::from(claim.unreported);
        let sequence = u32::from(claim.blocks > 0);
        let work = nanos(claim.work);
        self.claims_fresh -= fresh;
        self.prompts -= u32::from(claim.tokens > 0);
        self.tokens -= claim.tokens;
        self.tokens_fresh -= claim.tokens * u64::from(fresh);
        self.sequences -= sequence;
        self.sequences_fresh -= sequence * fresh;
        self.guests -= sequence * u32::from(claim.guest);
        self.blocks -= u64::from(claim.blocks);
        self.blocks_fresh -= claim.blocks * fresh;
        self.streams -= u32::from(claim.blocks > 0 && claim.tokens == 0);
        self.arriving -= u32::from(claim.is_arriving());
        if claim.tpot.is_none() {
            self.without_tpot -= sequence;
            self.unpaced_arriving -= u32::from(claim.is_arriving());
            self.unpaced_blocks -= u64::from(claim.blocks);
        }
        self.work[claim.urgency] -= work;
        self.work_fresh[claim.urgency] -= work * u64::from(fresh);
    }
}

/// One hour at most, so that sums do not overflow with any reported prices.
fn nanos(work: Duration) -> u64 {
    work.min(Duration::from_secs(3600)).as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::FlightId;

    const MS: Duration = Duration::from_millis(1);

    fn at(millis: u32) -> Time {
        Time::ZERO + MS * millis
    }

    fn handoff(number: u64) -> HandoffId {
        HandoffId {
            flight: FlightId(number),
            attempt: 0,
        }
    }

    fn span(from: u32, until: u32) -> StreamSpan {
        StreamSpan {
            from: at(from),
            until: at(until),
            tokens: 9,
        }
    }

    /// A prompt of 40 tokens whose stream stays here.
    fn whole() -> LegClaim {
        LegClaim {
            tokens: 40,
            blocks: 3,
            work: MS * 7,
            urgency: 2,
            tpot: Some(MS * 20),
            span: span(10, 50),
            ..LegClaim::NEW
        }
    }

    /// A stream whose prompt runs elsewhere.
    fn arriving_stream(from: u32) -> LegClaim {
        LegClaim {
            blocks: 5,
            span: span(from, from + 80),
            ..LegClaim::NEW
        }
    }

    #[test]
    fn an_overdue_span_continues_for_an_eighth_of_its_length() {
        let late = |runs, now| {
            let span = span(100, 180).now(runs, at(now));
            (span.from, span.until, span.tokens)
        };
        assert_eq!(late(false, 50), (at(100), at(180), 9));
        assert_eq!(late(false, 130), (at(130), at(210), 9), "about to come");
        assert_eq!(late(true, 130), (at(130), at(180), 9));
        // An eighth of 80 ms is still to go at least.
        assert_eq!(late(true, 175), (at(175), at(185), 9));
        assert_eq!(late(true, 500), (at(500), at(510), 9));
    }

    #[test]
    fn sums_follow_claims_that_open_change_and_close() {
        let mut ledger = WorkerLedger::default();
        let guest = LegClaim {
            guest: true,
            unreported: false,
            tokens: 2,
            blocks: 4,
            ..LegClaim::NEW
        };
        ledger.open(handoff(1), whole(), at(1));
        ledger.open(handoff(2), arriving_stream(30), at(2));
        ledger.open(handoff(3), guest, at(3));
        let mut expected = LedgerTotals {
            prompts: 2,
            tokens: 42,
            tokens_fresh: 40,
            sequences: 3,
            sequences_fresh: 2,
            guests: 1,
            blocks: 12,
            blocks_fresh: 8,
            claims_fresh: 2,
            streams: 1,
            arriving: 1,
            without_tpot: 2,
            unpaced_blocks: 9,
            unpaced_arriving: 1,
            ..LedgerTotals::default()
        };
        (expected.work[2], expected.work_fresh[2]) = (7_000_000, 7_000_000);
        assert_eq!(*ledger.totals(), expected);
        ledger.check();
        ledger.change(handoff(1), |claim| claim.unreported = false);
        expected.work_fresh[2] = 0;
        let expected = LedgerTotals {
            tokens_fresh: 0,
            sequences_fresh: 1,
            claims_fresh: 1,
            blocks_fresh: 5,
            ..expected
        };
        assert_eq!(*ledger.totals(), expected);
        ledger.check();
        for number in 1..=3 {
            assert!(ledger.close(handoff(number), at(4)).is_some());
            ledger.check();
        }
        assert_eq!(*ledger.totals(), LedgerTotals::default());
        assert_eq!(ledger.close(handoff(1), at(5)), None);
    }

    #[test]
    fn a_worker_is_at_work_since_its_first_prompt_or_the_last_done() {
        let mut ledger = WorkerLedger::default();
        ledger.open(handoff(1), whole(), at(1));
        ledger.open(handoff(2), whole(), at(2));
        ledger.open(handoff(3), arriving_stream(30), at(3));
        assert_eq!(ledger.at_work_since, at(1));
        ledger.prompt_done(handoff(1), at(4));
        assert_eq!(ledger.at_work_since, at(4));
        let done = ledger.get(handoff(1)).copied();
        let done = done.map(|p| (p.tokens, p.work, p.answered));
        assert_eq!(done, Some((0, Duration::ZERO, true)));
        ledger.prompt_done(handoff(3), at(5));
        ledger.close(handoff(1), at(6));
        assert_eq!(ledger.at_work_since, at(4), "no work was left of them");
        ledger.close(handoff(2), at(7));
        assert_eq!(ledger.at_work_since, at(7));
        ledger.open(handoff(4), whole(), at(9));
        assert_eq!(ledger.at_work_since, at(9), "nothing was left");
        ledger.check();
    }

    #[test]
    fn a_load_settles_the_claims_that_it_includes() {
        let mut ledger = WorkerLedger::default();
        let order = |order| LegClaim {
            order: Some(order),
            ..whole()
        };
        ledger.open(handoff(1), order(1), at(0));
        ledger.open(handoff(2), order(2), at(0));
        let prompt = LegClaim {
            tokens: 40,
            ordered: true,
            ..LegClaim::NEW
        };
        ledger.open(handoff(3), prompt, at(0));
        let answered = LegClaim {
            answered: true,
            ..whole()
        };
        ledger.open(handoff(4), answered, at(0));
        // A worker that counts no orders has received what it answered, and prompts.
        assert_eq!(ledger.settled_by(0), [handoff(3), handoff(4)]);
        assert_eq!(ledger.settled_by(1), [handoff(1)]);
        assert_eq!(ledger.settled_by(2), [handoff(1), handoff(2)]);
        ledger.settle(1);
        assert_eq!(ledger.settled_by(2), [handoff(2)]);
        assert_eq!(ledger.totals().sequences_fresh, 2);
        ledger.check();
    }

    #[test]
    fn the_tightest_gap_is_the_shortest_that_a_step_keeps() {
        let mut ledger = WorkerLedger::default();
        assert_eq!(ledger.tpot_least(MS), None);
        for (number, tpot) in [(1, 20), (2, 10), (3, 30)] {
            let tpot = Some(MS * tpot);
            ledger.open(handoff(number), LegClaim { tpot, ..whole() }, at(0));
        }
        let least = |ledger: &WorkerLedger, step| ledger.tpot_least(MS * step);
        assert_eq!(least(&ledger, 10), Some(MS * 10));
        assert_eq!(least(&ledger, 11), Some(MS * 20));
        assert_eq!(least(&ledger, 31), None);
        ledger.close(handoff(2), at(0));
        assert_eq!(least(&ledger, 10), Some(MS * 20));
        ledger.check();
    }

    #[test]
    fn streams_of_other_workers_arrive_later_or_run() {
        let mut ledger = WorkerLedger::default();
        for (number, from) in [(1, 30), (2, 40), (3, 40)] {
            ledger.open(handoff(number), arriving_stream(from), at(0));
        }
        let later = |ledger: &WorkerLedger, by| {
            let all = (1..=4).take_while(|count| ledger.arrive_after(at(by), *count));
            all.count()
        };
        assert_eq!([29, 30, 39, 40].map(|by| later(&ledger, by)), [3, 2, 2, 0]);
        ledger.began(handoff(2), at(60));
        assert_eq!(later(&ledger, 39), 1);
        assert_eq!(ledger.totals().arriving, 2);
        let began = ledger.get(handoff(2)).map(|p| (p.span, p.runs));
        assert_eq!(began, Some((span(60, 140), true)));
        ledger.check();
        let paced = LegClaim {
            tpot: Some(MS),
            ..arriving_stream(90)
        };
        ledger.open(handoff(4), paced, at(60));
        let spans = |paced| ledger.spans(paced, at(60)).map(|span| span.from);
        assert_eq!(spans(true).collect::<Vec<_>>(), [at(90)]);
        assert_eq!(spans(false).count(), 4);
    }
}
