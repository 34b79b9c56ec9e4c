//! Sizes of JSON Schemas: their expressions, and the multiples that hold for one value.

use super::GrammarSize;
use serde_json::Value;
use std::collections::BTreeSet;

/// Limit of the schemas that are followed to find those that hold for one value.
const VISITS_MAX: u32 = 50_000;
/// Depth to which they are followed.
const DEPTH_MAX: u32 = 32;

/// A number as `coefficient * 10^-exponent`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Multiple {
    coefficient: u64,
    exponent: u32,
}

impl Multiple {
    fn of(value: &Value) -> Option<Self> {
        let mut value = value.as_f64().filter(|value| *value > 0.0)?;
        let mut exponent = 0;
        while value.fract() != 0.0 && exponent < 400 {
            value *= 10.0;
            exponent += 1;
        }
        // The library refuses one beyond 32 bits.
        let is_known = value <= f64::from(u32::MAX);
        #[expect(clippy::cast_possible_truncation, reason = "a whole number of 32 bits")]
        #[expect(clippy::cast_sign_loss, reason = "it is positive")]
        is_known.then_some(Self {
            coefficient: value as u64,
            exponent,
        })
    }

    /// The least number that is a multiple of both.
    fn common(self, other: Self) -> Self {
        let exponent = self.exponent.max(other.exponent);
        let scaled = |number: Self| {
            let scale = 10_u64.saturating_pow(exponent - number.exponent);
            number.coefficient.saturating_mul(scale)
        };
        let (a, b) = (scaled(self), scaled(other));
        let (mut divisor, mut rest) = (a, b);
        while rest != 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        Self {
            coefficient: (a / divisor.max(1)).saturating_mul(b),
            exponent,
        }
    }
}

/// Finds the multiples that hold for one value.
struct MultipleWalk<'a> {
    whole: &'a Value,
    visits_left: u32,
}

impl MultipleWalk<'_> {
    fn of(&mut self, schema: &Value, depth: u32) -> Option<Multiple> {
        let members = schema.as_object()?;
        self.visits_left = self.visits_left.checked_sub(1)?;
        let depth = depth.checked_sub(1)?;
        let mut found = members.get("multipleOf").and_then(Multiple::of);
        let mut add = |more: Option<Multiple>| {
            found = match (found, more) {
                (Some(one), Some(other)) => Some(one.common(other)),
                (one, other) => one.or(other),
            };
        };
        for key in ["allOf", "anyOf", "oneOf"] {
            for part in members
                .get(key)
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
            {
                add(self.of(part, depth));
            }
        }
        let whole = self.whole;
        let target = members.get("$ref").and_then(Value::as_str);
        let target = target.and_then(|target| whole.pointer(target.strip_prefix('#')?));
        if let Some(target) = target {
            add(self.of(target, depth));
        }
        found
    }
}

impl GrammarSize {
    pub(super) fn add_schema(&mut self, whole: &Value) {
        let mut schemas = Vec::new();
        self.add_patterns(whole, &mut schemas);
        if !schemas
            .iter()
            .any(|schema| schema.get("multipleOf").is_some())
        {
            return;
        }
        let mut walk = MultipleWalk {
            whole,
            visits_left: VISITS_MAX,
        };
        let mut multiples = BTreeSet::new();
        for schema in schemas {
            multiples.extend(walk.of(schema, DEPTH_MAX));
        }
        let remainders = multiples.iter().map(|multiple| multiple.coefficient);
        self.remainders = remainders.fold(self.remainders, u64::saturating_add);
    }

    /// Adds the expressions of a schema, and collects it and the schemas within it. Values of
    /// keywords such as `default` count too: a property may have that name, and a reference may
    /// lead there.
    fn add_patterns<'v>(&mut self, schema: &'v Value, schemas: &mut Vec<&'v Value>) {
        match schema {
            Value::Object(members) => {
                schemas.push(schema);
                for (keyword, value) in members {
                    match (keyword.as_str(), value) {
                        ("pattern", Value::String(regex)) => self.add_regex(regex),
                        ("patternProperties", Value::Object(properties)) => {
                            properties.keys().for_each(|regex| self.add_regex(regex));
                            self.add_patterns(value, schemas);
                        }
                        _ => self.add_patterns(value, schemas),
                    }
                }
            }
            Value::Array(items) => {
                for item in items {
                    self.add_patterns(item, schemas);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}
