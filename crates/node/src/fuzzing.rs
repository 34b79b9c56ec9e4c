//! What workers, routers and operators hand to a node, for tests and libFuzzer.

use crate::line::{Introduction, LinkState};
use crate::trace::Mark;
use crate::wire::proto;
use crate::{picker, policy, scaling};
use cleave_domain::{Emission, HandoffId, Order, Report};
use cleave_transfer::Pass;
use prost::Message;
use std::fmt::Debug;

/// Kinds of messages that [`grpc`] tells apart.
const KINDS: u8 = 10;

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
    // Lines of YAML end in either sign, or in both.
    let lines = text.split(['\n', '\r']).count() as u64;
    for flaw in flaws {
        assert!(flaw.line <= lines + 1, "{flaw:?} of {lines} lines");
        assert!(!flaw.says.is_empty(), "{flaw:?}");
    }
}

/// A message of one kind, which the first byte chooses: from the other end of a fleet's stream, a proxy or an
/// orchestrator.
///
/// # Panics
/// If what was understood would travel as something else, or is answered as something else.
pub fn grpc(bytes: &[u8]) {
    let Some((kind, message)) = bytes.split_first() else {
        return;
    };
    match kind % KINDS {
        0 => same::<proto::Hello, Introduction>(message),
        1 => same::<proto::Report, Report>(message),
        2 => same::<proto::Order, Order>(message),
        3 => same::<proto::Tokens, (HandoffId, Emission)>(message),
        4 => same::<proto::LinkState, LinkState>(message),
        5 => same::<proto::Pass, (HandoffId, Pass)>(message),
        6 => mark(message),
        7 => picker::fuzzing::conversation(message),
        8 => scaling::fuzzing::metrics(message),
        _ => scaling::fuzzing::selector(message),
    }
}

/// A request's name and trace, which is never wrong: what cannot be one is none.
fn mark(bytes: &[u8]) {
    if let Ok(message) = proto::Mark::decode(bytes) {
        let read = Mark::from(message);
        assert_eq!(Mark::from(proto::Mark::from(&read)), read);
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
    // By its words: a number that is none is not equal to itself. By its bytes: not all words are shown.
    assert_eq!(format!("{read:?}"), format!("{again:?}"));
    assert_eq!(sent, M::from(again).encode_to_vec());
}
