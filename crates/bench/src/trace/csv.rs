//! Traces and lengths in CSV tables with a header.
//!
//! Owns: the columns of Azure's traces (2023 and later), of LLMServingSim's measurements, of plain
//! pairs of lengths and of histograms. Never: guesses a column by its place.

use super::{TraceContent, TraceLines, TraceRow};
use crate::lengths::{LengthDistribution, LengthHistogram};
use crate::number::parse_non_negative;
use crate::prompt::{PromptPlan, unique_key};
use anyhow::{Context, bail, ensure};
use cleave_domain::Time;
use std::collections::BTreeMap;

/// Known names of each column.
const TIMES: [&str; 3] = ["TIMESTAMP", "arrival_s", "timestamp_s"];
const INPUTS: [&str; 3] = ["ContextTokens", "input_tokens", "num_prefill_tokens"];
const OUTPUTS: [&str; 3] = ["GeneratedTokens", "output_tokens", "num_decode_tokens"];
const HISTOGRAM: [&str; 5] = ["dataset", "bin_lo", "bin_hi", "p_input", "p_output"];

pub(super) fn read(
    header: &str,
    dataset: Option<&str>,
    lines: TraceLines<'_>,
) -> anyhow::Result<TraceContent> {
    let columns: Vec<&str> = header.split(',').map(str::trim).collect();
    let find = |names: &[&str]| {
        columns
            .iter()
            .position(|column| names.iter().any(|name| name.eq_ignore_ascii_case(column)))
    };
    if HISTOGRAM.iter().all(|name| columns.contains(name)) {
        let histogram_columns = HISTOGRAM.map(|name| find(&[name]).unwrap_or_default());
        return histograms(histogram_columns, dataset, lines).map(TraceContent::Lengths);
    }
    let (Some(input), Some(output)) = (find(&INPUTS), find(&OUTPUTS)) else {
        bail!(
            "line 1: unknown table: its columns are `{header}`; expected one of {INPUTS:?}, one of \
             {OUTPUTS:?}, and for times one of {TIMES:?}, or {HISTOGRAM:?}, or JSON lines"
        );
    };
    match find(&TIMES) {
        Some(time) => timed([time, input, output], lines).map(TraceContent::Timed),
        None => pairs([input, output], lines).map(TraceContent::Lengths),
    }
}

fn timed(
    [time, input, output]: [usize; 3],
    lines: TraceLines<'_>,
) -> anyhow::Result<Vec<TraceRow>> {
    let mut rows = Vec::new();
    for line in lines {
        let (number, text) = line?;
        let index = rows.len() as u64;
        let row = || -> anyhow::Result<TraceRow> {
            Ok(TraceRow {
                at: Time::from_nanos(parse_time_nanos(column_text(&text, time)?)?),
                prompt: PromptPlan::unique(unique_key(index), tokens(&text, input)?.max(1)),
                output: tokens(&text, output)?.max(1),
            })
        };
        rows.push(row().with_context(|| format!("line {number}"))?);
    }
    super::sorted_from_zero(rows)
}

fn pairs([input, output]: [usize; 2], lines: TraceLines<'_>) -> anyhow::Result<LengthDistribution> {
    let mut pairs = Vec::new();
    for line in lines {
        let (number, text) = line?;
        let pair = || anyhow::Ok((tokens(&text, input)?.max(1), tokens(&text, output)?.max(1)));
        pairs.push(pair().with_context(|| format!("line {number}"))?);
    }
    ensure!(!pairs.is_empty(), "no lengths in the file");
    Ok(LengthDistribution::Pairs(pairs))
}

fn histograms(
    columns: [usize; 5],
    dataset: Option<&str>,
    lines: TraceLines<'_>,
) -> anyhow::Result<LengthDistribution> {
    let mut sets: BTreeMap<String, [LengthHistogram; 2]> = BTreeMap::new();
    for line in lines {
        let (number, text) = line?;
        let mut add = || -> anyhow::Result<()> {
            let [name, from, to, input, output] = columns;
            let (from, to) = (tokens(&text, from)?, tokens(&text, to)?);
            let weights = [
                parse_non_negative(column_text(&text, input)?)?,
                parse_non_negative(column_text(&text, output)?)?,
            ];
            let set = sets
                .entry(column_text(&text, name)?.to_owned())
                .or_default();
            for (histogram, weight) in set.iter_mut().zip(weights) {
                // The file's bins are (from, to].
                histogram
                    .add(from + 1, to, weight)
                    .with_context(|| format!("bin {from} to {to} or its weight is invalid"))?;
            }
            Ok(())
        };
        add().with_context(|| format!("line {number}"))?;
    }
    let names = || sets.keys().cloned().collect::<Vec<_>>().join(", ");
    let set = match dataset {
        Some(name) => sets
            .get(name)
            .with_context(|| format!("no dataset `{name}`; there are {}", names()))?,
        None if sets.len() == 1 => sets.values().next().context("no histogram")?,
        None => bail!("choose one of its datasets with --dataset: {}", names()),
    };
    let [input, output] = set.clone();
    ensure!(
        !input.is_empty() && !output.is_empty(),
        "a histogram without weight"
    );
    Ok(LengthDistribution::Histograms { input, output })
}

fn column_text(line: &str, column: usize) -> anyhow::Result<&str> {
    let cell = line.split(',').nth(column).map(str::trim);
    cell.with_context(|| format!("`{line}` has no column {}", column + 1))
}

fn tokens(line: &str, column: usize) -> anyhow::Result<u32> {
    let text = column_text(line, column)?;
    let tokens = text.parse();
    tokens.with_context(|| format!("column {}: `{text}` is not a number of tokens", column + 1))
}

/// Parses a time as nanoseconds since some start: seconds, or a date and a time of day in UTC such
/// as `2023-11-16 18:15:46.6805900` (also with `T`, `Z` or `+00:00`).
fn parse_time_nanos(text: &str) -> anyhow::Result<u64> {
    if let Ok(seconds) = parse_non_negative(text) {
        return Ok((seconds * 1e9) as u64);
    }
    date_nanos(text).with_context(|| {
        format!("`{text}` is neither seconds nor a time such as 2023-11-16 18:15:46.680")
    })
}

fn date_nanos(text: &str) -> Option<u64> {
    let text = text.trim_end_matches("+00:00").trim_end_matches('Z');
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let hour: u64 = time.next()?.parse().ok()?;
    let minute: u64 = time.next()?.parse().ok()?;
    let second = time.next()?;
    let (second, fraction) = second.split_once('.').unwrap_or((second, "0"));
    let second: u64 = second.parse().ok()?;
    // 64 bits hold nanoseconds until 2554.
    let sound = (1970..2500).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 61
        && !fraction.is_empty()
        && fraction.len() <= 9
        && fraction.bytes().all(|byte| byte.is_ascii_digit());
    if !sound {
        return None;
    }
    let days = u64::try_from(days_from_civil(year, month, day)).ok()?;
    let scale = 10_u64.pow(9 - fraction.len() as u32);
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    Some(seconds * 1_000_000_000 + fraction.parse::<u64>().ok()? * scale)
}

/// Days since 1970-01-01 in the Gregorian calendar (H. Hinnant, "chrono-compatible low-level date
/// algorithms"): years begin in March, so that the leap day is the last one.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_timestamps_match_date_u() {
        // date -u -d '2023-11-16 18:15:46' +%s; date -u -d '2024-02-29 23:59:59' +%s
        assert_eq!(
            parse_time_nanos("2023-11-16 18:15:46.6805900").unwrap(),
            1_700_158_546_680_590_000
        );
        assert_eq!(
            parse_time_nanos("2024-02-29T23:59:59Z").unwrap(),
            1_709_251_199_000_000_000
        );
        assert_eq!(
            parse_time_nanos("2024-05-10 00:00:00.009930+00:00").unwrap(),
            1_715_299_200_009_930_000
        );
        assert_eq!(parse_time_nanos("0.046927").unwrap(), 46_927_000);
        for bad in [
            "",
            "yesterday",
            "2023-13-16 18:15:46.68",
            "2023-11-16",
            "2023-11-16 25:00:00.0",
            "2999-11-16 18:15:46.68",
            "-1",
        ] {
            assert!(parse_time_nanos(bad).is_err(), "{bad}");
        }
    }
}
