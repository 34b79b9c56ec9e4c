//! Checks the decoder of link messages; for tests and libFuzzer.

use crate::wire::{
    CHECK_BYTES, FRAME, FrameHead, HEADER_BYTES, LinkMessage, LinkWireError, MessageHeader, PROBE,
};
use bytes::BytesMut;

const BLOCK_BYTES: u32 = 4096;

/// Reads messages as a link does until one is invalid: each as it is, and then with a correct
/// checksum, so that the checks behind the checksum are reached too.
///
/// # Panics
/// If a message that was understood would be encoded as another one.
pub fn frames(mut bytes: &[u8]) {
    while let Ok(header) = MessageHeader::of(bytes, BLOCK_BYTES) {
        let checked_len = HEADER_BYTES + header.checksummed_len();
        let Some((_, rest)) = bytes.split_at_checked(HEADER_BYTES + header.body_len) else {
            return;
        };
        let mut message = bytes[..checked_len].to_vec();
        bytes = rest;
        let as_received = read(&header, &message);
        let received = message.clone();
        set_checksum(&mut message);
        let closed = read(&header, &message);
        if message == received {
            assert_eq!(as_received, closed);
        } else {
            assert!(as_received.is_err(), "{as_received:?}");
        }
        let Ok(closed) = closed else {
            return;
        };
        if let Some(read) = closed {
            let mut written = BytesMut::new();
            read.encode(&mut written);
            // Compared after another decoding: postcard reads longer forms of a number too.
            let header = MessageHeader::of(&written, BLOCK_BYTES).expect("it was just encoded");
            assert_eq!(self::read(&header, &written), Ok(Some(read)));
        }
    }
}

fn read(header: &MessageHeader, message: &[u8]) -> Result<Option<LinkMessage>, LinkWireError> {
    match header.kind {
        PROBE => header.fields(message).map(|_| None),
        FRAME => FrameHead::parse(message, BLOCK_BYTES).map(|head| Some(LinkMessage::Frame(head))),
        _ => LinkMessage::decode(message).map(Some),
    }
}

/// Sets the correct checksum of a message, up to its payload.
pub(crate) fn set_checksum(message: &mut [u8]) {
    if let Some((checked, check)) = message.split_last_chunk_mut::<CHECK_BYTES>() {
        *check = crate::checksum(checked).to_le_bytes();
    }
}
