//! `report.html`: one self-contained page, in light and dark.
//!
//! Owns: the content of the page and its order. Never: computes what `result.json` lacks.
//! Invariant: the page loads nothing, and outside text is always escaped.

use crate::plot::{
    AxisScale, Plot, PlotAxis, PlotMark, PlotSeries, append, escape_html, format_number,
};
use crate::result::{BenchReport, RateResult, ReportKind, RunReport};
use crate::summary::{LatencyCurves, RunSummary, SampleStats};
use cleave_domain::RequestStage;

const STYLE: &str = include_str!("report.css");
/// Stages that are drawn: up to the first token, and of a hand-off after it.
const STAGES: [RequestStage; 7] = [
    RequestStage::RouterQueue,
    RequestStage::Retry,
    RequestStage::PrefillWait,
    RequestStage::Prefill,
    RequestStage::Transfer,
    RequestStage::DecodeWait,
    RequestStage::FirstDecode,
];
/// Height of a bar of stages, with the space below it.
const BAR: f64 = 26.0;

pub(crate) fn html(report: &BenchReport) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    append(
        &mut out,
        format_args!(
            "<meta name=\"viewport\" content=\"width=device-width\"><title>cleave bench</title><style>{STYLE}</style></head><body>"
        ),
    );
    write_header(&mut out, report);
    let shown = run_to_show(report);
    if let Some((_, run)) = shown {
        write_tiles(&mut out, report, run);
    }
    write_rates(&mut out, report);
    if let Some((index, run)) = shown {
        write_details(&mut out, index, run, report.runs.len());
    }
    let configuration = serde_json::to_string_pretty(&report.configuration).unwrap_or_default();
    append(
        &mut out,
        format_args!(
            "<h2>Configuration</h2><pre>{}</pre></body></html>\n",
            // Each line is escaped alone, so that line breaks stay.
            configuration
                .lines()
                .map(escape_html)
                .collect::<Vec<_>>()
                .join("\n")
        ),
    );
    out
}

/// The run that is shown in detail: the last one at the highest rate that met the goal, or else the
/// last one.
fn run_to_show(report: &BenchReport) -> Option<(usize, &RunReport)> {
    let best = report.goodput.as_ref().and_then(|found| found.rate_max);
    let of_best = report.tries.iter().find(|tried| Some(tried.rate) == best);
    let index = match of_best.and_then(|tried| tried.runs.last()) {
        Some(index) => *index,
        None => report.runs.len().checked_sub(1)?,
    };
    report.runs.get(index).map(|run| (index, run))
}

fn write_header(out: &mut String, report: &BenchReport) {
    let server = &report.server;
    let title = match report.kind {
        ReportKind::Run => "A run",
        ReportKind::Goodput => "Goodput",
    };
    let model = escape_html(server.model.as_deref().unwrap_or("an unnamed model"));
    let url = report.configuration["url"].as_str().unwrap_or_default();
    let software = server
        .software
        .as_deref()
        .map_or(String::new(), |software| {
            format!(", software {}", escape_html(software))
        });
    append(
        out,
        format_args!(
            "<h1>{title}: {model}</h1><p class=\"soft\">{}{software} · prompts: {} · load from {} cores, {} {} · \
             {:.0} s in all · cleave {} · {}</p>",
            escape_html(url),
            escape_html(&server.prompts),
            report.environment.cores,
            report.environment.os,
            report.environment.arch,
            report.took_s,
            report.version,
            date(report.started_unix_s),
        ),
    );
    if report.interrupted {
        out.push_str("<p class=\"note\">Ended by the user before its time.</p>");
    }
    for note in &report.notes {
        append(
            out,
            format_args!("<p class=\"note\">{}</p>", escape_html(note)),
        );
    }
}

/// Formats seconds since 1970 as `2026-11-20 18:50 UTC` (H. Hinnant, "chrono-compatible low-level
/// date algorithms").
fn date(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400 + 719_468, unix_s % 86_400);
    // Eras of 400 years have 146,097 days; years begin in March, so the leap day comes last.
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

fn write_tiles(out: &mut String, report: &BenchReport, run: &RunReport) {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let all = &run.all;
    let mut tiles = match &report.goodput {
        Some(found) => vec![
            ("goodput, requests/s", format_number(found.goodput_rps)),
            ("per device", format_number(found.goodput_rps_per_device)),
            (
                "highest rate that kept the goal",
                found.rate_max.map_or("none".to_owned(), format_number),
            ),
            ("goal", percent(found.goal)),
        ],
        None => vec![
            ("goodput, requests/s", format_number(all.goodput_rps)),
            ("per device", format_number(all.goodput_rps_per_device)),
            ("offered, requests/s", format_number(all.offered_rps)),
        ],
    };
    tiles.extend([
        ("attainment", percent(all.attainment)),
        ("TTFT p99, ms", format_p99(&all.ttft_ms)),
        ("TPOT p99, ms", format_p99(&all.tpot_ms)),
        (
            "output tokens/s",
            format_number(all.output_tokens_per_second),
        ),
    ]);
    out.push_str("<div class=\"tiles\">");
    for (name, value) in tiles {
        append(
            out,
            format_args!("<div class=\"tile\"><b>{value}</b><span>{name}</span></div>"),
        );
    }
    out.push_str("</div>");
}

fn format_p99(stats: &SampleStats) -> String {
    match stats.count {
        0 => "none".to_owned(),
        _ => format_number(stats.p99),
    }
}

/// Plots attainment and goodput against the rate.
fn write_rates(out: &mut String, report: &BenchReport) {
    let Some(found) = report.goodput.as_ref().filter(|_| !report.tries.is_empty()) else {
        return;
    };
    let mut tries: Vec<&RateResult> = report.tries.iter().collect();
    tries.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    let rate = || tries.iter().map(|tried| tried.rate);
    let line =
        |of: fn(&RateResult) -> f64| tries.iter().map(|tried| (tried.rate, of(tried))).collect();
    let points = tries.iter().map(|tried| {
        let interval = tried.attainment_interval;
        (tried.rate, tried.attainment, interval.low, interval.high)
    });
    let attainment = Plot {
        title: "Attainment against rate",
        x: PlotAxis::from_zero_or_log("offered requests per second", rate()),
        y: PlotAxis {
            name: "share within targets",
            from: 0.0,
            to: 1.0,
            steps: AxisScale::Linear,
        },
        series: vec![
            series("", 0, PlotMark::Line(line(|tried| tried.attainment))),
            series("attainment, 95 %", 0, PlotMark::Points(points.collect())),
            series("goal", 3, PlotMark::Horizontal(found.goal)),
        ],
    };
    let goodput = Plot {
        title: "Goodput against rate",
        x: PlotAxis::from_zero_or_log("offered requests per second", rate()),
        y: PlotAxis::from_zero("requests per second", rate()),
        series: vec![
            series("offered", 1, PlotMark::Line(line(|tried| tried.rate))),
            series(
                "within targets",
                0,
                PlotMark::Line(line(|tried| tried.goodput_rps)),
            ),
        ],
    };
    append(
        out,
        format_args!(
            "<h2>Rates</h2><div class=\"plots\">{}{}</div>",
            attainment.svg(),
            goodput.svg()
        ),
    );
    write_rate_table(out, &tries);
}

fn series(name: &str, colour: usize, mark: PlotMark) -> PlotSeries {
    PlotSeries {
        name: name.to_owned(),
        colour,
        mark,
    }
}

fn write_rate_table(out: &mut String, tries: &[&RateResult]) {
    out.push_str(
        "<div class=\"wide\"><table><tr><th>rate/s</th><th>requests</th><th>attainment</th><th>95 % interval</th>\
         <th>verdict</th><th>goodput/s</th><th>TTFT p50</th><th>p99, ms</th><th>TPOT p50</th><th>p99, ms</th></tr>",
    );
    for tried in tries {
        let interval = tried.attainment_interval;
        let verdict = if tried.kept { "kept" } else { "broken" };
        let cells = [
            format_number(tried.rate),
            tried.decided.to_string(),
            format!("{:.1} %", 100.0 * tried.attainment),
            format!("{:.1}–{:.1} %", 100.0 * interval.low, 100.0 * interval.high),
            format!("{verdict}{}", open_suffix(tried)),
            format_number(tried.goodput_rps),
            format_number(tried.ttft_ms[0]),
            format_number(tried.ttft_ms[1]),
            format_number(tried.tpot_ms[0]),
            format_number(tried.tpot_ms[1]),
        ];
        write_row(out, &cells);
    }
    out.push_str("</table></div>");
}

fn open_suffix(tried: &RateResult) -> &'static str {
    match tried.verdict {
        crate::confidence::GoalVerdict::Open => ", open",
        _ => "",
    }
}

fn write_row(out: &mut String, cells: &[String]) {
    out.push_str("<tr>");
    for cell in cells {
        append(out, format_args!("<td>{}</td>", escape_html(cell)));
    }
    out.push_str("</tr>");
}

/// Shows one run in detail.
fn write_details(out: &mut String, index: usize, run: &RunReport, count: usize) {
    let which = match count {
        1 => String::new(),
        _ => format!(" (run {index} of 0 to {})", count - 1),
    };
    append(
        out,
        format_args!(
            "<h2>Latencies at {} requests per second{which}</h2><div class=\"plots\">",
            format_number(run.rate)
        ),
    );
    type CurveOf = fn(&LatencyCurves) -> &Vec<f64>;
    let curves: [(&str, &str, CurveOf); 4] = [
        ("Time to first token", "ttft", |curves| &curves.ttft_ms),
        ("Time per output token", "tpot", |curves| &curves.tpot_ms),
        ("Gaps between chunks", "", |curves| &curves.gap_ms),
        ("End to end", "e2e", |curves| &curves.e2e_ms),
    ];
    for (title, target, of) in curves {
        out.push_str(&distribution(run, title, target, of));
    }
    append(out, format_args!("{}</div>", timeline(run)));
    write_stages(out, run);
    write_table(out, run);
}

/// The cumulative distribution of a latency, a line for each class.
fn distribution(
    run: &RunReport,
    title: &str,
    target: &str,
    of: fn(&LatencyCurves) -> &Vec<f64>,
) -> String {
    let all = || {
        run.classes
            .values()
            .flat_map(|summary| of(&summary.curves))
            .copied()
    };
    let mut series = Vec::new();
    for (colour, (class, summary)) in run.classes.iter().enumerate() {
        let curve = of(&summary.curves);
        let last = curve.len().saturating_sub(1).max(1) as f64;
        let points = curve.iter().enumerate();
        let points = points
            .map(|(at, millis)| (*millis, at as f64 / last))
            .collect();
        series.push(PlotSeries {
            name: class.clone(),
            colour,
            mark: PlotMark::Line(points),
        });
        let limits = run.targets.get(class);
        let limit = limits.and_then(|limits| match target {
            "ttft" => limits.ttft,
            "tpot" => limits.tpot,
            "e2e" => limits.e2e,
            _ => None,
        });
        series.extend(limit.map(|limit| PlotSeries {
            name: String::new(),
            colour,
            mark: PlotMark::Vertical(limit),
        }));
    }
    let limits = series.iter().filter_map(|series| match series.mark {
        PlotMark::Vertical(limit) => Some(limit),
        _ => None,
    });
    let numbers: Vec<f64> = all().chain(limits).collect();
    let plot = Plot {
        title,
        x: PlotAxis::from_zero_or_log("ms", numbers.iter().copied()),
        y: PlotAxis {
            name: "share of those answered",
            from: 0.0,
            to: 1.0,
            steps: AxisScale::Linear,
        },
        series,
    };
    plot.svg()
}

/// Arrivals, requests in flight, and misses by the time they were due.
fn timeline(run: &RunReport) -> String {
    let bins = &run.timeline;
    let width = match &bins[..] {
        [first, second, ..] => second.from_s - first.from_s,
        _ => 1.0,
    };
    let line = |of: &dyn Fn(&crate::result::TimelineBin) -> u32| -> Vec<(f64, f64)> {
        bins.iter()
            .map(|bin| (bin.from_s, f64::from(of(bin))))
            .collect()
    };
    let most = bins.iter().map(|bin| f64::from(bin.due.max(bin.in_flight)));
    let end = bins.iter().map(|bin| bin.from_s + width);
    let plot = Plot {
        title: "Timeline",
        x: PlotAxis::from_zero("seconds", end),
        y: PlotAxis::from_zero("requests", most),
        series: vec![
            series("due", 0, PlotMark::Bars(line(&|bin| bin.due), width)),
            series(
                "of these missed",
                3,
                PlotMark::Bars(line(&|bin| bin.missed), width),
            ),
            series("in flight", 4, PlotMark::Line(line(&|bin| bin.in_flight))),
        ],
    };
    plot.svg()
}

/// Mean times of the stages up to the first token, as the server reported.
fn write_stages(out: &mut String, run: &RunReport) {
    let classes: Vec<_> = run
        .classes
        .iter()
        .filter(|(_, s)| !s.stages_ms.is_empty())
        .collect();
    let mean = |summary: &RunSummary, stage: &RequestStage| {
        let stats = summary.stages_ms.get(stage.name());
        stats.map_or(0.0, |stats| stats.mean)
    };
    let total = |summary: &RunSummary| STAGES.iter().map(|stage| mean(summary, stage)).sum::<f64>();
    let most = classes
        .iter()
        .map(|(_, summary)| total(summary))
        .fold(0.0, f64::max);
    if most <= 0.0 {
        return;
    }
    let height = BAR * (classes.len() as f64 + 1.0);
    append(
        out,
        format_args!(
            "<h2>Stages, on the mean: until the first token, and of the hand-off after it</h2><div class=\"stages\"><svg viewBox=\"0 0 940 {height}\" role=\"img\" \
             aria-label=\"stages\"><text x=\"4\" y=\"14\" class=\"legend\">"
        ),
    );
    for (colour, stage) in STAGES.iter().enumerate() {
        append(
            out,
            format_args!("<tspan fill=\"var(--c{colour})\"> ■ {stage}</tspan>"),
        );
    }
    out.push_str("</text>");
    for (row, (class, summary)) in classes.iter().enumerate() {
        let (top, mut from) = (BAR * (row as f64 + 1.0), 110.0);
        append(
            out,
            format_args!(
                "<text x=\"4\" y=\"{:.1}\" class=\"label\">{}</text>",
                top + 13.0,
                escape_html(class)
            ),
        );
        for (colour, stage) in STAGES.iter().enumerate() {
            let millis = mean(summary, stage);
            let width = millis / most * 740.0;
            append(
                out,
                format_args!(
                    "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"var(--c{colour})\">\
                     <title>{stage}: {} ms</title></rect>",
                    format_number(millis)
                ),
            );
            from += width;
        }
        append(
            out,
            format_args!(
                "<text x=\"{:.1}\" y=\"{:.1}\">{} ms</text>",
                from + 5.0,
                top + 13.0,
                format_number(total(summary))
            ),
        );
    }
    out.push_str("</svg></div>");
}

fn write_table(out: &mut String, run: &RunReport) {
    out.push_str("<h2>Numbers</h2><div class=\"wide\">");
    let all = [("all".to_owned(), &run.all)];
    let classes = run
        .classes
        .iter()
        .map(|(name, summary)| (name.clone(), summary));
    let several = classes.filter(|_| run.classes.len() > 1);
    for (name, summary) in all.into_iter().chain(several) {
        let missed = summary
            .missed
            .iter()
            .map(|(miss, count)| format!("{count} {miss:?}").to_lowercase());
        let missed: Vec<String> = missed.collect();
        append(
            out,
            format_args!(
                "<p><b>{}</b>: {} requests, {} answered, {} within targets; missed: {}; undecided: {}</p><table><tr><th></th><th>n</th>\
                 {}</tr>",
                escape_html(&name),
                summary.offered,
                summary.done,
                summary.met,
                if missed.is_empty() {
                    "none".to_owned()
                } else {
                    missed.join(", ")
                },
                summary.undecided,
                SampleStats::COLUMNS
                    .map(|name| format!("<th>{name}</th>"))
                    .concat()
            ),
        );
        let stages = RequestStage::ALL.iter().filter_map(|stage| {
            let stats = summary.stages_ms.get(stage.name())?;
            Some((format!("{stage}, ms"), stats))
        });
        let rows = [
            ("time to first token, ms", &summary.ttft_ms),
            ("time per output token, ms", &summary.tpot_ms),
            ("gaps between chunks, ms", &summary.gap_ms),
            ("end to end, ms", &summary.e2e_ms),
            ("prompt, tokens", &summary.input_tokens),
            ("prompt from cache, tokens", &summary.cached_tokens),
            ("answer, tokens", &summary.output_tokens),
            ("Retry-After, s", &summary.retry_after_s),
            ("generator's lateness, ms", &summary.lateness_ms),
        ];
        let rows = rows.map(|(name, stats)| (name.to_owned(), stats));
        for (name, stats) in rows
            .into_iter()
            .chain(stages)
            .filter(|(_, stats)| stats.count > 0)
        {
            write_row(out, &cells(name, stats));
        }
        out.push_str("</table>");
    }
    out.push_str("</div>");
}

fn cells(name: String, stats: &SampleStats) -> Vec<String> {
    let columns = stats.columns().map(|column| match stats.count {
        0 => "none".to_owned(),
        _ => format_number(column),
    });
    [name, stats.count.to_string()]
        .into_iter()
        .chain(columns)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_dates_match_date_u() {
        // date -u -d @1700158546; date -u -d @1709251199
        assert_eq!(date(1_700_158_546), "2023-11-16 18:15 UTC");
        assert_eq!(date(1_709_251_199), "2024-02-29 23:59 UTC");
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
    }
}
