//! Warnings about a worker that joins beside others.
//!
//! Owns: what an operator should know of a worker that fits no other one, or that shares a GPU.
//! Never turns a worker away.

use cleave_domain::DeviceId;
use cleave_fleet::Registration;
use tracing::warn;

/// Logs a mismatch between a worker and those that are connected.
pub(crate) fn warn_of_mismatch<'a>(
    joining: &Registration,
    connected: impl Iterator<Item = &'a Registration> + Clone,
) {
    warn_of_fingerprint(joining, connected.clone());
    warn_of_shared_gpu(joining, connected);
}

/// Blocks go only between equal fingerprints. A rolling upgrade therefore never mixes two
/// revisions, and a worker with the wrong weights would otherwise be useless without any message.
fn warn_of_fingerprint<'a>(
    joining: &Registration,
    mut connected: impl Iterator<Item = &'a Registration> + Clone,
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
    joining: &Registration,
    mut connected: impl Iterator<Item = &'a Registration>,
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

/// Whether two workers of different processes have the whole of one GPU. Workers of one process
/// have no data address.
fn shares_gpu(one: &Registration, other: &Registration) -> bool {
    let gpu = |of: &Registration| {
        let device = of.description.device.clone();
        device.filter(|DeviceId(name)| name.starts_with("gpu-"))
    };
    let is_apart = !one.data_address.is_empty() || !other.data_address.is_empty();
    is_apart && gpu(one).is_some() && gpu(one) == gpu(other)
}
