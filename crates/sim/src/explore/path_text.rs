//! The path to a counterexample as text, one line per transition.
//!
//! Owns: the words. Never: is read by a program. Invariant: the same path gives the same bytes.

use super::state::{PendingNotice, SmallWorldMessage, SmallWorldState};
use super::transitions::{Transition, TransitionCost};
use super::worlds::SmallWorld;
use crate::log_text;
use std::fmt::Write as _;

/// Explains the columns of a path.
pub(super) const LEGEND: &str = "\
   move  what (! fault, ~ out of the usual order)                                 ended | each worker: life state held/all
   state: . idle, s step, c copy, - draining, x dead
";

/// Applies a path again, and describes each transition.
pub(super) fn path_text(small: &SmallWorld, path: &[(Transition, TransitionCost)]) -> String {
    let mut text = LEGEND.to_owned();
    let Ok(mut state) = SmallWorldState::first(small) else {
        return text;
    };
    for (number, (transition, cost)) in path.iter().enumerate() {
        let mark = match cost {
            TransitionCost::Free => ' ',
            TransitionCost::Reorder => '~',
            TransitionCost::Fault => '!',
        };
        let words = transition_text(&state, small, *transition);
        // The last transition violates a property, perhaps by a panic, so it is not applied again.
        if number + 1 < path.len() {
            let _ = state.take(small, *transition, *cost);
        }
        let columns = columns(&state);
        let _ = writeln!(text, "{:>7} {mark}{words:<70} {columns}", number + 1);
    }
    text
}

fn transition_text(state: &SmallWorldState, small: &SmallWorld, transition: Transition) -> String {
    let packet = |index: usize| {
        let envelope = &state.packets[index].envelope;
        let words = log_text::packet(&envelope.packet);
        format!("{} {words} from {}", envelope.to.worker, envelope.from)
    };
    match transition {
        Transition::Submit => format!("r1 asked       {}", small.flight(state.submitted)),
        Transition::Notice(notice) => notice_text(notice),
        Transition::ToWorker(worker) => {
            let order = state.workers[worker].to_worker.front();
            let words = order.map_or(String::new(), |order| log_text::order(&order.0));
            format!("w{:x} ordered     {words}", worker + 1)
        }
        Transition::ToRouter(worker) => {
            let message = state.workers[worker].to_router.front();
            let words = match message.map(|message| &message.0) {
                Some(SmallWorldMessage::Report(report)) => log_text::report(report),
                Some(SmallWorldMessage::Token(handoff, emission)) => {
                    let token = emission.sampled.token;
                    format!("token {handoff} #{} = {token}", emission.index)
                }
                None => String::new(),
            };
            format!("r1 told        w{:x} {words}", worker + 1)
        }
        Transition::Packet(index) => format!("-> arrived     {}", packet(index)),
        Transition::Counted(index) => {
            let (handoff, given) = &state.count_answers[index];
            format!("r1 counted     {handoff} {}", given.len())
        }
        Transition::Late(index) => {
            let late = &state.late_writes[index];
            format!("-> lands late  {} {}", late.export.to, late.export.handoff)
        }
        Transition::Engine(worker) => format!("w{:x} engine", worker + 1),
        Transition::Exit(worker) => format!("w{:x} exits", worker + 1),
        Transition::Command => {
            let (worker, command) = small.commands[state.commanded];
            format!("r1 commanded   w{:x} {command:?}", worker + 1)
        }
        Transition::TimePasses => "-- time passes".to_owned(),
        Transition::TimePassesEarly => "-- time passes, though things are under way".to_owned(),
        Transition::Lose(index) => format!("-- lost        {}", packet(index)),
        Transition::Duplicate(index) => format!("-- doubled     {}", packet(index)),
        Transition::Damage(index) => format!("-- damaged     {}", packet(index)),
        Transition::Flip(index) => format!("-- flipped     {}", packet(index)),
        Transition::FlipReport(worker) => format!("-- flipped     next word of w{:x}", worker + 1),
        Transition::FlipOrder(worker) => format!("-- flipped     next order to w{:x}", worker + 1),
        Transition::ChangeSeal(index, field) => {
            format!("-- changed     {field:?} {}", packet(index))
        }
        Transition::Misroute(index, how) => format!("-- astray      {how:?} {}", packet(index)),
        Transition::Cancel(index) => format!("r1 left        {}", small.flight(index)),
        Transition::Crash(worker) => format!("w{:x} crashes", worker + 1),
        Transition::Expire(worker) if worker == state.workers.len() => "r1 clock jumps".to_owned(),
        Transition::Expire(worker) => format!("w{:x} clock jumps", worker + 1),
        Transition::Cut(a, b) => format!("-- link breaks w{:x} w{:x}", a + 1, b + 1),
        Transition::Disconnect(worker) => format!("-- stream breaks r1 w{:x}", worker + 1),
        Transition::EngineFault(worker) => format!("w{:x} engine breaks what it does", worker + 1),
    }
}

fn notice_text(notice: PendingNotice) -> String {
    match notice {
        PendingNotice::LinkLost { side, peer } => format!("{} lost link   to {peer}", side.worker),
        PendingNotice::PeerFenced { side, peer } => format!("{} knows dead  {peer}", side.worker),
        PendingNotice::WorkerLost(worker) => format!("r1 hears       {worker} lost"),
        PendingNotice::RouterLost(side) => format!("{} hears       r1 lost", side.worker),
        PendingNotice::WorkerStarts(worker) => format!("w{:x} starts", worker + 1),
        PendingNotice::Reconnects(worker) => format!("w{:x} meets       r1", worker + 1),
    }
}

fn columns(state: &SmallWorldState) -> String {
    let ended = state.clients.iter().filter(|r| r.ending.is_some()).count();
    let mut columns = format!("{ended:>2}");
    for process in &state.workers {
        let _ = match &process.body {
            None => write!(columns, " | {}x    ", process.incarnation),
            Some(body) => {
                let pool = body.brain.pool();
                let (all, free) = (pool.blocks_count(), pool.blocks_available());
                write!(
                    columns,
                    " | {}{} {}/{all}",
                    process.incarnation,
                    body.state_symbol(),
                    all - free
                )
            }
        };
    }
    columns
}
