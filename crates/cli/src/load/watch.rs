//! The output of a measurement for its user.
//!
//! Owns: the progress bar (on a terminal only) and the tables. Never: computes a number.

use cleave_bench::{
    BenchReport, GoalVerdict, ProgressObserver, RateResult, RunProgress, RunSummary, SampleStats,
    SearchTime,
};
use cleave_domain::RequestStage;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::Write;
use std::time::Duration;

/// Template of the progress bar, which is shown on a terminal only.
const BAR: &str = "{prefix}{bar:30} {pos}/{len}  {msg}";

/// The progress bar and the table of a running measurement.
pub(crate) struct ProgressScreen {
    bar: ProgressBar,
}

impl ProgressScreen {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(BAR) {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Prints the head of a table of rates.
    pub(crate) fn with_table() -> anyhow::Result<Self> {
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{:>9}  {:>9}  {:>10}  {:>15}  {:>9}  {:>17}  {:>17}  ",
            "rate/s",
            "requests",
            "attainment",
            "95 % interval",
            "goodput/s",
            "TTFT p50 p99 ms",
            "TPOT p50 p99 ms"
        )?;
        out.flush()?;
        Ok(Self::new())
    }
}

/// Says before a search how long it will take.
pub(crate) fn print_expected_time(
    time: &SearchTime,
    time_cap: Option<Duration>,
) -> anyhow::Result<()> {
    let SearchTime {
        runs_min,
        time_min,
        runs_max,
        time_max,
    } = time;
    let mut err = std::io::stderr().lock();
    let (least, most) = (duration_words(*time_min), duration_words(*time_max));
    let capped = match time_cap {
        Some(_) => "",
        None => "; --time-cap limits it, and Ctrl-C writes what is measured by then",
    };
    writeln!(
        err,
        "expected: {runs_min} to {runs_max} runs, {least} to {most}, and the wait for the last answers of each{capped}"
    )?;
    Ok(())
}

fn duration_words(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{:.1} h", span.as_secs_f64() / 3600.0),
    }
}

impl ProgressObserver for ProgressScreen {
    fn run_progresses(&self, progress: &RunProgress) {
        let RunProgress {
            planned: _,
            sent,
            ended: over,
            met,
            took,
        } = progress;
        self.bar.set_position(u64::from(*over));
        let flight = sent.saturating_sub(*over);
        let took = Duration::from_secs(took.as_secs());
        self.bar
            .set_message(format!("{flight} in flight, {met} met, {took:?}"));
    }

    fn run_begins(&self, rate: f64, planned: usize) {
        tracing::debug!("{planned} requests at {rate:.3} per second");
        self.bar.reset();
        self.bar.set_prefix(format!("{rate:.3}/s "));
        self.bar.set_length(planned as u64);
    }

    fn rate_tried(&self, tried: &RateResult) {
        let line = row(tried);
        self.bar.suspend(|| {
            let mut out = std::io::stdout().lock();
            // A closed output does not end the measurement.
            writeln!(out, "{line}").and_then(|()| out.flush()).ok();
        });
    }
}

impl Drop for ProgressScreen {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn row(tried: &RateResult) -> String {
    let interval = tried.attainment_interval;
    let verdict = match (tried.verdict, tried.kept) {
        (GoalVerdict::Kept, _) => "kept",
        (GoalVerdict::Broken, _) => "broken",
        (GoalVerdict::Open, true) => "kept (open)",
        (GoalVerdict::Open, false) => "broken (open)",
    };
    format!(
        "{:>9.3}  {:>9}  {:>9.1}%  {:>6.1}–{:>5.1} %  {:>9.3}  {:>8.1} {:>8.1}  {:>8.2} {:>8.2}  {verdict}",
        tried.rate,
        tried.decided,
        100.0 * tried.attainment,
        100.0 * interval.low,
        100.0 * interval.high,
        tried.goodput_rps,
        tried.ttft_ms[0],
        tried.ttft_ms[1],
        tried.tpot_ms[0],
        tried.tpot_ms[1],
    )
}

/// Prints the numbers of a run, by class if there are several.
pub(crate) fn print_run(report: &BenchReport) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    for run in &report.runs {
        print_summary(&mut out, "all", &run.all)?;
        if run.classes.len() > 1 {
            for (class, summary) in &run.classes {
                print_summary(&mut out, class, summary)?;
            }
        }
    }
    Ok(())
}

fn print_summary(out: &mut impl Write, name: &str, summary: &RunSummary) -> anyhow::Result<()> {
    let interval = summary.attainment_interval;
    let (low, high) = interval.map_or((0.0, 1.0), |interval| (interval.low, interval.high));
    writeln!(
        out,
        "{name}: {} requests ({:.3}/s), {} answered, {} within targets: attainment {:.1} % ({:.1}–{:.1} %), \
         goodput {:.3}/s, {:.3}/s per device",
        summary.offered,
        summary.offered_rps,
        summary.done,
        summary.met,
        100.0 * summary.attainment,
        100.0 * low,
        100.0 * high,
        summary.goodput_rps,
        summary.goodput_rps_per_device,
    )?;
    if !summary.missed.is_empty() || summary.undecided > 0 {
        let missed = summary.missed.iter();
        let missed = missed.map(|(miss, count)| format!("{count} {}", word(miss)));
        let missed: Vec<String> = missed.collect();
        let undecided = summary.undecided;
        writeln!(
            out,
            "  missed: {}; undecided: {undecided}",
            missed.join(", ")
        )?;
    }
    let per_second = |rate: f64| match summary.done {
        0 => "none".to_owned(),
        _ => format!("{rate:.1}"),
    };
    writeln!(
        out,
        "  tokens/s: {} out, {} in\n  {:<12}{}",
        per_second(summary.output_tokens_per_second),
        per_second(summary.input_tokens_per_second),
        "ms",
        SampleStats::COLUMNS
            .map(|name| format!(" {name:>9}"))
            .concat()
    )?;
    let stages = RequestStage::ALL.iter().filter_map(|stage| {
        let stats = summary.stages_ms.get(stage.name())?;
        Some((stage.name(), stats))
    });
    let latencies = [
        ("TTFT", &summary.ttft_ms),
        ("TPOT", &summary.tpot_ms),
        ("gap", &summary.gap_ms),
        ("end to end", &summary.e2e_ms),
        ("lateness", &summary.lateness_ms),
    ];
    for (name, stats) in latencies.into_iter().chain(stages) {
        print_stats(out, name, stats)?;
    }
    Ok(())
}

fn print_stats(out: &mut impl Write, name: &str, stats: &SampleStats) -> anyhow::Result<()> {
    let columns = stats.columns().map(|column| match stats.count {
        0 => format!(" {:>9}", "none"),
        _ => format!(" {column:>9.2}"),
    });
    writeln!(out, "  {name:<12}{}", columns.concat())?;
    Ok(())
}

fn word(miss: &cleave_bench::MissReason) -> String {
    let word = serde_json::to_value(miss).unwrap_or_default();
    word.as_str().unwrap_or_default().to_owned()
}

/// Prints the result of a search.
pub(crate) fn print_goodput(report: &BenchReport) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let Some(found) = &report.goodput else {
        return Ok(());
    };
    let (low, high) = (
        found.attainment_interval.low,
        found.attainment_interval.high,
    );
    match found.rate_max {
        Some(rate) => writeln!(
            out,
            "\ngoodput {:.3}/s ({:.3}/s per device) at {rate:.3} requests per second: attainment {:.1} % \
             ({:.1}–{:.1} %), goal {:.1} %",
            found.goodput_rps,
            found.goodput_rps_per_device,
            100.0 * found.attainment,
            100.0 * low,
            100.0 * high,
            100.0 * found.goal,
        )?,
        None if report.tries.is_empty() => writeln!(out, "\nno run was completed")?,
        None => writeln!(out, "\nno rate met the goal of {:.1} %", 100.0 * found.goal)?,
    }
    match (found.complete, found.rate_broken) {
        (false, _) if report.interrupted => writeln!(out, "interrupted: the search was not over")?,
        (false, _) => writeln!(out, "time ran out: the true rate may be higher")?,
        (true, None) => writeln!(out, "no rate missed the goal: the true rate may be higher")?,
        (true, Some(_)) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_answers_has_no_latencies() {
        let mut out = Vec::new();
        print_summary(&mut out, "all", &RunSummary::default()).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("tokens/s: none out, none in"), "{text}");
        let mut latencies = text.lines().skip_while(|line| !line.starts_with("  TTFT"));
        assert!(latencies.clone().next().is_some(), "{text}");
        assert!(latencies.all(|line| !line.contains('0')), "{text}");
    }
}
