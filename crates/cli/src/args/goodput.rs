//! The flags of commands that measure the goodput of a simulated fleet: `sim goodput`, `check`.

use super::PartsArgs;
use super::adapters::host_loras_max;
use crate::load::{WorkloadArgs, parse_positive, parse_span};
use clap::Args;
use cleave_sched::AdapterLimits;
use cleave_sim::goodput::{AdapterFleet, FleetText, RoutingScheme, WorkerProfile};
use std::path::PathBuf;
use std::time::Duration;

/// The requests that a simulated fleet receives.
#[derive(Args, Clone, Debug)]
pub(crate) struct ArrivalArgs {
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Arrivals per second of the whole fleet; if absent, those of the trace, or 1 for each worker.
    #[arg(long, value_name = "RPS", value_parser = parse_positive)]
    pub(crate) rate: Option<f64>,
    /// Time after which arrivals end, such as 60s; if absent, the end of the trace, or one minute
    /// without a trace.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) duration: Option<Duration>,
}

impl ArrivalArgs {
    /// Whether a workload or a trace is given.
    pub(crate) fn is_given(&self) -> bool {
        self.workload.workload.is_some() || self.workload.trace.is_some()
    }
}

/// The simulated fleet and its requests.
#[derive(Args, Clone, Debug)]
pub(crate) struct ScenarioArgs {
    /// Workers, such as `prefill=4,decode=4,profile=h100-llama-3-8b`; `both=N` adds workers that
    /// serve both legs. With `--hardware`, without `profile=NAME`.
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["devices", "profile"])]
    pub(crate) fleet: Option<FleetText>,
    /// Number of devices of `--profile` or `--hardware`; their division between the legs is chosen
    /// for the workload.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) devices: Option<u32>,
    /// Profile of a device; an unknown name lists all profiles.
    #[arg(long, value_name = "NAME", default_value = "h100-llama-3-8b")]
    pub(crate) profile: String,
    #[command(flatten)]
    pub(crate) parts: PartsArgs,
    #[command(flatten)]
    pub(crate) arrivals: ArrivalArgs,
    /// Largest random deviation of each step from its predicted time, in thousandths.
    #[arg(long, value_name = "PERMILLE", help_heading = "Simulation", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..1000))]
    pub(crate) noise: u32,
    #[command(flatten)]
    pub(crate) adapters: SimAdapterArgs,
    /// Print one JSON object.
    #[arg(long, help_heading = "Simulation")]
    pub(crate) json: bool,
}

/// The LoRA adapters that a simulated fleet serves.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Adapters")]
pub(crate) struct SimAdapterArgs {
    /// LoRA adapters of rank 16 that requests name: the n-th has a share of one n-th of the first
    /// one's. None if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) adapters: Option<u32>,
    /// Adapters that each worker has loaded at once, at most.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096), requires = "adapters")]
    pub(crate) max_loras: u32,
    /// Adapters that each worker has in host memory at once, at most, those of `--max-loras`
    /// included; as many as `--max-loras` if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), requires = "adapters")]
    pub(crate) max_cpu_loras: Option<u32>,
}

impl SimAdapterArgs {
    /// The adapters of workers of this profile.
    ///
    /// # Errors
    /// If the profile has no prices of adapters, or `--max-cpu-loras` is below `--max-loras`.
    pub(crate) fn fleet(self, profile: &WorkerProfile) -> Result<Option<AdapterFleet>, String> {
        let Self {
            adapters,
            max_loras,
            max_cpu_loras,
        } = self;
        let Some(count) = adapters else {
            return Ok(None);
        };
        let loaded_max = max_loras as usize;
        let host_max = host_loras_max(max_cpu_loras.map(|max| max as usize), loaded_max)?;
        Ok(Some(AdapterFleet {
            count,
            limits: AdapterLimits {
                loaded_max,
                host_max,
            },
            prices: profile.adapter_prices()?,
        }))
    }
}

/// The fleet as the flags describe it.
pub(crate) enum FleetArg<'a> {
    Named(&'a FleetText),
    Devices(u32),
}

impl ScenarioArgs {
    pub(crate) fn workers(&self) -> Option<FleetArg<'_>> {
        let named = self.fleet.as_ref().map(FleetArg::Named);
        named.or(self.devices.map(FleetArg::Devices))
    }
}

/// Targets given by flags instead of a policy file.
#[derive(Args, Clone, Debug)]
pub(crate) struct TargetArgs {
    /// Target of the time to first token, such as 500ms.
    #[arg(long, value_name = "TIME", help_heading = "Targets", value_parser = parse_span)]
    pub(crate) ttft: Option<Duration>,
    /// Target of the mean time per output token after it.
    #[arg(long, value_name = "TIME", help_heading = "Targets", value_parser = parse_span)]
    pub(crate) tpot: Option<Duration>,
    /// Target of the time to the last token.
    #[arg(long, value_name = "TIME", help_heading = "Targets", value_parser = parse_span)]
    pub(crate) e2e: Option<Duration>,
    /// Required share of requests that meet the targets.
    #[arg(
        long,
        value_name = "SHARE",
        help_heading = "Targets",
        default_value_t = 0.9
    )]
    pub(crate) goal: f64,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cleave sim goodput --devices 8 --workload long-short --rate 60 --ttft 500ms --tpot 40ms --compare
  cleave sim goodput --fleet prefill=3,decode=5,profile=h100-llama-3-8b --search \\
      --trace conversation_trace.jsonl.gz --ttft 5s --tpot 50ms
  cleave sim goodput --fleet both=4,profile=h100-llama-3-8b --workload long-short --rate 20 \\
      --ttft 1s --adapters 64 --max-loras 8
  cleave sim goodput --devices 1024 --workload long-short --rate 8000 --duration 5s \\
      --ttft 500ms --router-cost
  cleave sim goodput --hardware h200 --model qwen3-32b --tensor-parallel-size 2 \\
      --fleet prefill=1,decode=3 --workload long-short --rate 4 --ttft 2s --tpot 50ms

Baselines get the same devices and the same arrivals. In an aggregated baseline every device
serves both legs.")]
pub(crate) struct SimGoodputArgs {
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
    #[command(flatten)]
    pub(crate) targets: TargetArgs,
    /// Routing to simulate; may be repeated.
    #[arg(long, value_name = "WAY", help_heading = "Simulation", value_parser = parse_scheme, default_value = "auto")]
    pub(crate) way: Vec<RoutingScheme>,
    /// Simulate all routings, including the baselines.
    #[arg(long, help_heading = "Simulation")]
    pub(crate) compare: bool,
    /// Search for the highest rate at which the goal is met, starting at the workload's rate.
    #[arg(long, help_heading = "Simulation", conflicts_with = "router_cost")]
    pub(crate) search: bool,
    /// Measure the cost of the router's brain on this machine: time per decision, and memory.
    #[arg(long, help_heading = "Simulation")]
    pub(crate) router_cost: bool,
}

/// The result that is wanted for each routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GoodputQuestion {
    OneRate,
    /// The highest rate that meets the goal.
    HighestRate,
    /// The cost of the router's brain.
    RouterCost,
}

impl SimGoodputArgs {
    pub(crate) fn question(&self) -> GoodputQuestion {
        if self.search {
            GoodputQuestion::HighestRate
        } else if self.router_cost {
            GoodputQuestion::RouterCost
        } else {
            GoodputQuestion::OneRate
        }
    }
}

/// Parses `auto`, `split`, `aggregated`, `load-split` …
fn parse_scheme(text: &str) -> Result<RoutingScheme, String> {
    let named = RoutingScheme::ALL
        .into_iter()
        .find(|scheme| flag(*scheme) == text);
    named.ok_or_else(|| {
        let names: Vec<&str> = RoutingScheme::ALL.into_iter().map(flag).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn flag(scheme: RoutingScheme) -> &'static str {
    match scheme {
        RoutingScheme::Auto => "auto",
        RoutingScheme::Split => "split",
        RoutingScheme::Whole => "aggregated",
        RoutingScheme::LoadSplit => "load-split",
        RoutingScheme::LoadWhole => "load-aggregated",
        RoutingScheme::RoundRobinSplit => "round-robin-split",
        RoutingScheme::RoundRobinWhole => "round-robin-aggregated",
    }
}

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cleave check policy.yaml
  cleave check policy.yaml --devices 8 --workload chat=0.7*short-long,batch=0.3*long-short --rate 40

The first command checks the file alone. The second also searches for the highest rate at which the
fleet meets every goal, in simulated runs of at least ten seconds and 300 requests each, unless
--limit or --duration sets another length.

The exit status is 1 if the policy is invalid, or if a class would miss its goal at that rate.")]
pub(crate) struct CheckArgs {
    /// Policy file with classes, tenants and rules, as for `--policy` of `serve` and `router`.
    #[arg(value_name = "POLICY")]
    pub(crate) policy: PathBuf,
    #[command(flatten)]
    pub(crate) scenario: ScenarioArgs,
}
