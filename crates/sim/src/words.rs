//! Facts in the few words that fit a column of the log.

use cleave_domain::{Order, Progress, Report};
use cleave_kv::Packet;
use cleave_sched::Input;

/// Characters that fit.
const WIDTH: usize = 46;

pub(crate) fn order(order: &Order) -> String {
    match order {
        Order::Reserve(order) => format!("reserve {} from {}", order.handoff, order.sender),
        Order::Prefill(order) => format!("prefill {} for {}", order.handoff, order.target.worker),
        Order::Cancel { handoff } => format!("cancel {handoff}"),
        Order::Renew { handoffs } => format!("renew {}", handoffs.len()),
        Order::Migrate(order) => format!("move {} to {}", order.of, order.target.worker),
        Order::Drain => "drain".to_owned(),
        Order::Serve { role } => format!("serve {role}"),
        Order::PassOn(_) => "pass on".to_owned(),
    }
}

pub(crate) fn report(report: &Report) -> String {
    match report {
        Report::Reserved {
            handoff,
            present,
            blocks,
        } => format!("reserved {handoff} {present}+{}", blocks.len()),
        Report::Refused { handoff, refusal } => short(&format!("refused {handoff} {refusal:?}")),
        Report::Prices(prices) => format!("prices {}", prices.rows.len()),
        Report::Prefilled { handoff, .. } => format!("prefilled {handoff}"),
        Report::Landed { handoff } => format!("landed {handoff}"),
        Report::Finished {
            handoff, reason, ..
        } => format!("finished {handoff} {reason:?}"),
        Report::LegFailed { handoff, failure } => short(&format!("failed {handoff} {failure:?}")),
        Report::Released { handoff } => format!("released {handoff}"),
        Report::Load(load) => format!(
            "load q{} w{} r{} f{}{}",
            load.queue_tokens,
            load.sequences_waiting,
            load.sequences_running,
            load.blocks_free,
            match load.progress {
                Progress::Moving => "",
                Progress::Stuck => " stuck",
            }
        ),
        Report::Draining => "draining".to_owned(),
        Report::Stayed { handoff, failure } => short(&format!("stayed {handoff} {failure:?}")),
        Report::Crowded { handoff } => format!("crowded by {handoff}"),
        Report::Serves { role } => format!("serves {role}"),
        Report::PassedOn(_) => "passed on".to_owned(),
        Report::Prefix { stored, evicted } => {
            format!("prefix +{} -{}", stored.len(), evicted.len())
        }
    }
}

pub(crate) fn packet(packet: &Packet) -> String {
    match packet {
        Packet::Frame { handoff, part, .. } => {
            let (from, to) = (part.offset, part.offset + part.len);
            format!("frame {handoff} {}:{from}..{to}", part.ordinal)
        }
        Packet::Seal(seal) => format!("seal {} of {}", seal.handoff, seal.blocks_count),
        Packet::Landed { handoff } => format!("landed {handoff}"),
        Packet::Abandoned { handoff, cause } => short(&format!("abandoned {handoff} {cause:?}")),
        Packet::Stop { handoff } => format!("stop {handoff}"),
        Packet::Stopped { handoff } => format!("stopped {handoff}"),
    }
}

pub(crate) fn input(input: &Input) -> String {
    match input {
        Input::Stepped { result, took } => {
            format!("{} drew {} in {took:?}", result.step, result.sampled.len())
        }
        Input::Exported {
            handoff, ordinal, ..
        } => format!("exported {handoff} {ordinal}"),
        Input::Imported {
            handoff,
            part,
            outcome,
        } => short(&format!(
            "imported {handoff} {}:{} {outcome:?}",
            part.ordinal, part.offset
        )),
        Input::StepFailed { step, .. } => format!("{step} failed"),
        Input::EngineLost { .. } => "engine lost".to_owned(),
        Input::RouterJoined { router } => format!("{router} joined"),
        Input::RouterLost { router } => format!("{router} lost"),
        other => short(&format!("{other:?}")),
    }
}

pub(crate) fn router_input(input: &cleave_router::Input) -> String {
    match input {
        cleave_router::Input::WorkerLost { worker } => format!("{worker} lost"),
        cleave_router::Input::WorkerJoined { worker, .. } => format!("{worker} joined"),
        other => short(&format!("{other:?}")),
    }
}

pub(crate) fn short(text: &str) -> String {
    text.chars().take(WIDTH).collect()
}
