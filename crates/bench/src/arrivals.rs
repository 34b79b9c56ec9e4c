//! Arrival processes of requests.
//!
//! Owns: the times of arrivals. Never: waits for an answer; that makes the load open-loop.
//! Invariant: times never go back, and their mean rate is the requested rate.

use crate::number::{parse_count, parse_duration, parse_positive, split_key_value};
use crate::rng::{DrawPurpose, WorkloadRng};
use anyhow::{Context, bail};
use cleave_domain::Time;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The distribution of arrival times; the rate is separate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ArrivalProcess {
    /// Independent arrivals: exponential gaps.
    Poisson,
    /// Gamma gaps; a coefficient of variation above 1 is burstier than Poisson.
    Gamma {
        /// Standard deviation of the gaps, divided by their mean.
        cv: f64,
    },
    Uniform,
    /// Groups of this many requests at once; the groups arrive as Poisson.
    Burst {
        /// Requests in a group.
        size: u32,
    },
    /// Poisson in the on-phases, nothing in the off-phases. The rate is the mean over both.
    OnOff {
        /// Length of an on-phase; the first one begins at once.
        on: Duration,
        /// Length of an off-phase.
        off: Duration,
    },
    /// The times of the trace, faster or slower by one factor.
    Trace,
}

impl FromStr for ArrivalProcess {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let value = |key: &str| -> anyhow::Result<String> {
            for item in rest.split(',') {
                match split_key_value(item) {
                    Ok((name, value)) if name == key => return Ok(value.to_owned()),
                    _ => {}
                }
            }
            bail!("arrivals `{text}`: `{key}=…` is missing")
        };
        let arrivals = match name.trim() {
            "poisson" => Self::Poisson,
            "uniform" => Self::Uniform,
            "trace" => Self::Trace,
            "gamma" => Self::Gamma {
                cv: parse_positive(&value("cv")?).context("cv of gamma arrivals")?,
            },
            "burst" => Self::Burst {
                size: parse_count(&value("size")?).context("size of bursts")?,
            },
            "onoff" => Self::OnOff {
                on: parse_duration(&value("on")?).context("on-phase")?,
                off: parse_duration(&value("off")?).context("off-phase")?,
            },
            other => bail!(
                "unknown arrivals `{other}`; there are poisson, gamma:cv=2, uniform, burst:size=16, \
                 onoff:on=5s,off=10s and trace"
            ),
        };
        let takes = match arrivals {
            Self::Poisson | Self::Uniform | Self::Trace => 0,
            Self::Gamma { .. } | Self::Burst { .. } => 1,
            Self::OnOff { .. } => 2,
        };
        let given = rest.split(',').filter(|item| !item.trim().is_empty());
        if given.count() == takes {
            Ok(arrivals)
        } else {
            bail!("arrivals `{text}`: {name} takes {takes} values")
        }
    }
}

impl fmt::Display for ArrivalProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poisson => f.write_str("poisson"),
            Self::Gamma { cv } => write!(f, "gamma:cv={cv}"),
            Self::Uniform => f.write_str("uniform"),
            Self::Burst { size } => write!(f, "burst:size={size}"),
            Self::OnOff { on, off } => {
                let (on, off) = (on.as_secs_f64(), off.as_secs_f64());
                write!(f, "onoff:on={on}s,off={off}s")
            }
            Self::Trace => f.write_str("trace"),
        }
    }
}

/// The endless times of one process at one rate.
pub(crate) struct ArrivalTimes {
    arrivals: ArrivalProcess,
    rate: f64,
    rng: WorkloadRng,
    /// Seconds since the start; for on-off only on-phases count.
    at: f64,
    /// Requests of the current group that are still to come.
    group: u32,
}

impl ArrivalTimes {
    /// `rate` is in requests per second; `arrivals` is not [`ArrivalProcess::Trace`], whose times
    /// come from the trace.
    pub(crate) fn new(arrivals: ArrivalProcess, rate: f64, seed: u64) -> Self {
        Self {
            arrivals,
            rate,
            rng: WorkloadRng::new(seed, DrawPurpose::Arrivals),
            at: 0.0,
            group: 0,
        }
    }
}

impl Iterator for ArrivalTimes {
    type Item = Time;

    fn next(&mut self) -> Option<Time> {
        let gap = 1.0 / self.rate;
        let seconds = match self.arrivals {
            ArrivalProcess::Poisson => {
                self.at += gap * self.rng.exponential();
                self.at
            }
            ArrivalProcess::Gamma { cv } => {
                // A gamma distribution of shape 1/cv² has this cv; the scale sets the mean.
                let shape = 1.0 / (cv * cv);
                self.at += self.rng.gamma(shape, gap / shape);
                self.at
            }
            ArrivalProcess::Uniform => {
                self.at += gap;
                self.at
            }
            ArrivalProcess::Burst { size } => {
                if self.group == 0 {
                    self.at += gap * f64::from(size) * self.rng.exponential();
                    self.group = size;
                }
                self.group -= 1;
                self.at
            }
            ArrivalProcess::OnOff { on, off } => {
                let (on, off) = (on.as_secs_f64(), off.as_secs_f64());
                self.at += gap * on / (on + off) * self.rng.exponential();
                self.at + (self.at / on).floor() * off
            }
            ArrivalProcess::Trace => return None,
        };
        Some(at_seconds(seconds))
    }
}

/// A time so many seconds after the start.
pub(crate) fn at_seconds(seconds: f64) -> Time {
    Time::ZERO + Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: usize = 200_000;

    fn seconds(arrivals: &str, rate: f64) -> Vec<f64> {
        ArrivalTimes::new(arrivals.parse().unwrap(), rate, 7)
            .take(COUNT)
            .map(|at| at.as_nanos() as f64 / 1e9)
            .collect()
    }

    /// Mean and coefficient of variation.
    fn moments(numbers: &[f64]) -> (f64, f64) {
        let count = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / count;
        let variance = numbers.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt() / mean)
    }

    fn gaps(times: &[f64]) -> Vec<f64> {
        times.windows(2).map(|two| two[1] - two[0]).collect()
    }

    #[test]
    fn gaps_have_their_processs_mean_and_variation() {
        // (process, coefficient of variation of its gaps)
        let groups = 16.0_f64;
        // A gap of a grouped process is 0 but for one in `groups`, which is exponential of mean
        // m·groups: E[g²] = 2·m²·groups, so cv² = 2·groups − 1.
        let of_groups = (2.0 * groups - 1.0).sqrt();
        for (arrivals, cv) in [
            ("poisson", 1.0),
            ("gamma:cv=0.5", 0.5),
            ("gamma:cv=1", 1.0),
            ("gamma:cv=3", 3.0),
            ("uniform", 0.0),
            ("burst:size=16", of_groups),
        ] {
            let (mean, variation) = moments(&gaps(&seconds(arrivals, 50.0)));
            assert!((mean * 50.0 - 1.0).abs() < 0.03, "{arrivals}: mean {mean}");
            assert!(
                (variation - cv).abs() < 0.03 * cv.max(0.01),
                "{arrivals}: {variation}"
            );
        }
    }

    #[test]
    fn poisson_counts_have_equal_mean_and_variance() {
        let times = seconds("poisson", 20.0);
        let mut counts = vec![0.0; times.last().unwrap().floor() as usize];
        for at in &times {
            if let Some(count) = counts.get_mut(at.floor() as usize) {
                *count += 1.0;
            }
        }
        let (mean, cv) = moments(&counts);
        assert!((mean - 20.0).abs() < 0.3, "{mean}");
        let dispersion = cv * cv * mean;
        assert!((dispersion - 1.0).abs() < 0.05, "{dispersion}");
    }

    #[test]
    fn off_phases_have_no_arrivals_and_the_mean_rate_holds() {
        let times = seconds("onoff:on=2s,off=6s", 40.0);
        for at in &times {
            assert!(at % 8.0 <= 2.0 + 1e-6, "{at} is in an off-phase");
        }
        let rate = COUNT as f64 / times.last().unwrap();
        assert!((rate - 40.0).abs() < 1.0, "{rate}");
    }

    #[test]
    fn arrival_specs_round_trip_and_bad_ones_are_refused() {
        for good in [
            "poisson",
            "gamma:cv=2.5",
            "uniform",
            "burst:size=8",
            "onoff:on=5s,off=10s",
            "trace",
        ] {
            let arrivals: ArrivalProcess = good.parse().unwrap();
            assert_eq!(arrivals.to_string(), good);
        }
        for bad in [
            "",
            "gamma",
            "gamma:cv=0",
            "gamma:cv=-1",
            "burst:size=0",
            "burst:cv=1",
            "poisson:cv=2",
            "onoff:on=5s",
            "onoff:on=5,off=1s",
        ] {
            assert!(bad.parse::<ArrivalProcess>().is_err(), "{bad}");
        }
    }
}
