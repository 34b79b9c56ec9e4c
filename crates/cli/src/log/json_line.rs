//! Log lines as JSON, one object for each event.
//!
//! Owns: the names `timestamp`, `level` and `target`, which precede the event's own fields and its
//! `message` in the same object. Invariant: numbers and truth values stay what they are, and a
//! field of `NESTED` is the object that its text describes.

use serde::Serializer;
use serde::ser::SerializeMap;
use serde_json::Value;
use std::fmt;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Fields whose text is JSON already: decisions, and notes of brains.
const NESTED: [&str; 2] = ["record", "note"];

/// Fields that `tracing` adds to the lines of libraries that use the crate `log`.
const OF_LOG: &str = "log.";

/// Writes an event as one line of JSON.
pub(super) struct JsonLineFormat;

impl<S, N> FormatEvent<S, N> for JsonLineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let line = fields.line(&time, event).map_err(|_| fmt::Error)?;
        writeln!(writer, "{line}")
    }
}

/// The fields of one event, in their order.
#[derive(Default)]
struct EventFields(Vec<(&'static str, Value)>);

impl EventFields {
    fn line(&self, time: &str, event: &Event<'_>) -> serde_json::Result<String> {
        let metadata = event.metadata();
        let mut line = Vec::new();
        let mut serializer = serde_json::Serializer::new(&mut line);
        let mut object = serializer.serialize_map(None)?;
        object.serialize_entry("timestamp", time)?;
        object.serialize_entry("level", metadata.level().as_str())?;
        let of_log = |key: &str| self.0.iter().find(|(name, _)| *name == key);
        match of_log("log.target") {
            Some((_, target)) => object.serialize_entry("target", target)?,
            None => object.serialize_entry("target", metadata.target())?,
        }
        // The message is the event's last field.
        let own = self.0.iter().rev();
        for (name, value) in own.filter(|(name, _)| !name.starts_with(OF_LOG)) {
            object.serialize_entry(name, value)?;
        }
        object.end()?;
        Ok(String::from_utf8_lossy(&line).into_owned())
    }

    fn push(&mut self, field: &Field, value: Value) {
        self.0.push((field.name(), value));
    }
}

impl Visit for EventFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        let is_nested = NESTED.contains(&field.name());
        let nested = is_nested.then(|| serde_json::from_str(&text).ok());
        self.push(field, nested.flatten().unwrap_or_else(|| text.into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::LogBytes;
    use serde_json::json;

    #[test]
    fn values_keep_their_kinds_and_are_no_text() {
        let bytes = LogBytes::default();
        let writer = bytes.clone();
        let lines = tracing_subscriber::fmt()
            .event_format(JsonLineFormat)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(lines, || {
            let (record, shown) = (r#"{"a": [1]}"#, "a\nb");
            tracing::info!(
                target: "access",
                count = 3_u64,
                change = -2_i64,
                ms = 0.5,
                set = true,
                name = "a b",
                absent = None::<u64>,
                %record,
                %shown,
                "over"
            );
        });
        let mut line: Value = serde_json::from_str(bytes.text().trim_end()).unwrap();
        let time = line["timestamp"].take();
        assert!(
            time.as_str().is_some_and(|text| text.ends_with('Z')),
            "{time}"
        );
        let expected = json!({
            "timestamp": null,
            "level": "INFO",
            "target": "access",
            "message": "over",
            "count": 3,
            "change": -2,
            "ms": 0.5,
            "set": true,
            "name": "a b",
            "record": {"a": [1]},
            "shown": "a\nb",
        });
        assert_eq!(line, expected);
    }
}
