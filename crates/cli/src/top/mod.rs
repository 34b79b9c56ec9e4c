//! `cleave top`: the data of `/ui` in a terminal.
//!
//! Owns: the choice between a live view, text and JSON, and the keys. Never: counts or concludes
//! anything: all data comes from the page's stream. Invariant: the terminal is restored, however
//! the command ends.

mod columns;
mod draw;
mod fleet;
mod stream;

use crate::args::TopArgs;
use crate::server_client::ServerClient;
use anyhow::{Context, bail};
use draw::{SORTS, TopView};
use fleet::FleetView;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::io::{IsTerminal, Write};
use stream::UiEvents;
use tokio::sync::mpsc;

/// Width of text where there is no terminal.
const TEXT_WIDTH: u16 = 120;

pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let key = args.key.key()?;
        let pages = ServerClient::connect(&args.url, args.cacert.as_deref(), key.as_deref())?;
        let events = UiEvents::open(&pages).await?;
        let shown = std::io::stdout().is_terminal();
        match (args.json, args.once || !shown) {
            (true, _) => print_json(events, args.once).await,
            (false, true) => print_once(events, &args.url).await,
            (false, false) => draw_until_quit(events, &args.url).await,
        }
    })
}

/// Prints one line of JSON for each event.
async fn print_json(mut events: UiEvents, once: bool) -> anyhow::Result<()> {
    let mut fleet = FleetView::default();
    loop {
        let (name, board) = events.next().await?;
        fleet.apply(&name, board)?;
        let mut out = std::io::stdout().lock();
        let line = fleet.json().to_string();
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() || once {
            return Ok(()); // Nobody reads any more, or nobody wants more.
        }
    }
}

/// Prints the second state as text; the first one has no rates yet.
async fn print_once(mut events: UiEvents, url: &str) -> anyhow::Result<()> {
    let mut fleet = FleetView::default();
    for _ in 0..2 {
        let (name, board) = events.next().await?;
        fleet.apply(&name, board)?;
    }
    let text = text(&fleet, url)?;
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

/// Draws the state as text, with room for everything.
fn text(fleet: &FleetView, url: &str) -> anyhow::Result<String> {
    let height = draw::height_whole(fleet);
    let mut terminal = Terminal::new(TestBackend::new(TEXT_WIDTH, height))?;
    let mut view = TopView::of(url);
    view.whole = true;
    terminal.draw(|frame| draw::draw(frame, fleet, &mut view))?;
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for row in buffer.content().chunks(usize::from(TEXT_WIDTH)) {
        let line: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    Ok(text)
}

async fn draw_until_quit(mut events: UiEvents, url: &str) -> anyhow::Result<()> {
    // This call also installs a panic hook that restores the terminal.
    let mut terminal = ratatui::init();
    let ended = follow(&mut terminal, &mut events, url).await;
    ratatui::restore();
    ended
}

async fn follow(
    terminal: &mut ratatui::DefaultTerminal,
    events: &mut UiEvents,
    url: &str,
) -> anyhow::Result<()> {
    let mut keys = keys();
    let mut fleet = FleetView::default();
    let mut view = TopView::of(url);
    loop {
        terminal.draw(|frame| draw::draw(frame, &fleet, &mut view))?;
        tokio::select! {
            event = events.next() => {
                let (name, board) = event?;
                if !view.paused {
                    fleet.apply(&name, board)?;
                }
            }
            key = keys.recv() => match key {
                Some(Event::Key(key)) if view.press(key) == KeyOutcome::Quit => return Ok(()),
                Some(_) => {}
                None => bail!("the terminal was closed"),
            },
        }
    }
}

/// Effect of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyOutcome {
    Quit,
    Continue,
}

impl TopView {
    fn press(&mut self, key: KeyEvent) -> KeyOutcome {
        if key.kind == KeyEventKind::Release {
            return KeyOutcome::Continue;
        }
        let interrupts =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if interrupts {
            return KeyOutcome::Quit;
        }
        if self.typing {
            self.type_key(key.code);
            return KeyOutcome::Continue;
        }
        if self.help {
            self.help = false;
            return KeyOutcome::Continue;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return KeyOutcome::Quit,
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Char('s') => self.sort = (self.sort + 1) % SORTS.len(),
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Down => self.first = self.first.saturating_add(1),
            KeyCode::Up => self.first = self.first.saturating_sub(1),
            KeyCode::PageDown => self.first = self.first.saturating_add(20),
            KeyCode::PageUp => self.first = self.first.saturating_sub(20),
            KeyCode::Home => self.first = 0,
            KeyCode::End => self.first = usize::MAX,
            _ => {}
        }
        KeyOutcome::Continue
    }

    fn type_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
    }
}

/// Reads keys on a thread, which ends with the process or the terminal.
fn keys() -> mpsc::UnboundedReceiver<Event> {
    let (send, keys) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if send.send(event).is_err() {
                return;
            }
        }
    });
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fleet() -> FleetView {
        let mut fleet = FleetView::default();
        let quantiles = json!({"count": 9, "p50_ms": 21.5, "p90_ms": 80.0, "p99_ms": 421.0});
        let row = |name: &str, role: &str, state: &str| {
            json!([
                name, role, state, "gpu-0", 1, 12, 3, 900, 55.0, 30, 40, 14.2, 8, 640.0, 77
            ])
        };
        let snapshot = json!({
            "columns": ["name", "role", "state", "device", "sharing", "running", "waiting", "queue_tokens",
                "backlog_ms", "blocks_held", "blocks_count", "step_ms", "heard_ms", "tokens_per_second", "placed"],
            "uptime_seconds": 3700,
            "workers": [row("prefill-0", "prefill", "ready"), row("decode-0", "decode", "stuck"), row("decode-1", "decode", "ready")],
            "gone": [], "workers_count": 3,
            "flights": {"queued": 4, "reserved": 1, "prefill": 2, "transfer": 3, "decode": 50, "moving": 1},
            "stages": [["prefill", quantiles], ["transfer", null]],
            "classes": [{
                "name": "interactive", "ttft_target_ms": 500.0, "tpot_target_ms": null, "goal": 0.95,
                "minute": {"good": 97, "late": 3, "refused": 5, "failed": 0, "cancelled": 1},
                "total": {"good": 970, "late": 30, "refused": 5, "failed": 0, "cancelled": 1},
                "goodput": 1.62, "ttft": quantiles, "tpot": null,
            }],
            "devices": 2,
            "handoffs": {"bytes_total": 5_000_000, "landed_total": 10, "joined_total": 2, "links": []},
            "history": [[1, 1, 0, 20, 2_000_000], [1, 1, 0, 20, 2_000_000]],
            "events": [{"at_ms": 1_000, "kind": "stuck", "reason": "no step ends", "about": "decode-0", "count": 2}],
            "scaling": {"advisory": true, "pools": [{"pool": "decode", "workers": 2, "wanted": 3, "reason": "kv"}], "recent": []},
        });
        fleet.apply("snapshot", snapshot).expect("it is a snapshot");
        fleet
    }

    #[test]
    fn the_text_view_has_every_panel() {
        let text = text(&fleet(), "http://h:1").unwrap();
        for word in [
            "http://h:1",
            "queued 4",
            "decode 50",
            "interactive",
            "97.0 %",
            "≥ 95",
            "421",
            "decode-0",
            "stuck",
            "75 %",
            "no step ends",
            "wanted 3",
            "2.0 MB/s",
        ] {
            assert!(text.contains(word), "`{word}` is not in\n{text}");
        }
    }

    #[test]
    fn rates_that_are_not_known_yet_are_not_zero() {
        let mut fleet = fleet();
        let known = text(&fleet, "u").unwrap();
        assert!(known.contains("1920 tokens/s"), "{known}");
        let mut delta = fleet.json();
        let unrated = |name: &str| {
            json!([
                name, "decode", "ready", null, 0, 0, 0, 0, 0.0, 0, 40, null, null, null, 0
            ])
        };
        delta["workers"] = json!(["prefill-0", "decode-0", "decode-1"].map(unrated));
        fleet.apply("delta", delta).unwrap();
        let unknown = text(&fleet, "u").unwrap();
        assert!(unknown.contains("– tokens/s"), "{unknown}");
    }

    #[test]
    fn nothing_is_counted_before_the_first_snapshot() {
        let mut view = TopView::of("http://h:1");
        let picture = drawn(&FleetView::default(), &mut view, 80, 24).join("\n");
        assert!(
            picture.contains("http://h:1   connected: waiting"),
            "{picture}"
        );
        let counts = ["workers", "goodput", "queued", " of 0", "KV"];
        for word in counts {
            assert!(!picture.contains(word), "`{word}` in\n{picture}");
        }
        view.press(KeyEvent::new(KeyCode::Char('?'), KeyModifiers::NONE));
        let picture = drawn(&FleetView::default(), &mut view, 80, 24).join("\n");
        assert!(picture.contains("scroll through the workers"), "{picture}");
    }

    #[test]
    fn a_fleet_without_classes_has_no_negative_zero() {
        let mut fleet = fleet();
        let mut delta = fleet.json();
        delta["workers"] = json!([]);
        delta["classes"] = json!([]);
        delta["history"] = json!([]);
        fleet.apply("delta", delta).unwrap();
        let text = text(&fleet, "u").unwrap();
        assert!(text.contains("goodput 0.00/s (0.00 per device)"), "{text}");
        assert!(text.contains("KV 0.0 B/s"), "{text}");
    }

    #[test]
    fn a_worker_that_left_disappears() {
        let mut fleet = fleet();
        let mut delta = fleet.json();
        delta["workers"] = json!([[
            "decode-1", "decode", "draining", null, 0, 0, 0, 0, 0.0, 0, 40, null, null, null, 77
        ]]);
        delta["gone"] = json!(["decode-0"]);
        fleet.apply("delta", delta).unwrap();
        let text = text(&fleet, "u").unwrap();
        assert!(text.contains("draining"), "{text}");
        let table = text.lines().filter(|line| line.contains("decode-"));
        assert_eq!(table.count(), 1 + 1, "one row, and the event\n{text}");
        let workers = &fleet.json()["workers"];
        assert_eq!(workers.as_array().map(Vec::len), Some(2));
        assert_eq!(workers[0]["name"], "decode-1");
    }

    /// The lines of a terminal of this size.
    fn drawn(fleet: &FleetView, view: &mut TopView, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal
            .draw(|frame| draw::draw(frame, fleet, view))
            .unwrap();
        let cells = terminal.backend().buffer().content();
        let lines = cells.chunks(usize::from(width));
        lines
            .map(|row| row.iter().map(ratatui::buffer::Cell::symbol).collect())
            .collect()
    }

    #[test]
    fn no_number_is_cut_on_a_small_terminal() {
        let mut fleet = fleet();
        let mut delta = fleet.json();
        delta["workers"] = json!([[
            "decode-10",
            "decode",
            "ready",
            "gpu-0",
            0,
            1234,
            56789,
            123_456_789,
            0.0,
            30,
            40,
            14.2,
            8,
            12345.0,
            0
        ]]);
        fleet.apply("delta", delta).unwrap();
        for width in [60, 80, 100, 200] {
            let text = drawn(&fleet, &mut TopView::of("u"), width, 24).join("\n");
            let worker = text
                .lines()
                .find(|line| line.contains("decode-10"))
                .unwrap();
            let words: Vec<&str> = worker.split_whitespace().collect();
            let whole = ["1234", "56789", "123456789", "12345"];
            let is_known =
                |word: &&str| !word.chars().all(|c| c.is_ascii_digit()) || whole.contains(word);
            assert!(
                words
                    .iter()
                    .all(|word| is_known(word) || *word == "75" || *word == "14.2"),
                "{worker}"
            );
            assert!(words.contains(&"1234") || width < 80, "{worker}");
            assert_eq!(words.contains(&"gpu-0"), width >= 100, "{worker}");
            assert!(text.contains("97.0 % ≥ 95"), "{text}");
        }
    }

    #[test]
    fn lost_workers_stay_and_are_counted_apart() {
        let mut fleet = fleet();
        let mut delta = fleet.json();
        delta["workers"] = json!([]);
        delta["gone"] = json!(["decode-1"]);
        delta["lost"] = json!([{"name": "decode-1", "model": "m", "role": "decode", "device": null, "at_ms": 7}]);
        fleet.apply("delta", delta).unwrap();
        let text = text(&fleet, "u").unwrap();
        assert!(text.contains("2 workers   1 stuck   1 lost"), "{text}");
        let row = text.lines().find(|line| line.starts_with("decode-1"));
        assert!(row.is_some_and(|row| row.contains("lost")), "{text}");
    }

    #[test]
    fn a_filter_reads_states_and_roles_too() {
        let mut view = TopView::of("u");
        for (filter, expected) in [("stuck", 1), ("prefill", 1), ("GPU-0", 3), ("x", 0)] {
            view.filter = filter.to_owned();
            let text = drawn(&fleet(), &mut view, 120, 40).join("\n");
            assert!(text.contains(&format!("{expected} of 3")), "{text}");
        }
    }

    #[test]
    fn any_key_closes_the_help() {
        let mut view = TopView::of("u");
        view.press(KeyEvent::new(KeyCode::Char('?'), KeyModifiers::NONE));
        let text = drawn(&fleet(), &mut view, 80, 24).join("\n");
        assert!(text.contains("scroll through the workers"), "{text}");
        assert!(text.contains("Esc drops it)"), "no line is cut\n{text}");
        let quit = view.press(KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE));
        assert_eq!((quit, view.help), (KeyOutcome::Continue, false));
    }

    #[test]
    fn keys_typed_into_the_filter_only_filter() {
        let mut view = TopView::of("u");
        let press = |view: &mut TopView, code| view.press(KeyEvent::new(code, KeyModifiers::NONE));
        press(&mut view, KeyCode::Char('/'));
        for letter in "sq".chars() {
            assert_eq!(
                press(&mut view, KeyCode::Char(letter)),
                KeyOutcome::Continue
            );
        }
        assert_eq!((view.filter.as_str(), view.sort), ("sq", 0));
        press(&mut view, KeyCode::Enter);
        press(&mut view, KeyCode::Char('s'));
        assert_eq!(view.sort, 1);
        assert_eq!(press(&mut view, KeyCode::Char('q')), KeyOutcome::Quit);
    }
}
