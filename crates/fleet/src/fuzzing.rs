//! Messages of workers and routers, for tests and libFuzzer.

use crate::connection::{LinkState, Registration};
use crate::wire::proto;
use cleave_domain::{Emission, HandoffId, Order, Report};
use cleave_telemetry::RequestContext;
use cleave_transfer::WriteGrant;
use prost::Message;
use std::fmt::Debug;

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
        0 => same::<proto::Hello, Registration>(message),
        1 => same::<proto::Report, Report>(message),
        2 => same::<proto::Order, Order>(message),
        3 => same::<proto::Tokens, (HandoffId, Emission)>(message),
        4 => same::<proto::LinkState, LinkState>(message),
        5 => same::<proto::Pass, (HandoffId, WriteGrant)>(message),
        _ => context(message),
    }
}

/// A request's id and trace. Decoding never fails: an invalid field counts as absent.
fn context(bytes: &[u8]) {
    if let Ok(message) = proto::Mark::decode(bytes) {
        let read = RequestContext::from(message);
        assert_eq!(RequestContext::from(proto::Mark::from(&read)), read);
    }
}

fn same<M, T>(bytes: &[u8])
where
    M: Message + Default + From<T>,
    T: TryFrom<M> + Clone + Debug,
    T::Error: Debug,
{
    let Ok(message) = M::decode(bytes) else {
        return;
    };
    let Ok(read) = T::try_from(message) else {
        return;
    };
    let sent = M::from(read.clone()).encode_to_vec();
    let again = M::decode(sent.as_slice()).expect("what was encoded is a message");
    let again = T::try_from(again).expect("what was understood once is understood again");
    // Compared by text, since NaN is not equal to itself, and by bytes, since not all fields are
    // printed.
    assert_eq!(format!("{read:?}"), format!("{again:?}"));
    assert_eq!(sent, M::from(again).encode_to_vec());
}
