//! The part of a sequence that decides its future, for fingerprints of the brain.
//!
//! Owns: the choice of fields. Never: hashes a statistic, or what follows from the tokens.

use super::{SequenceStage, SequenceTable, SequenceTimes, WorkerSequence};
use crate::forecast::WorkForecast;
use cleave_domain::{Request, RequestSlo, SamplingParams, StopRules, Time};
use std::hash::{Hash, Hasher};

impl SequenceTable {
    /// Hashes all sequences in the order of rank, by which earlier arrivals come first.
    pub(crate) fn fingerprint(&self, now: Time, forecast: &WorkForecast, hasher: &mut impl Hasher) {
        self.len().hash(hasher);
        let mut by_rank: Vec<_> = self.iter().collect();
        by_rank.sort_unstable_by_key(|sequence| sequence.rank);
        for sequence in by_rank {
            sequence.fingerprint(now, hasher);
            if forecast.has_prices() {
                sequence.client_timing.fingerprint(now).hash(hasher);
                sequence.rank.due.since(now).hash(hasher);
            }
        }
    }
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
            kv,
            peer_state_open,
            tokens,
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
        (kv.swap(), kv.fetch(), peer_state_open, tokens).hash(hasher);
        kv.fingerprint(hasher);
        (kv.published(), exported, slot, opened, steps_count).hash(hasher);
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
        top_n_sigma,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        logit_bias,
        seed,
        logprobs,
        prompt_logprobs,
        constraint,
    } = sampling;
    let shares = [temperature, top_p, min_p, top_n_sigma].map(|number| number.to_bits());
    let penalties = [repetition_penalty, presence_penalty, frequency_penalty];
    let penalties = penalties.map(|number| number.to_bits());
    (shares, penalties, top_k, seed, logprobs, prompt_logprobs).hash(hasher);
    for (token, bias) in logit_bias {
        (token, bias.to_bits()).hash(hasher);
    }
    constraint.hash(hasher);
}
