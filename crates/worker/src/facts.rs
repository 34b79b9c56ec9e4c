//! Translations between facts of the body and inputs of the brain.

use cleave_domain::{HandoffId, LinkPrice, WorkerRef};
use cleave_fleet::nanos;
use cleave_kv::Packet;
use cleave_sched::{PayloadCondition, WorkerInput};
use cleave_transfer::LinkSpeed;

/// Half the shortest round trip, and the bandwidth measured in one direction.
pub(super) fn price_of(speed: LinkSpeed) -> LinkPrice {
    const PICOS: u64 = 1_000_000_000_000;
    LinkPrice {
        latency_nanos: nanos(speed.latency / 2),
        byte_picos: PICOS / speed.bytes_per_second.max(1),
    }
}

/// The input that a sender's answer would be, for a sender that cannot write here.
pub(super) fn stopped(from: WorkerRef, handoff: HandoffId) -> WorkerInput {
    WorkerInput::Arrived {
        from,
        packet: Packet::Stopped { handoff },
        condition: PayloadCondition::Intact,
    }
}
