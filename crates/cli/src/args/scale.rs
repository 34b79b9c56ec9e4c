//! The flags of a simulated fleet that grows and shrinks: `sim scale`.
//!
//! Owns: their names, formats and limits. Never: reads a file or makes a fleet. Invariant: targets
//! come either from a policy file or from flags, never from both.

use super::{ArrivalArgs, PartsArgs, TargetArgs};
use crate::load::parse_span;
use clap::{ArgGroup, Args};
use cleave_domain::PoolCounts;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave sim scale --policy policy.yaml --trace conversation_trace.jsonl.gz --start 2m
  cleave sim scale --profile a100-llama-3-8b --devices 16 --ttft 3s --tpot 80ms \\
      --workload long-long --rate 12 --duration 20m \\
      --curve 0s=0.1,3m=0.15,9m=1,12m=1,17m=0.1 --start 30s --compare

`--compare` also serves the same arrivals with two fixed fleets, of the largest and of the mean size
of this one, and with a fleet that scales by thresholds of KV occupancy and queues.")]
#[command(group(ArgGroup::new("size").required(true).args(["policy", "devices"])))]
pub(crate) struct ScaleArgs {
    /// Policy file with the targets and the part `scaling`, as for `--policy` of `serve` and
    /// `router`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["ttft", "tpot", "e2e"])]
    pub(crate) policy: Option<PathBuf>,
    /// Without a policy: limit of devices for prefill and decode workers.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=10_000))]
    pub(crate) devices: Option<u32>,
    #[command(flatten)]
    pub(crate) targets: TargetArgs,
    /// Profile of a device; an unknown name lists all profiles.
    #[arg(
        long,
        value_name = "NAME",
        help_heading = "Simulation",
        default_value = "h100-llama-3-8b"
    )]
    pub(crate) profile: String,
    #[command(flatten)]
    pub(crate) parts: PartsArgs,
    #[command(flatten)]
    pub(crate) arrivals: ArrivalArgs,
    /// Load over time, as shares of the arrivals with straight lines between the points; all
    /// arrivals if absent.
    #[arg(long, value_name = "TIME=SHARE,…", help_heading = "Simulation", value_delimiter = ',', value_parser = parse_rate_point)]
    pub(crate) curve: Vec<RatePoint>,
    /// Workers at the beginning, such as `prefill=2,decode=1`; each pool's `min` if absent.
    #[arg(long, value_name = "SPEC", help_heading = "Simulation", value_parser = parse_counts)]
    pub(crate) first: Option<PoolCounts>,
    /// Time from the decision to start a worker until it serves.
    #[arg(long, value_name = "TIME", help_heading = "Simulation", default_value = "60s", value_parser = parse_span)]
    pub(crate) start: Duration,
    /// Time at which a random worker dies; may be repeated.
    #[arg(long, value_name = "TIME", help_heading = "Simulation", value_parser = parse_span)]
    pub(crate) kill: Vec<Duration>,
    /// Largest random deviation of each step from its predicted time, in thousandths.
    #[arg(long, value_name = "PERMILLE", help_heading = "Simulation", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..1000))]
    pub(crate) noise: u32,
    /// Also simulate other ways to size the fleet.
    #[arg(long, help_heading = "Simulation")]
    pub(crate) compare: bool,
    /// Print each change of the desired number of workers.
    #[arg(long, help_heading = "Simulation")]
    pub(crate) changes: bool,
    /// Print one JSON object.
    #[arg(long, help_heading = "Simulation")]
    pub(crate) json: bool,
}

/// The share of the arrivals that is kept at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RatePoint {
    pub(crate) at: Duration,
    pub(crate) permille: u32,
}

/// Parses a point such as `9m=0.5`.
fn parse_rate_point(text: &str) -> Result<RatePoint, String> {
    let wrong = || format!("`{text}`: expected a time and a share from 0 to 1, such as 9m=0.5");
    let (at, share) = text.split_once('=').ok_or_else(wrong)?;
    let share: f64 = share.parse().map_err(|_| wrong())?;
    let within = (0.0..=1.0).contains(&share);
    let is_beginning = at.trim_end_matches(char::is_alphabetic) == "0";
    Ok(RatePoint {
        at: if is_beginning {
            Duration::ZERO
        } else {
            parse_span(at)?
        },
        permille: within
            .then_some((share * 1e3).round() as u32)
            .ok_or_else(wrong)?,
    })
}

/// Parses counts such as `prefill=2,decode=1`.
fn parse_counts(text: &str) -> Result<PoolCounts, String> {
    let mut counts = PoolCounts::default();
    for part in text.split(',') {
        let wrong =
            || format!("`{part}`: expected prefill, decode or both, and a count, such as decode=2");
        let (pool, count) = part.split_once('=').ok_or_else(wrong)?;
        let count = count.parse().ok().filter(|count| *count <= 10_000);
        let place = match pool {
            "prefill" => &mut counts.prefill,
            "decode" => &mut counts.decode,
            "both" => &mut counts.both,
            _ => return Err(wrong()),
        };
        *place = count.ok_or_else(wrong)?;
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::{parse_counts, parse_rate_point};
    use std::time::Duration;

    #[test]
    fn curves_and_fleets_are_parsed_and_errors_name_the_part() {
        let point = parse_rate_point("1.5m=0.25").unwrap();
        assert_eq!((point.at, point.permille), (Duration::from_secs(90), 250));
        assert_eq!(parse_rate_point("0=1").unwrap().at, Duration::ZERO);
        for text in ["3m", "3m=2", "3m=-0.1", "3m=NaN", "3=1", "x=1"] {
            let error = parse_rate_point(text).unwrap_err();
            assert!(error.contains(text.split('=').next().unwrap()), "{error}");
        }
        let counts = parse_counts("decode=2,prefill=1").unwrap();
        assert_eq!((counts.prefill, counts.decode, counts.both), (1, 2, 0));
        for text in [
            "",
            "decode",
            "decode=-1",
            "decode=99999",
            "tea=1",
            "both=1,",
        ] {
            assert!(parse_counts(text).is_err(), "{text}");
        }
    }
}
