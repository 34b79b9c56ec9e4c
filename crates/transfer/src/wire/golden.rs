//! The bytes of every message, so that no change of a type changes the wire unnoticed.
//!
//! A test that fails here asks for a higher [`VERSION`], and for new bytes in this file. The first
//! nine bytes of a message that opens a stream stay as they are for ever, and so do their kinds.

use super::*;
use cleave_domain::{BlockHash, Failure, Incarnation, WorkerId};
use cleave_kv::SealedWindow;

/// Asserts the kind and the fields of a message, in hexadecimal digits.
fn assert_bytes(message: &LinkMessage, expected: &str) {
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes);
    let fields = &bytes[HEADER_BYTES..bytes.len() - CHECK_BYTES];
    let kind = format!("{} ", bytes[0]);
    let digits = fields.iter().map(|byte| format!("{byte:02x}"));
    let written: String = std::iter::once(kind).chain(digits).collect();
    assert_eq!(
        written, expected,
        "{message:?}: other bytes, higher VERSION"
    );
}

fn handoff() -> HandoffId {
    HandoffId {
        flight: FlightId(300),
        attempt: 2,
    }
}

fn worker() -> WorkerRef {
    WorkerRef {
        worker: WorkerId(3),
        incarnation: Incarnation(4),
    }
}

fn frame() -> FrameHead {
    FrameHead {
        handoff: handoff(),
        block: BlockRef {
            block: BlockIndex(5),
            generation: Generation(6),
        },
        part: BlockPart {
            plane: KvPlane::State,
            ordinal: 7,
            offset: 8,
            len: 9,
        },
        checksum: 10,
    }
}

fn hello() -> LinkHello {
    LinkHello {
        from: worker(),
        to: WorkerRef::default(),
        block_bytes: 4096,
        fingerprint: "f".to_owned(),
    }
}

#[test]
fn messages_that_open_a_stream_keep_their_bytes() {
    let (me, from, key) = (worker(), worker(), 11);
    assert_bytes(
        &LinkMessage::Hello(hello()),
        "1 434c564b0a000304000080200166",
    );
    assert_bytes(
        &LinkMessage::HelloRdma(hello()),
        "24 434c564b0a000304000080200166",
    );
    assert_bytes(
        &LinkMessage::Reject("no".to_owned()),
        "3 434c564b0a00026e6f",
    );
    assert_bytes(&LinkMessage::Join { from, key }, "12 434c564b0a0003040b");
    let (credit, frame_bytes) = (12, 13);
    let welcome = LinkMessage::Welcome {
        me,
        credit,
        key,
        frame_bytes,
    };
    assert_bytes(&welcome, "2 434c564b0a0003040c0b0d");
}

#[test]
fn messages_of_a_hand_off_keep_their_bytes() {
    let seal = Seal {
        handoff: handoff(),
        blocks_count: 2,
        digest: 3,
        content: BlockHash([4; 16]),
        output: vec![5, 600],
        state: Some(6),
        window: Some(SealedWindow {
            first: 7,
            digest: 8,
        }),
    };
    assert_bytes(
        &LinkMessage::Frame(frame()),
        "4 2c01000000000000020000000500000006000000010700000008000000090000000a00000000000000",
    );
    assert_bytes(
        &LinkMessage::SlotFrame(frame(), 14),
        "16 ac02020506010708090a0e",
    );
    assert_bytes(&LinkMessage::PoolFrame(frame()), "23 ac02020506010708090a");
    assert_bytes(
        &LinkMessage::Seal(seal),
        "5 ac02020203040404040404040404040404040404040205d8040106010708",
    );
    assert_bytes(&LinkMessage::Landed(handoff()), "6 ac0202");
    assert_bytes(&LinkMessage::Stop(handoff()), "14 ac0202");
    assert_bytes(&LinkMessage::Stopped(handoff()), "15 ac0202");
    let grant = WriteGrant([15; 32]);
    assert_bytes(
        &LinkMessage::WriteGrant(handoff(), grant),
        "27 ac02020f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f",
    );
}

#[test]
fn causes_and_failures_keep_their_numbers() {
    let abandoned = |cause, expected: &str| {
        assert_bytes(&LinkMessage::Abandoned(handoff(), cause), expected);
    };
    abandoned(AbandonCause::Finished, "7 ac020200");
    abandoned(AbandonCause::Cancelled, "7 ac020201");
    let failed = |failure, expected: &str| abandoned(AbandonCause::Failed(failure), expected);
    failed(Failure::WorkerLost, "7 ac02020200");
    failed(Failure::WorkerStuck, "7 ac02020201");
    failed(Failure::LinkLost, "7 ac02020202");
    failed(Failure::LeaseExpired, "7 ac02020203");
    failed(Failure::Corrupt, "7 ac02020204");
    failed(Failure::Rejected, "7 ac02020205");
    failed(Failure::Engine("e".to_owned()), "7 ac020202060165");
    failed(Failure::OutOfBlocks, "7 ac02020207");
    failed(Failure::Draining, "7 ac02020208");
    failed(Failure::SlowReader, "7 ac02020209");
    failed(
        Failure::RetriesSpent(Box::new(Failure::WorkerLost)),
        "7 ac0202020a00",
    );
    failed(Failure::Constraint("e".to_owned()), "7 ac0202020b0165");
}

#[test]
fn messages_of_a_link_keep_their_bytes() {
    assert_bytes(&LinkMessage::Joined, "13 ");
    assert_bytes(&LinkMessage::Credit(300), "8 ac02");
    assert_bytes(&LinkMessage::CreditSlots(vec![1, 300]), "17 0201ac02");
    assert_bytes(&LinkMessage::Ping(1), "9 01");
    assert_bytes(&LinkMessage::Pong(1), "10 01");
    assert_bytes(&LinkMessage::Probe(1), "11 ");
    assert_bytes(&LinkMessage::SlotProbe(1), "18 01");
    assert_bytes(&LinkMessage::AskPool, "19 ");
    assert_bytes(&LinkMessage::Pool(vec![1, 255]), "20 0201ff");
    assert_bytes(&LinkMessage::NoPool("no".to_owned()), "21 026e6f");
    assert_bytes(&LinkMessage::Opened, "22 ");
    let (start, metadata) = (300, vec![1, 255]);
    assert_bytes(&LinkMessage::RingOffer { start, metadata }, "25 ac020201ff");
    assert_bytes(&LinkMessage::NoRing("no".to_owned()), "26 026e6f");
    assert_bytes(&LinkMessage::KeepAlive, "28 ");
}
