//! Traces recorded from real services.
//!
//! Owns: reading them in any known format, which is recognised by content. Never: draws anything
//! except by a published sampling rule. Invariant: an error names the file and the line.

mod csv;
mod mooncake;
mod servegen;

pub(crate) use servegen::{ServeGenClients, ServeGenDraw};

use crate::lengths::LengthDistribution;
use crate::prompt::PromptPlan;
use anyhow::{Context, bail, ensure};
use cleave_domain::Time;
use flate2::read::MultiGzDecoder;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Longest line; the longest known lines are histograms of 10 kB.
const LINE_BYTES_MAX: usize = 16 << 20;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceRow {
    /// Time since the first request.
    pub(crate) at: Time,
    pub(crate) prompt: PromptPlan,
    /// Number of answer tokens.
    pub(crate) output: u32,
}

/// The content of a file.
#[derive(Clone, Debug)]
pub(crate) enum TraceContent {
    /// Requests with their times, in order; at least one.
    Timed(Vec<TraceRow>),
    /// Prompt and output lengths without arrival times.
    Lengths(LengthDistribution),
    /// Clients from which requests are drawn.
    ServeGen(ServeGenClients),
}

/// Lines of a file with their numbers, from 1.
type TraceLines<'a> = &'a mut dyn Iterator<Item = anyhow::Result<(usize, String)>>;

/// Reads `path`, plain or gzipped. `dataset` chooses one of several in a file.
pub(crate) fn read(path: &Path, dataset: Option<&str>) -> anyhow::Result<TraceContent> {
    let trace = read_lines(path, |lines| {
        let Some(first) = lines.next() else {
            bail!("the file is empty");
        };
        let (_, first) = first?;
        match format_of(&first)? {
            TraceFormat::Mooncake => mooncake::read(&first, lines).map(TraceContent::Timed),
            TraceFormat::Table => csv::read(&first, dataset, lines),
            TraceFormat::ServeGenClients => {
                let lengths = servegen::paired_file(path, "clients.csv", "lengths.jsonl")?;
                let clients = servegen::clients(lines)?;
                servegen::join_lengths(clients, &lengths).map(TraceContent::ServeGen)
            }
            TraceFormat::ServeGenLengths => {
                let clients = servegen::paired_file(path, "lengths.jsonl", "clients.csv")?;
                let clients = read_lines(&clients, |lines| {
                    lines.next();
                    servegen::clients(lines)
                })?;
                servegen::join_lengths(clients, path).map(TraceContent::ServeGen)
            }
        }
    })?;
    match (&trace, dataset) {
        (TraceContent::Lengths(LengthDistribution::Histograms { .. }), _) | (_, None) => Ok(trace),
        (_, Some(name)) => bail!(
            "{}: there is one dataset in this file, and no `{name}`",
            path.display()
        ),
    }
}

enum TraceFormat {
    Mooncake,
    Table,
    ServeGenClients,
    ServeGenLengths,
}

fn format_of(first: &str) -> anyhow::Result<TraceFormat> {
    if first.trim_start().starts_with('{') {
        let object: Value = serde_json::from_str(first).context("line 1 is not a JSON object")?;
        let has = |name: &str| object.get(name).is_some();
        return match (has("timestamp") && has("input_length"), has("client")) {
            (true, _) => Ok(TraceFormat::Mooncake),
            (_, true) => Ok(TraceFormat::ServeGenLengths),
            _ => bail!(
                "line 1: JSON lines need `timestamp`, `input_length` and `output_length` (Mooncake), \
                 or `client`, `t_s`, `in` and `out` (ServeGen's lengths)"
            ),
        };
    }
    let columns: Vec<&str> = first.split(',').map(str::trim).collect();
    if columns.starts_with(&["client", "t_s"]) {
        Ok(TraceFormat::ServeGenClients)
    } else {
        Ok(TraceFormat::Table)
    }
}

/// Opens a file, plain or gzipped, and gives its non-blank lines to `read`.
fn read_lines<T>(
    path: &Path,
    read: impl FnOnce(TraceLines<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = || path.display().to_string();
    let (file, _) = cleave_files::open(path).with_context(name)?;
    let mut file = BufReader::with_capacity(1 << 16, file);
    let gzipped = file
        .fill_buf()
        .with_context(name)?
        .starts_with(&[0x1f, 0x8b]);
    let mut bytes: Box<dyn BufRead> = if gzipped {
        Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(file)))
    } else {
        Box::new(file)
    };
    let mut number = 0;
    let mut lines = std::iter::from_fn(|| {
        loop {
            number += 1;
            match line(&mut bytes) {
                Ok(Some(text)) if text.trim().is_empty() => {}
                Ok(Some(text)) => return Some(Ok((number, text))),
                Ok(None) => return None,
                Err(error) => return Some(Err(error.context(format!("line {number}")))),
            }
        }
    });
    read(&mut lines).with_context(name)
}

fn line(bytes: &mut dyn BufRead) -> anyhow::Result<Option<String>> {
    let mut line = String::new();
    let read = bytes
        .take(LINE_BYTES_MAX as u64)
        .read_line(&mut line)
        .context("unreadable (neither text nor gzipped text?)")?;
    ensure!(read < LINE_BYTES_MAX, "longer than {LINE_BYTES_MAX} bytes");
    let end = line.trim_end_matches(['\n', '\r']).len();
    line.truncate(end);
    Ok((read > 0).then_some(line))
}

/// Rows in the order of their times, the first one at zero.
fn sorted_from_zero(mut rows: Vec<TraceRow>) -> anyhow::Result<Vec<TraceRow>> {
    rows.sort_by_key(|row| row.at);
    let first = rows.first().context("no requests in the file")?.at;
    for row in &mut rows {
        row.at = Time::ZERO + row.at.since(first);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    //! The expected numbers were computed from the same excerpts by a script in another language.

    use super::*;
    use crate::prompt::PromptVocabulary;
    use crate::rng::{DrawPurpose, WorkloadRng};
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/data")
            .join(name)
    }

    #[cfg(unix)]
    #[test]
    fn a_trace_that_is_a_device_is_refused_without_waiting() {
        let error = read(Path::new("/dev/zero"), None).unwrap_err();
        assert!(format!("{error:#}").contains("device"), "{error:#}");
    }

    fn timed(name: &str) -> Vec<TraceRow> {
        match read(&data(name), None).unwrap() {
            TraceContent::Timed(rows) => rows,
            other => panic!("{name}: {other:?}"),
        }
    }

    fn lengths(name: &str, dataset: Option<&str>) -> LengthDistribution {
        match read(&data(name), dataset).unwrap() {
            TraceContent::Lengths(lengths) => lengths,
            other => panic!("{name}: {other:?}"),
        }
    }

    /// Requests, prompt tokens, answer tokens, nanoseconds from the first to the last.
    fn sums(rows: &[TraceRow]) -> (usize, u32, u32, u64) {
        let input = rows.iter().map(|row| row.prompt.tokens()).sum();
        let output = rows.iter().map(|row| row.output).sum();
        (
            rows.len(),
            input,
            output,
            rows.last().unwrap().at.as_nanos(),
        )
    }

    #[test]
    fn trace_rows_match_the_file() {
        for (name, expected) in [
            (
                "mooncake_conversation.jsonl",
                (24, 104_064, 8_119, 150_000_000_000),
            ),
            ("azure2023_conv.csv", (40, 27_985, 4_430, 24_146_296_000)),
            ("llmservingsim.csv", (20, 24_725, 13_787, 1_776_964_000)),
        ] {
            assert_eq!(sums(&timed(name)), expected, "{name}");
        }
    }

    #[test]
    fn equal_block_ids_give_equal_prefix_tokens() {
        let rows = timed("mooncake_conversation.jsonl");
        let parts: Vec<_> = rows.iter().flat_map(|row| &row.prompt.0).collect();
        let distinct: BTreeSet<u64> = parts.iter().map(|part| part.key).collect();
        assert_eq!((parts.len(), distinct.len()), (212, 102));
        let alphabet = PromptVocabulary::IdRange {
            first: 256,
            end: 100_000,
        };
        let ids = |index: usize| -> Vec<u32> {
            let mut out = Vec::new();
            alphabet.write(&rows[index].prompt, 5, &mut out);
            serde_json::from_slice(&out).unwrap()
        };
        let common = |one: usize, other: usize| {
            let (one, other) = (ids(one), ids(other));
            one.iter().zip(&other).take_while(|(a, b)| a == b).count()
        };
        assert_eq!(common(21, 15), 6144);
        assert_eq!(common(19, 8), 5632);
        assert_eq!(common(9, 0), 5632);
    }

    #[test]
    fn length_files_are_drawn_as_measured() {
        let mut rng = WorkloadRng::new(1, DrawPurpose::Lengths);
        let LengthDistribution::Pairs(pairs) = lengths("sharegpt_pairs.csv", None) else {
            panic!("pairs");
        };
        let sum = |of: fn(&(u32, u32)) -> u32| pairs.iter().map(of).sum::<u32>();
        assert_eq!(
            (pairs.len(), sum(|p| p.0), sum(|p| p.1)),
            (30, 64_556, 16_432)
        );
        let drawn = lengths("distserve_hist.csv", Some("sharegpt"));
        let mut mean = [0.0, 0.0];
        for _ in 0..200_000 {
            let (input, output) = drawn.draw(&mut rng);
            mean[0] += f64::from(input) / 200_000.0;
            mean[1] += f64::from(output) / 200_000.0;
        }
        assert!(
            (mean[0] - 752.04).abs() < 5.0 && (mean[1] - 200.77).abs() < 3.0,
            "{mean:?}"
        );
    }

    #[test]
    fn servegen_clients_follow_the_published_sampling() {
        for name in ["servegen_clients.csv", "servegen_lengths.jsonl.gz"] {
            let TraceContent::ServeGen(clients) = read(&data(name), None).unwrap() else {
                panic!("{name}");
            };
            // One of the four clients has no lengths.
            assert!((clients.rate(1800.0) - 0.643_899).abs() < 1e-6);
            let draw = |rate, seed| {
                let draw = ServeGenDraw {
                    rate,
                    seconds: 1800.0,
                    requests_max: usize::MAX,
                    seed,
                };
                clients.draw(draw)
            };
            // ceil(rate · 600) of each client and window: 800 + 164 + 75 + 11 + 111.
            let all = draw(None, 1).unwrap();
            assert_eq!(all.len(), 1161);
            assert!(all.windows(2).all(|two| two[0].at <= two[1].at));
            let many: Vec<TraceRow> = (0..40).flat_map(|seed| draw(None, seed).unwrap()).collect();
            let mean = |of: fn(&TraceRow) -> u32| {
                many.iter().map(|row| f64::from(of(row))).sum::<f64>() / many.len() as f64
            };
            let (input, output) = (mean(|row| row.prompt.tokens()), mean(|row| row.output));
            assert!((input - 466.2).abs() < 8.0, "{input}");
            assert!((output - 130.5).abs() < 3.0, "{output}");
            let thinned: usize = (0..40)
                .map(|seed| draw(Some(0.2), seed).unwrap().len())
                .sum();
            let rate = thinned as f64 / 40.0 / 1800.0;
            assert!((rate - 0.2).abs() < 0.01, "{rate}");
            assert!(draw(Some(9.0), 1).is_err(), "more than there is");
        }
    }

    #[test]
    fn bad_trace_files_name_the_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let mooncake =
            r#"{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}"#;
        for (text, dataset, expected) in [
            ("", None, "empty"),
            ("a,b\n1,2\n", None, "line 1"),
            ("{\"a\": 1}\n", None, "line 1"),
            (&format!("{mooncake}\n\n{{oops\n"), None, "line 3"),
            (
                &format!("{mooncake}\n{}", mooncake.replace('5', "0")),
                None,
                "line 2",
            ),
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n",
                None,
                "line 2",
            ),
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\n1,1\n",
                None,
                "line 2",
            ),
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\n",
                None,
                "no requests",
            ),
            ("input_tokens,output_tokens\n1,-2\n", None, "line 2"),
            (
                "dataset,bin_lo,bin_hi,p_input,p_output\na,0,9,1,1\nb,0,9,1,1\n",
                None,
                "--dataset",
            ),
            (
                "dataset,bin_lo,bin_hi,p_input,p_output\na,0,9,1,1\n",
                Some("c"),
                "there are a",
            ),
            (
                "input_tokens,output_tokens\n1,2\n",
                Some("c"),
                "one dataset",
            ),
            (
                "client,t_s,rate_rps,cv,dist,shape,scale\n",
                None,
                "belong together",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read(&path, dataset).unwrap_err();
            let message = format!("{error:#}");
            assert!(
                message.contains(expected) && message.contains("trace"),
                "{text}: {message}"
            );
        }
    }
}
