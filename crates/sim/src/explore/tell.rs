//! The path to a counterexample, one line per move.
//!
//! Owns: the words. Never: is read by anything but people. Invariant: the same path, the same bytes.

use super::moves::{Cost, Move};
use super::small::Small;
use super::state::{Notice, State, Word};
use crate::words;
use std::fmt::Write as _;

/// What the columns mean.
pub(super) const LEGEND: &str = "\
   move  what (! fault, ~ out of the usual order)                                 ended | each worker: life state held/all
   state: . idle, s step, c copy, - draining, x dead
";

/// Walks a path again, and tells of each move.
pub(super) fn path(small: &Small, path: &[(Move, Cost)]) -> String {
    let mut text = LEGEND.to_owned();
    let Ok(mut state) = State::first(small) else {
        return text;
    };
    for (number, (what, cost)) in path.iter().enumerate() {
        let mark = match cost {
            Cost::Nothing => ' ',
            Cost::Order => '~',
            Cost::Fault => '!',
        };
        let words = words(&state, small, *what);
        // The last move breaks something, perhaps by a panic; it has been made before.
        if number + 1 < path.len() {
            let _ = state.take(small, *what, *cost);
        }
        let columns = columns(&state);
        let _ = writeln!(text, "{:>7} {mark}{words:<70} {columns}", number + 1);
    }
    text
}

fn words(state: &State, small: &Small, what: Move) -> String {
    let packet = |index: usize| {
        let parcel = &state.parcels[index].parcel;
        let words = words::packet(&parcel.packet);
        format!("{} {words} from {}", parcel.to.worker, parcel.from)
    };
    match what {
        Move::Submit => format!("r1 asked       {}", small.flight(state.submitted)),
        Move::Notice(notice) => notice_words(notice),
        Move::ToWorker(worker) => {
            let order = state.seats[worker].to_worker.front();
            let words = order.map_or(String::new(), |order| words::order(&order.0));
            format!("w{:x} ordered     {words}", worker + 1)
        }
        Move::ToRouter(worker) => {
            let word = state.seats[worker].to_router.front();
            let words = match word.map(|word| &word.0) {
                Some(Word::Report(report)) => words::report(report),
                Some(Word::Token(handoff, emission)) => {
                    let token = emission.sampled.token;
                    format!("token {handoff} #{} = {token}", emission.index)
                }
                None => String::new(),
            };
            format!("r1 told        w{:x} {words}", worker + 1)
        }
        Move::Packet(index) => format!("-> arrived     {}", packet(index)),
        Move::Counted(index) => {
            let (handoff, given) = &state.counts[index];
            format!("r1 counted     {handoff} {}", given.len())
        }
        Move::Late(index) => {
            let late = &state.late[index];
            format!("-> lands late  {} {}", late.export.to, late.export.handoff)
        }
        Move::Engine(worker) => format!("w{:x} engine", worker + 1),
        Move::Exit(worker) => format!("w{:x} exits", worker + 1),
        Move::Command => {
            let (worker, command) = small.commands[state.commanded];
            format!("r1 commanded   w{:x} {command:?}", worker + 1)
        }
        Move::Tick => "-- time passes".to_owned(),
        Move::Slow => "-- time passes, though things are under way".to_owned(),
        Move::Lose(index) => format!("-- lost        {}", packet(index)),
        Move::Twice(index) => format!("-- doubled     {}", packet(index)),
        Move::Damage(index) => format!("-- damaged     {}", packet(index)),
        Move::Flip(index) => format!("-- flipped     {}", packet(index)),
        Move::FlipWord(worker) => format!("-- flipped     next word of w{:x}", worker + 1),
        Move::FlipOrder(worker) => format!("-- flipped     next order to w{:x}", worker + 1),
        Move::Change(index, field) => format!("-- changed     {field:?} {}", packet(index)),
        Move::Astray(index, how) => format!("-- astray      {how:?} {}", packet(index)),
        Move::Cancel(index) => format!("r1 left        {}", small.flight(index)),
        Move::Crash(worker) => format!("w{:x} crashes", worker + 1),
        Move::Expire(worker) if worker == state.seats.len() => "r1 clock jumps".to_owned(),
        Move::Expire(worker) => format!("w{:x} clock jumps", worker + 1),
        Move::Cut(a, b) => format!("-- link breaks w{:x} w{:x}", a + 1, b + 1),
        Move::Part(worker) => format!("-- stream breaks r1 w{:x}", worker + 1),
        Move::Break(worker) => format!("w{:x} engine breaks what it does", worker + 1),
    }
}

fn notice_words(notice: Notice) -> String {
    match notice {
        Notice::LinkLost { side, peer } => format!("{} lost link   to {peer}", side.worker),
        Notice::Severed { side, peer } => format!("{} knows dead  {peer}", side.worker),
        Notice::WorkerLost(worker) => format!("r1 hears       {worker} lost"),
        Notice::RouterLost(side) => format!("{} hears       r1 lost", side.worker),
        Notice::Starts(worker) => format!("w{:x} starts", worker + 1),
        Notice::Meets(worker) => format!("w{:x} meets       r1", worker + 1),
    }
}

fn columns(state: &State) -> String {
    let ended = state.readers.iter().filter(|r| r.ending.is_some()).count();
    let mut columns = format!("{ended:>2}");
    for seat in &state.seats {
        let _ = match &seat.body {
            None => write!(columns, " | {}x    ", seat.life),
            Some(body) => {
                let pool = body.brain.pool();
                let (all, free) = (pool.blocks_count(), pool.blocks_available());
                write!(
                    columns,
                    " | {}{} {}/{all}",
                    seat.life,
                    body.mark(),
                    all - free
                )
            }
        };
    }
    columns
}
