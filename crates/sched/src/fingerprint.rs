//! Which states of a brain are one.
//!
//! Owns: what of a brain's state decides its future, in a form that does not depend on how it came
//! about. Never: hashes a statistic, or a number that only counts.
//! Invariant: two brains born alike with equal fingerprints say the same to the same facts, told the
//! same span after each, but for times in notes and hints when to come back.

use crate::Brain;
use crate::crowd::Wish;
use crate::plan::LATE_STEPS;
use crate::sequence::{Sequence, Stage, Times};
use cleave_domain::{Load, Request, Sampling, Slo, StopRules, Time};
use std::hash::{Hash, Hasher};

impl Brain {
    /// Hashes exactly what decides how the brain will behave, so that a model checker may take two
    /// states with equal fingerprints for one. Times count from now, arrivals by their order alone,
    /// steps where prices are known, by the turn of those who are late, and else not at all (those under
    /// way are answered in order, and an answer to an earlier one is ignored). To be asked once everything was
    /// polled.
    ///
    /// Left out: what it was told at birth, other than its life and the role it has now; how long
    /// steps took, which only says when to come back; when things happened that are only noted; the
    /// order in which the thousands of past hand-offs will be forgotten.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            limits,
            now,
            pool,
            sequences,
            past,
            moves,
            // Follow from the sequences.
            active: _,
            slots: _,
            leases,
            stalls,
            resends,
            under_way,
            routers,
            severed,
            steps,
            arrivals: _,
            step_mean: _,
            swap_prices,
            acceptance,
            tiers,
            learner,
            told,
            // Follows from the prices.
            quantum: _,
            chunked,
            draining,
            wish,
            stirred,
            load_told,
            pool_told: _,
            outputs,
        } = self;
        assert!(outputs.is_empty(), "something is still to be polled");
        (limits.me, limits.role, draining).hash(hasher);
        pool.fingerprint(hasher);
        tiers.fingerprint(*now, |touched| pool.older(touched), hasher);
        sequences.len().hash(hasher);
        self.hash_sequences(hasher);
        for (handoff, leaving) in moves {
            (handoff, &leaving.order, &leaving.sender).hash(hasher);
            (leaving.exported, leaving.still.is_some()).hash(hasher);
        }
        past.hash(hasher);
        for deadlines in [leases, stalls, tiers.patience()] {
            for (handoff, until) in deadlines.iter() {
                (handoff, until.since(*now)).hash(hasher);
            }
        }
        for (handoff, due, span) in resends.iter() {
            (handoff, due.map(|due| due.since(*now)), span).hash(hasher);
        }
        under_way.len().hash(hasher);
        for step in under_way {
            let left = (step.since + limits.step_max).since(*now);
            (step.stuck, step.void, left).hash(hasher);
            (&step.placed, &step.drafts).hash(hasher);
        }
        if let Some(Wish { handoff, said }) = wish {
            (handoff, now.since(*said)).hash(hasher);
        }
        (routers, severed, swap_prices, stirred).hash(hasher);
        (learner.prices(), learner.state(), acceptance).hash(hasher);
        if learner.knows() {
            told.fingerprint(*now).hash(hasher);
            (chunked.map(|at| now.since(at)), steps % LATE_STEPS).hash(hasher);
        }
        hash_load(load_told, hasher);
    }

    /// In the order of rank: whoever arrived earlier comes first.
    fn hash_sequences(&self, hasher: &mut impl Hasher) {
        let mut by_rank: Vec<_> = self.sequences.values().collect();
        by_rank.sort_unstable_by_key(|sequence| sequence.rank);
        for sequence in by_rank {
            sequence.fingerprint(self.now, hasher);
            if self.learner.knows() {
                sequence.pace.fingerprint(self.now).hash(hasher);
                sequence.rank.due.since(self.now).hash(hasher);
            }
        }
    }
}

fn hash_load(load: &Load, hasher: &mut impl Hasher) {
    let Load {
        queue_tokens,
        sequences_waiting,
        sequences_running,
        blocks_free,
        progress,
        context_tokens,
        streams,
        backlog,
        tpot_least,
        step_left,
        orders_heard,
    } = load;
    let waiting = (sequences_waiting, sequences_running);
    (queue_tokens, waiting, blocks_free, progress).hash(hasher);
    (context_tokens, streams, backlog, tpot_least).hash(hasher);
    (step_left, orders_heard).hash(hasher);
}

impl Sequence {
    fn fingerprint(&self, now: Time, hasher: &mut impl Hasher) {
        let Self {
            rank,
            router,
            request,
            unmet,
            stage,
            phase,
            incoming,
            outgoing,
            moving,
            swap,
            fetch,
            peered,
            tokens,
            computed,
            table,
            promise,
            // Follow from the tokens.
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
            // Counts only where there are prices: the brain adds it then.
            pace: _,
        } = self;
        let Times {
            accepted: _,
            started,
            sending: _,
            sealed: _,
            drawn: _,
        } = times;
        (rank.handoff, rank.priority, now.since(rank.since), router).hash(hasher);
        hash_request(request, hasher);
        let stage = match stage {
            Stage::Reserved => 0_u8,
            Stage::Active => 1,
            Stage::Sending => 2,
            Stage::Still => 3,
            Stage::Closing { cancelled: None } => 4,
            Stage::Closing { cancelled: Some(_) } => 5,
        };
        (stage, unmet, phase, incoming, outgoing, moving).hash(hasher);
        (swap, fetch, peered, tokens, computed, table, promise).hash(hasher);
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
        // In the rank.
        priority: _,
        cache_salt,
        slo,
    } = request;
    let StopRules {
        max_tokens,
        min_tokens,
        stop_tokens,
    } = stop;
    // The tokens themselves are the sequence's.
    (prompt.len(), generated.len(), cache_salt).hash(hasher);
    (max_tokens, min_tokens, stop_tokens).hash(hasher);
    let Slo {
        // Whose it is, the router minds.
        class: _,
        tenant: _,
        ttft,
        priority,
        tpot,
        // Its parts are promised to workers.
        e2e: _,
    } = slo;
    (ttft, tpot, priority).hash(hasher);
    hash_sampling(sampling, hasher);
}

fn hash_sampling(sampling: &Sampling, hasher: &mut impl Hasher) {
    let Sampling {
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
