//! The flags of logs and traces.
//!
//! Owns: these flags, and the precedence of flags and environment. Never: writes a log.

use clap::{Args, ValueEnum};
use cleave_api::{AccessLog, PromptLog};
use cleave_telemetry::{OtlpScheme, TraceOptions, TraceSampler, TraceSamplerError};
use std::path::PathBuf;

/// Flags of every command.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Format of log lines, which go to standard error.
    #[arg(long, value_enum, global = true, default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// Lowest level that is logged: `info` if absent, and `warn` for `cleave chat`. RUST_LOG takes
    /// precedence where it matches, such as `RUST_LOG=h2=debug`. At `debug` every decision about a
    /// request is a line with its id.
    #[arg(long, value_enum, global = true)]
    pub(crate) log_level: Option<LogLevel>,
}

/// Format of log lines; see [`LogArgs::log_format`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines of text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Level of log lines; see [`LogArgs::log_level`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Flags of routers and workers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Traces")]
pub(crate) struct TraceArgs {
    /// Send OpenTelemetry traces to this OTLP gRPC endpoint, such as http://localhost:4317 or
    /// https://collector:4317. Without a scheme it is https, unless OTEL_EXPORTER_OTLP_INSECURE is
    /// true.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub(crate) otlp_endpoint: Option<String>,
    /// PEM file of authorities that may sign the collector's certificate; the system's if absent.
    #[arg(long, value_name = "FILE", env = "OTEL_EXPORTER_OTLP_CERTIFICATE")]
    pub(crate) otlp_certificate: Option<PathBuf>,
    /// Share of the traces that begin here and are recorded, 0 to 1; traces of clients are recorded
    /// if the client records them. If absent, OTEL_TRACES_SAMPLER decides, or all are recorded.
    #[arg(long, value_name = "SHARE", value_parser = TraceSampler::share)]
    pub(crate) trace_sample: Option<TraceSampler>,
}

#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Clients")]
pub(crate) struct PromptArgs {
    /// Log the body of each completion request as it arrived, and the parts of it that error
    /// messages quote. Without this flag no log, trace or metric contains text or tokens of a
    /// prompt or an answer.
    #[arg(long)]
    pub(crate) log_prompts: bool,
    /// Log a line for each HTTP request when it is over: method, path, status, model, class,
    /// tokens, times, workers, the reason of a refusal. Without this flag such lines have the level
    /// `debug`, and `warn` where the server failed; probes and /metrics have `debug` in any case.
    #[arg(long)]
    pub(crate) access_log: bool,
}

impl PromptArgs {
    pub(crate) fn shown(self) -> PromptLog {
        if self.log_prompts {
            PromptLog::Shown
        } else {
            PromptLog::Hidden
        }
    }

    pub(crate) fn access_log(self) -> AccessLog {
        if self.access_log {
            AccessLog::On
        } else {
            AccessLog::Off
        }
    }
}

impl TraceArgs {
    /// Combines the flags with the environment.
    ///
    /// # Errors
    /// If the environment names an unknown sampler.
    pub(crate) fn options(&self) -> Result<TraceOptions, TraceSamplerError> {
        let name = std::env::var("OTEL_TRACES_SAMPLER").ok();
        let argument = std::env::var("OTEL_TRACES_SAMPLER_ARG").ok();
        let sampler = match (self.trace_sample, name) {
            (Some(sampler), _) => sampler,
            (None, Some(name)) => TraceSampler::named(&name, argument.as_deref())?,
            (None, None) => TraceSampler::default(),
        };
        let is_insecure = [
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE",
            "OTEL_EXPORTER_OTLP_INSECURE",
        ]
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let default_scheme = if is_insecure {
            OtlpScheme::Http
        } else {
            OtlpScheme::Https
        };
        // By OpenTelemetry's specification an empty variable is the same as none.
        let endpoint = self.otlp_endpoint.clone().filter(|url| !url.is_empty());
        Ok(TraceOptions {
            endpoint,
            default_scheme,
            certificate: self.otlp_certificate.clone(),
            sampler,
        })
    }
}
