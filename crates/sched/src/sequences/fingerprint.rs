//! The part of a sequence that decides its future, for fingerprints of the brain.
//!
//! Owns: the choice of fields. Never: hashes a statistic, or what follows from the tokens.

use super::{SequenceStage, SequenceTable, SequenceTimes, WorkerSequence};
use crate::forecast::WorkForecast;
use cleave_domain::Time;
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
            pooled,
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
        // As bytes, because numbers with a fraction have no hash.
        let request = postcard::to_allocvec(request).expect("a vector grows as it is filled");
        request.hash(hasher);
        let cancelled = matches!(stage, SequenceStage::Closing { cancelled: Some(_) });
        (std::mem::discriminant(stage), cancelled).hash(hasher);
        (on_miss, phase, incoming, outgoing, moving).hash(hasher);
        (kv.swap(), kv.fetch(), peer_state_open, tokens).hash(hasher);
        kv.fingerprint(hasher);
        (kv.published(), exported, slot, opened, steps_count).hash(hasher);
        (
            prompt_scores.len(),
            pooled.len(),
            cached_tokens,
            started.is_some(),
        )
            .hash(hasher);
        speculating.fingerprint().hash(hasher);
    }
}

#[cfg(test)]
mod tests {
    use crate::sequences::sample::sequence;
    use cleave_domain::{Request, Time};
    use std::hash::{DefaultHasher, Hasher};
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn each_part_of_a_request_distinguishes_states() {
        let print = |change: &dyn Fn(&mut Request)| {
            let mut sequence = sequence(1, 8);
            change(Arc::make_mut(&mut sequence.request));
            let mut hasher = DefaultHasher::new();
            sequence.fingerprint(Time::ZERO, &mut hasher);
            hasher.finish()
        };
        let plain = print(&|_| {});
        assert_eq!(plain, print(&|_| {}));
        let changes: [&dyn Fn(&mut Request); 7] = [
            &|request| request.sampling.min_p = 0.5,
            &|request| request.sampling.logit_bias = vec![(1, 2.0)],
            &|request| request.sampling.seed += 1,
            &|request| request.stop.stop_tokens = [7].into(),
            &|request| request.slo.ttft = Some(Duration::from_secs(1)),
            &|request| request.cache_salt += 1,
            &|request| request.adapter = Some(cleave_domain::AdapterId([1; 16])),
        ];
        for (index, change) in changes.into_iter().enumerate() {
            assert_ne!(plain, print(change), "change {index}");
        }
    }
}
