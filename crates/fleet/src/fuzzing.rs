//! Messages of workers and routers, for tests and libFuzzer.

use crate::connection::{LinkState, Registration};
use crate::wire::{Bounded, decode, encode};
use cleave_domain::{Emission, HandoffId, Order, Report, WorkerRef};
use cleave_telemetry::RequestContext;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::sync::Arc;

/// Kinds of messages that [`grpc`] distinguishes.
const KINDS: u8 = 7;

/// A message of one kind, which the first byte chooses, as the other end of a fleet's stream would
/// send it.
///
/// # Panics
/// If a message that was understood would be encoded as another one.
pub fn grpc(bytes: &[u8]) {
    let Some((kind, message)) = bytes.split_first() else {
        return;
    };
    match kind % KINDS {
        0 => same::<Registration>(message),
        1 => same::<Report>(message),
        2 => same::<(Order, Option<Arc<RequestContext>>)>(message),
        3 => same::<Vec<(HandoffId, Emission)>>(message),
        4 => same::<LinkState>(message),
        5 => same::<(HandoffId, [u8; 32])>(message),
        _ => same::<(WorkerRef, String)>(message),
    }
}

fn same<T: Serialize + DeserializeOwned + Bounded + Debug>(bytes: &[u8]) {
    let Ok(read) = decode::<T>("sample", bytes) else {
        return;
    };
    let sent = encode(&read);
    let again = decode::<T>("sample", &sent).expect("what was understood is understood again");
    // Compared by text, since NaN is not equal to itself, and by bytes, since not all fields are
    // printed.
    assert_eq!(format!("{read:?}"), format!("{again:?}"));
    assert_eq!(sent, encode(&again));
}
