//! Stage times of a request, as the server reports them (lesson 23).
//!
//! Owns: reading `x-cleave-timing`, in `Server-Timing`'s syntax (W3C), and the field `timing`.
//! Never: guesses a stage that was not reported.

use cleave_domain::RequestStage;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Milliseconds of each stage; none where the server reported nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StageTimes([Option<f64>; RequestStage::ALL.len()]);

impl StageTimes {
    pub(crate) fn of(&self, stage: RequestStage) -> Option<f64> {
        let index = RequestStage::ALL.iter().position(|other| *other == stage)?;
        self.0[index]
    }

    /// Parses `name;dur=1.2, name;desc="x";dur=3`; `None` without any of our stages.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        let mut stages = Self::default();
        for entry in header.split(',') {
            let mut parts = entry.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let duration = parts.find_map(|part| part.strip_prefix("dur="));
            let millis = duration.and_then(|text| text.trim_matches('"').parse::<f64>().ok());
            stages.set(name, millis);
        }
        (stages != Self::default()).then_some(stages)
    }

    fn set(&mut self, name: &str, millis: Option<f64>) {
        let sound = millis.filter(|millis| millis.is_finite() && *millis >= 0.0);
        let index = RequestStage::ALL
            .iter()
            .position(|stage| stage.name() == name);
        if let Some(index) = index {
            self.0[index] = sound;
        }
    }
}

/// The format of the server: `{"prefill_ms": 30.5}`.
impl Serialize for StageTimes {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let mut map = out.serialize_map(None)?;
        for (stage, millis) in RequestStage::ALL.iter().zip(self.0) {
            if let Some(millis) = millis {
                map.serialize_entry(&format!("{stage}_ms"), &millis)?;
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for StageTimes {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct StageTimesVisitor;
        impl<'de> Visitor<'de> for StageTimesVisitor {
            type Value = StageTimes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("stages with their milliseconds")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StageTimes, A::Error> {
                let mut stages = StageTimes::default();
                while let Some(key) = map.next_key::<String>()? {
                    // Other fields are the server's own sums.
                    match key.strip_suffix("_ms") {
                        Some(name) => stages.set(name, map.next_value()?),
                        None => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(stages)
            }
        }
        source.deserialize_map(StageTimesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Lesson: 23.
    #[test]
    fn stage_times_are_read_as_the_server_writes_them() {
        let header =
            "router_queue;dur=1.25, prefill_wait;dur=0, prefill;desc=\"p\";dur=30.5, other;dur=9";
        let stages = StageTimes::parse(header).unwrap();
        let reported = RequestStage::ALL.map(|stage| stages.of(stage));
        let some = [Some(1.25), None, Some(0.0), Some(30.5)];
        assert_eq!(reported[..4], some);
        assert_eq!(reported[4..], [None; 4]);
        for nothing in ["", "other;dur=3", "prefill", "prefill;dur=soon", ";;,,"] {
            assert_eq!(StageTimes::parse(nothing), None, "{nothing}");
        }
        let field =
            r#"{"router_queue_ms": 1.25, "retry_ms": 3, "ttft_ms": 99, "worker": {"a": 1}}"#;
        let stages: StageTimes = serde_json::from_str(field).unwrap();
        assert_eq!(stages.of(RequestStage::Retry), Some(3.0));
        let written = serde_json::to_string(&stages).unwrap();
        assert_eq!(written, r#"{"router_queue_ms":1.25,"retry_ms":3.0}"#);
    }
}
