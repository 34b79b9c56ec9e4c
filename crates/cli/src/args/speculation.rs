//! The flag of speculation.
//!
//! Owns: what `--speculative-config` says, as vLLM spells it. Never: decides when a guess is worth its row.
//! Invariant: what passed is a configuration that every engine takes, whatever it does of it.

use clap::Args;
use cleave_sched::Lookup;
use serde::Deserialize;
use std::ops::RangeInclusive;

/// Tokens that may be guessed for one sequence in one step: no guess is worth more rows.
const DRAFTS: RangeInclusive<u32> = 1..=16;
/// Tokens that are looked for.
const MATCHES: RangeInclusive<u32> = 1..=64;
/// Where neither is said.
const MATCH_MAX: u32 = 4;
const MATCH_MIN: u32 = 2;
/// What is said where nobody guesses.
const OFF: &str = "off";
/// On where the engine verifies guesses: text without any runs as fast as when it is off, because rows are only verified
/// where they are predicted to pay (README, Several tokens in a step).
const DEFAULT: &str = r#"{"method":"ngram","num_speculative_tokens":4}"#;

/// Several tokens in one step.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArgs {
    /// Guess the next tokens from those that a sequence has, and verify several in one step where that is predicted to
    /// pay; the answers stay the same. `off`, or JSON as of vLLM, such as
    /// `{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}`: at most 4 tokens,
    /// those that followed the last 4 to 2 tokens where they were before. A device that draws its tokens itself
    /// verifies none, whatever is said.
    #[arg(long, value_name = "JSON", default_value = DEFAULT, value_parser = parse)]
    pub(crate) speculative_config: Speculation,
}

/// How tokens are guessed, if they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Speculation(pub(crate) Option<Lookup>);

/// As it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    method: Method,
    num_speculative_tokens: u32,
    prompt_lookup_max: Option<u32>,
    prompt_lookup_min: Option<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Method {
    Ngram,
}

fn parse(text: &str) -> Result<Speculation, String> {
    if text == OFF {
        return Ok(Speculation(None));
    }
    read(text).map(|lookup| Speculation(Some(lookup)))
}

fn read(text: &str) -> Result<Lookup, String> {
    let written: Written = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let Written {
        method: Method::Ngram,
        num_speculative_tokens,
        prompt_lookup_max,
        prompt_lookup_min,
    } = written;
    let match_max = prompt_lookup_max.or(prompt_lookup_min.map(|least| least.max(MATCH_MAX)));
    let match_max = match_max.unwrap_or(MATCH_MAX);
    let match_min = prompt_lookup_min.unwrap_or(MATCH_MIN.min(match_max));
    let within = |name: &str, value: u32, range: RangeInclusive<u32>| match range.contains(&value) {
        true => Ok(value),
        false => Err(format!(
            "{name} is {value}; it must be from {} to {}",
            range.start(),
            range.end()
        )),
    };
    let match_max = within("prompt_lookup_max", match_max, MATCHES)?;
    Ok(Lookup {
        drafts_max: within("num_speculative_tokens", num_speculative_tokens, DRAFTS)?,
        match_max,
        match_min: within("prompt_lookup_min", match_min, 1..=match_max)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speculative_config_is_read_as_vllm_writes_it() {
        let read = |text| {
            read(text).map(|lookup| {
                let Lookup {
                    drafts_max,
                    match_max,
                    match_min,
                } = lookup;
                [drafts_max, match_max, match_min]
            })
        };
        let whole = r#"{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":5,"prompt_lookup_min":1}"#;
        assert_eq!(read(whole), Ok([3, 5, 1]));
        assert_eq!(
            read(r#"{"method":"ngram","num_speculative_tokens":4}"#),
            Ok([4, 4, 2])
        );
        let least = r#"{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":6}"#;
        assert_eq!(read(least), Ok([4, 6, 6]));
        let short = r#"{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":1}"#;
        assert_eq!(read(short), Ok([4, 1, 1]));
        for (says, text) in [
            (
                "num_speculative_tokens is 0",
                r#"{"method":"ngram","num_speculative_tokens":0}"#,
            ),
            (
                "from 1 to 16",
                r#"{"method":"ngram","num_speculative_tokens":17}"#,
            ),
            ("missing field `method`", r#"{"num_speculative_tokens":4}"#),
            (
                "unknown variant `eagle`",
                r#"{"method":"eagle","num_speculative_tokens":4}"#,
            ),
            (
                "unknown field `model`",
                r#"{"method":"ngram","num_speculative_tokens":4,"model":"m"}"#,
            ),
            (
                "prompt_lookup_min is 3",
                r#"{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":2,"prompt_lookup_min":3}"#,
            ),
            ("expected", "ngram"),
            ("expected", "Off"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(says), "{refused}");
        }
        assert_eq!(parse("off"), Ok(Speculation(None)));
        let Ok(Speculation(Some(lookup))) = parse(DEFAULT) else {
            panic!("it is on where nothing is said");
        };
        assert_eq!(
            (lookup.drafts_max, lookup.match_max, lookup.match_min),
            (4, 4, 2)
        );
    }
}
