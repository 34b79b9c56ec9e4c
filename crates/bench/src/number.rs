//! Numbers with units, as a user writes them.
//!
//! Owns: spans of time and `key=value` pairs. Never: has a default.

use anyhow::{Context, bail, ensure};
use std::str::FromStr;
use std::time::Duration;

/// A positive span such as `500ms`, `2s`, `1.5m`. A bare number is refused: in other tools it is
/// milliseconds here and seconds there.
///
/// # Errors
/// What is wrong with `text`, and how it is written right.
pub fn span(text: &str) -> anyhow::Result<Duration> {
    let text = text.trim();
    let unit_at = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "" => bail!("`{text}` has no unit; write {text}ms or {text}s"),
        other => bail!("`{text}`: unknown unit `{other}`; use us, ms, s, m or h"),
    };
    let number = positive(number).with_context(|| format!("`{text}` is no span of time"))?;
    let span = number * seconds;
    ensure!(span <= 31_536_000.0, "`{text}` is longer than a year");
    Ok(Duration::from_secs_f64(span))
}

/// A finite number above 0.
pub(crate) fn positive(text: &str) -> anyhow::Result<f64> {
    let number: Option<f64> = text.trim().parse().ok();
    let positive = number.filter(|number| *number > 0.0 && number.is_finite());
    positive.with_context(|| format!("`{text}` is not a number above 0"))
}

/// A finite number, 0 or above.
pub(crate) fn non_negative(text: &str) -> anyhow::Result<f64> {
    let number: Option<f64> = text.trim().parse().ok();
    let within = number.filter(|number| *number >= 0.0 && number.is_finite());
    within.with_context(|| format!("`{text}` is not a number of 0 or above"))
}

/// A whole number of at least 1.
pub(crate) fn whole<T: FromStr + PartialOrd + From<u8>>(text: &str) -> anyhow::Result<T> {
    let number: Option<T> = text.trim().parse().ok();
    let whole = number.filter(|number| *number >= T::from(1));
    whole.with_context(|| format!("`{text}` is not a whole number of at least 1"))
}

/// `key` and `value` of `key=value`.
pub(crate) fn pair(text: &str) -> anyhow::Result<(&str, &str)> {
    let (key, value) = text
        .split_once('=')
        .with_context(|| format!("`{}`: expected NAME=VALUE", text.trim()))?;
    Ok((key.trim(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_without_a_unit_was_taken_for_another() {
        assert_eq!(span("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(span("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(span("2m").unwrap(), Duration::from_secs(120));
        assert_eq!(span("50us").unwrap(), Duration::from_micros(50));
        for bad in ["", "5", "ms", "-1s", "0s", "1d", "NaNs", "infs", "1e99s"] {
            assert!(span(bad).is_err(), "{bad}");
        }
        assert!(span("5").unwrap_err().to_string().contains("5ms"));
    }
}
