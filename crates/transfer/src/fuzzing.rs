//! What a peer sends on a data link, for tests and libFuzzer.

use crate::wire::{FRAME, FRAME_HEAD_BYTES, FrameHead, HEADER_BYTES, Header, Message, PROBE};
use bytes::BytesMut;

const BLOCK_BYTES: u32 = 4096;

/// Reads messages as a link does until one is wrong.
///
/// # Panics
/// If a message that was understood would be written differently.
pub fn frames(mut bytes: &[u8]) {
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let Ok(read) = Header::parse(*header, BLOCK_BYTES) else {
            return;
        };
        let Some((body, rest)) = rest.split_at_checked(read.body_len) else {
            return;
        };
        bytes = rest;
        let message = match read.kind {
            PROBE => continue,
            FRAME => {
                let Some(head) = body.get(..FRAME_HEAD_BYTES) else {
                    return;
                };
                let head = FrameHead::parse(head, read.body_len, BLOCK_BYTES);
                head.map(Message::Frame)
            }
            kind => Message::decode(kind, body),
        };
        let Ok(message) = message else {
            return;
        };
        let mut written = BytesMut::new();
        message.encode(&mut written);
        let payload = match message {
            Message::Frame(head) => head.part.len as usize,
            _ => 0,
        };
        assert_eq!(written[HEADER_BYTES..], body[..body.len() - payload]);
        assert_eq!(written[..HEADER_BYTES], header[..]);
    }
}
