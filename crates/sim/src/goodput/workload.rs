//! Clients that there are not: arrivals and lengths from a seed.
//!
//! Owns: named shapes of requests, as the quantiles of their lengths, and how they arrive.
//! Never: reads a trace; whoever has one makes arrivals of it.
//! Invariant: the same workload draws the same arrivals on every machine: nothing but integers and the four
//! exact operations of IEEE 754.

use super::{Arrival, Part, Prompt};
use crate::dice::{Dice, mix};
use cleave_domain::{Slo, SloPolicy, Time};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Lengths by quantile: (thousandth, tokens), from 0 to 1000, straight lines between.
type Lengths = &'static [(u32, u32)];

/// A named shape of requests.
#[derive(Clone, Copy, Debug)]
struct Shape {
    name: &'static str,
    prompt: Lengths,
    output: Lengths,
}

/// Prompts and answers are each light or heavy, by the bounds of TetriInfer (arXiv:2401.11181): 512 prompt
/// tokens and 128 output tokens. The others have the quantiles of public traces: the conversation and
/// code services of Azure (2023, CC-BY-4.0), and Mooncake's conversations (Apache-2.0).
const SHAPES: [Shape; 8] = [
    Shape {
        name: "light-light",
        prompt: LIGHT_PROMPT,
        output: LIGHT_OUTPUT,
    },
    Shape {
        name: "light-heavy",
        prompt: LIGHT_PROMPT,
        output: HEAVY_OUTPUT,
    },
    Shape {
        name: "heavy-light",
        prompt: HEAVY_PROMPT,
        output: LIGHT_OUTPUT,
    },
    Shape {
        name: "heavy-heavy",
        prompt: HEAVY_PROMPT,
        output: HEAVY_OUTPUT,
    },
    Shape {
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
    Shape {
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
    Shape {
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
    Shape {
        name: "fixed",
        prompt: &[(0, 1024), (1000, 1024)],
        output: &[(0, 128), (1000, 128)],
    },
];

const LIGHT_PROMPT: Lengths = &[(0, 16), (500, 128), (1000, 512)];
const HEAVY_PROMPT: Lengths = &[(0, 512), (500, 2048), (1000, 8192)];
const LIGHT_OUTPUT: Lengths = &[(0, 8), (500, 48), (1000, 128)];
const HEAVY_OUTPUT: Lengths = &[(0, 128), (500, 320), (1000, 1024)];

/// Requests of one or several shapes and classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Names of shapes; each arrival is of one of them, evenly.
    shapes: Vec<&'static str>,
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    /// How long they come.
    pub span: Duration,
    /// Coefficient of variation of the gaps, in thousandths: 1000 is Poisson, more comes in bursts.
    pub cv_permille: u32,
    /// Tokens that prompts of one group begin with.
    pub shared_tokens: u32,
    /// How many such groups.
    pub groups: u32,
    /// Draws it.
    pub seed: u64,
}

impl Workload {
    /// What arrives. Each arrival is of one of the policy's classes, evenly.
    pub fn arrivals(&self, policy: &SloPolicy) -> Vec<Arrival> {
        let mut dice = Dice::new(mix(self.seed));
        let mut gaps = Gaps::new(self.rate_milli, self.cv_permille);
        let mut at = Time::ZERO;
        let mut all = Vec::new();
        loop {
            at = at + gaps.draw(&mut dice);
            if at.since(Time::ZERO) >= self.span {
                return all;
            }
            let class = dice.pick(&policy.classes);
            all.push(Arrival {
                at,
                prompt: Prompt::alone(0, 1),
                output_tokens: 1,
                slo: promise(policy, &class.name),
                priority: 0,
            });
            let name: &&str = dice.pick(&self.shapes);
            let shape = shape(name).expect("parsed");
            let last = all.last_mut().expect("one was pushed");
            last.output_tokens = length(shape.output, &mut dice).max(1);
            let tokens = length(shape.prompt, &mut dice).max(1);
            last.prompt = self.prompt(tokens, &mut dice);
        }
    }

    fn prompt(&self, tokens: u32, dice: &mut Dice) -> Prompt {
        let own = dice.next();
        if self.shared_tokens == 0 {
            return Prompt::alone(own, tokens);
        }
        let group = dice.range(1, u64::from(self.groups.max(1)));
        let part = |name, tokens| Part { name, tokens };
        Prompt {
            parts: Arc::new([part(group, self.shared_tokens), part(own, tokens)]),
        }
    }
}

/// Of these arrivals as many as a curve says, drawn from a seed: knots of (second, share in thousandths),
/// ascending, straight lines between them, the last one's share after it.
pub fn shaped(arrivals: Vec<Arrival>, curve: &[(u64, u32)], seed: u64) -> Vec<Arrival> {
    let mut dice = Dice::new(mix(seed));
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
    let mut stays = |arrival: &Arrival| dice.chance(share(arrival.at.since(Time::ZERO).as_secs()));
    arrivals.into_iter().filter(|one| stays(one)).collect()
}

/// What a policy promises to a request that asks for a class by name.
pub fn promise(policy: &SloPolicy, class: &str) -> Slo {
    let class = policy.class(class);
    Slo {
        class: class.name.clone(),
        tenant: String::new(),
        ttft: class.ttft,
        tpot: class.tpot,
        e2e: class.e2e,
        priority: class.priority,
    }
}

fn shape(name: &str) -> Option<&'static Shape> {
    SHAPES.iter().find(|shape| shape.name == name)
}

fn length(lengths: Lengths, dice: &mut Dice) -> u32 {
    let throw = dice.range(0, 999_999);
    let above = lengths.partition_point(|(permille, _)| u64::from(*permille) * 1000 <= throw);
    let (left, right) = (lengths[above - 1], lengths[above]);
    let run = u64::from(right.0 - left.0) * 1000;
    let along = throw - u64::from(left.0) * 1000;
    left.1 + (u64::from(right.1 - left.1) * along / run) as u32
}

/// Gaps between arrivals: exponential, or of two exponentials with balanced means where they come in
/// bursts (the hyperexponential of a given mean and coefficient of variation).
#[derive(Clone, Copy, Debug)]
struct Gaps {
    /// Nanoseconds, of the short and the long ones.
    means: [f64; 2],
    /// Of a million gaps so many are short.
    short_ppm: u64,
}

impl Gaps {
    fn new(rate_milli: u64, cv_permille: u32) -> Self {
        let mean = 1e12 / rate_milli.max(1) as f64;
        let square = (f64::from(cv_permille) / 1000.0).powi(2).max(1.0);
        let short = (1.0 + ((square - 1.0) / (square + 1.0)).sqrt()) / 2.0;
        Self {
            means: [mean / (2.0 * short), mean / (2.0 * (1.0 - short))],
            short_ppm: (short * 1e6) as u64,
        }
    }

    fn draw(&mut self, dice: &mut Dice) -> Duration {
        let mean = self.means[usize::from(dice.range(0, 999_999) >= self.short_ppm)];
        let uniform = ((dice.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        Duration::from_nanos((-ln(uniform) * mean) as u64)
    }
}

/// The natural logarithm of a number in (0, 1], by the four exact operations alone: a platform's own
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

impl FromStr for Workload {
    type Err = String;

    /// `conversation`, `heavy-light+light-heavy,rate=12.5,seconds=60,cv=2,shared=512,groups=10,seed=7`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',').map(str::trim);
        let names = parts.next().unwrap_or_default();
        let known = || {
            let names: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            names.join(", ")
        };
        let shapes = names.split('+').map(|name| {
            let shape = shape(name.trim());
            let unknown = || format!("no workload `{name}`; there are {}", known());
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

impl Workload {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let wrong = || format!("{name}={value} of a workload: a number in range is meant");
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
    use super::{Workload, ln};
    use cleave_domain::SloPolicy;
    use std::time::Duration;

    #[test]
    fn the_logarithm_is_one() {
        for x in [1.0, 0.999, 0.75, 0.5, 0.123, 1e-3, 1e-15] {
            assert!((ln(x) - f64::ln(x)).abs() < 1e-10, "{x}");
        }
    }

    #[test]
    fn arrivals_have_the_rate_the_burstiness_and_the_lengths_asked_for() {
        let drawn = |text: &str| {
            let workload: Workload = text.parse().unwrap();
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
    fn prompts_of_a_group_begin_alike_and_only_there() {
        let text = "fixed,rate=5,seconds=10,shared=100,groups=1";
        let workload: Workload = text.parse().unwrap();
        let all = workload.arrivals(&SloPolicy::default());
        let (one, two) = (all[0].prompt.write(), all[1].prompt.write());
        assert_eq!(one.len(), 1124);
        assert_eq!(one[..100], two[..100]);
        assert_ne!(one[100..], two[100..]);
    }

    #[test]
    fn what_is_wrong_with_a_workload_is_named() {
        for (text, says) in [
            ("tea", "conversation"),
            ("fixed,rate", "name=value"),
            ("fixed,rate=-1", "rate=-1"),
            ("fixed,sugar=1", "sugar"),
        ] {
            let error = text.parse::<Workload>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
        let workload: Workload = "code,rate=2.5,seconds=0.5".parse().unwrap();
        assert_eq!(workload.rate_milli, 2500);
        assert_eq!(workload.span, Duration::from_millis(500));
    }
}
