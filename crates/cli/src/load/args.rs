//! The arguments of `cleave bench run` and `cleave bench goodput`.
//!
//! Owns: the flags, and the part of them that a report contains. Never: acts on them.

use clap::{Args, ValueEnum};
use cleave_bench::{
    AnswerLength, ApiEndpoint, ArrivalProcess, PromptEncoding, RequestOptions, ServerTarget,
    SloHeaders, StageRequest,
};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// Lowest rate of a search.
pub(crate) const RATE_MIN: f64 = 1e-3;

/// Flags of the server and of the requests to it.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArgs {
    /// URL of an OpenAI-compatible server, such as http://127.0.0.1:8000; https:// is supported.
    #[arg(long, value_name = "URL")]
    pub(crate) url: String,
    /// Certificate authorities, in PEM, that an https:// server must be signed by; the system's if
    /// absent.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// Name of the model; the first one that the server lists if absent.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// API key, sent as `Authorization: Bearer …`.
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY")]
    pub(crate) api_key: Option<String>,
    /// Additional header of each request; may be repeated.
    #[arg(long = "header", value_name = "NAME: VALUE")]
    pub(crate) headers: Vec<String>,
    /// Endpoint to send requests to.
    #[arg(long, value_enum, default_value_t = EndpointArg::Completions)]
    pub(crate) endpoint: EndpointArg,
    /// Form of the prompts: token ids (exact lengths; completions only), or text whose tokens the
    /// server counts beforehand.
    #[arg(long, value_enum, default_value_t = PromptArg::Auto)]
    pub(crate) prompt: PromptArg,
    /// Vocabulary size of the model; the server is asked if absent.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) vocab: Option<u32>,
    /// Let the model end its answers, for servers that refuse `ignore_eos` and `min_tokens`.
    #[arg(long)]
    pub(crate) respect_eos: bool,
    /// Additional fields of each request's body, as a JSON object; they replace default fields.
    #[arg(long, value_name = "JSON", value_parser = parse_object)]
    pub(crate) extra_body: Option<JsonObjectArg>,
    /// SLO headers to send: `x-slo-class`, the targets (`x-slo-ttft-ms`, `x-slo-tpot-ms`,
    /// `x-slo-e2e-ms`), or both.
    #[arg(long, value_enum, default_value_t = SloHeadersArg::None)]
    pub(crate) slo_headers: SloHeadersArg,
    /// Ask the server for the stages of the time to first token (`x-cleave-timing: 1`).
    #[arg(long)]
    pub(crate) timing: bool,
}

/// Flags of the requests' lengths and times.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Workload")]
pub(crate) struct WorkloadArgs {
    /// Trace file, plain or gzipped: of Mooncake, Azure or ServeGen, or a CSV table of arrivals and
    /// lengths (columns `arrival_s,input_tokens,output_tokens`), of lengths alone, or of
    /// histograms.
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    pub(crate) trace: Option<PathBuf>,
    /// Synthetic workload: `short-short`, `short-long`, `long-short` or `long-long` (prompt and
    /// answer), with changes such as `short-long:input=128,output=512,cv=1.5,prefix=64`, or several
    /// classes such as `chat=0.7*short-long,batch=0.3*long-short`.
    #[arg(long, value_name = "SPEC")]
    pub(crate) workload: Option<String>,
    /// Name of the set of lengths, in a file of several.
    #[arg(long, value_name = "NAME", requires = "trace")]
    pub(crate) dataset: Option<String>,
    /// Name of the class of a trace or of a workload of one class, for `--slo-headers`; a mixture
    /// names its classes.
    #[arg(long, value_name = "NAME")]
    pub(crate) class: Option<String>,
    /// Arrival process: `poisson`, `gamma:cv=2`, `uniform`, `burst:size=16`, `onoff:on=5s,off=10s`,
    /// or `trace` for the times of the trace. If absent, `trace` if the trace has times, otherwise
    /// `poisson`.
    #[arg(long, value_name = "PROCESS")]
    pub(crate) arrivals: Option<ArrivalProcess>,
    /// Factor on prompt lengths; shared prefixes stay shared.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) input_scale: f64,
    /// Factor on answer lengths.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) output_scale: f64,
    /// Limit of a prompt; longer ones are cut.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_input: Option<u32>,
    /// Limit of an answer; longer ones are cut.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_output: Option<u32>,
    /// Limit of prompt and answer together: the model's context.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) max_context: Option<u32>,
    /// Limit of the number of requests.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) limit: Option<u32>,
    /// Seed of everything random: the same seed gives the same requests at the same times.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Flags of the measurement and its output.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Measurement")]
pub(crate) struct MeasureArgs {
    /// Targets, such as `ttft=500ms,tpot=50ms,e2e=30s`; `chat:ttft=200ms` for one class, repeated
    /// for several. Refused, failed and late requests all count as misses.
    #[arg(long, value_name = "TARGETS")]
    pub(crate) slo: Vec<String>,
    /// Number of devices of the server; goodput is divided by it.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) devices: u32,
    /// Time at the start of a run, such as 5s, whose requests are not counted.
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    pub(crate) warmup: Option<Duration>,
    /// Time after which a request has failed.
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = parse_span)]
    pub(crate) timeout: Duration,
    /// Time after the last arrival at which unfinished requests count as misses.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_span)]
    pub(crate) grace: Duration,
    /// Threads that send and read; one more thread prepares prompts.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) threads: u32,
    /// Folder for result.json, report.html and requests.jsonl; created if absent.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// The arguments of `cleave bench run`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cleave bench run --url http://localhost:8000 --workload short-long --rate 4 --duration 60s \\
      --slo ttft=500ms,tpot=50ms --out ./short-long
  cleave bench run --url http://localhost:8000 --trace conversation_trace.jsonl.gz --speed 2 \\
      --input-scale 0.1 --max-context 8192 --limit 500 --out ./mooncake
  cleave bench run --url http://localhost:8000 --rate 10 --limit 1000 \\
      --workload 'chat=0.7*short-long,batch=0.3*long-short' --arrivals gamma:cv=2 \\
      --slo chat:ttft=300ms,tpot=50ms --slo batch:e2e=60s --slo-headers class --out ./mixed

The load is open-loop: each request is sent at its time, whether or not earlier ones were answered,
and its latencies count from that time. Ctrl-C ends the run and writes the results so far.")]
pub(crate) struct LoadRunArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Mean requests per second; the times of a trace are stretched to it.
    #[arg(long, value_name = "RPS", help_heading = "Workload", value_parser = parse_positive, conflicts_with = "speed")]
    pub(crate) rate: Option<f64>,
    /// Factor on the speed of a trace's times.
    #[arg(long, value_name = "FACTOR", help_heading = "Workload", value_parser = parse_positive)]
    pub(crate) speed: Option<f64>,
    /// Time after which arrivals end, such as 60s.
    #[arg(long, value_name = "TIME", help_heading = "Workload", value_parser = parse_span)]
    pub(crate) duration: Option<Duration>,
    /// Exit with status 1 unless at least this share of the requests met its targets; 1 for all of
    /// them.
    #[arg(long, value_name = "SHARE", help_heading = "Measurement", value_parser = parse_required_share)]
    pub(crate) goal: Option<f64>,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

/// The arguments of `cleave bench goodput`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cleave bench goodput --url http://localhost:8000 --workload short-long \\
      --slo ttft=500ms,tpot=50ms --goal 0.9 --out ./goodput
  cleave bench goodput --url http://localhost:8000 --trace azure_conv.csv --input-scale 0.25 \\
      --slo ttft=1s,tpot=80ms --rate 2 --duration 60s --time-cap 30m --out ./azure
  cleave bench goodput --url http://localhost:8000 --workload long-short \\
      --slo ttft=2s --rates 1,2,4,8 --out ./sweep

The rate is doubled or halved until one rate meets the goal and a higher one misses it; then the
interval between them is halved. A rate meets or misses the goal if the 95 % interval (Wilson) of
its attainment lies above or below it. If the goal lies inside, the rate is run again, and in the
end its attainment decides. A run that can no longer meet the goal is cut short. Each run has new
prompts, so that no run finds those of another in a cache, and starts when the server is idle.")]
pub(crate) struct LoadGoodputArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    #[command(flatten)]
    pub(crate) workload: WorkloadArgs,
    /// Required share of requests that meet their targets.
    #[arg(long, value_name = "SHARE", help_heading = "Search", default_value_t = 0.9, value_parser = parse_goal)]
    pub(crate) goal: f64,
    /// Rate of the first run, in requests per second.
    #[arg(long, value_name = "RPS", help_heading = "Search", default_value_t = 1.0, value_parser = parse_positive)]
    pub(crate) rate: f64,
    /// Run exactly these rates, separated by commas, each to its end.
    #[arg(long, value_name = "RPS", help_heading = "Search", value_delimiter = ',', value_parser = parse_positive)]
    pub(crate) rates: Vec<f64>,
    /// Limit of the rates that are tried.
    #[arg(long, value_name = "RPS", help_heading = "Search", default_value_t = 10_000.0, value_parser = parse_positive)]
    pub(crate) max_rate: f64,
    /// Largest relative distance between the highest rate that met the goal and the lowest that
    /// missed it: 0.05 is 5 %.
    #[arg(long, value_name = "SHARE", help_heading = "Search", default_value_t = 0.05, value_parser = parse_positive)]
    pub(crate) precision: f64,
    /// Least number of requests of a run.
    #[arg(long, value_name = "N", help_heading = "Search", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) requests: u32,
    /// Least duration of a run's arrivals.
    #[arg(long, value_name = "TIME", help_heading = "Search", default_value = "30s", value_parser = parse_span)]
    pub(crate) duration: Duration,
    /// Limit of runs at one rate while its verdict is open.
    #[arg(long, value_name = "N", help_heading = "Search", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) repeats: u32,
    /// Limit of the whole search: no run starts that would end later.
    #[arg(long, value_name = "TIME", help_heading = "Search", value_parser = parse_span)]
    pub(crate) time_cap: Option<Duration>,
    #[command(flatten)]
    pub(crate) measure: MeasureArgs,
}

#[derive(Clone, Debug)]
pub(crate) struct JsonObjectArg(pub(crate) Map<String, Value>);

fn parse_object(text: &str) -> Result<JsonObjectArg, String> {
    let object = serde_json::from_str(text).map(JsonObjectArg);
    object.map_err(|error| format!("expected a JSON object: {error}"))
}

pub(crate) fn parse_span(text: &str) -> Result<Duration, String> {
    cleave_bench::parse_duration(text).map_err(|error| format!("{error:#}"))
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

/// A check accepts 1; a search does not, because it needs rates on both sides of its goal.
fn parse_required_share(text: &str) -> Result<f64, String> {
    let goal: Option<f64> = text.parse().ok();
    let within = goal.filter(|goal| *goal > 0.0 && *goal <= 1.0);
    within.ok_or_else(|| "expected a share above 0 and at most 1, such as 0.9".to_owned())
}

/// Endpoint of the requests; see [`ServerArgs::endpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndpointArg {
    Completions,
    Chat,
}

/// Form of the prompts; see [`ServerArgs::prompt`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PromptArg {
    Auto,
    Tokens,
    Text,
}

/// SLO headers of the requests; see [`ServerArgs::slo_headers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SloHeadersArg {
    None,
    Class,
    Targets,
    Both,
}

impl ServerArgs {
    /// Converts the flags into the target of the load generator.
    pub(crate) fn target(&self) -> ServerTarget {
        ServerTarget {
            url: self.url.clone(),
            authorities: self.cacert.clone(),
            model: self.model.clone(),
            encoding: match self.prompt {
                PromptArg::Auto => PromptEncoding::Auto,
                PromptArg::Tokens => PromptEncoding::Tokens,
                PromptArg::Text => PromptEncoding::Text,
            },
            vocabulary: self.vocab,
            request_options: RequestOptions {
                endpoint: match self.endpoint {
                    EndpointArg::Completions => ApiEndpoint::Completions,
                    EndpointArg::Chat => ApiEndpoint::Chat,
                },
                ending: if self.respect_eos {
                    AnswerLength::ByModel
                } else {
                    AnswerLength::AsPlanned
                },
                slo_headers: match self.slo_headers {
                    SloHeadersArg::None => SloHeaders::None,
                    SloHeadersArg::Class => SloHeaders::Class,
                    SloHeadersArg::Targets => SloHeaders::Targets,
                    SloHeadersArg::Both => SloHeaders::Both,
                },
                timing: if self.timing {
                    StageRequest::Asked
                } else {
                    StageRequest::Silent
                },
                api_key: self.api_key.clone(),
                headers: self.headers.clone(),
                fields: self
                    .extra_body
                    .clone()
                    .map_or_else(Map::new, |JsonObjectArg(map)| map),
            },
        }
    }
}

/// Returns the configuration for the report: all flags except the key and the values of headers,
/// which may be secret.
pub(crate) fn report_configuration(
    server: &ServerArgs,
    workload: &WorkloadArgs,
    measure: &MeasureArgs,
) -> Map<String, Value> {
    let target = server.target();
    let names = server
        .headers
        .iter()
        .filter_map(|header| header.split(':').next());
    let seconds = |span: Duration| span.as_secs_f64();
    let configuration = json!({
        "url": server.url,
        "endpoint": target.request_options.endpoint,
        "prompt": target.encoding,
        "ending": target.request_options.ending,
        "slo_headers": target.request_options.slo_headers,
        "timing": target.request_options.timing,
        "headers": names.collect::<Vec<_>>(),
        "extra_body": target.request_options.fields,
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
    match configuration {
        Value::Object(configuration) => configuration,
        _ => Map::new(),
    }
}
