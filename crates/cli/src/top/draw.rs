//! The drawing of `cleave top`.
//!
//! Owns: the layout, and the order of the workers. Never: queries or counts. Invariant: colour is
//! never the only sign of a state.

use super::columns::{Column, shortened, table};
use super::fleet::{FleetView, natural_order};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Clear, Paragraph, Table};
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
    /// Whether the keys are explained in front of everything else.
    pub(super) help: bool,
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
            help: false,
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

/// The text before the first snapshot.
const WAITING: &str = "connected: waiting for the server's state";

const EVENTS_SHOWN: usize = 6;

/// Lines of a terminal that has room for all events; a smaller one shows fewer.
const TALL: u16 = 30;
const EVENTS_SHOWN_LOW: usize = 3;

/// Longer names of workers, classes and devices are shortened.
const NAME_CHARS_MAX: usize = 28;

const HELP: &str = "q, Esc   quit
↑ ↓ PgUp PgDn Home End   scroll through the workers
s   sort by the next column        r   reverse the order
/   filter: name, role, state, device or model (Enter keeps it, Esc drops it)
p   pause                          ?   this help";

/// Lines of a drawing with all workers.
pub(super) fn height_whole(fleet: &FleetView) -> u16 {
    let rows = fleet.workers().count() + 2;
    let rows = u16::try_from(rows).unwrap_or(u16::MAX / 2);
    rows + above(fleet) + below(fleet, EVENTS_SHOWN)
}

fn above(fleet: &FleetView) -> u16 {
    let classes = u16::try_from(fleet.list("/classes").len()).unwrap_or(8);
    3 + 2 + (classes.min(8) + 2) + scaling_height(fleet)
}

fn below(fleet: &FleetView, events_max: usize) -> u16 {
    let events = fleet.list("/events").len().min(events_max);
    u16::try_from(events).unwrap_or(0) + 2
}

fn scaling_height(fleet: &FleetView) -> u16 {
    u16::from(!fleet.at("/scaling").is_null())
}

pub(super) fn draw(frame: &mut Frame, fleet: &FleetView, view: &mut TopView) {
    if fleet.is_known() {
        draw_fleet(frame, fleet, view);
    } else {
        // Zeros would be taken for the state of the fleet.
        let waits = Line::from(vec![
            program_name(),
            Span::raw(format!("{}   {WAITING}", view.url)),
        ]);
        frame.render_widget(Paragraph::new(waits), frame.area());
    }
    if view.help {
        draw_help(frame);
    }
}

fn draw_fleet(frame: &mut Frame, fleet: &FleetView, view: &mut TopView) {
    let classes = fleet.list("/classes").len().min(8);
    let tall = view.whole || frame.area().height >= TALL;
    let events_max = if tall { EVENTS_SHOWN } else { EVENTS_SHOWN_LOW };
    let [head, stages_area, class_area, scaling, workers, events] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(2),
        Constraint::Length(u16::try_from(classes).unwrap_or(8) + 2),
        Constraint::Length(scaling_height(fleet)),
        Constraint::Min(3),
        Constraint::Length(below(fleet, events_max)),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(summary_lines(fleet, view)), head);
    frame.render_widget(Paragraph::new(stages(fleet)), stages_area);
    frame.render_widget(class_table(fleet, class_area.width), class_area);
    frame.render_widget(Paragraph::new(scaling_line(fleet)), scaling);
    worker_table(frame, workers, fleet, view);
    frame.render_widget(event_table(fleet, events_max, events.width), events);
}

fn draw_help(frame: &mut Frame) {
    let area = frame.area();
    let lines = u16::try_from(HELP.lines().count()).unwrap_or(u16::MAX) + 2;
    let [_, middle, _] = Layout::vertical([
        Constraint::Fill(1),
        Constraint::Length(lines.min(area.height)),
        Constraint::Fill(1),
    ])
    .areas(area);
    let block = Block::new().borders(Borders::ALL).title(" keys ");
    frame.render_widget(Clear, middle);
    frame.render_widget(Paragraph::new(HELP).block(block), middle);
}

fn summary_lines(fleet: &FleetView, view: &TopView) -> Vec<Line<'static>> {
    let sum = |field: &str| -> f64 {
        let each = fleet.list("/classes").iter();
        total(each.filter_map(|class| class.pointer(field)?.as_f64()))
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
        rates => format!("{:.0}", total(rates.iter().copied())),
    };
    let seconds = fleet.list("/history");
    let recent = &seconds[seconds.len().saturating_sub(5)..];
    let bytes = total(recent.iter().filter_map(|second| second[4].as_f64()));
    let bytes = bytes / recent.len().max(1) as f64;
    let goodput = sum("/goodput");
    let title = Line::from(vec![
        program_name(),
        Span::raw(format!(
            "{}   up {}   {}",
            view.url,
            span(fleet.number("/uptime_seconds")),
            match fleet.connected_count() {
                1 => "1 worker".to_owned(),
                count => format!("{count} workers"),
            }
        )),
        Span::styled(trouble(fleet), Style::new().fg(Color::Red)),
        Span::styled(
            if view.paused { "   PAUSED" } else { "" },
            Style::new().fg(Color::Yellow),
        ),
    ]);
    vec![
        title,
        Line::from(format!(
            "goodput {goodput:.2}/s ({:.2} per device)   SLO {attainment}   {tokens} tokens/s   KV {}",
            goodput / devices,
            rate(bytes)
        )),
    ]
}

fn program_name() -> Span<'static> {
    Span::styled("cleave ", Style::new().add_modifier(Modifier::BOLD))
}

/// The sum, which is 0 for no numbers: that of the standard library is then -0.
fn total(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |sum, number| sum + number)
}

/// Workers that need an operator, in words.
fn trouble(fleet: &FleetView) -> String {
    let counted = ["stuck", "lost"].map(|state| {
        let count = fleet
            .workers()
            .filter(|row| text_of(row, "state") == state)
            .count();
        if count > 0 {
            format!("   {count} {state}")
        } else {
            String::new()
        }
    });
    counted.concat()
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

fn class_table(fleet: &FleetView, width: u16) -> Table<'static> {
    let classes: Vec<&Value> = fleet.list("/classes").iter().take(8).collect();
    let attainments: Vec<Attainment> = classes.iter().map(|class| Attainment::of(class)).collect();
    let cells = |cell: &dyn Fn(&Value) -> String| classes.iter().map(|class| cell(class)).collect();
    let count = |class: &Value, field: &str| number_at(class, field).unwrap_or_default();
    let times = |class: &Value, aim: &str| {
        let quantile = |name: &str| {
            number_at(class, &format!("/{aim}/{name}_ms")).map_or("–".to_owned(), millis)
        };
        let target = number_at(class, &format!("/{aim}_target_ms"));
        let target = target.map_or(String::new(), |target| format!(" of {}", millis(target)));
        format!("{} / {}{target}", quantile("p50"), quantile("p99"))
    };
    let column = |title, rank, cells| Column { title, cells, rank };
    let name =
        |class: &Value| shortened(class["name"].as_str().unwrap_or_default(), NAME_CHARS_MAX);
    let outcomes = |class: &Value| {
        let of = |verdict: &str| count(class, &format!("/minute/{verdict}"));
        let (good, late, refused, failed) = (of("good"), of("late"), of("refused"), of("failed"));
        format!("{good} {late} {refused} {failed}")
    };
    let columns = vec![
        column("class", 0, cells(&name)),
        column("SLO", 0, attainments.iter().map(Attainment::text).collect()),
        column(
            "goodput",
            1,
            cells(&|class| format!("{:.2}/s", count(class, "/goodput"))),
        ),
        column("met late refused failed", 4, cells(&outcomes)),
        column("TTFT p50 / p99", 2, cells(&|class| times(class, "ttft"))),
        column("TPOT p50 / p99", 3, cells(&|class| times(class, "tpot"))),
    ];
    let style = |attainment: &Attainment| {
        if attainment.is_below() {
            Style::new().fg(Color::Red)
        } else {
            Style::new()
        }
    };
    let styles: Vec<Style> = attainments.iter().map(style).collect();
    table(columns, &styles, width)
}

/// The share of a class's requests of the last minute that met their targets.
struct Attainment {
    share: Option<f64>,
    goal: Option<f64>,
}

impl Attainment {
    fn of(class: &Value) -> Self {
        let count = |field: &str| number_at(class, field).unwrap_or_default();
        let good = count("/minute/good");
        let judged_count = good + count("/minute/late") + count("/minute/failed");
        Self {
            share: (judged_count > 0.0).then(|| good / judged_count),
            goal: number_at(class, "/goal"),
        }
    }

    fn is_below(&self) -> bool {
        let both = self.share.zip(self.goal);
        both.is_some_and(|(share, goal)| share < goal)
    }

    fn text(&self) -> String {
        let share = self
            .share
            .map_or("–".to_owned(), |share| format!("{:.1} %", share * 100.0));
        let goal = self
            .goal
            .map_or(String::new(), |goal| format!(" ≥ {:.0}", goal * 100.0));
        let mark = if self.is_below() { " below" } else { "" };
        format!("{share}{goal}{mark}")
    }
}

fn number_at(value: &Value, field: &str) -> Option<f64> {
    value.pointer(field).and_then(Value::as_f64)
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
    let is_shown = |row: &&Map<String, Value>| {
        let fields = ["name", "role", "state", "device", "model"];
        let filter = view.filter.to_lowercase();
        fields
            .iter()
            .any(|field| text_of(row, field).to_lowercase().contains(&filter))
    };
    let mut rows: Vec<&Map<String, Value>> = fleet.workers().filter(is_shown).collect();
    rows.sort_by(|a, b| order(a, b, SORTS[view.sort]));
    if view.reversed {
        rows.reverse();
    }
    let rows_max = usize::from(area.height.saturating_sub(2));
    view.first = view.first.min(rows.len().saturating_sub(rows_max));
    let shown: Vec<_> = rows
        .iter()
        .skip(view.first)
        .take(rows_max)
        .copied()
        .collect();
    let keys = match (view.whole, view.typing) {
        (true, _) => String::new(),
        (false, true) => format!(" filter: {}▏ ", view.filter),
        (false, false) => format!(
            " {} of {}   by {} (s, r)   filter {} (/)   ? help   q quit ",
            rows.len(),
            fleet.workers().count(),
            SORTS[view.sort],
            if view.filter.is_empty() {
                "–"
            } else {
                &view.filter
            },
        ),
    };
    let block = Block::new().borders(Borders::TOP).title(keys);
    frame.render_widget(worker_columns(&shown, area.width).block(block), area);
}

fn worker_columns(rows: &[&Map<String, Value>], width: u16) -> Table<'static> {
    let number = |row: &Map<String, Value>, name: &str| row.get(name).and_then(Value::as_f64);
    let column = |title, rank, cell: &dyn Fn(&Map<String, Value>) -> String| Column {
        title,
        cells: rows.iter().map(|row| cell(row)).collect(),
        rank,
    };
    let text = |title, rank, name: &'static str| {
        column(title, rank, &|row| {
            shortened(text_of(row, name), NAME_CHARS_MAX)
        })
    };
    let whole = |title, rank, name: &'static str| {
        column(title, rank, &|row| {
            number(row, name).map_or("–".to_owned(), |value| format!("{value:.0}"))
        })
    };
    let kv = |row: &Map<String, Value>| {
        let count = number(row, "blocks_count").filter(|count| *count > 0.0);
        let part = number(row, "blocks_held").zip(count);
        part.map_or("–".to_owned(), |(held, count)| {
            format!("{:.0} %", held / count * 100.0)
        })
    };
    let step = |row: &Map<String, Value>| number(row, "step_ms").map_or("–".to_owned(), millis);
    let device = |row: &Map<String, Value>| {
        let sharing = number(row, "sharing").filter(|others| *others > 0.0);
        let shared = sharing.map_or(String::new(), |others| format!(" (of {})", others + 1.0));
        shortened(text_of(row, "device"), NAME_CHARS_MAX) + &shared
    };
    let columns = vec![
        text("worker", 0, "name"),
        text("role", 1, "role"),
        text("state", 0, "state"),
        whole("batch", 2, "running"),
        whole("waiting", 5, "waiting"),
        whole("queue", 4, "queue_tokens"),
        column("KV", 3, &kv),
        column("last step", 6, &step),
        whole("tokens/s", 7, "tokens_per_second"),
        column("device", 8, &device),
    ];
    let style = |row: &&Map<String, Value>| match text_of(row, "state") {
        "stuck" | "lost" => Style::new().fg(Color::Red),
        "draining" => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    };
    let styles: Vec<Style> = rows.iter().map(style).collect();
    table(columns, &styles, width)
}

fn event_table(fleet: &FleetView, events_max: usize, width: u16) -> Table<'static> {
    let events: Vec<&Value> = fleet.list("/events").iter().take(events_max).collect();
    let column = |rank, cell: &dyn Fn(&Value) -> String| Column {
        title: "",
        cells: events.iter().map(|event| cell(event)).collect(),
        rank,
    };
    let text = |event: &Value, field: &str| {
        let text = event[field].as_str().unwrap_or_default();
        shortened(&text.replace('_', " "), NAME_CHARS_MAX)
    };
    let when = |event: &Value| {
        let seconds = event["at_ms"].as_u64().unwrap_or_default() / 1000 % 86_400;
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        format!("{hours:02}:{minutes:02}:{:02} UTC", seconds % 60)
    };
    let count = |event: &Value| match event["count"].as_u64() {
        Some(count) if count > 1 => format!("×{count}"),
        _ => String::new(),
    };
    let about =
        |event: &Value| shortened(event["about"].as_str().unwrap_or_default(), NAME_CHARS_MAX);
    let columns = vec![
        column(1, &when),
        column(0, &|event| text(event, "kind")),
        column(0, &|event| text(event, "reason")),
        column(0, &about),
        column(2, &count),
    ];
    let styles = vec![Style::new(); events.len()];
    let block = Block::new().borders(Borders::TOP).title(" events ");
    table(columns, &styles, width).block(block)
}

fn text_of<'a>(row: &'a Map<String, Value>, name: &str) -> &'a str {
    row.get(name).and_then(Value::as_str).unwrap_or_default()
}

fn order(a: &Map<String, Value>, b: &Map<String, Value>, by: &str) -> Ordering {
    let number = |row: &Map<String, Value>| row.get(by).and_then(Value::as_f64);
    let first = match by {
        "name" => Ordering::Equal,
        "state" => state_rank(text_of(a, by)).cmp(&state_rank(text_of(b, by))),
        _ => number(b).partial_cmp(&number(a)).unwrap_or(Ordering::Equal),
    };
    first.then_with(|| natural_order(text_of(a, "name"), text_of(b, "name")))
}

/// States that need an operator come first.
fn state_rank(state: &str) -> u8 {
    match state {
        "lost" => 0,
        "stuck" => 1,
        "draining" => 2,
        _ => 3,
    }
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
