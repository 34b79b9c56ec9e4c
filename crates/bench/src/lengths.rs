//! Lengths of prompts and answers.
//!
//! Owns: length distributions and the scaling of lengths. Never: knows arrival times. Invariant: a
//! length is at least 1.

use crate::prompt::PromptPlan;
use crate::rng::WorkloadRng;

/// The log-normal's long tail is cut at this many times its mean.
const TAIL_MEANS_MAX: f64 = 8.0;

/// Tokens of one request: (input, output).
pub(crate) type LengthPair = (u32, u32);

/// The source of a class's lengths.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum LengthDistribution {
    /// Independent log-normals with these means; `cv` is the coefficient of variation of both, 0
    /// for fixed lengths.
    LogNormal { input: f64, output: f64, cv: f64 },
    /// Measured pairs, drawn evenly; never empty.
    Pairs(Vec<LengthPair>),
    /// Separate distributions of input and output: often only these are published.
    Histograms {
        input: LengthHistogram,
        output: LengthHistogram,
    },
}

impl LengthDistribution {
    pub(crate) fn draw(&self, rng: &mut WorkloadRng) -> LengthPair {
        match self {
            Self::LogNormal { input, output, cv } => {
                let mut draw = |mean: f64| {
                    if *cv > 0.0 {
                        round_to_tokens(rng.log_normal(mean, *cv).min(TAIL_MEANS_MAX * mean))
                    } else {
                        round_to_tokens(mean)
                    }
                };
                (draw(*input), draw(*output))
            }
            Self::Pairs(pairs) => pairs[rng.below(pairs.len())],
            Self::Histograms { input, output } => (input.draw(rng), output.draw(rng)),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LengthHistogram {
    /// First and last length in tokens, and the summed weight of this and all bins before it.
    bins: Vec<(u32, u32, f64)>,
}

impl LengthHistogram {
    /// Adds a bin of lengths `from..=to`, drawn evenly. `None` if the bin or its weight is invalid.
    pub(crate) fn add(&mut self, from: u32, to: u32, weight: f64) -> Option<()> {
        let before = self.bins.last().map_or(0.0, |bin| bin.2);
        if from > to || !weight.is_finite() || weight < 0.0 {
            return None;
        }
        if weight > 0.0 {
            self.bins.push((from, to, before + weight));
        }
        Some(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bins.is_empty()
    }

    /// Draws by inverse distribution.
    pub(crate) fn draw(&self, rng: &mut WorkloadRng) -> u32 {
        let Some(&(.., total)) = self.bins.last() else {
            return 1;
        };
        let wanted = rng.unit() * total;
        let at = self.bins.partition_point(|bin| bin.2 <= wanted);
        let (from, to, _) = self.bins[at.min(self.bins.len() - 1)];
        let inside = rng.below((to - from) as usize + 1) as u32;
        (from + inside).max(1)
    }
}

fn round_to_tokens(length: f64) -> u32 {
    (length.round() as u32).max(1)
}

/// Scaling of a workload's lengths, so that a small model can serve it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthScaling {
    /// Factor on prompt lengths.
    pub input: f64,
    /// Factor on answer lengths.
    pub output: f64,
    /// Longest prompt, in tokens; longer ones are cut.
    pub input_max: u32,
    /// Longest answer, in tokens; longer ones are cut.
    pub output_max: u32,
    /// Most tokens of prompt and answer together: a model's context. The answer gets at most half
    /// of it unless the prompt leaves more; then the prompt is cut.
    pub context_max: u32,
}

impl Default for LengthScaling {
    fn default() -> Self {
        Self {
            input: 1.0,
            output: 1.0,
            input_max: u32::MAX,
            output_max: u32::MAX,
            context_max: u32::MAX,
        }
    }
}

impl LengthScaling {
    /// Prompt and answer length after scaling.
    pub(crate) fn apply(&self, prompt: &PromptPlan, output: u32) -> (PromptPlan, u32) {
        let mut output = round_to_tokens(f64::from(output) * self.output).min(self.output_max);
        let prompt = prompt.scaled(self.input, self.input_max.min(self.context_max - 1));
        let input = prompt.tokens();
        if u64::from(input) + u64::from(output) <= u64::from(self.context_max) {
            return (prompt, output);
        }
        // The answer gets what the prompt leaves, or half of the context; the prompt the rest.
        let left = self.context_max.saturating_sub(input);
        output = output.min(left.max(self.context_max / 2)).max(1);
        (prompt.scaled(1.0, self.context_max - output), output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::DrawPurpose;

    #[test]
    fn log_normal_lengths_have_their_mean_and_cv() {
        let mut rng = WorkloadRng::new(3, DrawPurpose::Lengths);
        let lengths = LengthDistribution::LogNormal {
            input: 1000.0,
            output: 200.0,
            cv: 0.5,
        };
        let drawn: Vec<LengthPair> = (0..100_000).map(|_| lengths.draw(&mut rng)).collect();
        let mean = |of: fn(&LengthPair) -> u32| {
            drawn.iter().map(|pair| f64::from(of(pair))).sum::<f64>() / drawn.len() as f64
        };
        let (input, output) = (mean(|pair| pair.0), mean(|pair| pair.1));
        assert!((input - 1000.0).abs() < 10.0, "{input}");
        assert!((output - 200.0).abs() < 2.0, "{output}");
        let spread = drawn.iter().map(|pair| (f64::from(pair.0) - input).powi(2));
        let cv = (spread.sum::<f64>() / drawn.len() as f64).sqrt() / input;
        assert!((cv - 0.5).abs() < 0.02, "{cv}");
        let fixed = LengthDistribution::LogNormal {
            input: 7.0,
            output: 9.0,
            cv: 0.0,
        };
        assert_eq!(fixed.draw(&mut rng), (7, 9));
    }

    #[test]
    fn histogram_bins_are_drawn_by_weight() {
        let mut histogram = LengthHistogram::default();
        histogram.add(1, 10, 0.25).unwrap();
        histogram.add(11, 20, 0.0).unwrap();
        histogram.add(101, 101, 0.75).unwrap();
        assert!(histogram.add(5, 4, 1.0).is_none());
        assert!(histogram.add(5, 6, f64::NAN).is_none());
        let mut rng = WorkloadRng::new(3, DrawPurpose::Lengths);
        let drawn: Vec<u32> = (0..40_000).map(|_| histogram.draw(&mut rng)).collect();
        let low = drawn.iter().filter(|tokens| **tokens <= 10).count();
        assert!((9_700..10_300).contains(&low), "{low}");
        assert!(drawn.iter().all(|tokens| *tokens <= 10 || *tokens == 101));
    }

    #[test]
    fn requests_are_cut_to_the_models_context() {
        let scaling = LengthScaling {
            context_max: 1000,
            ..LengthScaling::default()
        };
        let both = |input, output| {
            let (prompt, output) = scaling.apply(&PromptPlan::unique(1, input), output);
            (prompt.tokens(), output)
        };
        assert_eq!(both(300, 300), (300, 300));
        assert_eq!(both(300, 900), (300, 700));
        assert_eq!(both(5000, 20), (980, 20));
        assert_eq!(both(5000, 5000), (500, 500));
    }
}
