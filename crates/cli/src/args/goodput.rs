//! The flags of what asks a simulated fleet for its goodput: `sim goodput`, `check`.

use crate::load::{WorkloadArgs, parse_positive, parse_span};
use clap::Args;
use cleave_sim::goodput::{Fleet, Way};
use std::path::PathBuf;
use std::time::Duration;

/// What is asked of a simulated fleet.
#[derive(Args, Clone, Debug)]
pub(crate) struct ArrivalArgs {
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Arrivals per second, of the whole fleet; a trace's own, or 1 for each worker, if absent.
    #[arg(long, value_name = "RPS", value_parser = parse_positive)]
    pub(crate) rate: Option<f64>,
    /// Arrivals end after so long, such as 60s; a trace's end, or a minute without one, if absent.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) duration: Option<Duration>,
}

impl ArrivalArgs {
    /// Whether anything is asked.
    pub(crate) fn some(&self) -> bool {
        self.workload.workload.is_some() || self.workload.trace.is_some()
    }
}

/// What is simulated.
#[derive(Args, Clone, Debug)]
pub(crate) struct ScenarioArgs {
    /// The workers, such as `prefill=4,decode=4,profile=h100-llama-3-8b`; `both=N` too.
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["devices", "profile"])]
    pub(crate) fleet: Option<Fleet>,
    /// So many devices of `--profile`, their legs divided as serves the workload best.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) devices: Option<u32>,
    /// The kind of device; an unknown name lists them.
    #[arg(long, value_name = "NAME", default_value = "h100-llama-3-8b")]
    pub(crate) profile: String,
    #[command(flatten)]
    pub(crate) arrivals: ArrivalArgs,
    /// How far each step may be off its price, in thousandths.
    #[arg(long, value_name = "PERMILLE", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..1000))]
    pub(crate) noise: u32,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Of what a simulated fleet is made.
pub(crate) enum Workers<'a> {
    Named(&'a Fleet),
    Devices(u32),
}

impl ScenarioArgs {
    pub(crate) fn workers(&self) -> Option<Workers<'_>> {
        let named = self.fleet.as_ref().map(Workers::Named);
        named.or(self.devices.map(Workers::Devices))
    }
}

/// What is promised, without a file.
#[derive(Args, Clone, Debug)]
pub(crate) struct TargetArgs {
    /// Time to the first token, such as 500ms.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) ttft: Option<Duration>,
    /// Time between tokens after it, on average.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) tpot: Option<Duration>,
    /// Time to the last token.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) e2e: Option<Duration>,
    /// The share of requests that are to meet them.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    pub(crate) goal: f64,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave sim goodput --devices 8 --workload long-short --rate 60 --ttft 500ms --tpot 40ms --compare
  cleave sim goodput --fleet prefill=3,decode=5,profile=h100-llama-3-8b --trace conversation_trace.jsonl.gz \\
      --ttft 5s --tpot 50ms --search
  cleave sim goodput --devices 1024 --workload long-short --rate 8000 --duration 5s --ttft 500ms --router-cost

Baselines get the same devices and the same arrivals; where one worker serves both legs, every device does.")]
pub(crate) struct GoodputArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    #[command(flatten)]
    pub(crate) targets: TargetArgs,
    /// How to route; may be repeated.
    #[arg(long, value_name = "WAY", value_parser = parse_way, default_value = "auto")]
    pub(crate) way: Vec<Way>,
    /// Every way to route, the baselines too.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Look for the highest rate at which the goal is met, from the workload's rate on.
    #[arg(long, conflicts_with = "router_cost")]
    pub(crate) search: bool,
    /// Measure what the router's brain costs here: time for each decision, memory.
    #[arg(long)]
    pub(crate) router_cost: bool,
}

/// What is asked about each way to route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// What comes of one rate.
    Rate,
    /// Which rate is the highest.
    Highest,
    /// What its router costs.
    Cost,
}

impl GoodputArgs {
    pub(crate) fn question(&self) -> Question {
        if self.search {
            Question::Highest
        } else if self.router_cost {
            Question::Cost
        } else {
            Question::Rate
        }
    }
}

/// `auto`, `split`, `aggregated`, `load-split` …
fn parse_way(text: &str) -> Result<Way, String> {
    let named = Way::ALL.into_iter().find(|way| flag(*way) == text);
    named.ok_or_else(|| {
        let names: Vec<&str> = Way::ALL.into_iter().map(flag).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn flag(way: Way) -> &'static str {
    match way {
        Way::Auto => "auto",
        Way::Split => "split",
        Way::Whole => "aggregated",
        Way::LoadSplit => "load-split",
        Way::LoadWhole => "load-aggregated",
        Way::TurnsSplit => "round-robin-split",
        Way::TurnsWhole => "round-robin-aggregated",
    }
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave check policy.yaml
  cleave check policy.yaml --devices 8 --workload chat=0.7*short-long,batch=0.3*long-short --rate 40

The first looks at the file alone; the second also looks for the highest rate at which the fleet keeps
every promise, in simulated runs of ten seconds and 300 requests each at least, unless --limit or
--duration says otherwise.

Exit status 1 when the file is no policy, or when some class would miss its goal at that rate.")]
pub(crate) struct CheckArgs {
    /// Classes, tenants and rules, as `--policy` of `serve` and `router` takes them.
    #[arg(value_name = "POLICY")]
    pub(crate) policy: PathBuf,
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
}
