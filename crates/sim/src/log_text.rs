//! Messages and inputs as short text that fits a column of the log.

use cleave_domain::{KvUnit, Order, Report, StepProgress};
use cleave_kv::Packet;
use cleave_sched::WorkerInput;

const WIDTH: usize = 46;

pub(crate) fn order(order: &Order) -> String {
    match order {
        Order::Reserve(order) => format!("reserve {} from {}", order.handoff, order.sender),
        Order::Prefill(order) => format!("prefill {} for {}", order.handoff, order.target.worker),
        Order::Run(order) => format!("run {}", order.handoff),
        Order::Cancel { handoff } => format!("cancel {handoff}"),
        Order::Renew { handoffs } => format!("renew {}", handoffs.len()),
        Order::Migrate(order) => format!("move {} to {}", order.of, order.target.worker),
        Order::Drain => "drain".to_owned(),
        Order::Serve { role } => format!("serve {role}"),
        Order::Relay(_) => "pass on".to_owned(),
        Order::FetchAdapter { adapter } => format!("fetch {adapter}"),
    }
}

pub(crate) fn report(report: &Report) -> String {
    match report {
        Report::Reserved {
            handoff,
            present,
            blocks,
            state: _,
            window: _,
        } => format!("reserved {handoff} {present}+{}", blocks.len()),
        Report::Running { handoff, present } => format!("running {handoff} {present}"),
        Report::Refused { handoff, refusal } => {
            truncated(&format!("refused {handoff} {refusal:?}"))
        }
        Report::Prices(prices) => format!("prices {}", prices.rows.len()),
        Report::Prefilled { handoff, .. } => format!("prefilled {handoff}"),
        Report::Landed { handoff } => format!("landed {handoff}"),
        Report::Finished {
            handoff, reason, ..
        } => format!("finished {handoff} {reason:?}"),
        Report::LegFailed { handoff, failure } => {
            truncated(&format!("failed {handoff} {failure:?}"))
        }
        Report::Released { handoff } => format!("released {handoff}"),
        Report::Load(load) => format!(
            "load q{} w{} r{} f{}{}",
            load.queue_tokens,
            load.sequences_waiting,
            load.sequences_running,
            load.blocks_free,
            match load.progress {
                StepProgress::Moving => "",
                StepProgress::Stuck => " stuck",
            }
        ),
        Report::Draining => "draining".to_owned(),
        Report::MigrationAborted { handoff, failure } => {
            truncated(&format!("stayed {handoff} {failure:?}"))
        }
        Report::MemoryPressure { handoff } => format!("crowded by {handoff}"),
        Report::Serves { role } => format!("serves {role}"),
        Report::Relayed(_) => "passed on".to_owned(),
        Report::Adapters(report) => format!("serves {} adapters", report.offers.len()),
        Report::Prefix { stored, evicted } => {
            format!("prefix +{} -{}", stored.len(), evicted.len())
        }
    }
}

pub(crate) fn packet(packet: &Packet) -> String {
    match packet {
        Packet::Frame { handoff, part, .. } => {
            let (from, to) = (part.offset, part.offset + part.len);
            format!("frame {handoff} {}:{from}..{to}", part.unit())
        }
        Packet::Seal(seal) => format!("seal {} of {}", seal.handoff, seal.blocks_count),
        Packet::Landed { handoff } => format!("landed {handoff}"),
        Packet::Abandoned { handoff, cause } => {
            truncated(&format!("abandoned {handoff} {cause:?}"))
        }
        Packet::Stop { handoff } => format!("stop {handoff}"),
        Packet::Stopped { handoff } => format!("stopped {handoff}"),
    }
}

pub(crate) fn input(input: &WorkerInput) -> String {
    match input {
        WorkerInput::Stepped { result, took } => {
            format!("{} drew {} in {took:?}", result.step, result.sampled.len())
        }
        WorkerInput::Exported {
            handoff,
            plane,
            ordinal,
            ..
        } => {
            let (plane, ordinal) = (*plane, *ordinal);
            format!("exported {handoff} {}", KvUnit { plane, ordinal })
        }
        WorkerInput::Imported {
            handoff,
            part,
            outcome,
        } => truncated(&format!(
            "imported {handoff} {}:{} {outcome:?}",
            part.unit(),
            part.offset
        )),
        WorkerInput::StepFailed { step, .. } => format!("{step} failed"),
        WorkerInput::EngineLost { .. } => "engine lost".to_owned(),
        WorkerInput::RouterJoined { router } => format!("{router} joined"),
        WorkerInput::RouterLost { router } => format!("{router} lost"),
        other => truncated(&format!("{other:?}")),
    }
}

pub(crate) fn router_input(input: &cleave_router::RouterInput) -> String {
    match input {
        cleave_router::RouterInput::WorkerLost { worker } => format!("{worker} lost"),
        cleave_router::RouterInput::WorkerJoined { worker, .. } => format!("{worker} joined"),
        other => truncated(&format!("{other:?}")),
    }
}

pub(crate) fn truncated(text: &str) -> String {
    text.chars().take(WIDTH).collect()
}
