//! The command line of `cleave bench run` and `cleave bench goodput`.
//!
//! Owns: what a user may type, and what of it is told in a report. Never: acts on it.

use clap::{Args, ValueEnum};
use cleave_bench::{Arrivals, Asking, Ending, Endpoint, PromptForm, SloHeaders, Target, Timing};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// A rate that no search goes below.
pub(crate) const RATE_MIN: f64 = 1e-3;

/// Which server, and how it is asked.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// Address of an OpenAI-compatible server, such as http://127.0.0.1:8000; https:// too.
    #[arg(long, value_name = "URL")]
    pub(crate) url: String,
    /// The authorities that may vouch for an https:// server, in PEM; this system's if absent.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// Name of the model; the first one that the server lists if absent.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Sent as `Authorization: Bearer …`.
    #[arg(
        long,
        value_name = "KEY",
        env = "OPENAI_API_KEY",
        hide_env_values = true
    )]
    pub(crate) api_key: Option<String>,
    /// One more header of each request; may be given several times.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub(crate) headers: Vec<String>,
    /// Which interface.
    #[arg(long, value_enum, default_value_t = EndpointArg::Completions)]
    pub(crate) endpoint: EndpointArg,
    /// Prompts as token ids (exact lengths; completions only) or as text whose tokens the server
    /// counts beforehand.
    #[arg(long, value_enum, default_value_t = PromptArg::Auto)]
    pub(crate) prompt: PromptArg,
    /// Token ids of the model; asked of the server if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) vocab: Option<u32>,
    /// Let the model end its answers: for servers that refuse `ignore_eos` and `min_tokens`.
    #[arg(long)]
    pub(crate) respect_eos: bool,
    /// More fields of each request's body, as a JSON object; they replace those that are sent anyway.
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub(crate) extra_body: Option<Object>,
    /// Send `x-slo-class`, the targets (`x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms`), or both.
    #[arg(long, value_enum, default_value_t = SloHeadersArg::None)]
    pub(crate) slo_headers: SloHeadersArg,
    /// Ask for the stages of the time to first token (`x-cleave-timing: 1`).
    #[arg(long)]
    pub(crate) timing: bool,
}

/// What is asked of it.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Workload")]
pub(crate) struct WorkloadArgs {
    /// A trace, plain or gzipped: Mooncake's, Azure's, ServeGen's, a table of arrivals and lengths, of
    /// lengths alone, or of histograms.
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    pub(crate) trace: Option<PathBuf>,
    /// `short-short`, `short-long`, `long-short` or `long-long` (prompt and answer), with changes such
    /// as `short-long:input=128,output=512,cv=1.5,prefix=64`, or several classes such as
    /// `chat=0.7*short-long,batch=0.3*long-short`.
    #[arg(long, value_name = "SPEC")]
    pub(crate) workload: Option<String>,
    /// Which set of lengths, in a file of several.
    #[arg(long, value_name = "NAME", requires = "trace")]
    pub(crate) dataset: Option<String>,
    /// Name of the one class of a trace or a workload, for `--slo-headers`; a mixture names its own.
    #[arg(long, value_name = "NAME")]
    pub(crate) class: Option<String>,
    /// When requests come: `poisson`, `gamma:cv=2`, `uniform`, `burst:size=16`, `onoff:on=5s,off=10s`, or
    /// `trace` for the trace's own times; that, or Poisson without a trace's, if absent.
    #[arg(long, value_name = "PROCESS")]
    pub(crate) arrivals: Option<Arrivals>,
    /// Factor on prompt lengths. Prefixes that requests share stay shared.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) input_scale: f64,
    /// Factor on answer lengths.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) output_scale: f64,
    /// Longest prompt; longer ones are cut.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_input: Option<u32>,
    /// Longest answer; longer ones are cut.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_output: Option<u32>,
    /// Prompt and answer together at most: the model's context.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) max_context: Option<u32>,
    /// Requests at most.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) limit: Option<u32>,
    /// Of everything random: same seed, same requests at the same times.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// What is measured, and where it goes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Measurement")]
pub(crate) struct MeasureArgs {
    /// Targets, such as `ttft=500ms,tpot=50ms,e2e=30s`; `chat:ttft=200ms` for one class, several times
    /// for several. Refused, failed and late requests all count as misses.
    #[arg(long, value_name = "TARGETS")]
    pub(crate) slo: Vec<String>,
    /// Devices that the server has; goodput is divided by them.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) devices: u32,
    /// Do not count requests of a run's first so much, such as 5s.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) warmup: Option<Duration>,
    /// A request that takes longer than this has failed.
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = parse_span)]
    pub(crate) timeout: Duration,
    /// What is not over so long after the last arrival is a miss.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_span)]
    pub(crate) grace: Duration,
    /// Threads that send and read; a further one writes prompts ahead.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// Folder for result.json, report.html and requests.jsonl; made if it is not there.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// `cleave bench run`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cleave bench run --url http://localhost:8000 --workload short-long --rate 4 --duration 60s \\
      --slo ttft=500ms,tpot=50ms --out ./short-long
  cleave bench run --url http://localhost:8000 --trace conversation_trace.jsonl.gz --speed 2 \\
      --input-scale 0.1 --max-context 8192 --limit 500 --out ./mooncake
  cleave bench run --url http://localhost:8000 --rate 10 --limit 1000 \\
      --workload 'chat=0.7*short-long,batch=0.3*long-short' --arrivals gamma:cv=2 \\
      --slo chat:ttft=300ms,tpot=50ms --slo batch:e2e=60s --slo-headers class --out ./mixed

Load is open: requests come when they are due, whether or not earlier ones were answered, and
latencies count from then. Ctrl-C writes what was measured so far.")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Mean requests per second; a trace with times is stretched to it.
    #[arg(long, value_name = "RPS", value_parser = parse_positive, conflicts_with = "speed")]
    pub(crate) rate: Option<f64>,
    /// Replay a trace's times so much faster than recorded.
    #[arg(long, value_name = "FACTOR", value_parser = parse_positive)]
    pub(crate) speed: Option<f64>,
    /// Arrivals end after this long, such as 60s.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) duration: Option<Duration>,
    /// Exit with status 1 unless this share of the requests was within its targets; 1 for all of them.
    #[arg(long, value_name = "SHARE", value_parser = parse_demand)]
    pub(crate) goal: Option<f64>,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// `cleave bench goodput`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cleave bench goodput --url http://localhost:8000 --workload short-long \\
      --slo ttft=500ms,tpot=50ms --goal 0.9 --out ./goodput
  cleave bench goodput --url http://localhost:8000 --trace azure_conv.csv --input-scale 0.25 \\
      --slo ttft=1s,tpot=80ms --rate 2 --duration 60s --time-cap 30m --out ./azure
  cleave bench goodput --url http://localhost:8000 --workload long-short \\
      --slo ttft=2s --rates 1,2,4,8 --out ./sweep

A rate is doubled or halved until the goal is kept below and broken above, then what is between is
halved. A rate keeps the goal if the 95 % interval (Wilson) of its attainment does; one whose
interval has the goal inside is run again, and decided by its attainment in the end. A run whose
goal is out of reach is cut short. Each run has other prompts, so that none finds those of another
in a cache, and begins when the server is at rest.")]
pub(crate) struct GoodputArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Share of requests that must be within their targets.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = parse_goal)]
    pub(crate) goal: f64,
    /// Rate of the first run, requests per second.
    #[arg(long, value_name = "RPS", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) rate: f64,
    /// Exactly these rates, with commas, each run to its end.
    #[arg(long, value_name = "RPS", value_delimiter = ',', value_parser = parse_positive)]
    pub(crate) rates: Vec<f64>,
    /// No rate above is tried.
    #[arg(long, value_name = "RPS", default_value_t = 10_000.0, value_parser = parse_positive)]
    pub(crate) max_rate: f64,
    /// How close the rate kept and the rate broken are in the end: 0.05 is 5 %.
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, value_parser = parse_positive)]
    pub(crate) precision: f64,
    /// Requests of a run at least.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) requests: u32,
    /// Arrivals of a run last at least this long.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_span)]
    pub(crate) duration: Duration,
    /// Runs at one rate at most, while it is open whether the goal is kept.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) repeats: u32,
    /// No run begins that would end after this long.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) time_cap: Option<Duration>,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// A JSON object.
#[derive(Clone, Debug)]
pub(crate) struct Object(pub(crate) Map<String, Value>);

fn parse_object(text: &str) -> Result<Object, String> {
    let object = serde_json::from_str(text).map(Object);
    object.map_err(|error| format!("expected a JSON object: {error}"))
}

pub(crate) fn parse_span(text: &str) -> Result<Duration, String> {
    cleave_bench::span(text).map_err(|error| format!("{error:#}"))
}

pub(crate) fn parse_positive(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    let within = number.filter(|number| (RATE_MIN..=1e6).contains(number));
    within.ok_or_else(|| format!("expected a number from {RATE_MIN} to 1000000"))
}

fn parse_goal(text: &str) -> Result<f64, String> {
    let goal: Option<f64> = text.parse().ok();
    let within = goal.filter(|goal| *goal > 0.0 && *goal < 1.0);
    within.ok_or_else(|| "expected a share between 0 and 1, such as 0.9".to_owned())
}

/// A share that may be all: a search needs room on both sides of its goal, a check does not.
fn parse_demand(text: &str) -> Result<f64, String> {
    let goal: Option<f64> = text.parse().ok();
    let within = goal.filter(|goal| *goal > 0.0 && *goal <= 1.0);
    within.ok_or_else(|| "expected a share above 0 and at most 1, such as 0.9".to_owned())
}

/// See [`ServerArgs::endpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndpointArg {
    Completions,
    Chat,
}

/// See [`ServerArgs::prompt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PromptArg {
    Auto,
    Tokens,
    Text,
}

/// See [`ServerArgs::slo_headers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SloHeadersArg {
    None,
    Class,
    Targets,
    Both,
}

impl ServerArgs {
    /// As the load generator takes it.
    pub(crate) fn target(&self) -> Target {
        Target {
            url: self.url.clone(),
            authorities: self.cacert.clone(),
            model: self.model.clone(),
            form: match self.prompt {
                PromptArg::Auto => PromptForm::Auto,
                PromptArg::Tokens => PromptForm::Tokens,
                PromptArg::Text => PromptForm::Text,
            },
            vocabulary: self.vocab,
            asking: Asking {
                endpoint: match self.endpoint {
                    EndpointArg::Completions => Endpoint::Completions,
                    EndpointArg::Chat => Endpoint::Chat,
                },
                ending: match self.respect_eos {
                    true => Ending::ByModel,
                    false => Ending::AsPlanned,
                },
                slo_headers: match self.slo_headers {
                    SloHeadersArg::None => SloHeaders::None,
                    SloHeadersArg::Class => SloHeaders::Class,
                    SloHeadersArg::Targets => SloHeaders::Targets,
                    SloHeadersArg::Both => SloHeaders::Both,
                },
                timing: match self.timing {
                    true => Timing::Asked,
                    false => Timing::Silent,
                },
                api_key: self.api_key.clone(),
                headers: self.headers.clone(),
                fields: self
                    .extra_body
                    .clone()
                    .map_or_else(Map::new, |Object(map)| map),
            },
        }
    }
}

/// What a report says of the request for it: all of it but the key and the headers' values, which may
/// be secret.
pub(crate) fn told(
    (server, workload, measure): (&ServerArgs, &WorkloadArgs, &MeasureArgs),
) -> Map<String, Value> {
    let target = server.target();
    let names = server
        .headers
        .iter()
        .filter_map(|header| header.split(':').next());
    let seconds = |span: Duration| span.as_secs_f64();
    let told = json!({
        "url": server.url,
        "endpoint": target.asking.endpoint,
        "prompt": target.form,
        "ending": target.asking.ending,
        "slo_headers": target.asking.slo_headers,
        "timing": target.asking.timing,
        "headers": names.collect::<Vec<_>>(),
        "extra_body": target.asking.fields,
        "trace": workload.trace,
        "workload": workload.workload,
        "dataset": workload.dataset,
        "class": workload.class,
        "arrivals": workload.arrivals.map(|arrivals| arrivals.to_string()),
        "input_scale": workload.input_scale,
        "output_scale": workload.output_scale,
        "max_input": workload.max_input,
        "max_output": workload.max_output,
        "max_context": workload.max_context,
        "limit": workload.limit,
        "seed": workload.seed,
        "slo": measure.slo,
        "devices": measure.devices,
        "warmup_s": measure.warmup.map(seconds),
        "timeout_s": seconds(measure.timeout),
        "grace_s": seconds(measure.grace),
        "threads": measure.threads,
    });
    match told {
        Value::Object(told) => told,
        _ => Map::new(),
    }
}
