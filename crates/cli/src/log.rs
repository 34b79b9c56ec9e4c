//! The destination and format of log lines.
//!
//! Owns: format and filter. Never: ignores RUST_LOG, which takes precedence over the flag.
//! Invariant: lines go to standard error, and no line contains the formatted message of a panic,
//! which may quote a prompt.

use crate::args::{LogArgs, LogFormat, LogLevel};
use std::io::IsTerminal;
use std::panic::PanicHookInfo;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

pub(crate) fn init(args: &LogArgs) {
    let filter = EnvFilter::builder()
        .with_default_directive(level(args.log_level).into())
        .from_env_lossy();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Text => lines
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false)
            .init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}

fn level(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Off => LevelFilter::OFF,
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}

/// Installs the panic hook of serving processes: a panic becomes a log line with its location, and
/// with its message if that is a static text.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic: &PanicHookInfo<'_>| {
        let message = panic.payload().downcast_ref::<&'static str>();
        let place = panic.location().map(ToString::to_string);
        tracing::error!(message, place, "panicked");
    }));
}
