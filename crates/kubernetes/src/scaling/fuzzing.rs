//! Questions of orchestrators about scaling, for tests and libFuzzer.
//!
//! Owns: reading drawn bytes as such questions, and what must hold for the answers. Never opens a
//! port, or decides how many workers there are to be. Invariant: each pool has another number, so
//! that an answer for the wrong pool is noticed.

use super::external::{SelectorTerm, parse_selector};
use super::keda::proto::GetMetricsRequest;
use super::keda::proto::external_scaler_server::ExternalScaler;
use super::keda::{ScalerService, pool};
use cleave_domain::{FleetTarget, PoolCounts, ScalingMode};
use cleave_fleet::{ScalingStatus, ScalingStatusReader};
use cleave_planner::scaling::ScalerDecision;
use futures::FutureExt;
use prost::Message;
use tokio::sync::watch;
use tonic::Request;

/// A different number of workers for each pool.
const WORKERS: PoolCounts = PoolCounts {
    prefill: 3,
    decode: 5,
    both: 7,
};

/// A request of KEDA for a metric's value.
///
/// # Panics
/// If another pool's number is answered, or under a name that was not asked for.
pub(crate) fn metrics(bytes: &[u8]) {
    let Ok(request) = GetMetricsRequest::decode(bytes) else {
        return;
    };
    let target = FleetTarget {
        workers: WORKERS,
        ..FleetTarget::default()
    };
    let decision = ScalerDecision {
        wanted: target,
        ..ScalerDecision::default()
    };
    let (_status_sender, status) =
        watch::channel(ScalingStatus::Decided(ScalingMode::Act, decision).into());
    let service = ScalerService::new(ScalingStatusReader::new(status));
    let answer = service.get_metrics(Request::new(request.clone()));
    let answer = answer.now_or_never().expect("it waits for nobody");
    let object = request.scaled_object_ref.unwrap_or_default();
    let Ok(answer) = answer else {
        return;
    };
    let values = answer.into_inner().metric_values;
    let [value] = values.as_slice() else {
        panic!("{values:?}");
    };
    let (name, role) = pool(&object).expect("a pool was answered for");
    assert_eq!(object.scaler_metadata["pool"], name);
    assert_eq!(value.metric_value, i64::from(WORKERS.for_role(role)));
    assert_eq!(value.metric_name, request.metric_name);
}

/// A label selector of Kubernetes.
///
/// # Panics
/// If a selector that was understood reads differently once it is written as Kubernetes writes it.
pub(crate) fn selector(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else {
        return;
    };
    let Ok(read) = parse_selector(text) else {
        return;
    };
    let written: Vec<String> = read.iter().map(term_text).collect();
    let again = parse_selector(&written.join(",")).expect("what is written is understood");
    assert_eq!(again, read);
}

fn term_text(term: &SelectorTerm) -> String {
    let SelectorTerm {
        key,
        values,
        is_negated: not,
    } = term;
    match (values, not) {
        (Some(values), false) => format!("{key} in ({})", values.join(",")),
        (Some(values), true) => format!("{key} notin ({})", values.join(",")),
        (None, false) => key.clone(),
        (None, true) => format!("!{key}"),
    }
}

/// Requests of KEDA and of an API server, for [`metrics`].
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use super::keda::proto::ScaledObjectRef;
    let encoded_request = |pool: &str, metric_name: &str| {
        let object = ScaledObjectRef {
            name: "cleave".to_owned(),
            namespace: "models".to_owned(),
            scaler_metadata: [("pool".to_owned(), pool.to_owned())].into(),
        };
        let request = GetMetricsRequest {
            scaled_object_ref: Some(object),
            metric_name: metric_name.to_owned(),
        };
        request.encode_to_vec()
    };
    vec![
        encoded_request("decode", "s0-cleave-workers-decode"),
        encoded_request("both", ""),
        encoded_request("queue", "cleave-workers-prefill"),
    ]
}
