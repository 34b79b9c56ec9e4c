//! Sharing of a GPU by the workers of one process.
//!
//! Owns: the default share of decode workers, and the warning for processes that share a GPU.
//! Never: divides a device; the engines' streams do.

use crate::args::DecodeShare;
use cleave_cuda::{CudaDevice, MultiprocessorShare, SharePart, StreamPriority};
use cleave_domain::Role;

/// Default share of decode workers, in percent, next to prefill workers of the same process. Decode
/// steps are limited by memory: one multiprocessor reads 64 bytes a cycle from the second-level
/// cache, about 110 GB/s, so 44 of an H200's 132 could read its 4.8 TB/s; 40 % leaves some margin
/// above that third. Prompts are limited by arithmetic and keep the rest. Computed, not measured.
const DECODE_PERCENT: u32 = 40;

/// Multiprocessors and priority of an engine's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuShare {
    pub(crate) priority: StreamPriority,
    pub(crate) share: Option<MultiprocessorShare>,
}

impl GpuShare {
    /// The whole GPU, for an engine that has it alone.
    pub(crate) const WHOLE: Self = Self {
        priority: StreamPriority::Normal,
        share: None,
    };

    /// Returns the share of a worker of this role, if decode workers have this percentage. The
    /// blocks of a kernel occupy their multiprocessors until they end, so a priority alone helps a
    /// decode step only between two kernels of a prompt.
    pub(crate) fn of(role: Role, decode_percent: Option<u32>) -> Self {
        let (priority, part) = match role {
            Role::Prefill => (StreamPriority::Normal, Some(SharePart::Rest)),
            Role::Decode => (StreamPriority::High, Some(SharePart::First)),
            Role::Both => (StreamPriority::Normal, None),
        };
        let share = decode_percent.zip(part);
        Self {
            priority,
            share: share.map(|(percent, part)| MultiprocessorShare { percent, part }),
        }
    }
}

/// Returns the percentage of the multiprocessors for decode workers; `None` if all workers share
/// all of them.
pub(crate) fn decode_percent(
    requested: Option<DecodeShare>,
    roles: &[Role],
    device: &std::sync::Arc<CudaDevice>,
) -> Option<u32> {
    let has = |role| roles.contains(&role);
    match requested {
        Some(DecodeShare::Undivided) => None,
        Some(DecodeShare::Percent(percent)) => Some(percent),
        None if has(Role::Prefill) && has(Role::Decode) => default_percent(device),
        None => None,
    }
}

fn default_percent(device: &std::sync::Arc<CudaDevice>) -> Option<u32> {
    match device.check_divisible(DECODE_PERCENT) {
        Ok(()) => Some(DECODE_PERCENT),
        Err(error) => {
            tracing::warn!(
                "the GPU's multiprocessors cannot be divided between the legs ({error}): a prompt's kernels delay decode steps; \
                 --gpu-decode-share none silences this warning"
            );
            None
        }
    }
}

/// Returns the warning at the start of a process with a single leg on a GPU, if its share has no
/// effect.
pub(crate) fn single_leg_warning(
    role: Role,
    requested: Option<DecodeShare>,
    is_mps: bool,
) -> Option<&'static str> {
    match (role, requested) {
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
    fn legs_of_one_gpu_have_disjoint_shares() {
        let share = |role| GpuShare::of(role, Some(40)).share;
        let percent = 40;
        let (first, rest) = (SharePart::First, SharePart::Rest);
        assert_eq!(
            share(Role::Decode),
            Some(MultiprocessorShare {
                percent,
                part: first
            })
        );
        assert_eq!(
            share(Role::Prefill),
            Some(MultiprocessorShare {
                percent,
                part: rest
            })
        );
        assert_eq!(share(Role::Both), None);
        assert_eq!(GpuShare::of(Role::Decode, None).share, None);
    }

    #[test]
    fn a_decode_share_without_mps_warns_a_single_leg() {
        let share = Some(DecodeShare::Percent(30));
        assert!(single_leg_warning(Role::Decode, share, false).is_some());
        assert!(single_leg_warning(Role::Prefill, share, false).is_some());
        assert_eq!(single_leg_warning(Role::Decode, share, true), None);
        assert_eq!(single_leg_warning(Role::Both, share, false), None);
        assert_eq!(single_leg_warning(Role::Decode, None, false), None);
        let undivided = Some(DecodeShare::Undivided);
        assert_eq!(single_leg_warning(Role::Decode, undivided, false), None);
    }
}
