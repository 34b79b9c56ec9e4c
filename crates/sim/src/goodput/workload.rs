//! Synthetic clients: arrivals and lengths from a seed.
//!
//! Owns: named shapes of requests, as the quantiles of their lengths, and their arrival process.
//! Never: reads a trace; the callers convert traces to arrivals. Invariant: the same workload draws
//! the same arrivals on every machine: it uses only integers and the four exact operations of IEEE
//! 754.

use super::{PromptRecipe, RecipePart, RequestArrival};
use cleave_domain::{RequestSlo, SloPolicy, SplitMix64, Time};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Lengths by quantile: (thousandth, tokens), from 0 to 1000, with straight lines between.
type LengthQuantiles = &'static [(u32, u32)];

/// A named shape of requests.
#[derive(Clone, Copy, Debug)]
struct RequestShape {
    name: &'static str,
    prompt: LengthQuantiles,
    output: LengthQuantiles,
}

/// Prompts and answers are light or heavy by the bounds of TetriInfer (arXiv:2401.11181): 512
/// prompt tokens and 128 output tokens. The other shapes have the quantiles of public traces: the
/// conversation and code services of Azure (2023, CC-BY-4.0), and Mooncake's conversations
/// (Apache-2.0).
const SHAPES: [RequestShape; 8] = [
    RequestShape {
        name: "light-light",
        prompt: LIGHT_PROMPT,
        output: LIGHT_OUTPUT,
    },
    RequestShape {
        name: "light-heavy",
        prompt: LIGHT_PROMPT,
        output: HEAVY_OUTPUT,
    },
    RequestShape {
        name: "heavy-light",
        prompt: HEAVY_PROMPT,
        output: LIGHT_OUTPUT,
    },
    RequestShape {
        name: "heavy-heavy",
        prompt: HEAVY_PROMPT,
        output: HEAVY_OUTPUT,
    },
    RequestShape {
        name: "conversation",
        prompt: &[
            (0, 8),
            (100, 220),
            (500, 1015),
            (900, 4074),
            (990, 4121),
            (1000, 14050),
        ],
        output: &[
            (0, 1),
            (100, 50),
            (500, 115),
            (900, 421),
            (990, 598),
            (1000, 1000),
        ],
    },
    RequestShape {
        name: "code",
        prompt: &[
            (0, 3),
            (100, 150),
            (500, 1465),
            (900, 5177),
            (990, 7436),
            (1000, 7437),
        ],
        output: &[
            (0, 1),
            (100, 7),
            (500, 13),
            (900, 55),
            (990, 248),
            (1000, 1899),
        ],
    },
    RequestShape {
        name: "long",
        prompt: &[
            (0, 128),
            (100, 964),
            (500, 6909),
            (900, 27367),
            (990, 85400),
            (1000, 126195),
        ],
        output: &[
            (0, 1),
            (100, 24),
            (500, 350),
            (900, 597),
            (990, 1118),
            (1000, 2000),
        ],
    },
    RequestShape {
        name: "fixed",
        prompt: &[(0, 1024), (1000, 1024)],
        output: &[(0, 128), (1000, 128)],
    },
];

const LIGHT_PROMPT: LengthQuantiles = &[(0, 16), (500, 128), (1000, 512)];
const HEAVY_PROMPT: LengthQuantiles = &[(0, 512), (500, 2048), (1000, 8192)];
const LIGHT_OUTPUT: LengthQuantiles = &[(0, 8), (500, 48), (1000, 128)];
const HEAVY_OUTPUT: LengthQuantiles = &[(0, 128), (500, 320), (1000, 1024)];

/// Requests of one or several shapes and classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntheticWorkload {
    /// Names of the shapes; each arrival has one of them, drawn evenly.
    shapes: Vec<&'static str>,
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    /// The time during which requests arrive.
    pub span: Duration,
    /// Coefficient of variation of the gaps, in thousandths: 1000 is Poisson, more is burstier.
    pub cv_permille: u32,
    /// Tokens of the prefix that prompts of one group share.
    pub shared_tokens: u32,
    /// Number of such groups.
    pub groups: u32,
    /// Seeds all draws of the workload.
    pub seed: u64,
}

impl SyntheticWorkload {
    /// The arrivals. Each has one of the policy's classes, drawn evenly.
    pub fn arrivals(&self, policy: &SloPolicy) -> Vec<RequestArrival> {
        let mut rng = SplitMix64::new(SplitMix64::finalize(self.seed));
        let mut gaps = ArrivalGaps::new(self.rate_milli, self.cv_permille);
        let mut at = Time::ZERO;
        let mut all = Vec::new();
        loop {
            at = at + gaps.draw(&mut rng);
            if at.since(Time::ZERO) >= self.span {
                return all;
            }
            let class = rng.pick(&policy.classes);
            all.push(RequestArrival {
                at,
                prompt: PromptRecipe::unshared(0, 1),
                output_tokens: 1,
                slo: slo_of_class(policy, &class.name),
                priority: 0,
                adapter: None,
            });
            let name: &&str = rng.pick(&self.shapes);
            let shape = shape_named(name).expect("parsed");
            let last = all.last_mut().expect("one was pushed");
            last.output_tokens = draw_length(shape.output, &mut rng).max(1);
            let tokens = draw_length(shape.prompt, &mut rng).max(1);
            last.prompt = self.prompt(tokens, &mut rng);
        }
    }

    fn prompt(&self, tokens: u32, rng: &mut SplitMix64) -> PromptRecipe {
        let own = rng.draw();
        if self.shared_tokens == 0 {
            return PromptRecipe::unshared(own, tokens);
        }
        let group = rng.range(1, u64::from(self.groups.max(1)));
        let part = |name, tokens| RecipePart { name, tokens };
        PromptRecipe {
            parts: Arc::new([part(group, self.shared_tokens), part(own, tokens)]),
        }
    }
}

/// Thins arrivals by a curve of shares, with draws from a seed: points of (second, share in
/// thousandths), ascending, with straight lines between; the last share holds after the curve.
pub fn thinned_by_curve(
    arrivals: Vec<RequestArrival>,
    curve: &[(u64, u32)],
    seed: u64,
) -> Vec<RequestArrival> {
    let mut rng = SplitMix64::new(SplitMix64::finalize(seed));
    let share = |second: u64| {
        let above = curve.partition_point(|(at, _)| *at <= second);
        let left = curve[above.saturating_sub(1)];
        let Some(right) = curve.get(above) else {
            return left.1;
        };
        let (along, run) = (second - left.0, (right.0 - left.0).max(1));
        let (from, to) = (u64::from(left.1), u64::from(right.1));
        ((from * (run - along) + to * along) / run) as u32
    };
    let mut is_drawn =
        |arrival: &RequestArrival| rng.chance(share(arrival.at.since(Time::ZERO).as_secs()));
    arrivals.into_iter().filter(|one| is_drawn(one)).collect()
}

/// The targets of a policy's class, as a request that names it gets them.
pub fn slo_of_class(policy: &SloPolicy, class: &str) -> RequestSlo {
    let class = policy.class(class);
    RequestSlo {
        class: class.name.clone(),
        tenant: String::new(),
        ttft: class.ttft,
        tpot: class.tpot,
        e2e: class.e2e,
        priority: class.priority,
    }
}

fn shape_named(name: &str) -> Option<&'static RequestShape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

fn draw_length(lengths: LengthQuantiles, rng: &mut SplitMix64) -> u32 {
    let throw = rng.range(0, 999_999);
    let above = lengths.partition_point(|(permille, _)| u64::from(*permille) * 1000 <= throw);
    let (left, right) = (lengths[above - 1], lengths[above]);
    let run = u64::from(right.0 - left.0) * 1000;
    let along = throw - u64::from(left.0) * 1000;
    left.1 + (u64::from(right.1 - left.1) * along / run) as u32
}

/// Gaps between arrivals: exponential, or for bursts a mixture of two exponentials with balanced
/// means (the hyperexponential of a given mean and coefficient of variation).
#[derive(Clone, Copy, Debug)]
struct ArrivalGaps {
    /// Mean nanoseconds of short and long gaps.
    means: [f64; 2],
    /// Short gaps of a million.
    short_ppm: u64,
}

impl ArrivalGaps {
    fn new(rate_milli: u64, cv_permille: u32) -> Self {
        let mean = 1e12 / rate_milli.max(1) as f64;
        let square = (f64::from(cv_permille) / 1000.0).powi(2).max(1.0);
        let short = (1.0 + ((square - 1.0) / (square + 1.0)).sqrt()) / 2.0;
        Self {
            means: [mean / (2.0 * short), mean / (2.0 * (1.0 - short))],
            short_ppm: (short * 1e6) as u64,
        }
    }

    fn draw(&mut self, rng: &mut SplitMix64) -> Duration {
        let mean = self.means[usize::from(rng.range(0, 999_999) >= self.short_ppm)];
        let uniform = ((rng.draw() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        Duration::from_nanos((-ln(uniform) * mean) as u64)
    }
}

/// The natural logarithm of a number in (0, 1] by the four exact operations alone: a platform's own
/// may differ in the last bit.
fn ln(x: f64) -> f64 {
    let (mut mantissa, mut doublings) = (x, 0.0);
    while mantissa < 0.75 {
        mantissa *= 2.0;
        doublings += 1.0;
    }
    let z = (mantissa - 1.0) / (mantissa + 1.0);
    let (mut power, mut sum) = (z, 0.0);
    for odd in [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0] {
        sum += power / odd;
        power *= z * z;
    }
    2.0 * sum - doublings * std::f64::consts::LN_2
}

impl FromStr for SyntheticWorkload {
    type Err = String;

    /// Such as `conversation` or
    /// `heavy-light+light-heavy,rate=12.5,seconds=60,cv=2,shared=512,groups=10,seed=7`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',').map(str::trim);
        let names = parts.next().unwrap_or_default();
        let names_text = || {
            let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            names.join(", ")
        };
        let shapes = names.split('+').map(|name| {
            let shape = shape_named(name.trim());
            let unknown = || format!("no workload `{name}`; there are {}", names_text());
            shape.map(|shape| shape.name).ok_or_else(unknown)
        });
        let mut workload = Self {
            shapes: shapes.collect::<Result<_, _>>()?,
            rate_milli: 1000,
            span: Duration::from_secs(60),
            cv_permille: 1000,
            shared_tokens: 0,
            groups: 1,
            seed: 0,
        };
        for part in parts {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}` of a workload is not name=value"))?;
            workload.set(name, value)?;
        }
        Ok(workload)
    }
}

impl SyntheticWorkload {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let wrong = || format!("{name}={value} of a workload: expected a number in range");
        let milli = || {
            let number: f64 = value.parse().map_err(|_| wrong())?;
            let fits = (0.0..=1e9).contains(&number);
            fits.then_some((number * 1000.0) as u64).ok_or_else(wrong)
        };
        let whole = || value.parse::<u32>().map_err(|_| wrong());
        match name {
            "rate" => self.rate_milli = milli()?.max(1),
            "seconds" => self.span = Duration::from_millis(milli()?),
            "cv" => self.cv_permille = u32::try_from(milli()?).map_err(|_| wrong())?,
            "shared" => self.shared_tokens = whole()?,
            "groups" => self.groups = whole()?.max(1),
            "seed" => self.seed = value.parse().map_err(|_| wrong())?,
            _ => {
                return Err(format!(
                    "`{name}` of a workload is unknown; there are rate, seconds, cv, shared, groups and seed"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{SyntheticWorkload, ln};
    use cleave_domain::SloPolicy;
    use std::time::Duration;

    #[test]
    fn the_portable_logarithm_matches_ln() {
        for x in [1.0, 0.999, 0.75, 0.5, 0.123, 1e-3, 1e-15] {
            assert!((ln(x) - f64::ln(x)).abs() < 1e-10, "{x}");
        }
    }

    #[test]
    fn arrivals_have_their_rate_variation_and_lengths() {
        let drawn = |text: &str| {
            let workload: SyntheticWorkload = text.parse().unwrap();
            workload.arrivals(&SloPolicy::default())
        };
        for (cv, text) in [
            (1.0, "light-heavy,rate=50,seconds=400,seed=3"),
            (3.0, "light-heavy,rate=50,seconds=400,cv=3,seed=3"),
        ] {
            let all = drawn(text);
            assert_eq!(all, drawn(text));
            let gaps: Vec<f64> = all
                .windows(2)
                .map(|pair| pair[1].at.since(pair[0].at).as_secs_f64())
                .collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            assert!((mean * 50.0 - 1.0).abs() < 0.06, "{mean}");
            let variance =
                gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            let found = variance.sqrt() / mean;
            assert!((found / cv - 1.0).abs() < 0.15, "{found} and not {cv}");
            assert!(all.iter().all(|a| (16..=512).contains(&a.prompt.tokens())));
            assert!(all.iter().all(|a| (128..=1024).contains(&a.output_tokens)));
        }
    }

    #[test]
    fn prompts_of_a_group_share_only_their_prefix() {
        let text = "fixed,rate=5,seconds=10,shared=100,groups=1";
        let workload: SyntheticWorkload = text.parse().unwrap();
        let all = workload.arrivals(&SloPolicy::default());
        let (one, two) = (all[0].prompt.token_ids(), all[1].prompt.token_ids());
        assert_eq!(one.len(), 1124);
        assert_eq!(one[..100], two[..100]);
        assert_ne!(one[100..], two[100..]);
    }

    #[test]
    fn synthetic_workload_mistakes_are_named() {
        for (text, message) in [
            ("tea", "conversation"),
            ("fixed,rate", "name=value"),
            ("fixed,rate=-1", "rate=-1"),
            ("fixed,sugar=1", "sugar"),
        ] {
            let error = text.parse::<SyntheticWorkload>().unwrap_err();
            assert!(error.contains(message), "{text}: {error}");
        }
        let workload: SyntheticWorkload = "code,rate=2.5,seconds=0.5".parse().unwrap();
        assert_eq!(workload.rate_milli, 2500);
        assert_eq!(workload.span, Duration::from_millis(500));
    }
}
