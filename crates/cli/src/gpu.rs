//! How workers of one process share a GPU.
//!
//! Owns: the share of decode workers where nobody gave one, and what is said of processes that share a GPU.
//! Never: divides a device; the engines' streams do.

use crate::args::DecodeShare;
use cleave_cuda::{Device, Part, Priority, Share};
use cleave_domain::Role;

/// Percent of a GPU's multiprocessors for decode workers beside prefill workers of the same process, where no
/// flag says it. Decode steps are bound by memory: one multiprocessor takes 64 bytes a cycle from the second-level cache,
/// some 110 GB/s, so 44 of an H200's 132 could carry its 4.8 TB/s; 40 % leaves some room above that third. Prompts are
/// bound by arithmetic, and keep the rest. Computed, not measured.
const DECODE_PERCENT: u32 = 40;

/// The multiprocessors and the priority of an engine's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuPart {
    pub(crate) priority: Priority,
    pub(crate) share: Option<Share>,
}

impl GpuPart {
    /// The whole GPU, for an engine that has nobody beside it.
    pub(crate) const WHOLE: Self = Self {
        priority: Priority::Normal,
        share: None,
    };

    /// The part of a worker of this role, where decode workers have so many percent. Kernels have a block on each of
    /// their multiprocessors until they end, so a priority alone helps a decode step only between two kernels of a prompt.
    pub(crate) fn of(role: Role, decode_percent: Option<u32>) -> Self {
        let (priority, part) = match role {
            Role::Prefill => (Priority::Normal, Some(Part::Rest)),
            Role::Decode => (Priority::High, Some(Part::First)),
            Role::Both => (Priority::Normal, None),
        };
        let share = decode_percent.zip(part);
        Self {
            priority,
            share: share.map(|(percent, part)| Share { percent, part }),
        }
    }
}

/// Percent of the multiprocessors for the decode workers among these; `None` where all share all of them.
pub(crate) fn decode_percent(
    asked: Option<DecodeShare>,
    roles: &[Role],
    device: &std::sync::Arc<Device>,
) -> Option<u32> {
    let has = |role| roles.contains(&role);
    match asked {
        Some(DecodeShare::Undivided) => None,
        Some(DecodeShare::Percent(percent)) => Some(percent),
        None if has(Role::Prefill) && has(Role::Decode) => default_percent(device),
        None => None,
    }
}

fn default_percent(device: &std::sync::Arc<Device>) -> Option<u32> {
    match device.can_divide(DECODE_PERCENT) {
        Ok(()) => Some(DECODE_PERCENT),
        Err(error) => {
            tracing::warn!(
                "the GPU's multiprocessors cannot be divided between the legs ({error}): a prompt's kernels hold up decode steps; \
                 --gpu-decode-share none says that this is meant"
            );
            None
        }
    }
}

/// The warning at the start of a process with a single leg on a GPU; nothing where that is all right.
pub(crate) fn of_single_leg(
    role: Role,
    asked: Option<DecodeShare>,
    is_mps: bool,
) -> Option<&'static str> {
    match (role, asked) {
        (Role::Both, _) | (_, None | Some(DecodeShare::Undivided)) => None,
        _ if is_mps => None,
        _ => Some(
            "--gpu-decode-share divides a GPU between the legs of one process (serve --prefill 1 --decode 1); processes \
             without MPS take turns on the whole GPU, so here the share only leaves multiprocessors idle: leave the flag out, or start \
             MPS (nvidia-cuda-mps-control -d)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legs_of_one_gpu_have_disjoint_parts() {
        let share = |role| GpuPart::of(role, Some(40)).share;
        let percent = 40;
        let (first, rest) = (Part::First, Part::Rest);
        assert_eq!(
            share(Role::Decode),
            Some(Share {
                percent,
                part: first
            })
        );
        assert_eq!(
            share(Role::Prefill),
            Some(Share {
                percent,
                part: rest
            })
        );
        assert_eq!(share(Role::Both), None);
        assert_eq!(GpuPart::of(Role::Decode, None).share, None);
    }

    #[test]
    fn a_share_of_a_process_alone_is_warned_of_without_mps() {
        let share = Some(DecodeShare::Percent(30));
        assert!(of_single_leg(Role::Decode, share, false).is_some());
        assert!(of_single_leg(Role::Prefill, share, false).is_some());
        assert_eq!(of_single_leg(Role::Decode, share, true), None);
        assert_eq!(of_single_leg(Role::Both, share, false), None);
        assert_eq!(of_single_leg(Role::Decode, None, false), None);
        let undivided = Some(DecodeShare::Undivided);
        assert_eq!(of_single_leg(Role::Decode, undivided, false), None);
    }
}
