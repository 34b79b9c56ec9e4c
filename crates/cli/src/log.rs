//! Where log lines go and how they are written.
//!
//! Owns: format and filter. Never: loses RUST_LOG: what it says goes before the flag. Invariant: lines go to
//! standard error, and a panic's message, which may quote a prompt, is in none of them.

use crate::args::{LogArgs, LogFormat, LogLevel};
use std::io::IsTerminal;
use std::panic::PanicHookInfo;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// From here on.
pub(crate) fn begin(args: &LogArgs) {
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

/// For processes that serve: a panic is a line like any other, with its place; its message is in it unless it
/// was put together from values.
pub(crate) fn panics() {
    std::panic::set_hook(Box::new(|panic: &PanicHookInfo<'_>| {
        let message = panic.payload().downcast_ref::<&'static str>();
        let place = panic.location().map(ToString::to_string);
        tracing::error!(message, place, "panicked");
    }));
}
