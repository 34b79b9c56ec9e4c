//! Values as JSON in log lines.

use serde::Serialize;
use std::fmt;

/// A value that a log line has as JSON; it is made only if the line is written.
pub struct JsonField<'a, T>(pub &'a T);

impl<T: Serialize> fmt::Display for JsonField<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match serde_json::to_string(self.0) {
            Ok(json) => f.write_str(&json),
            Err(error) => write!(f, "{error}"),
        }
    }
}
