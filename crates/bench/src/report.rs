//! `report.html`: one page that needs nothing else, in light and dark.
//!
//! Owns: what is shown of a report, and in which order. Never: computes what `result.json` has not.
//! Invariant: the page loads nothing, and text from outside stands in it only as text.

use crate::plot::{Axis, Mark, Plot, Series, Steps, escape, number, put};
use crate::result::{Kind, Report, RunReport, Try};
use crate::summary::{Curves, Stats, Summary};
use cleave_domain::Stage;

const STYLE: &str = include_str!("report.css");
/// Stages that are drawn: those until the first token, and those of a hand-off after it.
const STAGES: [Stage; 7] = [
    Stage::RouterQueue,
    Stage::Retry,
    Stage::PrefillWait,
    Stage::Prefill,
    Stage::Transfer,
    Stage::DecodeWait,
    Stage::FirstDecode,
];
/// Height of a bar of stages, with the space below it.
const BAR: f64 = 26.0;

/// The page.
pub(crate) fn html(report: &Report) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    put(
        &mut out,
        format_args!(
            "<meta name=\"viewport\" content=\"width=device-width\"><title>cleave bench</title><style>{STYLE}</style></head><body>"
        ),
    );
    head(&mut out, report);
    let shown = shown(report);
    if let Some((_, run)) = shown {
        tiles(&mut out, report, run);
    }
    rates(&mut out, report);
    if let Some((index, run)) = shown {
        details(&mut out, (index, run), report.runs.len());
    }
    let told = serde_json::to_string_pretty(&report.configuration).unwrap_or_default();
    put(
        &mut out,
        format_args!(
            "<h2>Configuration</h2><pre>{}</pre></body></html>\n",
            // Line breaks stay.
            told.lines().map(escape).collect::<Vec<_>>().join("\n")
        ),
    );
    out
}

/// The run that is looked at closely: the last one at the highest rate that kept the goal, else the
/// last one.
fn shown(report: &Report) -> Option<(usize, &RunReport)> {
    let best = report.goodput.as_ref().and_then(|found| found.rate_max);
    let of_best = report.tries.iter().find(|tried| Some(tried.rate) == best);
    let index = match of_best.and_then(|tried| tried.runs.last()) {
        Some(index) => *index,
        None => report.runs.len().checked_sub(1)?,
    };
    report.runs.get(index).map(|run| (index, run))
}

fn head(out: &mut String, report: &Report) {
    let server = &report.server;
    let what = match report.kind {
        Kind::Run => "A run",
        Kind::Goodput => "Goodput",
    };
    let model = escape(server.model.as_deref().unwrap_or("an unnamed model"));
    let url = report.configuration["url"].as_str().unwrap_or_default();
    let software = server
        .software
        .as_deref()
        .map_or(String::new(), |software| {
            format!(", software {}", escape(software))
        });
    put(
        out,
        format_args!(
            "<h1>{what}: {model}</h1><p class=\"soft\">{}{software} · prompts: {} · load from {} cores, {} {} · \
             {:.0} s in all · cleave {} · {}</p>",
            escape(url),
            escape(&server.prompts),
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
        put(out, format_args!("<p class=\"note\">{}</p>", escape(note)));
    }
}

/// `2026-11-20 18:50 UTC` of seconds since 1970 (H. Hinnant, "chrono-compatible low-level date
/// algorithms").
fn date(unix_s: u64) -> String {
    let (days, second) = (unix_s / 86_400 + 719_468, unix_s % 86_400);
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

fn tiles(out: &mut String, report: &Report, run: &RunReport) {
    let percent = |share: f64| format!("{:.1} %", 100.0 * share);
    let all = &run.all;
    let mut tiles = match &report.goodput {
        Some(found) => vec![
            ("goodput, requests/s", number(found.goodput_rps)),
            ("per device", number(found.goodput_rps_per_device)),
            (
                "highest rate that kept the goal",
                found.rate_max.map_or("none".to_owned(), number),
            ),
            ("goal", percent(found.goal)),
        ],
        None => vec![
            ("goodput, requests/s", number(all.goodput_rps)),
            ("per device", number(all.goodput_rps_per_device)),
            ("offered, requests/s", number(all.offered_rps)),
        ],
    };
    tiles.extend([
        ("attainment", percent(all.attainment)),
        ("TTFT p99, ms", number(all.ttft_ms.p99)),
        ("TPOT p99, ms", number(all.tpot_ms.p99)),
        ("output tokens/s", number(all.output_tokens_per_second)),
    ]);
    out.push_str("<div class=\"tiles\">");
    for (name, value) in tiles {
        put(
            out,
            format_args!("<div class=\"tile\"><b>{value}</b><span>{name}</span></div>"),
        );
    }
    out.push_str("</div>");
}

/// Attainment and goodput against the rate.
fn rates(out: &mut String, report: &Report) {
    let Some(found) = report.goodput.as_ref().filter(|_| !report.tries.is_empty()) else {
        return;
    };
    let mut tries: Vec<&Try> = report.tries.iter().collect();
    tries.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    let rate = || tries.iter().map(|tried| tried.rate);
    let line = |of: fn(&Try) -> f64| tries.iter().map(|tried| (tried.rate, of(tried))).collect();
    let points = tries.iter().map(|tried| {
        let interval = tried.attainment_interval;
        (tried.rate, tried.attainment, interval.low, interval.high)
    });
    let series = |name: &str, colour, mark| Series {
        name: name.to_owned(),
        colour,
        mark,
    };
    let attainment = Plot {
        title: "Attainment against rate",
        x: Axis::spread("offered requests per second", rate()),
        y: Axis {
            name: "share within targets",
            from: 0.0,
            to: 1.0,
            steps: Steps::Even,
        },
        series: vec![
            series("", 0, Mark::Line(line(|tried| tried.attainment))),
            series("attainment, 95 %", 0, Mark::Points(points.collect())),
            series("goal", 3, Mark::Across(found.goal)),
        ],
    };
    let goodput = Plot {
        title: "Goodput against rate",
        x: Axis::spread("offered requests per second", rate()),
        y: Axis::from_zero("requests per second", rate()),
        series: vec![
            series("offered", 1, Mark::Line(line(|tried| tried.rate))),
            series(
                "within targets",
                0,
                Mark::Line(line(|tried| tried.goodput_rps)),
            ),
        ],
    };
    put(
        out,
        format_args!(
            "<h2>Rates</h2><div class=\"plots\">{}{}</div>",
            attainment.svg(),
            goodput.svg()
        ),
    );
    rate_table(out, &tries);
}

fn rate_table(out: &mut String, tries: &[&Try]) {
    out.push_str(
        "<div class=\"wide\"><table><tr><th>rate/s</th><th>requests</th><th>attainment</th><th>95 % interval</th>\
         <th>verdict</th><th>goodput/s</th><th>TTFT p50</th><th>p99, ms</th><th>TPOT p50</th><th>p99, ms</th></tr>",
    );
    for tried in tries {
        let interval = tried.attainment_interval;
        let verdict = if tried.kept { "kept" } else { "broken" };
        let cells = [
            number(tried.rate),
            tried.decided.to_string(),
            format!("{:.1} %", 100.0 * tried.attainment),
            format!("{:.1}–{:.1} %", 100.0 * interval.low, 100.0 * interval.high),
            format!("{verdict}{}", open(tried)),
            number(tried.goodput_rps),
            number(tried.ttft_ms[0]),
            number(tried.ttft_ms[1]),
            number(tried.tpot_ms[0]),
            number(tried.tpot_ms[1]),
        ];
        row(out, &cells);
    }
    out.push_str("</table></div>");
}

fn open(tried: &Try) -> &'static str {
    match tried.verdict {
        crate::confidence::Verdict::Open => ", open",
        _ => "",
    }
}

fn row(out: &mut String, cells: &[String]) {
    out.push_str("<tr>");
    for cell in cells {
        put(out, format_args!("<td>{}</td>", escape(cell)));
    }
    out.push_str("</tr>");
}

/// One run closely.
fn details(out: &mut String, (index, run): (usize, &RunReport), count: usize) {
    let which = match count {
        1 => String::new(),
        _ => format!(" (run {index} of 0 to {})", count - 1),
    };
    put(
        out,
        format_args!(
            "<h2>Latencies at {} requests per second{which}</h2><div class=\"plots\">",
            number(run.rate)
        ),
    );
    type Of = fn(&Curves) -> &Vec<f64>;
    let curves: [(&str, &str, Of); 4] = [
        ("Time to first token", "ttft", |curves| &curves.ttft_ms),
        ("Time per output token", "tpot", |curves| &curves.tpot_ms),
        ("Gaps between chunks", "", |curves| &curves.gap_ms),
        ("End to end", "e2e", |curves| &curves.e2e_ms),
    ];
    for (title, target, of) in curves {
        out.push_str(&distribution(run, (title, target), of));
    }
    put(out, format_args!("{}</div>", timeline(run)));
    stages(out, run);
    table(out, run);
}

/// Share of requests at most as slow, a line for each class.
fn distribution(
    run: &RunReport,
    (title, target): (&str, &str),
    of: fn(&Curves) -> &Vec<f64>,
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
        series.push(Series {
            name: class.clone(),
            colour,
            mark: Mark::Line(points),
        });
        let limits = run.targets.get(class);
        let limit = limits.and_then(|limits| match target {
            "ttft" => limits.ttft,
            "tpot" => limits.tpot,
            "e2e" => limits.e2e,
            _ => None,
        });
        series.extend(limit.map(|limit| Series {
            name: String::new(),
            colour,
            mark: Mark::Upright(limit),
        }));
    }
    let limits = series.iter().filter_map(|series| match series.mark {
        Mark::Upright(limit) => Some(limit),
        _ => None,
    });
    let numbers: Vec<f64> = all().chain(limits).collect();
    let plot = Plot {
        title,
        x: Axis::spread("ms", numbers.iter().copied()),
        y: Axis {
            name: "share of those answered",
            from: 0.0,
            to: 1.0,
            steps: Steps::Even,
        },
        series,
    };
    plot.svg()
}

/// Arrivals, what is in flight, and misses where they were due.
fn timeline(run: &RunReport) -> String {
    let bins = &run.timeline;
    let width = match &bins[..] {
        [first, second, ..] => second.from_s - first.from_s,
        _ => 1.0,
    };
    let line = |of: &dyn Fn(&crate::result::Bin) -> u32| -> Vec<(f64, f64)> {
        bins.iter()
            .map(|bin| (bin.from_s, f64::from(of(bin))))
            .collect()
    };
    let most = bins.iter().map(|bin| f64::from(bin.due.max(bin.in_flight)));
    let end = bins.iter().map(|bin| bin.from_s + width);
    let series = |name: &str, colour, mark| Series {
        name: name.to_owned(),
        colour,
        mark,
    };
    let plot = Plot {
        title: "Timeline",
        x: Axis::from_zero("seconds", end),
        y: Axis::from_zero("requests", most),
        series: vec![
            series("due", 0, Mark::Bars(line(&|bin| bin.due), width)),
            series(
                "of these missed",
                3,
                Mark::Bars(line(&|bin| bin.missed), width),
            ),
            series("in flight", 4, Mark::Line(line(&|bin| bin.in_flight))),
        ],
    };
    plot.svg()
}

/// Where the time to the first token went, on the mean, as the server told.
fn stages(out: &mut String, run: &RunReport) {
    let told: Vec<_> = run
        .classes
        .iter()
        .filter(|(_, s)| !s.stages_ms.is_empty())
        .collect();
    let mean = |summary: &Summary, stage: &Stage| {
        let stats = summary.stages_ms.get(stage.name());
        stats.map_or(0.0, |stats| stats.mean)
    };
    let total = |summary: &Summary| STAGES.iter().map(|stage| mean(summary, stage)).sum::<f64>();
    let most = told
        .iter()
        .map(|(_, summary)| total(summary))
        .fold(0.0, f64::max);
    if most <= 0.0 {
        return;
    }
    let height = BAR * (told.len() as f64 + 1.0);
    put(
        out,
        format_args!(
            "<h2>Stages, on the mean: until the first token, and of the hand-off after it</h2><div class=\"stages\"><svg viewBox=\"0 0 940 {height}\" role=\"img\" \
             aria-label=\"stages\"><text x=\"4\" y=\"14\" class=\"legend\">"
        ),
    );
    for (colour, stage) in STAGES.iter().enumerate() {
        put(
            out,
            format_args!("<tspan fill=\"var(--c{colour})\"> ■ {stage}</tspan>"),
        );
    }
    out.push_str("</text>");
    for (place, (class, summary)) in told.iter().enumerate() {
        let (top, mut from) = (BAR * (place as f64 + 1.0), 110.0);
        put(
            out,
            format_args!(
                "<text x=\"4\" y=\"{:.1}\" class=\"label\">{}</text>",
                top + 13.0,
                escape(class)
            ),
        );
        for (colour, stage) in STAGES.iter().enumerate() {
            let millis = mean(summary, stage);
            let width = millis / most * 740.0;
            put(
                out,
                format_args!(
                    "<rect x=\"{from:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"18\" fill=\"var(--c{colour})\">\
                     <title>{stage}: {} ms</title></rect>",
                    number(millis)
                ),
            );
            from += width;
        }
        put(
            out,
            format_args!(
                "<text x=\"{:.1}\" y=\"{:.1}\">{} ms</text>",
                from + 5.0,
                top + 13.0,
                number(total(summary))
            ),
        );
    }
    out.push_str("</svg></div>");
}

fn table(out: &mut String, run: &RunReport) {
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
        put(
            out,
            format_args!(
                "<p><b>{}</b>: {} requests, {} answered, {} within targets; missed: {}; undecided: {}</p><table><tr><th></th><th>n</th>\
                 {}</tr>",
                escape(&name),
                summary.offered,
                summary.done,
                summary.met,
                if missed.is_empty() {
                    "none".to_owned()
                } else {
                    missed.join(", ")
                },
                summary.undecided,
                Stats::COLUMNS
                    .map(|name| format!("<th>{name}</th>"))
                    .concat()
            ),
        );
        let stages = Stage::ALL.iter().filter_map(|stage| {
            let stats = summary.stages_ms.get(stage.name())?;
            Some((format!("{stage}, ms"), stats))
        });
        let rows = [
            ("time to first token, ms", &summary.ttft_ms),
            ("time per output token, ms", &summary.tpot_ms),
            ("gaps between chunks, ms", &summary.gap_ms),
            ("end to end, ms", &summary.e2e_ms),
            ("prompt, tokens", &summary.input_tokens),
            ("of it cached, tokens", &summary.cached_tokens),
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
            row(out, &cells(name, stats));
        }
        out.push_str("</table>");
    }
    out.push_str("</div>");
}

fn cells(name: String, stats: &Stats) -> Vec<String> {
    let columns = stats.columns().map(number);
    [name, stats.count.to_string()]
        .into_iter()
        .chain(columns)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_that_of_date() {
        // date -u -d @1700158546; date -u -d @1709251199
        assert_eq!(date(1_700_158_546), "2023-11-16 18:15 UTC");
        assert_eq!(date(1_709_251_199), "2024-02-29 23:59 UTC");
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
    }
}
