//! `cleave top`: what `/ui` shows, in a terminal.
//!
//! Owns: the choice between a picture that moves, text and JSON, and the keys. Never: counts or concludes
//! anything: all of it comes by the page's stream. Invariant: the terminal is left as it was found, however
//! this ends.

mod draw;
mod fleet;
mod stream;

use crate::args::TopArgs;
use crate::page::Pages;
use anyhow::{Context, bail};
use draw::{SORTS, View};
use fleet::Fleet;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::io::{IsTerminal, Write};
use stream::Events;
use tokio::sync::mpsc;

/// Text is as wide as this where no terminal says otherwise.
const TEXT_WIDTH: u16 = 120;

/// See the module.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let pages = Pages::of(&args.url, args.cacert.as_deref(), args.admin_key.as_deref())?;
        let events = Events::open(&pages).await?;
        let shown = std::io::stdout().is_terminal();
        match (args.json, args.once || !shown) {
            (true, _) => json(events, args.once).await,
            (false, true) => once(events, &args.url).await,
            (false, false) => live(events, &args.url).await,
        }
    })
}

/// One line of JSON for each board.
async fn json(mut events: Events, once: bool) -> anyhow::Result<()> {
    let mut fleet = Fleet::default();
    loop {
        fleet.hear(events.next().await?)?;
        let mut out = std::io::stdout().lock();
        let line = fleet.json().to_string();
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() || once {
            return Ok(()); // Nobody reads any more, or nobody wants more.
        }
    }
}

/// The second board, which knows how fast things go, as text.
async fn once(mut events: Events, url: &str) -> anyhow::Result<()> {
    let mut fleet = Fleet::default();
    for _ in 0..2 {
        fleet.hear(events.next().await?)?;
    }
    let text = text(&fleet, url)?;
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

/// A picture with room for everything.
fn text(fleet: &Fleet, url: &str) -> anyhow::Result<String> {
    let height = draw::height_whole(fleet);
    let mut terminal = Terminal::new(TestBackend::new(TEXT_WIDTH, height))?;
    let mut view = View::of(url);
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

async fn live(mut events: Events, url: &str) -> anyhow::Result<()> {
    // It also sees to it that a panic leaves the terminal as it was.
    let mut terminal = ratatui::init();
    let ended = follow(&mut terminal, &mut events, url).await;
    ratatui::restore();
    ended
}

async fn follow(
    terminal: &mut ratatui::DefaultTerminal,
    events: &mut Events,
    url: &str,
) -> anyhow::Result<()> {
    let mut keys = keys();
    let mut fleet = Fleet::default();
    let mut view = View::of(url);
    loop {
        terminal.draw(|frame| draw::draw(frame, &fleet, &mut view))?;
        tokio::select! {
            board = events.next() => {
                let board = board?;
                if !view.paused {
                    fleet.hear(board)?;
                }
            }
            key = keys.recv() => match key {
                Some(Event::Key(key)) if view.press(key) == Pressed::Quit => return Ok(()),
                Some(_) => {}
                None => bail!("the terminal is gone"),
            },
        }
    }
}

/// What a key came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pressed {
    Quit,
    Stay,
}

impl View {
    fn press(&mut self, key: KeyEvent) -> Pressed {
        if key.kind == KeyEventKind::Release {
            return Pressed::Stay;
        }
        let interrupts =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if interrupts {
            return Pressed::Quit;
        }
        if self.typing {
            self.type_key(key.code);
            return Pressed::Stay;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Pressed::Quit,
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
        Pressed::Stay
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

/// Keys, read by a thread that ends with the process or the terminal.
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

    fn fleet() -> Fleet {
        let mut fleet = Fleet::default();
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
        let event = ("snapshot".to_owned(), snapshot);
        fleet.hear(event).expect("it is a snapshot");
        fleet
    }

    #[test]
    fn the_whole_picture_has_every_panel() {
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
    fn a_worker_that_left_stayed_in_the_picture() {
        let mut fleet = fleet();
        let mut delta = fleet.json();
        delta["workers"] = json!([[
            "decode-1", "decode", "draining", null, 0, 0, 0, 0, 0.0, 0, 40, null, null, null, 77
        ]]);
        delta["gone"] = json!(["decode-0"]);
        fleet.hear(("delta".to_owned(), delta)).unwrap();
        let text = text(&fleet, "u").unwrap();
        assert!(text.contains("draining"), "{text}");
        let table = text.lines().filter(|line| line.contains("decode-"));
        assert_eq!(table.count(), 1 + 1, "one row, and the event\n{text}");
        let workers = &fleet.json()["workers"];
        assert_eq!(workers.as_array().map(Vec::len), Some(2));
        assert_eq!(workers[0]["name"], "decode-1");
    }

    #[test]
    fn keys_typed_into_the_filter_sorted_the_table() {
        let mut view = View::of("u");
        let press = |view: &mut View, code| view.press(KeyEvent::new(code, KeyModifiers::NONE));
        press(&mut view, KeyCode::Char('/'));
        for letter in "sq".chars() {
            assert_eq!(press(&mut view, KeyCode::Char(letter)), Pressed::Stay);
        }
        assert_eq!((view.filter.as_str(), view.sort), ("sq", 0));
        press(&mut view, KeyCode::Enter);
        press(&mut view, KeyCode::Char('s'));
        assert_eq!(view.sort, 1);
        assert_eq!(press(&mut view, KeyCode::Char('q')), Pressed::Quit);
    }
}
