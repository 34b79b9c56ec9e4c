//! Parsers for the values of flags.
//!
//! Owns: sizes, times, addresses, names, and the error messages. Never: knows the flag. Invariant:
//! a parsed value needs no further check.

use cleave_fleet::{SILENCE_MIN, invalid_name_reason};
use std::fmt;
use std::time::Duration;

/// A limit above any machine's memory.
const SWAP_BYTES_MAX: u64 = 64 << 40;

/// Parses a temperature from 0 to 2, as the API does.
pub(crate) fn parse_temperature(text: &str) -> Result<f32, String> {
    let number: Option<f32> = text.parse().ok();
    let within = number.filter(|number| (0.0..=2.0).contains(number));
    within.ok_or_else(|| "expected a number from 0 to 2".to_owned())
}

/// Parses a top-p above 0 and at most 1, as the API does.
pub(crate) fn parse_top_p(text: &str) -> Result<f32, String> {
    let number: Option<f32> = text.parse().ok();
    let within = number.filter(|number| (f32::MIN_POSITIVE..=1.0).contains(number));
    within.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

/// Parses `host:port`. The worker resolves the host again and again while it runs, so it is not
/// resolved here.
pub(crate) fn parse_router(text: &str) -> Result<String, String> {
    let sound = text.rsplit_once(':').is_some_and(|(host, port)| {
        let host_is_one = !host.is_empty() && !host.contains('/');
        host_is_one && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if sound {
        Ok(text.to_owned())
    } else {
        Err("expected host:port, such as 127.0.0.1:8000".to_owned())
    }
}

/// Parses the name of a worker.
pub(crate) fn parse_worker_name(text: &str) -> Result<String, String> {
    match invalid_name_reason(text) {
        None => Ok(text.to_owned()),
        Some(reason) => Err(format!("a name that {reason} is not valid")),
    }
}

/// Longest name of a model, in bytes.
const MODEL_NAME_BYTES_MAX: usize = 256;

/// Parses the name under which a model is served. It stands in answers and in log lines.
pub(crate) fn parse_model_name(text: &str) -> Result<String, String> {
    let reason = if text.trim().is_empty() {
        "is empty"
    } else if text.len() > MODEL_NAME_BYTES_MAX {
        "is longer than 256 bytes"
    } else if text.chars().any(char::is_control) {
        "has a line break or another control character"
    } else {
        return Ok(text.to_owned());
    };
    Err(format!("a name that {reason} is not valid"))
}

/// A time in seconds, as a flag takes and shows it: `5`, `0.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SecondsArg(pub(crate) Duration);

impl fmt::Display for SecondsArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

/// Parses a positive time.
pub(crate) fn parse_seconds(text: &str) -> Result<SecondsArg, String> {
    seconds_from(0.01, text)
}

/// Parses a silence that is longer than the interval of heartbeats.
pub(crate) fn parse_silence_limit(text: &str) -> Result<SecondsArg, String> {
    seconds_from(SILENCE_MIN.as_secs_f64(), text)
}

/// Parses a time that may be zero.
pub(crate) fn parse_seconds_or_zero(text: &str) -> Result<SecondsArg, String> {
    seconds_from(0.0, text)
}

fn seconds_from(least: f64, text: &str) -> Result<SecondsArg, String> {
    let seconds: Option<f64> = text.parse().ok();
    let within = seconds.filter(|seconds| (least..=86_400.0).contains(seconds));
    let within = within.ok_or_else(|| format!("expected seconds, from {least} to 86400"))?;
    Ok(SecondsArg(Duration::from_secs_f64(within)))
}

/// Parses as [`parse_bytes`], or 0, up to the limit of a machine's memory.
pub(crate) fn parse_swap_bytes(text: &str) -> Result<u64, String> {
    let bytes = match text.trim() {
        "0" => 0,
        size => parse_bytes(size)?,
    };
    if bytes <= SWAP_BYTES_MAX {
        Ok(bytes)
    } else {
        Err("expected at most 64TiB".to_owned())
    }
}

/// Parses bytes such as `1048576`, `512MiB`, `4GiB`, `2G` (a single letter is a binary unit, as in
/// Kubernetes' `Gi`).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let number: u64 = text[..digits]
        .parse()
        .map_err(|_| "expected a size such as 512MiB or 4GiB".to_owned())?;
    let unit = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" | "ki" => 1 << 10,
        "m" | "mib" | "mi" => 1 << 20,
        "g" | "gib" | "gi" => 1 << 30,
        "t" | "tib" | "ti" => 1 << 40,
        other => return Err(format!("unknown unit `{other}`; use KiB, MiB or GiB")),
    };
    number
        .checked_mul(unit)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(|| "size out of range".to_owned())
}

/// Parses as [`parse_bytes`], within the limits of one body.
pub(crate) fn parse_body_bytes(text: &str) -> Result<usize, String> {
    let bytes = parse_bytes(text)?;
    if (1 << 10..=1 << 30).contains(&bytes) {
        usize::try_from(bytes).map_err(|error| error.to_string())
    } else {
        Err("expected a size from 1KiB to 1GiB".to_owned())
    }
}

/// Parses as [`parse_bytes`], within the limits of the memory for all bodies.
pub(crate) fn parse_body_memory(text: &str) -> Result<usize, String> {
    let bytes = parse_bytes(text)?;
    if (1 << 20..=1 << 36).contains(&bytes) {
        usize::try_from(bytes).map_err(|error| error.to_string())
    } else {
        Err("expected a size from 1MiB to 64GiB".to_owned())
    }
}

/// Parses as [`parse_bytes`], within the limits of a real KV block.
pub(crate) fn parse_block_bytes(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(parse_bytes(text)?);
    let fits = bytes
        .ok()
        .filter(|bytes| (4 << 10..=1 << 30).contains(bytes));
    fits.ok_or_else(|| "expected at least 4KiB and at most 1GiB".to_owned())
}

/// Parses as [`parse_bytes`], within the limits of a mock engine's KV block.
pub(crate) fn parse_mock_block_bytes(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(parse_bytes(text)?);
    let fits = bytes.ok().filter(|bytes| (1..=1 << 30).contains(bytes));
    fits.ok_or_else(|| "expected at least 1B and at most 1GiB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_values_are_checked_as_flags() {
        assert_eq!(parse_temperature("0.7"), Ok(0.7));
        assert_eq!(parse_top_p("1"), Ok(1.0));
        for bad in ["-1", "2.1", "NaN", "inf", "warm"] {
            assert!(parse_temperature(bad).is_err(), "{bad}");
            assert!(parse_top_p(bad).is_err(), "{bad}");
        }
        assert!(parse_top_p("0").is_err());
    }

    #[test]
    fn sizes_parse_with_units() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("4G"), Ok(4 << 30));
        assert_eq!(parse_bytes("100"), Ok(100));
        for bad in [
            "",
            "GiB",
            "4 parsecs",
            "0",
            "99999999999999999999",
            "17179869184GiB",
        ] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_models_name_fits_a_log_line() {
        for good in ["Qwen/Qwen2.5-0.5B", "mein Modell", "é"] {
            assert_eq!(parse_model_name(good).as_deref(), Ok(good));
        }
        for bad in ["", " ", "a\nb", "a\u{1b}[31m", &"x".repeat(257)] {
            assert!(parse_model_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_and_limits_are_range_checked() {
        assert_eq!(
            parse_seconds("0.5"),
            Ok(SecondsArg(Duration::from_millis(500)))
        );
        for bad in ["", "0", "-1", "NaN", "inf", "1e9", "5s"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_swap_bytes("0"), Ok(0));
        assert_eq!(parse_swap_bytes("1k"), Ok(1024));
        assert!(parse_swap_bytes("99999TiB").is_err());
        // Heartbeats are not sent often enough for a shorter silence.
        assert!(parse_silence_limit("0.02").is_err());
        assert_eq!(parse_silence_limit("0.1"), Ok(SecondsArg(SILENCE_MIN)));
        assert_eq!(parse_seconds_or_zero("0"), Ok(SecondsArg(Duration::ZERO)));
        assert_eq!(
            parse_seconds_or_zero("0.5"),
            Ok(SecondsArg(Duration::from_millis(500)))
        );
        for bad in ["18446744073709551615", "-1", "5s"] {
            assert!(parse_seconds_or_zero(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn router_addresses_need_a_host_and_a_port() {
        for good in ["127.0.0.1:8000", "[::1]:8000", "router.svc:1"] {
            assert_eq!(parse_router(good).as_deref(), Ok(good));
        }
        for bad in ["", "127.0.0.1", ":80", "h:0", "h:99999", "http://h:80"] {
            assert!(parse_router(bad).is_err(), "{bad}");
        }
    }
}
