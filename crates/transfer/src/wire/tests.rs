//! Tests of the encoding of messages on a link.

use super::*;
use cleave_domain::{BlockHash, Failure, Incarnation, WorkerId};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

fn worker() -> impl Strategy<Value = WorkerRef> {
    (any::<u64>(), any::<u64>()).prop_map(|(worker, incarnation)| WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
    })
}

fn handoff() -> impl Strategy<Value = HandoffId> {
    (any::<u64>(), any::<u32>()).prop_map(|(flight, attempt)| HandoffId {
        flight: FlightId(flight),
        attempt,
    })
}

fn failure() -> impl Strategy<Value = Failure> {
    let plain = prop_oneof![
        Just(Failure::WorkerLost),
        Just(Failure::LinkLost),
        Just(Failure::LeaseExpired),
        Just(Failure::Corrupt),
        Just(Failure::Rejected),
        Just(Failure::OutOfBlocks),
        Just(Failure::Draining),
        Just(Failure::WorkerStuck),
        Just(Failure::SlowReader),
        ".{0,40}".prop_map(Failure::Engine),
        ".{0,40}".prop_map(Failure::Constraint),
    ];
    plain.prop_recursive(2, 3, 1, |last| {
        last.prop_map(|last| Failure::RetriesSpent(Box::new(last)))
    })
}

fn cause() -> impl Strategy<Value = AbandonCause> {
    prop_oneof![
        Just(AbandonCause::Finished),
        Just(AbandonCause::Cancelled),
        failure().prop_map(AbandonCause::Failed),
    ]
}

fn hello() -> impl Strategy<Value = LinkHello> {
    (worker(), worker(), any::<u32>(), ".{0,200}").prop_map(
        |(from, to, block_bytes, fingerprint)| LinkHello {
            from,
            to,
            block_bytes,
            fingerprint,
        },
    )
}

fn message() -> impl Strategy<Value = LinkMessage> {
    let metadata = prop::collection::vec(any::<u8>(), 0..200);
    let ring_offer = (any::<u64>(), metadata)
        .prop_map(|(start, metadata)| LinkMessage::RingOffer { start, metadata });
    let seal = (
        handoff(),
        any::<(u32, u64, [u8; 16], Vec<u32>, Option<u64>)>(),
    )
        .prop_map(
            |(handoff, (blocks_count, digest, content, output, state))| {
                LinkMessage::Seal(Seal {
                    handoff,
                    blocks_count,
                    digest,
                    content: BlockHash(content),
                    output,
                    state,
                    window: None,
                })
            },
        );
    prop_oneof![
        hello().prop_map(LinkMessage::Hello),
        hello().prop_map(LinkMessage::HelloRdma),
        ring_offer,
        ".{0,200}".prop_map(LinkMessage::NoRing),
        Just(LinkMessage::KeepAlive),
        (worker(), any::<(u64, u64, u32)>()).prop_map(|(me, (credit, key, frame_bytes))| {
            LinkMessage::Welcome {
                me,
                credit,
                key,
                frame_bytes,
            }
        }),
        (worker(), any::<u64>()).prop_map(|(from, key)| LinkMessage::Join { from, key }),
        Just(LinkMessage::Joined),
        (frame_head(), any::<u32>()).prop_map(|(head, slot)| LinkMessage::SlotFrame(head, slot)),
        handoff().prop_map(LinkMessage::Stop),
        handoff().prop_map(LinkMessage::Stopped),
        prop::collection::vec(any::<u32>(), 0..50).prop_map(LinkMessage::CreditSlots),
        any::<u32>().prop_map(LinkMessage::SlotProbe),
        Just(LinkMessage::AskPool),
        prop::collection::vec(any::<u8>(), 0..200).prop_map(LinkMessage::Pool),
        ".{0,200}".prop_map(LinkMessage::NoPool),
        Just(LinkMessage::Opened),
        frame_head().prop_map(LinkMessage::PoolFrame),
        (handoff(), any::<[u8; 32]>())
            .prop_map(|(handoff, grant)| LinkMessage::WriteGrant(handoff, WriteGrant(grant))),
        ".{0,200}".prop_map(LinkMessage::Reject),
        seal,
        handoff().prop_map(LinkMessage::Landed),
        (handoff(), cause()).prop_map(|(handoff, cause)| LinkMessage::Abandoned(handoff, cause)),
        any::<u64>().prop_map(LinkMessage::Credit),
        any::<u64>().prop_map(LinkMessage::Ping),
        any::<u64>().prop_map(LinkMessage::Pong),
    ]
}

fn frame_head() -> impl Strategy<Value = FrameHead> {
    let plane = prop_oneof![Just(KvPlane::Blocks), Just(KvPlane::State)];
    let numbers = any::<(u32, u32, u32, u64)>();
    (handoff(), plane, numbers, 0u32..1000, 1u32..1000).prop_map(
        |(handoff, plane, (block, generation, ordinal, checksum), offset, len)| FrameHead {
            handoff,
            block: BlockRef {
                block: BlockIndex(block),
                generation: Generation(generation),
            },
            part: BlockPart {
                plane,
                ordinal,
                offset,
                len,
            },
            checksum,
        },
    )
}

fn encoded(message: &LinkMessage) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes);
    bytes.to_vec()
}

/// Decodes as a link does: up to the payload.
fn decoded(bytes: &[u8]) -> Result<LinkMessage, LinkWireError> {
    match MessageHeader::of(bytes, 2000)? {
        MessageHeader { kind: FRAME, .. } => FrameHead::parse(bytes, 2000).map(LinkMessage::Frame),
        header if header.kind == PROBE => {
            header.fields(bytes)?;
            let len = header.body_len - CHECK_BYTES;
            Ok(LinkMessage::Probe(len as u32))
        }
        _ => LinkMessage::decode(bytes),
    }
}

/// Flips every bit of an encoded message, one at a time.
fn flip_each_bit(message: &LinkMessage) {
    let mut bytes = encoded(message);
    assert_eq!(decoded(&bytes).as_ref(), Ok(message));
    for bit in 0..8 * bytes.len() {
        bytes[bit / 8] ^= 1 << (bit % 8);
        let read = decoded(&bytes);
        assert!(read.is_err(), "bit {bit} of {message:?} makes {read:?}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

proptest! {
    #[test]
    fn every_message_round_trips(message in message()) {
        let bytes = encoded(&message);
        let header = MessageHeader::of(&bytes, 0).unwrap();
        prop_assert_eq!(header.body_len, bytes.len() - HEADER_BYTES);
        prop_assert_eq!(LinkMessage::decode(&bytes).unwrap(), message);
    }

    #[test]
    fn every_frame_head_round_trips(head in frame_head()) {
        let bytes = encoded(&LinkMessage::Frame(head));
        prop_assert_eq!(bytes.len(), HEADER_BYTES + FRAME_HEAD_BYTES);
        prop_assert_eq!(FrameHead::parse(&bytes, 2000).unwrap(), head);
    }

    // Invariant: I50.
    #[test]
    fn a_flipped_bit_never_makes_another_message(message in message(), head in frame_head()) {
        flip_each_bit(&message);
        flip_each_bit(&LinkMessage::Frame(head));
        flip_each_bit(&LinkMessage::Probe(head.part.len));
    }

    #[test]
    fn arbitrary_bytes_never_panic_the_decoder(kind in 0u8..31, body in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
        let _ = decoded(&bytes);
        crate::fuzzing::set_checksum(&mut bytes);
        let _ = decoded(&bytes);
    }

    #[test]
    fn a_truncated_message_is_an_error(message in message(), keep in 0usize..1000) {
        let bytes = encoded(&message);
        let keep = keep % bytes.len();
        prop_assert!(LinkMessage::decode(&bytes[..keep]).is_err());
    }
}

/// The version in the preamble is checked before the checksum, because another release may
/// compute the checksum differently.
#[test]
fn another_version_is_reported_as_a_version_mismatch() {
    let hello = LinkMessage::Hello(LinkHello {
        from: WorkerRef::default(),
        to: WorkerRef::default(),
        block_bytes: 1,
        fingerprint: "f".to_owned(),
    });
    let mut bytes = encoded(&hello);
    bytes[HEADER_BYTES + 4] = 5;
    assert_eq!(decoded(&bytes), Err(LinkWireError::Version(5)));
    bytes[HEADER_BYTES + 4] = VERSION as u8;
    bytes[HEADER_BYTES + 6] ^= 1;
    assert_eq!(decoded(&bytes), Err(LinkWireError::Damaged("hello")));
}

/// A message of this kind with these fields and a correct checksum.
fn closed(kind: u8, fields: &[u8]) -> Vec<u8> {
    let len = (fields.len() + CHECK_BYTES) as u32;
    let mut bytes = [
        &[kind, 0, 0, 0],
        &len.to_le_bytes(),
        fields,
        &[0; CHECK_BYTES],
    ]
    .concat();
    crate::fuzzing::set_checksum(&mut bytes);
    bytes
}

#[test]
fn long_texts_and_nested_failures_are_cut_at_both_ends() {
    let mut failure = Failure::Engine("é".repeat(5000));
    for _ in 0..10 {
        failure = Failure::RetriesSpent(Box::new(failure));
    }
    let cause = AbandonCause::Failed(failure);
    let read = decoded(&encoded(&LinkMessage::Abandoned(
        HandoffId::default(),
        cause.clone(),
    )));
    let mut cut = Failure::Engine("é".repeat(2048));
    for _ in 0..3 {
        cut = Failure::RetriesSpent(Box::new(cut));
    }
    let cut = LinkMessage::Abandoned(HandoffId::default(), AbandonCause::Failed(cut));
    assert_eq!(read.as_ref(), Ok(&cut));

    let long = "x".repeat(6000);
    let fields = postcard::to_allocvec(&long).unwrap();
    let no_ring = 26;
    let read = decoded(&closed(no_ring, &fields));
    assert_eq!(read, Ok(LinkMessage::NoRing("x".repeat(4096))));
}

#[test]
fn endless_nesting_and_absurd_counts_are_errors() {
    let (abandoned, credit_slots) = (7, 17);
    let handoff = [0, 0];
    let failed = [2];
    let nested = [10; CONTROL_BYTES_MAX - 100];
    let deep = closed(abandoned, &[&handoff[..], &failed, &nested].concat());
    assert!(decoded(&deep).is_err());
    let count = postcard::to_allocvec(&u32::MAX).unwrap();
    assert_eq!(
        decoded(&closed(credit_slots, &count)),
        Err(LinkWireError::Truncated)
    );
    assert_eq!(
        decoded(&closed(abandoned, &[0, 0, 3])),
        Err(LinkWireError::Value(
            "abandoned",
            postcard::Error::SerdeDeCustom
        ))
    );
    assert_eq!(
        decoded(&closed(abandoned, &[0, 0, 0, 9])),
        Err(LinkWireError::TrailingBytes(1))
    );
}

#[test]
fn damaged_streams_are_errors_or_keep_their_meaning() {
    let mut runner = TestRunner::deterministic();
    let samples: Vec<Vec<u8>> = (0..200)
        .map(|_| {
            let message = message().new_tree(&mut runner).unwrap().current();
            let mut bytes = BytesMut::new();
            message.encode(&mut bytes);
            bytes.to_vec()
        })
        .collect();
    cleave_fuzz::check_samples("frames", &samples, 20_000, crate::fuzzing::frames);
}

#[test]
fn a_received_length_is_checked_before_allocation() {
    let header = |kind: u8, len: u32| {
        let [a, b, c, d] = len.to_le_bytes();
        MessageHeader::parse([kind, 0, 0, 0, a, b, c, d], 4096)
    };
    assert!(header(FRAME, 4096 + 49).is_ok());
    assert!(matches!(
        header(FRAME, 4096 + 50),
        Err(LinkWireError::TooLong { .. })
    ));
    assert!(matches!(
        header(SEAL, u32::MAX),
        Err(LinkWireError::TooLong { .. })
    ));
    assert!(matches!(
        header(PROBE, u32::MAX),
        Err(LinkWireError::TooLong { .. })
    ));
    assert_eq!(header(b'G', 0), Err(LinkWireError::Kind(b'G')));
}
