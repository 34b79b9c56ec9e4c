//! Warnings about a worker that joins beside others.
//!
//! Owns: what an operator should know of a worker that fits none of the others, or shares a GPU with one. Never:
//! turns a worker away.

use crate::line::Introduction;
use cleave_domain::DeviceId;
use tracing::warn;

/// Logs what is odd about a worker beside those that are connected.
pub(crate) fn warn_of<'a>(
    joining: &Introduction,
    connected: impl Iterator<Item = &'a Introduction> + Clone,
) {
    warn_of_fingerprint(joining, connected.clone());
    warn_of_shared_gpu(joining, connected);
}

/// Blocks go only between equal fingerprints. A rolling upgrade therefore never mixes two revisions, and a worker
/// with the wrong weights would be of no use without a word.
fn warn_of_fingerprint<'a>(
    joining: &Introduction,
    mut connected: impl Iterator<Item = &'a Introduction> + Clone,
) {
    let fingerprint = &joining.description.fingerprint;
    if connected
        .clone()
        .any(|other| other.description.fingerprint == *fingerprint)
    {
        return;
    }
    if let Some(other) = connected.next() {
        warn!(
            name = joining.name,
            fingerprint = fingerprint.0,
            other = other.name,
            its_fingerprint = other.description.fingerprint.0,
            "no worker has the fingerprint of the one that joins: none of them exchanges blocks with it"
        );
    }
}

/// Two processes on one GPU take turns on all of it, unless NVIDIA's Multi-Process Service runs.
fn warn_of_shared_gpu<'a>(
    joining: &Introduction,
    mut connected: impl Iterator<Item = &'a Introduction>,
) {
    if let Some(other) = connected.find(|other| shares_gpu(joining, other)) {
        warn!(
            name = joining.name,
            other = other.name,
            "two processes compute on one GPU: without MPS they are time-sliced, and a prompt of one holds up decode steps of \
             the other; `cleave serve --device cuda --prefill 1 --decode 1` divides a GPU between legs of one process"
        );
    }
}

/// Whether two workers of different processes have the whole of one GPU. Workers of one process have no data address.
fn shares_gpu(one: &Introduction, other: &Introduction) -> bool {
    let gpu = |of: &Introduction| {
        let device = of.description.device.clone();
        device.filter(|DeviceId(name)| name.starts_with("gpu-"))
    };
    let is_apart = !one.data_address.is_empty() || !other.data_address.is_empty();
    is_apart && gpu(one).is_some() && gpu(one) == gpu(other)
}
