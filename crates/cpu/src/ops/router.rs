//! The choice of experts for one row.
//!
//! Owns: the router's formula from logits on. Never: multiplies, or knows another row.
//! Invariant: of equal scores the expert or group of the lower index is chosen.

use cleave_cpu_kernels::kernel::CpuKernels;
use cleave_engine::ops::{
    ChosenWeights, ExpertGroups, ExpertsSpec, GroupScore, RouterScore, RouterSpec,
};

/// Experts of a row in ascending order, and their weights.
pub(super) struct RowChoice<'a> {
    pub(super) experts: &'a mut [u32],
    pub(super) weights: &'a mut [f32],
}

/// Chooses a row's experts. `logits` `(experts)` become scores.
///
/// # Safety
/// The processor has the kernels' instructions.
pub(super) unsafe fn choose(
    kernels: &CpuKernels,
    spec: &ExpertsSpec,
    choice_bias: Option<&[f32]>,
    logits: &mut [f32],
    choice: RowChoice<'_>,
) {
    let RowChoice { experts, weights } = choice;
    let RouterSpec {
        score,
        has_bias: _,
        has_choice_bias: _,
        groups,
        weights: rule,
        scale,
    } = spec.router;
    // SAFETY: as the caller promises.
    unsafe {
        match score {
            RouterScore::Softmax => (kernels.softmax)(logits),
            RouterScore::Sigmoid => (kernels.sigmoid)(logits),
            RouterScore::Identity => {}
        }
    }
    let scores = &*logits;
    let biased = |expert: usize| scores[expert] + choice_bias.map_or(0.0, |bias| bias[expert]);
    let mut best = BestExperts {
        experts,
        // The weights' memory has the scores of the choice until all are chosen.
        scores: weights,
        len: 0,
    };
    for expert in 0..spec.count {
        let is_open = groups.is_none_or(|groups| {
            let each = spec.count / groups.count;
            is_group_chosen(&groups, each, expert / each, &biased)
        });
        if is_open {
            best.offer(expert, biased(expert));
        }
    }
    experts.sort_unstable();
    for (weight, expert) in weights.iter_mut().zip(experts.iter()) {
        *weight = scores[*expert as usize];
    }
    match rule {
        ChosenWeights::Scores => {}
        ChosenWeights::Normalized { epsilon } => {
            let sum = weights.iter().sum::<f32>() + epsilon;
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        // SAFETY: as the caller promises.
        ChosenWeights::Softmax => unsafe { (kernels.softmax)(weights) },
    }
    weights.iter_mut().for_each(|weight| *weight *= scale);
}

/// The experts with the largest scores so far, the largest first.
struct BestExperts<'a> {
    experts: &'a mut [u32],
    scores: &'a mut [f32],
    len: usize,
}

impl BestExperts<'_> {
    /// Takes an expert if fewer are better. Experts are offered in ascending order, so that one
    /// that comes later does not displace an equal one.
    fn offer(&mut self, expert: usize, score: f32) {
        let better = self.scores[..self.len]
            .iter()
            .take_while(|other| **other >= score);
        let place = if score.is_nan() {
            self.len
        } else {
            better.count()
        };
        if place == self.experts.len() {
            return;
        }
        let last = self.len.min(self.experts.len() - 1);
        self.experts.copy_within(place..last, place + 1);
        self.scores.copy_within(place..last, place + 1);
        (self.experts[place], self.scores[place]) = (expert as u32, score);
        self.len = last + 1;
    }
}

/// Whether a group of `each` experts is one of the best.
fn is_group_chosen(
    groups: &ExpertGroups,
    each: usize,
    group: usize,
    biased: &dyn Fn(usize) -> f32,
) -> bool {
    let score_of = |group: usize| group_score(groups.score, group * each, each, biased);
    let own = score_of(group);
    let is_better = |other: &usize| {
        let score = score_of(*other);
        score > own || (score == own && *other < group)
    };
    (0..groups.count).filter(is_better).count() < groups.chosen
}

fn group_score(score: GroupScore, first: usize, each: usize, biased: &dyn Fn(usize) -> f32) -> f32 {
    let scores = (first..first + each).map(biased);
    let (largest, second) = scores.fold(
        (f32::NEG_INFINITY, f32::NEG_INFINITY),
        |(largest, second), score| {
            if score > largest {
                (score, largest)
            } else {
                (largest, second.max(score))
            }
        },
    );
    match score {
        GroupScore::Max => largest,
        GroupScore::TwoBestSum => largest + second,
    }
}
