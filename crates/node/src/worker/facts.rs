//! The body's facts in the brain's words, and the brain's in the body's.
//!
//! Never: remembers anything.

use crate::wire::nanos;
use cleave_domain::{HandoffId, LinkPrice, WorkerRef};
use cleave_kv::Packet;
use cleave_sched::{Condition, Input, Note};
use cleave_transfer::LinkSpeed;

/// Half the shortest round trip, and what is measured one way.
pub(super) fn price_of(speed: LinkSpeed) -> LinkPrice {
    const PICOS: u64 = 1_000_000_000_000;
    LinkPrice {
        latency_nanos: nanos(speed.latency / 2),
        byte_picos: PICOS / speed.bytes_per_second.max(1),
    }
}

/// Which hand-off a note is about, if it is about one.
pub(super) fn handoff_of(note: &Note) -> Option<HandoffId> {
    match note {
        Note::Sealed { handoff, .. }
        | Note::Landed { handoff, .. }
        | Note::Joined { handoff }
        | Note::HandoffFailed { handoff, .. }
        | Note::Repeated { handoff }
        | Note::FrameDiscarded { handoff }
        | Note::Preempted { handoff, .. }
        | Note::SwappedOut { handoff, .. }
        | Note::SwappedIn { handoff, .. }
        | Note::Fetched { handoff, .. }
        | Note::MovedOut { handoff, .. }
        | Note::Stayed { handoff, .. } => Some(*handoff),
        Note::Stepped { .. }
        | Note::Drafted { .. }
        | Note::PrefixLooked { .. }
        | Note::PrefillStarted { .. }
        | Note::Stuck { .. }
        | Note::CancelFreed { .. }
        | Note::Kept { .. }
        | Note::Tiers { .. }
        | Note::Pool { .. } => None,
    }
}

/// What a sender that cannot write here would say.
pub(super) fn stopped(from: WorkerRef, handoff: HandoffId) -> Input {
    Input::Arrived {
        from,
        packet: Packet::Stopped { handoff },
        condition: Condition::Intact,
    }
}
