//! The flags of logs and traces.
//!
//! Owns: these flags, and which of flag and environment counts. Never: writes a log.

use clap::{Args, ValueEnum};
use cleave_api::PromptLog;
use cleave_node::{SampleError, Sampler, TraceOptions};

/// What every command takes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// How log lines are written, to standard error.
    #[arg(
        long,
        value_enum,
        global = true,
        env = "CLEAVE_LOG_FORMAT",
        default_value = "text"
    )]
    pub(crate) log_format: LogFormat,
    /// What is logged, and what is worse. RUST_LOG goes first where it says something, as
    /// `RUST_LOG=h2=debug`; at `debug` every decision about a request is a line with its id.
    #[arg(
        long,
        value_enum,
        global = true,
        env = "CLEAVE_LOG_LEVEL",
        default_value = "info"
    )]
    pub(crate) log_level: LogLevel,
}

/// See [`LogArgs::log_format`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// See [`LogArgs::log_level`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// What routers and workers take.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Traces")]
pub(crate) struct TraceArgs {
    /// Send OpenTelemetry traces to this OTLP gRPC endpoint, such as http://localhost:4317.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
    /// Share of the traces that begin here and are recorded, 0 to 1; of clients' traces those are that they
    /// record. If absent, what OTEL_TRACES_SAMPLER says, or all.
    #[arg(long, value_name = "SHARE", value_parser = Sampler::share)]
    pub(crate) trace_sample: Option<Sampler>,
}

/// What routers take.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Clients")]
pub(crate) struct PromptArgs {
    /// Log the body of each completion request as it came, and what error messages quote of it. Without it
    /// neither log, trace nor metric has text or tokens of a prompt or an answer.
    #[arg(long)]
    pub(crate) log_prompts: bool,
}

impl PromptArgs {
    pub(crate) fn shown(self) -> PromptLog {
        match self.log_prompts {
            true => PromptLog::Shown,
            false => PromptLog::Hidden,
        }
    }
}

impl TraceArgs {
    /// With what the environment says.
    ///
    /// # Errors
    /// A sampler there that is none.
    pub(crate) fn options(&self) -> Result<TraceOptions, SampleError> {
        let name = std::env::var("OTEL_TRACES_SAMPLER").ok();
        let argument = std::env::var("OTEL_TRACES_SAMPLER_ARG").ok();
        let sampler = match (self.trace_sample, name) {
            (Some(sampler), _) => sampler,
            (None, Some(name)) => Sampler::named(&name, argument.as_deref())?,
            (None, None) => Sampler::default(),
        };
        Ok(TraceOptions {
            endpoint: self.otlp_endpoint.clone(),
            sampler,
        })
    }
}
