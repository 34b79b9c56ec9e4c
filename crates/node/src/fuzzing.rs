//! What workers, routers and operators hand to a node, for tests and libFuzzer.

use crate::line::{Introduction, LinkState};
use crate::policy;
use crate::wire::proto;
use cleave_domain::{Emission, HandoffId, Order, Report};
use prost::Message;
use std::fmt::Debug;

/// A policy's text.
///
/// # Panics
/// If a text is refused without a reason, or with one whose place is not in it.
pub fn policy(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else {
        return;
    };
    let Err(flaws) = policy::parse(text) else {
        return;
    };
    assert!(!flaws.is_empty(), "refused without a reason");
    let lines = text.split('\n').count() as u64;
    for flaw in flaws {
        assert!(flaw.line <= lines + 1, "{flaw:?} of {lines} lines");
        assert!(!flaw.says.is_empty(), "{flaw:?}");
    }
}

/// A message of one kind, which the first byte chooses, from the other end of a gRPC stream.
///
/// # Panics
/// If what was understood would travel as something else.
pub fn grpc(bytes: &[u8]) {
    let Some((kind, message)) = bytes.split_first() else {
        return;
    };
    match kind % 5 {
        0 => same::<proto::Hello, Introduction>(message),
        1 => same::<proto::Report, Report>(message),
        2 => same::<proto::Order, Order>(message),
        3 => same::<proto::Tokens, (HandoffId, Emission)>(message),
        _ => same::<proto::LinkState, LinkState>(message),
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
    // By its words: a number that is none is not equal to itself.
    assert_eq!(format!("{read:?}"), format!("{again:?}"));
}
