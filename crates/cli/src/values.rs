//! What the text of a flag may be.
//!
//! Owns: sizes, times, addresses, names, and the words that refuse them. Never: knows which flag it
//! reads. Invariant: what passes can be used without another look at it.

use cleave_node::{SILENCE_MIN, name_flaw};
use std::fmt;
use std::time::Duration;

/// Above any machine's memory.
const SWAP_BYTES_MAX: u64 = 64 << 40;

/// As the API takes it: 0 to 2.
pub(crate) fn parse_temperature(text: &str) -> Result<f32, String> {
    let number: Option<f32> = text.parse().ok();
    let within = number.filter(|number| (0.0..=2.0).contains(number));
    within.ok_or_else(|| "expected a number from 0 to 2".to_owned())
}

/// As the API takes it: above 0, at most 1.
pub(crate) fn parse_top_p(text: &str) -> Result<f32, String> {
    let number: Option<f32> = text.parse().ok();
    let within = number.filter(|number| (f32::MIN_POSITIVE..=1.0).contains(number));
    within.ok_or_else(|| "expected a number above 0 and at most 1".to_owned())
}

/// `host:port`; whether the host exists is found out, again and again, while the worker runs.
pub(crate) fn parse_router(text: &str) -> Result<String, String> {
    let sound = text.rsplit_once(':').is_some_and(|(host, port)| {
        let host_is_one = !host.is_empty() && !host.contains('/');
        host_is_one && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    match sound {
        true => Ok(text.to_owned()),
        false => Err("expected host:port, such as 127.0.0.1:8000".to_owned()),
    }
}

/// What others know a worker by.
pub(crate) fn parse_name(text: &str) -> Result<String, String> {
    match name_flaw(text) {
        None => Ok(text.to_owned()),
        Some(flaw) => Err(format!("a name that {flaw} is none")),
    }
}

/// A time, as a flag takes and shows it: `5`, `0.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

/// A positive time.
pub(crate) fn parse_seconds(text: &str) -> Result<Seconds, String> {
    seconds_from(0.01, text)
}

/// A silence that beats can break.
pub(crate) fn parse_silence(text: &str) -> Result<Seconds, String> {
    seconds_from(SILENCE_MIN.as_secs_f64(), text)
}

/// A time, or none.
pub(crate) fn parse_drain(text: &str) -> Result<Seconds, String> {
    seconds_from(0.0, text)
}

fn seconds_from(least: f64, text: &str) -> Result<Seconds, String> {
    let seconds: Option<f64> = text.parse().ok();
    let within = seconds.filter(|seconds| (least..=86_400.0).contains(seconds));
    let within = within.ok_or_else(|| format!("expected seconds, from {least} to 86400"))?;
    Ok(Seconds(Duration::from_secs_f64(within)))
}

/// As [`parse_bytes`], or 0, and no more than a machine may have.
pub(crate) fn parse_swap_bytes(text: &str) -> Result<u64, String> {
    let bytes = match text.trim() {
        "0" => 0,
        size => parse_bytes(size)?,
    };
    match bytes <= SWAP_BYTES_MAX {
        true => Ok(bytes),
        false => Err("expected at most 64TiB".to_owned()),
    }
}

/// Bytes from `1048576`, `512MiB`, `4GiB`, `2G` (a bare letter is binary, as in Kubernetes' `Gi`).
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

/// As [`parse_bytes`]: what one request may bring.
pub(crate) fn parse_body_bytes(text: &str) -> Result<usize, String> {
    let bytes = parse_bytes(text)?;
    match (1 << 10..=1 << 30).contains(&bytes) {
        true => usize::try_from(bytes).map_err(|error| error.to_string()),
        false => Err("expected a size from 1KiB to 1GiB".to_owned()),
    }
}

/// As [`parse_bytes`], for the memory of all bodies.
pub(crate) fn parse_body_memory(text: &str) -> Result<usize, String> {
    let bytes = parse_bytes(text)?;
    match (1 << 20..=1 << 36).contains(&bytes) {
        true => usize::try_from(bytes).map_err(|error| error.to_string()),
        false => Err("expected a size from 1MiB to 64GiB".to_owned()),
    }
}

/// As [`parse_bytes`], within what a pool is made of.
pub(crate) fn parse_block_bytes(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(parse_bytes(text)?);
    let fits = bytes
        .ok()
        .filter(|bytes| (4 << 10..=1 << 30).contains(bytes));
    fits.ok_or_else(|| "expected at least 4KiB and at most 1GiB".to_owned())
}

/// As [`parse_bytes`], for a block that nobody computes with.
pub(crate) fn parse_mock_block_bytes(text: &str) -> Result<u32, String> {
    let bytes = u32::try_from(parse_bytes(text)?);
    let fits = bytes.ok().filter(|bytes| (1..=1 << 30).contains(bytes));
    fits.ok_or_else(|| "expected at least 1B and at most 1GiB".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_numbers_are_checked_before_a_model_is_loaded() {
        assert_eq!(parse_temperature("0.7"), Ok(0.7));
        assert_eq!(parse_top_p("1"), Ok(1.0));
        for bad in ["-1", "2.1", "NaN", "inf", "warm"] {
            assert!(parse_temperature(bad).is_err(), "{bad}");
            assert!(parse_top_p(bad).is_err(), "{bad}");
        }
        assert!(parse_top_p("0").is_err());
    }

    #[test]
    fn sizes_have_units() {
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
    fn times_and_limits_are_checked() {
        assert_eq!(
            parse_seconds("0.5"),
            Ok(Seconds(Duration::from_millis(500)))
        );
        for bad in ["", "0", "-1", "NaN", "inf", "1e9", "5s"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_swap_bytes("0"), Ok(0));
        assert_eq!(parse_swap_bytes("1k"), Ok(1024));
        assert!(parse_swap_bytes("99999TiB").is_err());
        // Nobody says something more often than this needs.
        assert!(parse_silence("0.02").is_err());
        assert_eq!(parse_silence("0.1"), Ok(Seconds(SILENCE_MIN)));
        assert_eq!(parse_drain("0"), Ok(Seconds(Duration::ZERO)));
        assert_eq!(parse_drain("0.5"), Ok(Seconds(Duration::from_millis(500))));
        for bad in ["18446744073709551615", "-1", "5s"] {
            assert!(parse_drain(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_worker_that_can_never_join_was_started() {
        for good in ["127.0.0.1:8000", "[::1]:8000", "router.svc:1"] {
            assert_eq!(parse_router(good).as_deref(), Ok(good));
        }
        for bad in ["", "127.0.0.1", ":80", "h:0", "h:99999", "http://h:80"] {
            assert!(parse_router(bad).is_err(), "{bad}");
        }
    }
}
