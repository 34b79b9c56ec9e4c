//! Messages of a peer on a data link, for tests and libFuzzer.

use crate::wire::{CHECK_BYTES, FRAME, FrameHead, HEADER_BYTES, Header, Message, PROBE, WireError};
use bytes::BytesMut;

const BLOCK_BYTES: u32 = 4096;

/// Reads messages as a link does until one is wrong: each as it came, and then with the checksum that
/// fits, so that what stands behind the checksum is tried too.
///
/// # Panics
/// If a message that was understood would be written differently.
pub fn frames(mut bytes: &[u8]) {
    while let Ok(header) = Header::of(bytes, BLOCK_BYTES) {
        let checked_len = HEADER_BYTES + header.checked_len();
        let Some((_, rest)) = bytes.split_at_checked(HEADER_BYTES + header.body_len) else {
            return;
        };
        let mut message = bytes[..checked_len].to_vec();
        bytes = rest;
        let as_it_came = read(&header, &message);
        let came = message.clone();
        close(&mut message);
        let closed = read(&header, &message);
        if message == came {
            assert_eq!(as_it_came, closed);
        } else {
            assert!(as_it_came.is_err(), "{as_it_came:?}");
        }
        let Ok(closed) = closed else {
            return;
        };
        if let Some(read) = closed {
            let mut written = BytesMut::new();
            read.encode(&mut written);
            assert_eq!(written, message);
        }
    }
}

fn read(header: &Header, message: &[u8]) -> Result<Option<Message>, WireError> {
    match header.kind {
        PROBE => header.fields(message).map(|_| None),
        FRAME => FrameHead::parse(message, BLOCK_BYTES).map(|head| Some(Message::Frame(head))),
        _ => Message::decode(message).map(Some),
    }
}

/// Gives a message, up to its payload, the checksum that fits.
pub(crate) fn close(message: &mut [u8]) {
    if let Some((checked, check)) = message.split_last_chunk_mut::<CHECK_BYTES>() {
        *check = crate::checksum(checked).to_le_bytes();
    }
}
