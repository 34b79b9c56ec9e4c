//! Requests of proxies and orchestrators, for tests and libFuzzer.

use crate::{picker, scaling};

/// Kinds of requests that [`kubernetes`] distinguishes.
const KINDS: u8 = 3;

/// A request of one kind, which the first byte chooses, as a proxy or an orchestrator would send
/// it.
///
/// # Panics
/// If a request that was understood would be answered as another one.
pub fn kubernetes(bytes: &[u8]) {
    let Some((kind, request)) = bytes.split_first() else {
        return;
    };
    match kind % KINDS {
        0 => picker::fuzzing::conversation(request),
        1 => scaling::fuzzing::metrics(request),
        _ => scaling::fuzzing::selector(request),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_request_is_refused_or_answered_as_itself() {
        let mut samples = Vec::new();
        let mut keep = |kind: u8, request: &[u8]| samples.push([&[kind], request].concat());
        for conversation in picker::fuzzing::samples() {
            keep(0, &conversation);
        }
        for request in scaling::fuzzing::samples() {
            keep(1, &request);
        }
        for selector in ["pool=decode", "pool in (decode, both),!app", "a.b/c!=d"] {
            keep(2, selector.as_bytes());
        }
        cleave_fuzz::check_samples("kubernetes", &samples, 10_000, kubernetes);
    }
}
