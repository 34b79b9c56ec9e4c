//! The flags of what lets a simulated fleet grow and shrink: `sim scale`.
//!
//! Owns: their names, words and bounds, each default once. Never: reads a file or makes a fleet. Invariant: what is
//! taken names its promises in one way, a policy's file or flags.

use super::{ArrivalArgs, TargetArgs};
use crate::load::parse_span;
use clap::Args;
use cleave_domain::PoolCounts;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave sim scale --policy policy.yaml --trace conversation_trace.jsonl.gz --start 2m
  cleave sim scale --profile a100-llama-3-8b --devices 16 --ttft 3s --tpot 80ms --workload long-long \\
      --rate 12 --duration 20m --curve 0s=0.1,3m=0.15,9m=1,12m=1,17m=0.1 --start 30s --compare

`--compare` serves the same arrivals with fleets that nobody changes, as large as this one was at its most and
on average, and with one that goes by thresholds of KV occupancy and queues.")]
pub(crate) struct ScaleArgs {
    /// The promises and the part `scaling`, as `--policy` of `serve` and `router` takes them.
    #[arg(long, value_name = "FILE", required_unless_present = "devices", conflicts_with_all = ["devices", "ttft", "tpot", "e2e"])]
    pub(crate) policy: Option<PathBuf>,
    /// Without a policy: devices at most, of prefill and decode workers.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=10_000))]
    pub(crate) devices: Option<u32>,
    #[command(flatten)]
    pub(crate) targets: TargetArgs,
    /// The kind of device; an unknown name lists them.
    #[arg(long, value_name = "NAME", default_value = "h100-llama-3-8b")]
    pub(crate) profile: String,
    #[command(flatten)]
    pub(crate) arrivals: ArrivalArgs,
    /// How the load goes: shares of the arrivals by time, straight lines between; all of them if absent.
    #[arg(long, value_name = "TIME=SHARE,…", value_delimiter = ',', value_parser = parse_knot)]
    pub(crate) curve: Vec<Knot>,
    /// Workers that are there at the beginning, such as `prefill=2,decode=1`; each pool's `min` if absent.
    #[arg(long, value_name = "SPEC", value_parser = parse_counts)]
    pub(crate) first: Option<PoolCounts>,
    /// From the decision to start a worker until it serves.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_span)]
    pub(crate) start: Duration,
    /// A worker dies, whichever, after so long; may be repeated.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) kill: Vec<Duration>,
    /// How far each step may be off its price, in thousandths.
    #[arg(long, value_name = "PERMILLE", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..1000))]
    pub(crate) noise: u32,
    /// Other ways to size the fleet, too.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Print each change of how many workers are wanted.
    #[arg(long)]
    pub(crate) changes: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// So many of the arrivals come at that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Knot {
    pub(crate) at: Duration,
    pub(crate) permille: u32,
}

/// `9m=0.5`.
fn parse_knot(text: &str) -> Result<Knot, String> {
    let wrong = || format!("`{text}`: a time and a share from 0 to 1 are meant, such as 9m=0.5");
    let (at, share) = text.split_once('=').ok_or_else(wrong)?;
    let share: f64 = share.parse().map_err(|_| wrong())?;
    let within = (0.0..=1.0).contains(&share);
    let is_beginning = at.trim_end_matches(char::is_alphabetic) == "0";
    Ok(Knot {
        at: match is_beginning {
            true => Duration::ZERO,
            false => parse_span(at)?,
        },
        permille: within
            .then_some((share * 1e3).round() as u32)
            .ok_or_else(wrong)?,
    })
}

/// `prefill=2,decode=1`.
fn parse_counts(text: &str) -> Result<PoolCounts, String> {
    let mut counts = PoolCounts::default();
    for part in text.split(',') {
        let wrong =
            || format!("`{part}`: prefill, decode or both and a count are meant, such as decode=2");
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
    use super::{parse_counts, parse_knot};
    use std::time::Duration;

    #[test]
    fn a_curve_and_a_fleet_are_what_their_texts_say_and_what_is_wrong_is_named() {
        let knot = parse_knot("1.5m=0.25").unwrap();
        assert_eq!((knot.at, knot.permille), (Duration::from_secs(90), 250));
        assert_eq!(parse_knot("0=1").unwrap().at, Duration::ZERO);
        for text in ["3m", "3m=2", "3m=-0.1", "3m=NaN", "3=1", "x=1"] {
            let error = parse_knot(text).unwrap_err();
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
