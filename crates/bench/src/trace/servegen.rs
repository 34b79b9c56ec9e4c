//! ServeGen: clients of a large service, each with its own arrivals and lengths.
//!
//! Owns: the two files of a ServeGen extract and its sampling rule: for each client and window of
//! 600 s, draw ceil(rate · 600) gaps of the given distribution, stretch them so that they fill the
//! window, and draw lengths by inverse distribution from the histograms of that quarter of a day.
//! All clients are thinned by one factor to reach a wanted rate.
//! (Source: alibaba/ServeGen; Xiang et al., "ServeGen", 2025.)
//! Never: invents lengths: clients without histograms are left out.

use super::{TraceLines, TraceRow};
use crate::arrivals::at_seconds;
use crate::lengths::LengthHistogram;
use crate::number::parse_positive;
use crate::prompt::{PromptPlan, unique_key};
use crate::rng::{DrawPurpose, WorkloadRng};
use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const WINDOW_S: u32 = 600;
/// A histogram covers six hours.
const SLOT_S: u32 = 21_600;

#[derive(Clone, Copy, Debug, PartialEq)]
enum GapDistribution {
    Gamma,
    Weibull,
}

/// One client in one window.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ClientWindow {
    client: u32,
    /// Seconds from the trace's start to the window's.
    from_s: u32,
    rate: f64,
    gaps: GapDistribution,
    shape: f64,
    scale: f64,
}

/// Input and output lengths.
type LengthHistograms = [LengthHistogram; 2];

/// Clients and their lengths.
#[derive(Clone, Debug)]
pub(crate) struct ServeGenClients {
    /// Windows by time; each has histograms.
    windows: Vec<ClientWindow>,
    /// Histograms by client and slot.
    lengths: BTreeMap<(u32, u32), LengthHistograms>,
}

#[derive(Deserialize)]
struct ServeGenLengthsLine {
    client: u32,
    t_s: u32,
    r#in: [Vec<f64>; 2],
    out: [Vec<f64>; 2],
}

/// The other file of the pair, in the same folder: `name` in its name is replaced by `other`.
pub(super) fn paired_file(path: &Path, name: &str, other: &str) -> anyhow::Result<PathBuf> {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = file.trim_end_matches(".gz");
    let candidates = [
        stem.replace(name, other),
        format!("{}.gz", stem.replace(name, other)),
    ];
    let found = candidates
        .iter()
        .map(|file| path.with_file_name(file))
        .find(|file| stem.contains(name) && file.exists());
    found.with_context(|| {
        format!("ServeGen's {name} and {other} belong together: name them PREFIX_{name} and PREFIX_{other}, in one folder")
    })
}

/// Reads the table of clients, after its header.
pub(super) fn clients(lines: TraceLines<'_>) -> anyhow::Result<Vec<ClientWindow>> {
    let mut windows = Vec::new();
    for line in lines {
        let (number, text) = line?;
        windows.push(window(&text).with_context(|| format!("line {number}"))?);
    }
    Ok(windows)
}

fn window(text: &str) -> anyhow::Result<ClientWindow> {
    let cells: Vec<&str> = text.split(',').map(str::trim).collect();
    let [client, from_s, rate, _cv, gaps, shape, scale] = cells[..] else {
        bail!("expected client,t_s,rate_rps,cv,dist,shape,scale, not `{text}`");
    };
    Ok(ClientWindow {
        client: client.parse().context("client")?,
        from_s: from_s.parse().context("t_s")?,
        rate: parse_positive(rate).context("rate_rps")?,
        gaps: match gaps {
            "G" => GapDistribution::Gamma,
            "W" => GapDistribution::Weibull,
            other => bail!("dist `{other}`: expected G (gamma) or W (Weibull)"),
        },
        shape: parse_positive(shape).context("shape")?,
        scale: parse_positive(scale).context("scale")?,
    })
}

/// Joins clients with the histograms of the file at `lengths`.
pub(super) fn join_lengths(
    mut windows: Vec<ClientWindow>,
    lengths: &Path,
) -> anyhow::Result<ServeGenClients> {
    let lengths = super::read_lines(lengths, |lines| {
        let mut all = BTreeMap::new();
        for line in lines {
            let (number, text) = line?;
            let (at, histograms) = histograms(&text).with_context(|| format!("line {number}"))?;
            all.insert(at, histograms);
        }
        Ok(all)
    })?;
    windows.retain(|window| lengths.contains_key(&(window.client, window.from_s / SLOT_S)));
    windows.sort_by_key(|window| (window.from_s, window.client));
    ensure!(
        !windows.is_empty(),
        "no client of the clients file has lengths in the lengths file"
    );
    Ok(ServeGenClients { windows, lengths })
}

fn histograms(text: &str) -> anyhow::Result<((u32, u32), LengthHistograms)> {
    let line: ServeGenLengthsLine = serde_json::from_str(text).context(
        "expected {\"client\":…,\"t_s\":…,\"in\":[[tokens],[p]],\"out\":[[tokens],[p]]}",
    )?;
    let histogram = |[tokens, weights]: &[Vec<f64>; 2]| -> anyhow::Result<LengthHistogram> {
        ensure!(
            tokens.len() == weights.len() && !tokens.is_empty(),
            "expected one weight for each length, and at least one"
        );
        let mut histogram = LengthHistogram::default();
        for (tokens, weight) in tokens.iter().zip(weights) {
            let at = tokens.round().max(1.0) as u32;
            histogram
                .add(at, at, *weight)
                .with_context(|| format!("weight {weight} of {tokens} tokens"))?;
        }
        ensure!(!histogram.is_empty(), "a histogram without weight");
        Ok(histogram)
    };
    let both = [
        histogram(&line.r#in).context("in")?,
        histogram(&line.out).context("out")?,
    ];
    Ok(((line.client, line.t_s / SLOT_S), both))
}

/// Amount and seed of a draw from the clients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServeGenDraw {
    /// Mean requests per second; all of the clients' if `None`.
    pub(crate) rate: Option<f64>,
    /// Seconds from the first window on.
    pub(crate) seconds: f64,
    pub(crate) requests_max: usize,
    pub(crate) seed: u64,
}

impl ServeGenClients {
    /// Mean requests per second of the clients over the first `seconds`.
    pub(crate) fn rate(&self, seconds: f64) -> f64 {
        let (requests, span) = self
            .windows_of(seconds)
            .map(|(from, window)| {
                let inside = (seconds - f64::from(from)).min(f64::from(WINDOW_S));
                window.rate * inside
            })
            .fold((0.0, seconds), |(sum, span), more| (sum + more, span));
        requests / span
    }

    /// Requests in the order of their times.
    pub(crate) fn draw(&self, draw: ServeGenDraw) -> anyhow::Result<Vec<TraceRow>> {
        let all = self.rate(draw.seconds);
        let keep = draw.rate.map_or(1.0, |rate| rate / all);
        ensure!(
            keep <= 1.0,
            "these clients make only {all:.1} requests per second in that time, not {:.1}: give a lower rate",
            draw.rate.unwrap_or_default()
        );
        let mut rng = WorkloadRng::new(draw.seed, DrawPurpose::Clients);
        let mut rows = Vec::new();
        for (from, window) in self.windows_of(draw.seconds) {
            let mut times = window.times(&mut rng);
            // Thinning drops each request with the same chance, which keeps the clients' mixture.
            times.retain(|_| rng.unit() < keep);
            let slot = (window.client, window.from_s / SLOT_S);
            let [input, output] = &self.lengths[&slot];
            for time in times {
                let at = f64::from(from) + time;
                if at < draw.seconds {
                    let key = unique_key(rows.len() as u64);
                    rows.push(TraceRow {
                        at: at_seconds(at),
                        prompt: PromptPlan::unique(key, input.draw(&mut rng)),
                        output: output.draw(&mut rng),
                    });
                }
            }
        }
        rows.sort_by_key(|row| row.at);
        rows.truncate(draw.requests_max);
        ensure!(!rows.is_empty(), "no request in that time: ask for more");
        Ok(rows)
    }

    /// Windows that begin in the first `seconds`, with their start times.
    fn windows_of(&self, seconds: f64) -> impl Iterator<Item = (u32, &ClientWindow)> {
        let first = self.windows.first().map_or(0, |window| window.from_s);
        self.windows
            .iter()
            .map(move |window| (window.from_s - first, window))
            .take_while(move |(from, _)| f64::from(*from) < seconds)
    }
}

impl ClientWindow {
    /// Arrival times in seconds since the window's start, ascending.
    fn times(&self, rng: &mut WorkloadRng) -> Vec<f64> {
        let count = (self.rate * f64::from(WINDOW_S)).ceil() as usize;
        let gaps = (0..count).map(|_| match self.gaps {
            GapDistribution::Gamma => rng.gamma(self.shape, self.scale),
            GapDistribution::Weibull => rng.weibull(self.shape, self.scale),
        });
        let mut at = 0.0;
        let mut times: Vec<f64> = gaps
            .map(|gap| {
                at += gap;
                at
            })
            .collect();
        // The last request would fall on the window's end, which belongs to the next window.
        let stretch = f64::from(WINDOW_S) / at.max(f64::MIN_POSITIVE) * (1.0 - 1e-9);
        for time in &mut times {
            *time *= stretch;
        }
        times
    }
}
