//! Parsing of numbers with units, as a user writes them.
//!
//! Owns: durations and `key=value` pairs. Never: has a default.

use anyhow::{Context, bail, ensure};
use std::time::Duration;

/// Parses a positive duration such as `500ms`, `2s`, `1.5m`. A bare number is refused, since tools
/// differ in its unit.
///
/// # Errors
/// The mistake in `text`, and the right syntax.
pub fn parse_duration(text: &str) -> anyhow::Result<Duration> {
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
    let number = parse_positive(number).with_context(|| format!("`{text}` is not a duration"))?;
    let span = number * seconds;
    ensure!(span <= 31_536_000.0, "`{text}` is longer than a year");
    Ok(Duration::from_secs_f64(span))
}

/// Parses a finite number above 0.
pub(crate) fn parse_positive(text: &str) -> anyhow::Result<f64> {
    let number: Option<f64> = text.trim().parse().ok();
    let positive = number.filter(|number| *number > 0.0 && number.is_finite());
    positive.with_context(|| format!("`{text}` is not a number above 0"))
}

/// Parses a finite number of 0 or above.
pub(crate) fn parse_non_negative(text: &str) -> anyhow::Result<f64> {
    let number: Option<f64> = text.trim().parse().ok();
    let within = number.filter(|number| *number >= 0.0 && number.is_finite());
    within.with_context(|| format!("`{text}` is not a number of 0 or above"))
}

/// Parses a whole number from 1 to `u32::MAX`.
pub(crate) fn parse_count(text: &str) -> anyhow::Result<u32> {
    let digits = text.trim();
    ensure!(
        !digits.is_empty()
            && digits.bytes().any(|byte| byte != b'0')
            && digits.bytes().all(|byte| byte.is_ascii_digit()),
        "`{text}` is not a whole number of at least 1"
    );
    let number = digits.parse::<u32>();
    number
        .ok()
        .with_context(|| format!("`{text}` is too large: at most {}", u32::MAX))
}

/// Splits `key=value` into its key and value.
pub(crate) fn split_key_value(text: &str) -> anyhow::Result<(&str, &str)> {
    let (key, value) = text
        .split_once('=')
        .with_context(|| format!("`{}`: expected NAME=VALUE", text.trim()))?;
    Ok((key.trim(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_names_the_limit_that_it_misses() {
        assert_eq!(parse_count(" 4294967295 ").unwrap(), u32::MAX);
        for (bad, expected) in [
            ("0", "at least 1"),
            ("", "at least 1"),
            ("-3", "at least 1"),
            ("1.5", "at least 1"),
            ("99999999999", "at most 4294967295"),
        ] {
            let message = parse_count(bad).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_duration_without_a_unit_is_refused() {
        assert_eq!(parse_duration("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(parse_duration("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(parse_duration("2m").unwrap(), Duration::from_secs(120));
        assert_eq!(parse_duration("50us").unwrap(), Duration::from_micros(50));
        for bad in ["", "5", "ms", "-1s", "0s", "1d", "NaNs", "infs", "1e99s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        assert!(parse_duration("5").unwrap_err().to_string().contains("5ms"));
    }
}
