//! Reading fields of a JSON object with errors that name them.
//!
//! Owns: paths such as `messages[1].content`, type and range checks. Never: knows which fields
//! there are. Invariant: `null` is the same as absent, as in OpenAI's clients.

use crate::error::ApiError;
use serde_json::{Map, Value};
use std::ops::{Bound, RangeBounds, RangeInclusive};

/// A JSON object and where it stands in the body.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub(crate) fn of_body(body: &'a Value) -> Result<Self, ApiError> {
        match body {
            Value::Object(map) => Ok(Self {
                map,
                path: String::new(),
            }),
            other => Err(ApiError::bad_request(
                "invalid_json",
                format!("The body must be a JSON object, not {}.", kind(other)),
            )),
        }
    }

    /// An object at a path that the caller has built.
    pub(crate) fn at(path: String, value: &'a Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => Err(wrong(&path, "an object", other)),
        }
    }

    /// The full name of a field of this object.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.path)
        }
    }

    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// The field, unless absent or `null`.
    pub(crate) fn any(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.any(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.path(name), "a string", other)),
        }
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.any(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(wrong(&self.path(name), "a boolean", other)),
        }
    }

    pub(crate) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        self.any(name)
            .map(|value| integer(&self.path(name), value, range))
            .transpose()
    }

    pub(crate) fn number(
        &self,
        name: &str,
        range: impl RangeBounds<f64>,
    ) -> Result<Option<f32>, ApiError> {
        self.any(name)
            .map(|value| number(&self.path(name), value, range))
            .transpose()
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.any(name)
            .map(|value| Fields::at(self.path(name), value))
            .transpose()
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        match self.any(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.path(name), "an array", other)),
        }
    }
}

/// Something of another type was expected there.
pub(crate) fn wrong(path: &str, expected: &str, got: &Value) -> ApiError {
    ApiError::invalid(
        path,
        format!("`{path}` must be {expected}, not {}.", kind(got)),
    )
}

/// A whole number in `range`; `5.0` counts as one.
pub(crate) fn integer(
    path: &str,
    value: &Value,
    range: RangeInclusive<i64>,
) -> Result<i64, ApiError> {
    let whole =
        |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    let Value::Number(number) = value else {
        return Err(wrong(path, "an integer", value));
    };
    let found = number.as_i64().or_else(|| number.as_f64().and_then(whole));
    match found {
        Some(found) if range.contains(&found) => Ok(found),
        None if !number.is_u64() => Err(wrong(path, "an integer", value)),
        _ => Err(ApiError::invalid(
            path,
            format!(
                "`{path}` must be {}, not {number}.",
                span(*range.start(), *range.end())
            ),
        )),
    }
}

/// A number in `range`.
pub(crate) fn number(
    path: &str,
    value: &Value,
    range: impl RangeBounds<f64>,
) -> Result<f32, ApiError> {
    let Some(found) = value.as_f64() else {
        return Err(wrong(path, "a number", value));
    };
    if range.contains(&found) {
        return Ok(found as f32);
    }
    let lower = match range.start_bound() {
        Bound::Included(bound) => format!("at least {bound}"),
        Bound::Excluded(bound) => format!("greater than {bound}"),
        Bound::Unbounded => String::new(),
    };
    let upper = match range.end_bound() {
        Bound::Included(bound) => format!("at most {bound}"),
        Bound::Excluded(bound) => format!("less than {bound}"),
        Bound::Unbounded => String::new(),
    };
    let join = if lower.is_empty() || upper.is_empty() {
        ""
    } else {
        " and "
    };
    Err(ApiError::invalid(
        path,
        format!("`{path}` must be {lower}{join}{upper}, not {found}."),
    ))
}

fn span(low: i64, high: i64) -> String {
    match (low, high) {
        (low, i64::MAX) => format!("at least {low}"),
        (i64::MIN, high) => format!("at most {high}"),
        (low, high) => format!("between {low} and {high}"),
    }
}

/// A JSON type in words.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
