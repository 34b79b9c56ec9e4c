//! Tests of hand-offs with a state: twenty bytes in pieces of eight, eight and four.

use super::super::{HandoffDigest, PoolWriter, receiver, sender};
use super::{
    CONTENT, CORRUPT, HANDOFF, VOCAB_SIZE, block, capacity, checksum, feed, frame, part, seal,
    worker,
};
use crate::{BlockPart, Packet, Seal};
use cleave_domain::{AbandonCause, BlockIndex, BlockRef, Failure, HandoffTarget, KvPlane, KvUnit};
use receiver::{ExpectedHandoff, HandoffReceiver};
use sender::HandoffSender;

const STATE_BYTES: u32 = 20;

fn slot() -> BlockRef {
    block(4, 6)
}

/// Ten tokens in blocks of four, all of them to be sent, and a state.
fn pair() -> (HandoffSender, HandoffReceiver) {
    let blocks = vec![block(5, 3), block(7, 0), block(8, 0)];
    let target = HandoffTarget {
        worker: worker(2, 1),
        present: 0,
        blocks: blocks.clone(),
        state: Some(slot()),
        window: None,
    };
    let expected = ExpectedHandoff {
        handoff: HANDOFF,
        sender: worker(1, 1),
        present: 0,
        blocks,
        state: Some(slot()),
        window: None,
        capacity: capacity(Some(STATE_BYTES)),
        vocab_size: VOCAB_SIZE,
        tokens: 10,
        content: CONTENT,
        writer: PoolWriter::Receiver,
    };
    (
        HandoffSender::new(HANDOFF, target, &capacity(Some(STATE_BYTES))),
        HandoffReceiver::new(expected),
    )
}

fn piece(ordinal: u32) -> KvUnit {
    let plane = KvPlane::State;
    KvUnit { plane, ordinal }
}

fn piece_part(ordinal: u32, offset: u32, len: u32) -> BlockPart {
    BlockPart {
        plane: KvPlane::State,
        ..part(ordinal, offset, len)
    }
}

/// One frame for each block and piece, in the order of export, and the seal.
fn sent() -> (Vec<receiver::ReceiverInput>, Seal) {
    let (mut sender, _) = pair();
    for ordinal in 0..3 {
        let (unit, from) = (KvUnit::block(ordinal), BlockIndex(ordinal));
        sender.handle(sender::SenderInput::Computed { unit, from });
    }
    for ordinal in 0..3 {
        let (unit, from) = (piece(ordinal), BlockIndex(9));
        sender.handle(sender::SenderInput::Computed { unit, from });
    }
    let (content, output) = (CONTENT, vec![42]);
    sender.handle(sender::SenderInput::Sampled { content, output });
    let (mut frames, mut sealed) = (Vec::new(), None);
    while let Some(output) = sender.poll() {
        sender.check();
        match output {
            sender::SenderOutput::Export { unit, block, from } => {
                let len = capacity(Some(STATE_BYTES)).unit_bytes(unit);
                let whole = BlockPart {
                    plane: unit.plane,
                    ..part(unit.ordinal, 0, len)
                };
                if unit.plane == KvPlane::State {
                    assert_eq!((block, from), (slot(), BlockIndex(9)));
                }
                frames.push(frame(whole, block));
                let mut digest = HandoffDigest::default();
                digest.add_frame(whole, checksum(whole));
                let outcome = Ok((digest.value(), u64::from(len)));
                sender.handle(sender::SenderInput::Exported { unit, outcome });
            }
            sender::SenderOutput::Send(Packet::Seal(seal)) => sealed = Some(seal),
            other => panic!("unexpected {other:?}"),
        }
    }
    assert_eq!(sender.bytes(), 3 * 8 + u64::from(STATE_BYTES));
    (frames, sealed.expect("everything was exported"))
}

// Invariant: I4.
#[test]
fn blocks_state_and_seal_land_in_any_order() {
    let (mut inputs, sealed) = sent();
    assert_eq!(inputs.len(), 6);
    inputs.push(seal(sealed));
    // Every order of seven inputs: the digits of the number in factorial base select the next one.
    for mut number in 0..5040_usize {
        let mut left = inputs.clone();
        let mut order = Vec::new();
        for base in (1..=7).rev() {
            order.push(left.remove(number % base));
            number /= base;
        }
        let (_, mut receiver) = pair();
        let outputs = feed(&mut receiver, &order[..6]);
        assert!(receiver.is_open(), "{outputs:?}");
        let outputs = feed(&mut receiver, &order[6..]);
        assert_eq!(outputs[outputs.len() - 2..], ["send landed", "landed [42]"]);
        assert_eq!(receiver.bytes(), 3 * 8 + u64::from(STATE_BYTES));
    }
}

// Invariant: I4.
#[test]
fn nothing_lands_without_every_piece() {
    let (frames, sealed) = sent();
    for missing in 3..6 {
        let (_, mut receiver) = pair();
        let mut some = frames.clone();
        let late = some.remove(missing);
        feed(&mut receiver, &some);
        assert!(feed(&mut receiver, &[seal(sealed.clone())]).is_empty());
        assert!(receiver.is_sealed());
        let outputs = feed(&mut receiver, &[late.clone(), late]);
        assert_eq!(outputs.len(), 4, "{outputs:?}");
        assert_eq!(outputs[1..], ["send landed", "landed [42]", "discard"]);
    }
}

// Invariant: I2.
#[test]
fn an_invalid_frame_of_a_state_fails_the_hand_off() {
    let cases = [
        ("another slot", frame(piece_part(0, 0, 8), block(5, 3))),
        (
            "an older generation",
            frame(piece_part(0, 0, 8), block(4, 5)),
        ),
        ("a block in the slot", frame(part(0, 0, 8), slot())),
        ("a piece past the end", frame(piece_part(3, 0, 1), slot())),
        ("past the last piece", frame(piece_part(2, 0, 5), slot())),
        ("beyond the last piece", frame(piece_part(2, 4, 1), slot())),
        ("overlap", frame(piece_part(1, 3, 2), slot())),
        ("nothing", frame(piece_part(0, 0, 0), slot())),
    ];
    for (case, input) in cases {
        let (_, mut receiver) = pair();
        feed(&mut receiver, &[frame(piece_part(1, 0, 4), slot())]);
        let outputs = feed(&mut receiver, &[input]);
        assert_eq!(outputs, ["discard", CORRUPT[0], CORRUPT[1]], "{case}");
    }
    let (_, mut receiver) = pair();
    let once = frame(piece_part(1, 0, 4), slot());
    let outputs = feed(&mut receiver, &[once.clone(), once]);
    assert_eq!(outputs, ["import 1[0..4] to b4", "discard"]);
}

// Invariant: I4.
#[test]
fn a_seal_of_another_state_fails_the_hand_off() {
    let (frames, sealed) = sent();
    let changes: [fn(&mut Seal); 3] = [
        |seal| seal.state = None,
        |seal| seal.state = seal.state.map(|digest| digest ^ 1),
        |seal| seal.digest ^= 1,
    ];
    for change in changes {
        let mut wrong = sealed.clone();
        change(&mut wrong);
        let (_, mut receiver) = pair();
        feed(&mut receiver, &frames);
        assert_eq!(
            feed(&mut receiver, &[seal(wrong.clone())]),
            CORRUPT,
            "{wrong:?}"
        );
    }
    // Where no state is expected, none is taken.
    let (frames, mut sealed) = super::sent_handoff();
    sealed.state = Some(0);
    let (_, mut receiver) = super::pair();
    feed(&mut receiver, &frames);
    assert_eq!(feed(&mut receiver, &[seal(sealed)]), CORRUPT);
}

#[test]
fn the_sender_seals_only_with_the_whole_state() {
    let (mut sender, _) = pair();
    let (content, output) = (CONTENT, vec![42]);
    sender.handle(sender::SenderInput::Sampled { content, output });
    for ordinal in 0..3 {
        assert!(!sender.is_sealed());
        let unit = piece(ordinal);
        let from = BlockIndex(9);
        sender.handle(sender::SenderInput::Computed { unit, from });
        assert!(sender.is_reading_state() && sender.is_reading(unit));
        let outcome = Ok((7, 8));
        sender.handle(sender::SenderInput::Exported { unit, outcome });
        assert!(!sender.is_reading_state());
        sender.check();
    }
    assert!(sender.is_sealed());
}

#[test]
fn a_piece_out_of_order_gives_the_hand_off_up() {
    for ordinals in [&[1][..], &[0, 1, 2, 3], &[0, 2]] {
        let (mut sender, _) = pair();
        for ordinal in ordinals {
            let (unit, from) = (piece(*ordinal), BlockIndex(9));
            sender.handle(sender::SenderInput::Computed { unit, from });
        }
        let last = std::iter::from_fn(|| sender.poll()).last();
        let cause = AbandonCause::Failed(Failure::Rejected);
        assert_eq!(
            last,
            Some(sender::SenderOutput::Ended(cause)),
            "{ordinals:?}"
        );
    }
}
