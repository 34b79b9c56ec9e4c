//! The flag of speculative decoding.
//!
//! Owns: parsing `--speculative-config`, which has vLLM's format. Never: decides when a draft is
//! verified. Invariant: every engine accepts a configuration that passed.

use clap::Args;
use cleave_sched::LookupLimits;
use serde::Deserialize;
use std::ops::RangeInclusive;

/// Limits of draft tokens for one sequence in one step: more are never worth their rows.
const DRAFTS: RangeInclusive<u32> = 1..=16;
/// Limits of the length of a match.
const MATCH_TOKENS: RangeInclusive<u32> = 1..=64;
/// Default lengths of a match.
const MATCH_MAX: u32 = 4;
const MATCH_MIN: u32 = 2;
/// Value that switches speculation off.
const OFF: &str = "off";
/// On by default where the engine verifies drafts: text without matches is as fast as with it off,
/// because drafts are only verified where they are predicted to pay
/// (docs/guides/speculative-decoding.md).
const DEFAULT: &str = r#"{"method":"ngram","num_speculative_tokens":4}"#;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct SpeculationArgs {
    /// Speculative decoding by prompt lookup: draft the next tokens from the sequence's own tokens,
    /// and verify several in one step where that is predicted to pay. Answers stay the same. The
    /// value is `off`, or JSON in vLLM's format, such as
    /// `{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}`:
    /// it drafts at most 4 tokens, which followed an earlier occurrence of the last 4 to 2 tokens.
    /// A device that draws its tokens itself verifies no drafts, whatever the value.
    #[arg(long, value_name = "JSON", default_value = DEFAULT, value_parser = parse)]
    pub(crate) speculative_config: SpeculationArg,
}

/// The method of drafting; `None` for no speculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpeculationArg(pub(crate) Option<LookupLimits>);

/// The JSON form of the value.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpeculativeConfig {
    method: SpeculationMethod,
    num_speculative_tokens: u32,
    prompt_lookup_max: Option<u32>,
    prompt_lookup_min: Option<u32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum SpeculationMethod {
    Ngram,
}

fn parse(text: &str) -> Result<SpeculationArg, String> {
    if text == OFF {
        return Ok(SpeculationArg(None));
    }
    read(text).map(|lookup| SpeculationArg(Some(lookup)))
}

fn read(text: &str) -> Result<LookupLimits, String> {
    let written: SpeculativeConfig =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let SpeculativeConfig {
        method: SpeculationMethod::Ngram,
        num_speculative_tokens,
        prompt_lookup_max,
        prompt_lookup_min,
    } = written;
    let match_max = prompt_lookup_max.or(prompt_lookup_min.map(|least| least.max(MATCH_MAX)));
    let match_max = match_max.unwrap_or(MATCH_MAX);
    let match_min = prompt_lookup_min.unwrap_or(MATCH_MIN.min(match_max));
    let within = |name: &str, value: u32, range: RangeInclusive<u32>| {
        if range.contains(&value) {
            Ok(value)
        } else {
            Err(format!(
                "{name} is {value}; it must be from {} to {}",
                range.start(),
                range.end()
            ))
        }
    };
    let match_max = within("prompt_lookup_max", match_max, MATCH_TOKENS)?;
    Ok(LookupLimits {
        drafts_max: within("num_speculative_tokens", num_speculative_tokens, DRAFTS)?,
        match_max,
        match_min: within("prompt_lookup_min", match_min, 1..=match_max)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speculative_config_takes_vllm_json() {
        let read = |text| {
            read(text).map(|lookup| {
                let LookupLimits {
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
        for (expected, text) in [
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
            assert!(refused.contains(expected), "{refused}");
        }
        assert_eq!(parse("off"), Ok(SpeculationArg(None)));
        let Ok(SpeculationArg(Some(lookup))) = parse(DEFAULT) else {
            panic!("it is on where nothing is said");
        };
        assert_eq!(
            (lookup.drafts_max, lookup.match_max, lookup.match_min),
            (4, 4, 2)
        );
    }
}
