//! The codec between router and worker: a frame of protobuf closed by a checksum.
//!
//! Owns: the nine bytes after every message: the key of a protobuf field that no message has
//! ([`CHECK_KEY`]: number 15, eight bytes), then XXH3-64 of everything before that key. Never
//! passes on a message whose checksum does not match. Invariant: a message with any flipped bit is
//! an error, and never another message; and nothing is decoded before its checksum, its length and
//! the number of its items are checked, since an empty item of two bytes costs a hundred in memory.
//!
//! The checksum is a field at the end because earlier releases skip unknown fields: they can still
//! read which protocol the other side speaks, and report it. A message of such a release has no
//! checksum, and is refused with an error of its own. Only the last nine bytes count: a field of
//! that key inside a message is damage like any other, since no sender writes one.

use super::proto;
use bytes::{Buf, BufMut, Bytes};
use cleave_kv::checksum;
use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Field 15 of eight bytes; the messages' own fields stay below.
const CHECK_KEY: u8 = 15 << 3 | 1;
/// The key and the checksum.
const CHECK_BYTES: usize = 9;

/// A batch takes no further message that would make it longer; a longer message travels alone.
pub(crate) const BATCH_BYTES_MAX: usize = 64 << 10;
/// The longest batch that is read: its own frame included.
const BATCH_READ_MAX: usize = BATCH_BYTES_MAX + 64;
/// The longest hello: a tokenizer of up to 64 MiB and templates.
pub(crate) const HELLO_BYTES_MAX: usize = 96 << 20;
/// The longest order: a prompt of a few million tokens.
pub(crate) const ORDER_BYTES_MAX: usize = 32 << 20;
/// The longest message of output tokens: the scores of a long prompt.
pub(crate) const EMISSIONS_BYTES_MAX: usize = 32 << 20;
/// The longest message of any other kind: a report of some 400,000 cached blocks.
const OTHER_BYTES_MAX: usize = 8 << 20;
/// Items of a message at most: output tokens of one step, or fields of a hello.
const ITEMS_MAX: usize = 1 << 18;

/// The reason why a message was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MessageCheckError {
    /// The message ends without a checksum.
    #[error("a message has no checksum: does the other side run another release?")]
    Missing,
    /// The checksum does not match.
    #[error("a message was damaged on the way ({0}): its checksum does not fit")]
    Damaged(&'static str),
    /// The checksum matches, and the message is longer than any of its kind.
    #[error("a message ({0}) is too long: {1} bytes, and at most {2} are read")]
    TooLong(&'static str, usize, usize),
    /// The checksum matches, and the message has more items than any of its kind.
    #[error("a message ({0}) has more than {ITEMS_MAX} items")]
    TooMany(&'static str),
    /// The checksum matches, and the content is no message.
    #[error("a message is no protobuf: does the other side run another release?")]
    Unreadable,
}

impl From<MessageCheckError> for Status {
    fn from(error: MessageCheckError) -> Self {
        Self::data_loss(error.to_string())
    }
}

/// Limits of a kind of message, known before it is decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageKind {
    /// The name of the kind, for errors.
    name: &'static str,
    content: MessageContent,
    bytes_max: usize,
}

/// The form of the one field of a message.
#[derive(Clone, Copy, Debug)]
enum MessageContent {
    /// The fields of a protobuf message.
    Fields,
    /// One value in the encoding of its type.
    Value,
    /// An encoded list, which begins with the number of its items.
    List,
}

const fn kind(name: &'static str, content: MessageContent, bytes_max: usize) -> MessageKind {
    MessageKind {
        name,
        content,
        bytes_max,
    }
}

/// A message of one of the two directions: one field, whose number is its kind.
pub(crate) trait FleetMessage: Message + Default {
    /// The kind of that number.
    fn kind(field: u32) -> Option<MessageKind>;
}

impl FleetMessage for proto::Upward {
    fn kind(field: u32) -> Option<MessageKind> {
        use MessageContent::{Fields, List, Value};
        Some(match field {
            1 => kind("hello", Fields, HELLO_BYTES_MAX),
            2 => kind("report", Value, OTHER_BYTES_MAX),
            3 => kind("emissions", List, EMISSIONS_BYTES_MAX),
            4 => kind("beat", Fields, OTHER_BYTES_MAX),
            5 => kind("link", Value, OTHER_BYTES_MAX),
            6 => kind("pass", Value, OTHER_BYTES_MAX),
            7 => kind("batch", Fields, BATCH_READ_MAX),
            8 => kind("adapter answer", Value, OTHER_BYTES_MAX),
            _ => return None,
        })
    }
}

impl FleetMessage for proto::Downward {
    fn kind(field: u32) -> Option<MessageKind> {
        use MessageContent::{Fields, Value};
        Some(match field {
            1 => kind("greeting", Fields, OTHER_BYTES_MAX),
            2 => kind("welcome", Fields, OTHER_BYTES_MAX),
            3 => kind("rejection", Fields, OTHER_BYTES_MAX),
            4 => kind("order", Value, ORDER_BYTES_MAX),
            5 => kind("peer", Value, OTHER_BYTES_MAX),
            6 => kind("beat", Fields, OTHER_BYTES_MAX),
            7 => kind("peer gone", Value, OTHER_BYTES_MAX),
            8 => kind("name taken", Value, OTHER_BYTES_MAX),
            9 => kind("pass", Value, OTHER_BYTES_MAX),
            10 => kind("batch", Fields, BATCH_READ_MAX),
            11 => kind("adapter", Value, OTHER_BYTES_MAX),
            _ => return None,
        })
    }
}

/// The kind that the first key names; damaged bytes may name none. A key of more than one byte is
/// none of ours: all numbers are below 15.
fn first_kind<M: FleetMessage>(message: &[u8]) -> Option<MessageKind> {
    let key = message.first().filter(|key| key.is_ascii())?;
    M::kind(u32::from(key >> 3))
}

/// Counts the items of the one field of `message`. A second field beside it would be read and
/// dropped; no sender writes one.
fn count_items(content: MessageContent, mut message: &[u8]) -> Option<usize> {
    if message.is_empty() {
        return Some(0);
    }
    let (_, wire) = decode_key(&mut message).ok()?;
    let length = decode_varint(&mut message).ok()?;
    if wire != WireType::LengthDelimited || length != message.len() as u64 {
        return None;
    }
    match content {
        MessageContent::Fields => {
            let mut count = 0;
            while !message.is_empty() {
                let (field, wire) = decode_key(&mut message).ok()?;
                skip_field(wire, field, &mut message, DecodeContext::default()).ok()?;
                count += 1;
            }
            Some(count)
        }
        MessageContent::Value => Some(1),
        MessageContent::List => usize::try_from(decode_varint(&mut message).ok()?).ok(),
    }
}

/// Appends a message and its checksum.
pub(crate) fn encode_checked(message: &impl Message) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(message.encoded_len() + CHECK_BYTES);
    message
        .encode(&mut bytes)
        .expect("a vector grows as it is filled");
    let check = checksum(&bytes);
    bytes.push(CHECK_KEY);
    bytes.put_u64_le(check);
    bytes
}

/// Decodes a message whose checksum matches.
pub(crate) fn decode_checked<M: FleetMessage>(bytes: &[u8]) -> Result<M, MessageCheckError> {
    let (message, check) = match bytes.split_last_chunk::<CHECK_BYTES>() {
        Some((message, [CHECK_KEY, check @ ..])) => (message, u64::from_le_bytes(*check)),
        _ => return Err(MessageCheckError::Missing),
    };
    let kind = first_kind::<M>(message);
    let name = kind.map_or("unreadable", |kind| kind.name);
    if checksum(message) != check {
        return Err(MessageCheckError::Damaged(name));
    }
    let Some(kind) = kind else {
        return match message {
            [] => Ok(M::default()),
            _ => Err(MessageCheckError::Unreadable),
        };
    };
    let bytes_max = kind.bytes_max;
    if message.len() > bytes_max {
        return Err(MessageCheckError::TooLong(name, message.len(), bytes_max));
    }
    match count_items(kind.content, message) {
        Some(count) if count <= ITEMS_MAX => {}
        Some(_) => return Err(MessageCheckError::TooMany(name)),
        None => return Err(MessageCheckError::Unreadable),
    }
    M::decode(message).map_err(|_| MessageCheckError::Unreadable)
}

#[derive(Debug)]
pub(crate) struct CheckedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for CheckedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for CheckedCodec<T, U>
where
    T: FleetMessage + Send + 'static,
    U: FleetMessage + Send + 'static,
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

#[derive(Debug)]
pub(crate) struct CheckedEncoder<T>(PhantomData<T>);

impl<T: FleetMessage> Encoder for CheckedEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, message: T, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(Bytes::from(encode_checked(&message)));
        Ok(())
    }
}

#[derive(Debug)]
pub(crate) struct CheckedDecoder<U>(PhantomData<U>);

impl<U: FleetMessage> Decoder for CheckedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, bytes: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let bytes = bytes.copy_to_bytes(bytes.remaining());
        Ok(Some(decode_checked(&bytes)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::encode;
    use crate::wire::strategies::{downward, upward};
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::fmt::Debug;

    /// Flips every bit of an encoded message, one at a time. Very long ones are tried in every
    /// byte.
    fn flip_each_bit<M: FleetMessage + PartialEq + Debug>(message: &M) {
        let mut bytes = encode_checked(message);
        assert_eq!(decode_checked::<M>(&bytes).as_ref(), Ok(message));
        let bits = if bytes.len() > 4096 { 1 } else { 8 };
        for at in 0..bytes.len() {
            for bit in 0..bits {
                let bit = (bit + at) % 8;
                bytes[at] ^= 1 << bit;
                let read = decode_checked::<M>(&bytes);
                assert!(read.is_err(), "bit {bit} of byte {at}: {read:?}");
                bytes[at] ^= 1 << bit;
            }
        }
    }

    proptest! {
        // Invariant: I50.
        #[test]
        fn a_flipped_bit_is_always_an_error(up in upward(), down in downward()) {
            flip_each_bit(&up);
            flip_each_bit(&down);
        }

        #[test]
        fn a_truncated_message_is_an_error(down in downward(), keep in 0usize..10_000) {
            let bytes = encode_checked(&down);
            prop_assert!(decode_checked::<proto::Downward>(&bytes[..keep % bytes.len()]).is_err());
        }

        #[test]
        fn bytes_from_outside_are_an_error_and_never_a_panic(bytes in vec(any::<u8>(), 0..200)) {
            prop_assert!(decode_checked::<proto::Upward>(&bytes).is_err());
        }
    }

    #[test]
    fn a_message_is_measured_before_it_is_decoded() {
        use proto::upward::Kind;
        let up = |kind| encode_checked(&proto::Upward { kind: Some(kind) });
        let empty = proto::Upward::default();
        let messages = vec![empty; BATCH_BYTES_MAX];
        let batch = up(Kind::Batch(proto::UpwardBatch { messages }));
        let error = decode_checked::<proto::Upward>(&batch).unwrap_err();
        assert!(
            matches!(error, MessageCheckError::TooLong("batch", _, _)),
            "{error}"
        );
        let tokens = |count| up(Kind::Emissions(encode(&vec![0_u8; count])));
        assert!(decode_checked::<proto::Upward>(&tokens(ITEMS_MAX)).is_ok());
        let error = decode_checked::<proto::Upward>(&tokens(ITEMS_MAX + 1)).unwrap_err();
        assert_eq!(error, MessageCheckError::TooMany("emissions"));
    }

    /// Otherwise a longer key would hide the kind, and with it the limits.
    #[test]
    fn a_key_of_two_bytes_is_refused() {
        let list = proto::Upward {
            kind: Some(proto::upward::Kind::Emissions(encode(&Vec::<u8>::new()))),
        };
        let message = list.encode_to_vec();
        let key = [message[0] | 0x80, 0];
        let mut bytes = [&key[..], &message[1..]].concat();
        assert_eq!(proto::Upward::decode(&bytes[..]).as_ref(), Ok(&list));
        let check = checksum(&bytes);
        bytes.push(CHECK_KEY);
        bytes.put_u64_le(check);
        let error = decode_checked::<proto::Upward>(&bytes).unwrap_err();
        assert_eq!(error, MessageCheckError::Unreadable);
    }

    #[test]
    fn a_second_kind_in_one_message_is_refused() {
        let mut bytes = beat().encode_to_vec();
        bytes.extend(beat().encode_to_vec());
        let check = checksum(&bytes);
        bytes.push(CHECK_KEY);
        bytes.put_u64_le(check);
        let error = decode_checked::<proto::Upward>(&bytes).unwrap_err();
        assert_eq!(error, MessageCheckError::Unreadable);
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
        assert_eq!(
            decode_checked::<proto::Downward>(&old),
            Err(MessageCheckError::Missing)
        );
        assert_eq!(
            decode_checked::<proto::Downward>(&[]),
            Err(MessageCheckError::Missing)
        );
        let read = proto::Downward::decode(encode_checked(&greeting).as_slice());
        assert_eq!(read.unwrap(), greeting, "older releases skip the checksum");
    }

    #[test]
    fn an_error_names_the_kind_of_message() {
        let mut bytes = encode_checked(&beat());
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        let error = decode_checked::<proto::Upward>(&bytes).unwrap_err();
        assert_eq!(error, MessageCheckError::Damaged("beat"));
        let status = Status::from(error);
        assert_eq!(status.code(), tonic::Code::DataLoss);
        assert!(status.message().contains("damaged on the way (beat)"));
    }

    /// The checksum is the last field. One inside is read as part of the message, which has no such
    /// field.
    #[test]
    fn only_the_last_checksum_counts() {
        let mut bytes = encode_checked(&beat());
        let inner = bytes.clone();
        bytes.extend(&inner[inner.len() - CHECK_BYTES..]);
        let error = decode_checked::<proto::Upward>(&bytes).unwrap_err();
        assert_eq!(error, MessageCheckError::Damaged("beat"));
        let twice = [inner, encode_checked(&beat())].concat();
        assert!(decode_checked::<proto::Upward>(&twice).is_err());
    }
}
