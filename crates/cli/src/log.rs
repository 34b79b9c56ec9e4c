//! The destination and format of log lines.
//!
//! Owns: format and filter. Never: ignores RUST_LOG, which takes precedence over the flag.
//! Invariant: lines go to standard error, and no line contains the formatted message of a panic,
//! which may quote a prompt. An event is one line, whatever its values contain: names come from
//! folders and from other processes.

mod json_line;

use crate::args::{LogArgs, LogFormat, LogLevel};
use json_line::JsonLineFormat;
use std::fmt;
use std::io::IsTerminal;
use std::panic::PanicHookInfo;
use tracing::field::Field;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{self, Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Starts to log; `default` is the level of a command where none is given.
pub(crate) fn init(args: &LogArgs, default: LogLevel) {
    let filter = EnvFilter::builder()
        .with_default_directive(level(args.log_level.unwrap_or(default)).into())
        .from_env_lossy();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Text => lines
            .event_format(OneLineFormat::new(std::io::stderr().is_terminal()))
            .fmt_fields(quoted_fields())
            .init(),
        LogFormat::Json => lines.event_format(JsonLineFormat).init(),
    }
}

/// Writes fields as `name=value`. A value with spaces, or without a character, is in quotes.
fn quoted_fields() -> impl for<'a> FormatFields<'a> + 'static {
    format::debug_fn(write_field).delimited(" ")
}

fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    let name = field.name();
    // Lines of libraries that use the crate `log` have such fields, for formats that show targets.
    if name.starts_with("log.") {
        return Ok(());
    }
    let text = format!("{value:?}");
    if name == "message" {
        return writer.write_str(&text);
    }
    if writer.has_ansi_escapes() {
        write!(writer, "\u{1b}[3m{name}\u{1b}[0m\u{1b}[2m=\u{1b}[0m")?;
    } else {
        write!(writer, "{name}=")?;
    }
    // A whole quoted string, as a field that is a string has it.
    let is_quoted = serde_json::from_str::<String>(&text).is_ok();
    if !is_quoted && (text.is_empty() || text.contains(char::is_whitespace)) {
        write!(writer, "{text:?}")
    } else {
        writer.write_str(&text)
    }
}

/// Writes an event as text, with control characters in its values escaped.
struct OneLineFormat(Format);

impl OneLineFormat {
    fn new(ansi: bool) -> Self {
        Self(format::format().with_ansi(ansi).with_target(false))
    }
}

impl<S, N> FormatEvent<S, N> for OneLineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0
            .format_event(context, Writer::new(&mut line), event)?;
        let mut rest = line.trim_end_matches('\n');
        while let Some(at) = rest.find(is_escaped) {
            let (plain, special) = rest.split_at(at);
            writer.write_str(plain)?;
            // Colours, most of them the formatter's own, can do no harm.
            let colour = colour_length(special);
            let (special, after) = special.split_at(colour.unwrap_or(char_length(special)));
            if colour.is_some() {
                writer.write_str(special)?;
            } else {
                write!(writer, "{}", special.escape_default())?;
            }
            rest = after;
        }
        writer.write_str(rest)?;
        writer.write_char('\n')
    }
}

fn is_escaped(char: char) -> bool {
    char.is_control() || matches!(char, '\u{2028}' | '\u{2029}')
}

fn char_length(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

/// Bytes of the terminal's sequence for a colour with which a text begins (ECMA-48, "SGR").
fn colour_length(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\u{1b}[")?;
    let end = parameters.find(|char: char| !char.is_ascii_digit() && char != ';')?;
    parameters[end..].starts_with('m').then_some(end + 3)
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
        let reason = panic.payload().downcast_ref::<&'static str>();
        let place = panic.location().map(ToString::to_string);
        tracing::error!(reason, place, "panicked");
    }));
}

#[cfg(test)]
mod tests {
    use super::{OneLineFormat, is_escaped, quoted_fields};
    use std::io;
    use std::sync::{Arc, Mutex};

    /// The bytes that a subscriber wrote.
    #[derive(Clone, Default)]
    pub(super) struct LogBytes(Arc<Mutex<Vec<u8>>>);

    impl LogBytes {
        pub(super) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for LogBytes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines of the events of `log`.
    fn logged(ansi: bool, log: impl Fn()) -> String {
        let bytes = LogBytes::default();
        let writer = bytes.clone();
        let lines = tracing_subscriber::fmt()
            .event_format(OneLineFormat::new(ansi))
            .fmt_fields(quoted_fields())
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(lines, log);
        bytes.text()
    }

    #[test]
    fn values_with_spaces_or_without_characters_are_in_quotes() {
        let text = logged(false, || {
            let (device, empty, name) = ("AVX2, bf16", "", "a b");
            tracing::info!(%device, model = %empty, name, count = 3, "ready to serve");
            let forged = "\"a\" level=ERROR b";
            tracing::info!(%forged, "next");
        });
        let fields = r#"ready to serve device="AVX2, bf16" model="" name="a b" count=3"#;
        assert!(text.contains(fields), "{text}");
        let forged = r#"next forged="\"a\" level=ERROR b""#;
        assert!(text.contains(forged), "{text}");
    }

    #[test]
    fn a_value_with_line_breaks_stays_in_its_line() {
        for ansi in [false, true] {
            let text = logged(ansi, || {
                let name = "a\nERROR forged\r\u{2028}b\u{1b}[2Jc";
                tracing::info!(%name, "a worker joined: {name}");
            });
            let line = text.strip_suffix('\n').expect("a line");
            assert_eq!(line.find(|char| char != '\u{1b}' && is_escaped(char)), None);
            assert_eq!(line.contains('\u{1b}'), ansi, "{line}");
            assert!(!line.contains("\u{1b}[2J"), "{line}");
            let name = r"a\nERROR forged\r\u{2028}b";
            assert_eq!(line.matches(name).count(), 2, "{line}");
        }
    }
}
