//! The drawing of `cleave top`.
//!
//! Owns: the layout, and the order of the workers. Never: queries or counts. Invariant: colour is
//! never the only sign of a state.

use super::fleet::FleetView;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Row, Table};
use serde_json::{Map, Value};
use std::cmp::Ordering;

#[derive(Debug)]
pub(super) struct TopView {
    url: String,
    pub(super) sort: usize,
    pub(super) reversed: bool,
    pub(super) filter: String,
    /// Whether keys go into the filter.
    pub(super) typing: bool,
    pub(super) paused: bool,
    /// Index of the first visible worker.
    pub(super) first: usize,
    /// Whether everything is drawn at once, without keys.
    pub(super) whole: bool,
}

impl TopView {
    pub(super) fn of(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            sort: 0,
            reversed: false,
            filter: String::new(),
            typing: false,
            paused: false,
            first: 0,
            whole: false,
        }
    }
}

/// Columns to sort the workers by: the name ascending, numbers descending.
pub(super) const SORTS: [&str; 6] = [
    "name",
    "state",
    "running",
    "queue_tokens",
    "blocks_held",
    "tokens_per_second",
];

const EVENTS_SHOWN: usize = 6;

/// Lines of a drawing with all workers.
pub(super) fn height_whole(fleet: &FleetView) -> u16 {
    let rows = fleet.workers_count() + 2;
    let rows = u16::try_from(rows).unwrap_or(u16::MAX / 2);
    rows + above(fleet) + below(fleet)
}

fn above(fleet: &FleetView) -> u16 {
    let classes = u16::try_from(fleet.list("/classes").len()).unwrap_or(8);
    3 + 2 + (classes.min(8) + 2) + scaling_height(fleet)
}

fn below(fleet: &FleetView) -> u16 {
    let events = fleet.list("/events").len().min(EVENTS_SHOWN);
    u16::try_from(events).unwrap_or(0) + 2
}

fn scaling_height(fleet: &FleetView) -> u16 {
    u16::from(!fleet.at("/scaling").is_null())
}

pub(super) fn draw(frame: &mut Frame, fleet: &FleetView, view: &mut TopView) {
    let classes = fleet.list("/classes").len().min(8);
    let [head, stages_area, class_area, scaling, table, events] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(2),
        Constraint::Length(u16::try_from(classes).unwrap_or(8) + 2),
        Constraint::Length(scaling_height(fleet)),
        Constraint::Min(3),
        Constraint::Length(below(fleet)),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(summary_lines(fleet, view)), head);
    frame.render_widget(Paragraph::new(stages(fleet)), stages_area);
    frame.render_widget(class_table(fleet), class_area);
    frame.render_widget(Paragraph::new(scaling_line(fleet)), scaling);
    worker_table(frame, table, fleet, view);
    frame.render_widget(event_table(fleet), events);
}

fn summary_lines(fleet: &FleetView, view: &TopView) -> Vec<Line<'static>> {
    let sum = |field: &str| -> f64 {
        let each = fleet.list("/classes").iter();
        each.filter_map(|class| class.pointer(field)?.as_f64())
            .sum()
    };
    let (good, late, failed) = (
        sum("/minute/good"),
        sum("/minute/late"),
        sum("/minute/failed"),
    );
    let judged_count = good + late + failed;
    let attainment = if judged_count > 0.0 {
        format!("{:.1} %", good / judged_count * 100.0)
    } else {
        "–".to_owned()
    };
    let devices = fleet.number("/devices").max(1.0);
    // A worker has no rate before its second sample.
    let rates: Vec<f64> = fleet
        .workers()
        .filter_map(|row| row.get("tokens_per_second")?.as_f64())
        .collect();
    let tokens = match rates.as_slice() {
        [] => "–".to_owned(),
        rates => format!("{:.0}", rates.iter().sum::<f64>()),
    };
    let seconds = fleet.list("/history");
    let recent = &seconds[seconds.len().saturating_sub(5)..];
    let bytes: f64 = recent.iter().filter_map(|second| second[4].as_f64()).sum();
    let bytes = bytes / recent.len().max(1) as f64;
    let goodput = sum("/goodput");
    let title = Line::from(vec![
        Span::styled("cleave ", Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!(
            "{}   up {}   {} workers",
            view.url,
            span(fleet.number("/uptime_seconds")),
            fleet.workers_count()
        )),
        Span::styled(
            if view.paused { "   PAUSED" } else { "" },
            Style::new().fg(Color::Yellow),
        ),
    ]);
    vec![
        title,
        Line::from(format!(
            "goodput {goodput:.2}/s ({:.2} per device)   kept {attainment}   {tokens} tokens/s   hand-off {}",
            goodput / devices,
            rate(bytes)
        )),
    ]
}

fn stages(fleet: &FleetView) -> Line<'static> {
    let mut spans = Vec::new();
    let stages = [
        ("queued", Color::Gray),
        ("reserved", Color::Gray),
        ("prefill", Color::Yellow),
        ("transfer", Color::Magenta),
        ("decode", Color::Cyan),
    ];
    for (at, (stage, colour)) in stages.into_iter().enumerate() {
        let count = fleet.number(&format!("/flights/{stage}"));
        let arrow = if at == 0 { "" } else { "  →  " };
        spans.push(Span::raw(arrow));
        spans.push(Span::styled(
            format!("{stage} {count}"),
            Style::new().fg(colour),
        ));
    }
    Line::from(spans)
}

fn header_row(names: &[&'static str]) -> Row<'static> {
    Row::new(names.to_vec()).style(Style::new().add_modifier(Modifier::BOLD | Modifier::DIM))
}

fn class_table(fleet: &FleetView) -> Table<'static> {
    let rows = fleet.list("/classes").iter().take(8).map(|class| {
        let of = |field: &str| class.pointer(field).and_then(Value::as_f64);
        let count = |field: &str| of(field).unwrap_or_default();
        let (good, late, failed) = (
            count("/minute/good"),
            count("/minute/late"),
            count("/minute/failed"),
        );
        let judged_count = good + late + failed;
        let attainment = (judged_count > 0.0).then(|| good / judged_count);
        let goal = of("/goal");
        let falls = attainment
            .zip(goal)
            .is_some_and(|(attainment, goal)| attainment < goal);
        let attainment = attainment.map_or("–".to_owned(), |attainment| {
            format!("{:.1} %", attainment * 100.0)
        });
        let goal = goal.map_or(String::new(), |goal| format!(" ≥ {:.0}", goal * 100.0));
        let mark = if falls { " below" } else { "" };
        let times = |aim: &str| {
            let p = |q: &str| of(&format!("/{aim}/{q}_ms")).map_or("–".to_owned(), millis);
            let target = of(&format!("/{aim}_target_ms"));
            let target = target.map_or(String::new(), |t| format!(" of {}", millis(t)));
            format!("{} / {}{target}", p("p50"), p("p99"))
        };
        let style = if falls {
            Style::new().fg(Color::Red)
        } else {
            Style::new()
        };
        Row::new([
            class["name"].as_str().unwrap_or_default().to_owned(),
            format!("{attainment}{goal}{mark}"),
            format!("{:.2}/s", count("/goodput")),
            format!("{good} {late} {} {failed}", count("/minute/refused")),
            times("ttft"),
            times("tpot"),
        ])
        .style(style)
    });
    let widths = [
        Constraint::Length(16),
        Constraint::Length(19),
        Constraint::Length(9),
        Constraint::Length(24),
        Constraint::Length(26),
        Constraint::Min(20),
    ];
    Table::new(rows, widths).header(header_row(&[
        "class",
        "kept",
        "goodput",
        "met late refused failed",
        "TTFT p50 / p99",
        "TPOT p50 / p99",
    ]))
}

fn scaling_line(fleet: &FleetView) -> Line<'static> {
    let mut text = "scaling".to_owned();
    for pool in fleet.list("/scaling/pools") {
        let name = pool["pool"].as_str().unwrap_or_default();
        let reason = pool["reason"].as_str().unwrap_or_default();
        text += &format!(
            "   {name}: {} there, wanted {} ({reason})",
            pool["workers"], pool["wanted"]
        );
    }
    Line::from(text)
}

fn worker_table(frame: &mut Frame, area: Rect, fleet: &FleetView, view: &mut TopView) {
    let mut rows: Vec<&Map<String, Value>> = fleet
        .workers()
        .filter(|row| text_of(row, "name").contains(&view.filter))
        .collect();
    rows.sort_by(|a, b| order(a, b, SORTS[view.sort]));
    if view.reversed {
        rows.reverse();
    }
    let rows_max = usize::from(area.height.saturating_sub(2));
    view.first = view.first.min(rows.len().saturating_sub(rows_max));
    let shown = rows.iter().skip(view.first).take(rows_max);
    let shown = shown.map(|row| worker_row(row));
    let widths = [
        Constraint::Min(18),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(6),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(6),
        Constraint::Length(10),
        Constraint::Length(9),
        Constraint::Length(20),
    ];
    let keys = match (view.whole, view.typing) {
        (true, _) => String::new(),
        (false, true) => format!(" filter: {}▏ ", view.filter),
        (false, false) => format!(
            " {} of {}   by {} (s, r)   filter {} (/)   q ends ",
            rows.len(),
            fleet.workers_count(),
            SORTS[view.sort],
            if view.filter.is_empty() {
                "–"
            } else {
                &view.filter
            },
        ),
    };
    let block = Block::new().borders(Borders::TOP).title(keys);
    let table = Table::new(shown, widths).block(block).header(header_row(&[
        "worker",
        "leg",
        "state",
        "batch",
        "waiting",
        "queue",
        "KV",
        "last step",
        "tokens/s",
        "device",
    ]));
    frame.render_widget(table, area);
}

fn worker_row(row: &Map<String, Value>) -> Row<'static> {
    let number = |name: &str| row.get(name).and_then(Value::as_f64);
    let whole = |name: &str| number(name).map_or("–".to_owned(), |value| format!("{value:.0}"));
    let (held, count) = (number("blocks_held"), number("blocks_count"));
    let kv = held.zip(count.filter(|count| *count > 0.0));
    let kv = kv.map_or("–".to_owned(), |(held, count)| {
        format!("{:.0} %", held / count * 100.0)
    });
    let style = match text_of(row, "state") {
        "stuck" => Style::new().fg(Color::Red),
        "draining" => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    let sharing = number("sharing").filter(|others| *others > 0.0);
    let shared = sharing.map_or(String::new(), |others| format!(" (of {})", others + 1.0));
    Row::new([
        text_of(row, "name").to_owned(),
        text_of(row, "role").to_owned(),
        text_of(row, "state").to_owned(),
        whole("running"),
        whole("waiting"),
        whole("queue_tokens"),
        kv,
        number("step_ms").map_or("–".to_owned(), millis),
        whole("tokens_per_second"),
        text_of(row, "device").to_owned() + &shared,
    ])
    .style(style)
}

fn event_table(fleet: &FleetView) -> Table<'static> {
    let rows = fleet
        .list("/events")
        .iter()
        .take(EVENTS_SHOWN)
        .map(|event| {
            let text = |field: &str| event[field].as_str().unwrap_or_default().replace('_', " ");
            let count = event["count"].as_u64().unwrap_or(1);
            let times = if count > 1 {
                format!("×{count}")
            } else {
                String::new()
            };
            let seconds = event["at_ms"].as_u64().unwrap_or_default() / 1000 % 86_400;
            let when = format!(
                "{:02}:{:02}:{:02} UTC",
                seconds / 3600,
                seconds / 60 % 60,
                seconds % 60
            );
            let about = event["about"].as_str().unwrap_or_default().to_owned();
            Row::new([when, text("kind"), text("reason"), about, times])
        });
    let widths = [
        Constraint::Length(13),
        Constraint::Length(12),
        Constraint::Length(30),
        Constraint::Min(20),
        Constraint::Length(8),
    ];
    let block = Block::new()
        .borders(Borders::TOP)
        .title(" refusals, failures, changes ");
    Table::new(rows, widths).block(block)
}

fn text_of<'a>(row: &'a Map<String, Value>, name: &str) -> &'a str {
    row.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn order(a: &Map<String, Value>, b: &Map<String, Value>, by: &str) -> Ordering {
    let number = |row: &Map<String, Value>| row.get(by).and_then(Value::as_f64);
    let first = match by {
        "name" => Ordering::Equal,
        // "stuck" and "draining" come before "ready", which is the reverse of the alphabet.
        "state" => text_of(b, by).cmp(text_of(a, by)),
        _ => number(b).partial_cmp(&number(a)).unwrap_or(Ordering::Equal),
    };
    first.then_with(|| text_of(a, "name").cmp(text_of(b, "name")))
}

fn millis(ms: f64) -> String {
    match ms {
        ms if ms >= 10_000.0 => format!("{:.0} s", ms / 1e3),
        ms if ms >= 1_000.0 => format!("{:.2} s", ms / 1e3),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms => format!("{ms:.1} ms"),
    }
}

fn rate(bytes: f64) -> String {
    let mut rate = bytes;
    for unit in ["B/s", "kB/s", "MB/s"] {
        if rate < 1_000.0 {
            return format!("{rate:.1} {unit}");
        }
        rate /= 1_000.0;
    }
    format!("{rate:.1} GB/s")
}

fn span(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7_200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}
