//! Fingerprints of a brain's state, for model checking.
//!
//! Owns: the choice of state that decides the future, in a form that does not depend on how it came
//! about. Never: hashes a statistic, or a number that only counts.
//! Invariant: two brains with equal limits and equal fingerprints give the same outputs for the
//! same facts after the same spans, except for times in notes and in hints when to come back.

use crate::WorkerBrain;
use crate::sequences::{SequenceStage, SequenceTimes, WorkerSequence};
use cleave_domain::{Request, RequestSlo, SamplingParams, StopRules, Time, WorkerLoad};
use std::hash::{Hash, Hasher};

impl WorkerBrain {
    /// Hashes exactly the state that decides the brain's future, so that a model checker may merge
    /// two states with equal fingerprints. Times count from now, arrivals by their order alone; the
    /// number of steps counts where prices are known, modulo the turn of late prompts, and
    /// otherwise not at all (steps under way are answered in order, and an answer to an earlier one
    /// is ignored). The caller polls every output before.
    ///
    /// Left out: the limits, except its own identity and current role; the times that steps took,
    /// which only decide when to come back; times that are only noted; the order in which the
    /// thousands of past hand-offs will be forgotten.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            context,
            pools,
            sequences,
            recently_ended,
            moves,
            // Derived from the sequences.
            active: _,
            slots_free: _,
            leases,
            stalls,
            resends,
            fenced,
            steps,
            arrivals: _,
            swap_prices,
            acceptance,
            tiers,
            forecast,
            reports,
            pressure,
        } = self;
        let (limits, now) = (context.limits(), &context.now());
        assert!(
            !context.has_outputs(),
            "poll every output before taking a fingerprint"
        );
        (limits.me, limits.role).hash(hasher);
        reports.hash_drain(hasher);
        pools.fingerprint(hasher);
        tiers.fingerprint(*now, |touched| pools.blocks.count_older(touched), hasher);
        sequences.len().hash(hasher);
        self.hash_sequences(hasher);
        for (handoff, outbound) in moves {
            (handoff, &outbound.order, &outbound.sender).hash(hasher);
            (outbound.exported, outbound.paused_since.is_some()).hash(hasher);
        }
        recently_ended.hash(hasher);
        for deadlines in [leases, stalls, tiers.fetch_deadlines()] {
            for (handoff, until) in deadlines.iter() {
                (handoff, until.since(*now)).hash(hasher);
            }
        }
        for (handoff, due, span) in resends.iter() {
            (handoff, due.map(|due| due.since(*now)), span).hash(hasher);
        }
        steps.fingerprint(*now, limits.step_max, hasher);
        if let Some(requested) = pressure.last(*now) {
            requested.hash(hasher);
        }
        (
            reports.routers(),
            fenced,
            swap_prices,
            context.has_changed(),
        )
            .hash(hasher);
        (forecast.prices(), forecast.fingerprint(), acceptance).hash(hasher);
        if forecast.has_prices() {
            reports.turn(*now).hash(hasher);
            steps.turn(*now).hash(hasher);
        }
        hash_load(reports.load_reported(), hasher);
    }

    /// In the order of rank, by which earlier arrivals come first.
    fn hash_sequences(&self, hasher: &mut impl Hasher) {
        let mut by_rank: Vec<_> = self.sequences.values().collect();
        by_rank.sort_unstable_by_key(|sequence| sequence.rank);
        for sequence in by_rank {
            sequence.fingerprint(self.context.now(), hasher);
            if self.forecast.has_prices() {
                sequence
                    .client_timing
                    .fingerprint(self.context.now())
                    .hash(hasher);
                sequence.rank.due.since(self.context.now()).hash(hasher);
            }
        }
    }
}

fn hash_load(load: &WorkerLoad, hasher: &mut impl Hasher) {
    let WorkerLoad {
        queue_tokens,
        sequences_waiting,
        sequences_running,
        blocks_free,
        states_free,
        progress,
        context_tokens,
        streams,
        backlog,
        tpot_least,
        step_left,
        orders_received,
    } = load;
    let waiting = (sequences_waiting, sequences_running);
    (queue_tokens, waiting, blocks_free, progress).hash(hasher);
    states_free.hash(hasher);
    (context_tokens, streams, backlog, tpot_least).hash(hasher);
    (step_left, orders_received).hash(hasher);
}

impl WorkerSequence {
    fn fingerprint(&self, now: Time, hasher: &mut impl Hasher) {
        let Self {
            rank,
            router,
            request,
            on_miss,
            stage,
            phase,
            incoming,
            outgoing,
            moving,
            swap,
            fetch,
            peer_state_open,
            tokens,
            computed,
            table,
            reservation,
            state,
            // Derived from the tokens.
            hashes: _,
            published,
            exported,
            slot,
            opened,
            steps_count,
            prompt_scores,
            cached_tokens,
            times,
            speculating,
            // Matters only where prices are known: the brain adds it then.
            client_timing: _,
        } = self;
        let SequenceTimes {
            accepted: _,
            started,
            sending: _,
            sealed: _,
            drawn: _,
        } = times;
        (rank.handoff, rank.priority, now.since(rank.since), router).hash(hasher);
        hash_request(request, hasher);
        let stage = match stage {
            SequenceStage::Reserved => 0_u8,
            SequenceStage::Active => 1,
            SequenceStage::Sending => 2,
            SequenceStage::Paused => 3,
            SequenceStage::Closing { cancelled: None } => 4,
            SequenceStage::Closing { cancelled: Some(_) } => 5,
        };
        (stage, on_miss, phase, incoming, outgoing, moving).hash(hasher);
        (
            swap,
            fetch,
            peer_state_open,
            tokens,
            computed,
            table,
            reservation,
            state,
        )
            .hash(hasher);
        (published, exported, slot, opened, steps_count).hash(hasher);
        (prompt_scores.len(), cached_tokens, started.is_some()).hash(hasher);
        speculating.fingerprint().hash(hasher);
    }
}

fn hash_request(request: &Request, hasher: &mut impl Hasher) {
    let Request {
        prompt,
        generated,
        sampling,
        stop,
        // Part of the rank.
        priority: _,
        cache_salt,
        slo,
    } = request;
    let StopRules {
        max_tokens,
        min_tokens,
        stop_tokens,
    } = stop;
    // The tokens themselves are hashed with the sequence.
    (prompt.len(), generated.len(), cache_salt).hash(hasher);
    (max_tokens, min_tokens, stop_tokens).hash(hasher);
    let RequestSlo {
        // Of interest to the router only.
        class: _,
        tenant: _,
        ttft,
        priority,
        tpot,
        // Workers receive its parts instead.
        e2e: _,
    } = slo;
    (ttft, tpot, priority).hash(hasher);
    hash_sampling(sampling, hasher);
}

fn hash_sampling(sampling: &SamplingParams, hasher: &mut impl Hasher) {
    let SamplingParams {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
        logprobs,
        prompt_logprobs,
    } = sampling;
    let shares = [temperature, top_p, min_p].map(|number| number.to_bits());
    let penalties = [repetition_penalty, presence_penalty, frequency_penalty];
    let penalties = penalties.map(|number| number.to_bits());
    (shares, penalties, top_k, seed, logprobs, prompt_logprobs).hash(hasher);
    for (token, bias) in logit_bias {
        (token, bias.to_bits()).hash(hasher);
    }
}
