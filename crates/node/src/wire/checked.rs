//! The codec between router and worker: protobuf closed by a checksum.
//!
//! Owns: the nine bytes behind every message: the key of a protobuf field that no message has
//! ([`CHECK_KEY`]: number 15, eight bytes), then XXH3-64 of everything before that key. Never: gives a
//! message on whose checksum does not fit. Invariant: a message in which any bit was flipped is an
//! error, and never another message.
//!
//! The checksum is a field at the end because releases before it skip fields that they do not know:
//! they still read which protocol the other side speaks, and say so. A message of such a release has no
//! checksum, and is refused with words of its own. Only the last nine bytes count: a field of that key
//! inside a message is damage like any other, since nobody writes one.

use super::proto;
use bytes::{Buf, BufMut, Bytes};
use cleave_kv::checksum;
use prost::Message;
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Field 15 of eight bytes; the messages' own fields stay below.
const CHECK_KEY: u8 = 15 << 3 | 1;
/// The key and the checksum.
const CHECK_BYTES: usize = 9;

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CheckError {
    /// It ends without one.
    #[error("a message has no checksum: does the other side run another release?")]
    Missing,
    /// It does not fit.
    #[error("a message was damaged on the way ({0}): its checksum does not fit")]
    Damaged(&'static str),
    /// It fits, and what it closes is no message.
    #[error("a message is no protobuf: does the other side run another release?")]
    Unreadable,
}

impl From<CheckError> for Status {
    fn from(error: CheckError) -> Self {
        Self::data_loss(error.to_string())
    }
}

/// A message of one of the two directions.
pub(crate) trait Directed: Message + Default {
    /// The kind of message, for people.
    fn kind_name(&self) -> &'static str;
}

impl Directed for proto::Upward {
    fn kind_name(&self) -> &'static str {
        use proto::upward::Kind;
        match &self.kind {
            Some(Kind::Hello(_)) => "hello",
            Some(Kind::Report(_)) => "report",
            Some(Kind::Emissions(_)) => "emissions",
            Some(Kind::Beat(_)) => "beat",
            Some(Kind::Link(_)) => "link",
            Some(Kind::Pass(_)) => "pass",
            Some(Kind::Batch(_)) => "batch",
            None => "empty",
        }
    }
}

impl Directed for proto::Downward {
    fn kind_name(&self) -> &'static str {
        use proto::downward::Kind;
        match &self.kind {
            Some(Kind::Greeting(_)) => "greeting",
            Some(Kind::Welcome(_)) => "welcome",
            Some(Kind::Rejection(_)) => "rejection",
            Some(Kind::Order(_)) => "order",
            Some(Kind::Peer(_)) => "peer",
            Some(Kind::Beat(_)) => "beat",
            Some(Kind::PeerGone(_)) => "peer gone",
            Some(Kind::NameTaken(_)) => "name taken",
            Some(Kind::Pass(_)) => "pass",
            Some(Kind::Batch(_)) => "batch",
            None => "empty",
        }
    }
}

/// Appends a message and its checksum.
pub(crate) fn close(message: &impl Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(message.encoded_len() + CHECK_BYTES);
    message
        .encode(&mut bytes)
        .expect("a vector grows as it is filled");
    let check = checksum(&bytes);
    bytes.push(CHECK_KEY);
    bytes.put_u64_le(check);
    bytes
}

/// Reads a message whose checksum fits.
pub(crate) fn open<M: Directed>(bytes: &[u8]) -> Result<M, CheckError> {
    let (message, check) = match bytes.split_last_chunk::<CHECK_BYTES>() {
        Some((message, [CHECK_KEY, check @ ..])) => (message, u64::from_le_bytes(*check)),
        _ => return Err(CheckError::Missing),
    };
    let read = M::decode(message);
    if checksum(message) != check {
        // As far as it can still be read.
        let kind = read.as_ref().map_or("unreadable", M::kind_name);
        return Err(CheckError::Damaged(kind));
    }
    read.map_err(|_| CheckError::Unreadable)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct CheckedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CheckedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CheckedCodec<T, U>
where
    T: Directed + Send + 'static,
    U: Directed + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = CheckedEncoder<T>;
    type Decoder = CheckedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        CheckedEncoder(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        CheckedDecoder(PhantomData)
    }
}

/// The writing half.
#[derive(Debug)]
pub(crate) struct CheckedEncoder<T>(PhantomData<T>);

impl<T: Directed> Encoder for CheckedEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, message: T, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(Bytes::from(close(&message)));
        Ok(())
    }
}

/// The reading half.
#[derive(Debug)]
pub(crate) struct CheckedDecoder<U>(PhantomData<U>);

impl<U: Directed> Decoder for CheckedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        Ok(Some(open(&bytes)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::drawn::{emission, handoff, introduction, link_state, order, report, worker};
    use cleave_domain::{Order, Report, WorkerRef};
    use cleave_transfer::Pass;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::strategy::Union;
    use std::fmt::Debug;

    // Boxed: the strategies together would not fit a test's stack.
    fn upward() -> impl Strategy<Value = proto::Upward> {
        use proto::upward::Kind;
        let tokens = (handoff(), emission()).prop_map(proto::Tokens::from);
        let pass = (handoff(), any::<[u8; 32]>().prop_map(Pass));
        let kinds: [BoxedStrategy<Kind>; 7] = [
            introduction()
                .prop_map(|hello| Kind::Hello(hello.into()))
                .boxed(),
            report()
                .prop_map(|report| Kind::Report(report.into()))
                .boxed(),
            vec(tokens, 0..3)
                .prop_map(|tokens| Kind::Emissions(proto::Emissions { tokens }))
                .boxed(),
            any::<u64>()
                .prop_map(|received| Kind::Beat(proto::Beat { received }))
                .boxed(),
            link_state()
                .prop_map(|link| Kind::Link(link.into()))
                .boxed(),
            pass.prop_map(|pass| Kind::Pass(pass.into())).boxed(),
            vec(report(), 0..3)
                .prop_map(|reports| {
                    let message = |report: Report| proto::Upward {
                        kind: Some(Kind::Report(report.into())),
                    };
                    let messages = reports.into_iter().map(message).collect();
                    Kind::Batch(proto::UpwardBatch { messages })
                })
                .boxed(),
        ];
        Union::new(kinds).prop_map(|kind| proto::Upward { kind: Some(kind) })
    }

    fn downward() -> impl Strategy<Value = proto::Downward> {
        use proto::downward::Kind;
        let pass = (handoff(), any::<[u8; 32]>().prop_map(Pass));
        let greeting = (any::<u32>(), any::<u64>(), any::<u64>());
        let address = || "[a-z0-9:.]{0,20}";
        let greet = |(protocol, router, silence_nanos)| {
            Kind::Greeting(proto::Greeting {
                protocol,
                router,
                silence_nanos,
            })
        };
        let peer = |(worker, data_address): (WorkerRef, String)| {
            let worker = Some(worker.into());
            Kind::Peer(proto::Peer {
                worker,
                data_address,
            })
        };
        let kinds: [BoxedStrategy<Kind>; 10] = [
            greeting.prop_map(greet).boxed(),
            Just(Kind::Welcome(proto::Welcome {})).boxed(),
            ".{0,40}"
                .prop_map(|reason| Kind::Rejection(proto::Rejection { reason }))
                .boxed(),
            order().prop_map(|order| Kind::Order(order.into())).boxed(),
            (worker(), address()).prop_map(peer).boxed(),
            any::<u64>()
                .prop_map(|received| Kind::Beat(proto::Beat { received }))
                .boxed(),
            worker()
                .prop_map(|worker| Kind::PeerGone(worker.into()))
                .boxed(),
            address()
                .prop_map(|data_address| Kind::NameTaken(proto::NameTaken { data_address }))
                .boxed(),
            pass.prop_map(|pass| Kind::Pass(pass.into())).boxed(),
            vec(order(), 0..3)
                .prop_map(|orders| {
                    let message = |order: Order| proto::Downward {
                        kind: Some(Kind::Order(order.into())),
                    };
                    let messages = orders.into_iter().map(message).collect();
                    Kind::Batch(proto::DownwardBatch { messages })
                })
                .boxed(),
        ];
        Union::new(kinds).prop_map(|kind| proto::Downward { kind: Some(kind) })
    }

    /// Flips every bit of an encoded message, one at a time. Very long ones are tried in every byte.
    fn flip_each_bit<M: Directed + PartialEq + Debug>(message: &M) {
        let mut bytes = close(message);
        assert_eq!(open::<M>(&bytes).as_ref(), Ok(message));
        let bits = if bytes.len() > 4096 { 1 } else { 8 };
        for at in 0..bytes.len() {
            for bit in 0..bits {
                let bit = (bit + at) % 8;
                bytes[at] ^= 1 << bit;
                let read = open::<M>(&bytes);
                assert!(read.is_err(), "bit {bit} of byte {at}: {read:?}");
                bytes[at] ^= 1 << bit;
            }
        }
    }

    proptest! {
        #[test]
        fn one_flipped_bit_is_an_error_and_never_another_message(up in upward(), down in downward()) {
            flip_each_bit(&up);
            flip_each_bit(&down);
        }

        #[test]
        fn a_message_cut_short_is_refused(down in downward(), keep in 0usize..10_000) {
            let bytes = close(&down);
            prop_assert!(open::<proto::Downward>(&bytes[..keep % bytes.len()]).is_err());
        }

        #[test]
        fn bytes_from_outside_are_an_error_and_never_a_panic(bytes in vec(any::<u8>(), 0..200)) {
            prop_assert!(open::<proto::Upward>(&bytes).is_err());
        }
    }

    fn beat() -> proto::Upward {
        use proto::upward::Kind;
        let kind = Some(Kind::Beat(proto::Beat { received: 0 }));
        proto::Upward { kind }
    }

    #[test]
    fn a_release_without_checksums_is_named_and_reads_the_protocol() {
        let greeting = proto::Greeting {
            protocol: 5,
            ..proto::Greeting::default()
        };
        let kind = Some(proto::downward::Kind::Greeting(greeting));
        let greeting = proto::Downward { kind };
        let old = greeting.encode_to_vec();
        assert_eq!(open::<proto::Downward>(&old), Err(CheckError::Missing));
        assert_eq!(open::<proto::Downward>(&[]), Err(CheckError::Missing));
        let read = proto::Downward::decode(close(&greeting).as_slice());
        assert_eq!(read.unwrap(), greeting, "older releases skip the checksum");
    }

    #[test]
    fn an_error_names_the_kind_of_message() {
        let mut bytes = close(&beat());
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        let error = open::<proto::Upward>(&bytes).unwrap_err();
        assert_eq!(error, CheckError::Damaged("beat"));
        let status = Status::from(error);
        assert_eq!(status.code(), tonic::Code::DataLoss);
        assert!(status.message().contains("damaged on the way (beat)"));
    }

    /// The checksum is the last field. One inside is read as part of the message, which has no such field.
    #[test]
    fn a_second_checksum_closes_nothing() {
        let mut bytes = close(&beat());
        let inner = bytes.clone();
        bytes.extend(&inner[inner.len() - CHECK_BYTES..]);
        let error = open::<proto::Upward>(&bytes).unwrap_err();
        assert_eq!(error, CheckError::Damaged("beat"));
        let twice = [inner, close(&beat())].concat();
        assert!(open::<proto::Upward>(&twice).is_err());
    }
}
