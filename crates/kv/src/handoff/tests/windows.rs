//! Tests of hand-offs with a window of five tokens: blocks of twelve bytes in pieces of eight and
//! four.

use super::super::{HandoffDigest, PoolWriter, receiver, sender};
use super::{
    CONTENT, CORRUPT, HANDOFF, VOCAB_SIZE, block, checksum, feed, frame, part, seal, worker,
};
use crate::{BlockPart, Packet, Seal};
use cleave_domain::{
    BlockIndex, BlockRef, Capacity, HandoffTarget, KvPlane, KvUnit, WindowCapacity, WindowTarget,
};
use receiver::{ExpectedHandoff, HandoffReceiver, ReceiverInput};
use sender::{HandoffSender, SenderInput, SenderOutput};

const WINDOW_BYTES: u32 = 12;
const PIECES: u32 = 2;

fn capacity() -> Capacity {
    Capacity {
        windows: Some(WindowCapacity {
            tokens: 5,
            bytes: WINDOW_BYTES,
            count: 10,
        }),
        ..super::capacity(None)
    }
}

/// Reserved for blocks 0, 1 and 2 of the sequence.
fn window() -> WindowTarget {
    WindowTarget {
        first: 0,
        blocks: vec![block(1, 2), block(2, 2), block(3, 2)],
    }
}

/// Ten tokens in blocks of four, all of them to be sent. The token after them reads positions 6 to
/// 10, of blocks 1 and 2.
fn pair() -> (HandoffSender, HandoffReceiver) {
    let blocks = vec![block(5, 3), block(7, 0), block(8, 0)];
    let target = HandoffTarget {
        worker: worker(2, 1),
        present: 0,
        blocks: blocks.clone(),
        state: None,
        window: Some(window()),
    };
    let expected = ExpectedHandoff {
        handoff: HANDOFF,
        sender: worker(1, 1),
        present: 0,
        blocks,
        state: None,
        window: Some(window()),
        capacity: capacity(),
        vocab_size: VOCAB_SIZE,
        tokens: 10,
        content: CONTENT,
        writer: PoolWriter::Receiver,
    };
    (
        HandoffSender::new(HANDOFF, target, &capacity()),
        HandoffReceiver::new(expected),
    )
}

/// A whole block or piece.
fn whole(unit: KvUnit) -> BlockPart {
    BlockPart {
        plane: unit.plane,
        ..part(unit.ordinal, 0, capacity().unit_bytes(unit))
    }
}

/// One frame for each block, then for each piece of the window from the block `first` on, and the
/// seal.
fn sent_from(first: u32) -> (Vec<ReceiverInput>, Seal) {
    let (mut sender, _) = pair();
    let blocks = (0..3).map(|ordinal| (KvUnit::block(ordinal), BlockIndex(ordinal)));
    let window = (first..3).flat_map(|ordinal| {
        let units = capacity().window_units(ordinal);
        units.map(move |unit| (unit, BlockIndex(20 + ordinal)))
    });
    for (unit, from) in blocks.chain(window) {
        sender.handle(SenderInput::Computed { unit, from });
    }
    let (content, output) = (CONTENT, vec![42]);
    sender.handle(SenderInput::Sampled { content, output });
    let (mut frames, mut sealed) = (Vec::new(), None);
    while let Some(output) = sender.poll() {
        sender.check();
        match output {
            SenderOutput::Export { unit, block, .. } => {
                let ordinal = unit.ordinal / PIECES;
                let reading = unit.plane == KvPlane::Window && sender.is_reading_window(ordinal);
                assert_eq!(reading, unit.plane == KvPlane::Window);
                frames.push(frame(whole(unit), block));
                let mut digest = HandoffDigest::default();
                digest.add_frame(whole(unit), checksum(whole(unit)));
                let outcome = Ok((digest.value(), u64::from(whole(unit).len)));
                sender.handle(SenderInput::Exported { unit, outcome });
            }
            SenderOutput::Send(Packet::Seal(seal)) => sealed = Some(seal),
            other => panic!("unexpected {other:?}"),
        }
    }
    let bytes = 3 * 8 + (3 - first) * WINDOW_BYTES;
    assert_eq!(sender.bytes(), u64::from(bytes));
    (frames, sealed.expect("everything was exported"))
}

fn window_frame(ordinal: u32, block: BlockRef) -> ReceiverInput {
    let plane = KvPlane::Window;
    frame(whole(KvUnit { plane, ordinal }), block)
}

// Invariant: I4.
#[test]
fn blocks_window_and_seal_land_in_any_order() {
    let (mut inputs, sealed) = sent_from(1);
    assert_eq!(sealed.window.map(|window| window.first), Some(1));
    assert_eq!(inputs.len(), 3 + 4);
    inputs.push(seal(sealed));
    for mut number in (0..40_320_usize).step_by(7) {
        let mut left = inputs.clone();
        let mut order = Vec::new();
        for base in (1..=8).rev() {
            order.push(left.remove(number % base));
            number /= base;
        }
        let (_, mut receiver) = pair();
        let outputs = feed(&mut receiver, &order[..7]);
        assert!(receiver.is_open(), "{outputs:?}");
        let outputs = feed(&mut receiver, &order[7..]);
        assert_eq!(outputs[outputs.len() - 2..], ["send landed", "landed [42]"]);
        assert_eq!(receiver.bytes(), 3 * 8 + 2 * u64::from(WINDOW_BYTES));
    }
}

/// The receiver may take more blocks than the window that is left.
#[test]
fn a_longer_window_than_needed_lands_too() {
    let (frames, sealed) = sent_from(0);
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames);
    let outputs = feed(&mut receiver, &[seal(sealed)]);
    assert_eq!(outputs[outputs.len() - 2..], ["send landed", "landed [42]"]);
}

// Invariant: I58.
/// Every digest matches, but the sender sent a block that it says it gave up.
#[test]
fn a_block_behind_the_sealed_window_fails_the_hand_off() {
    let (frames, mut sealed) = sent_from(0);
    sealed.window.as_mut().unwrap().first = 1;
    let mut blocks = HandoffDigest::default();
    for ordinal in 0..3 {
        let block = whole(KvUnit::block(ordinal));
        blocks.add_frame(block, checksum(block));
    }
    sealed.digest = blocks.seal_digest(&sealed);
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames);
    assert_eq!(feed(&mut receiver, &[seal(sealed)]), CORRUPT);
}

// Invariant: I4.
#[test]
fn a_seal_of_another_window_fails_the_hand_off() {
    let (frames, sealed) = sent_from(1);
    let changes: [fn(&mut Seal); 5] = [
        |seal| seal.window = None,
        |seal| seal.window.as_mut().unwrap().digest ^= 1,
        |seal| seal.window.as_mut().unwrap().first = 2,
        |seal| seal.window.as_mut().unwrap().first = u32::MAX,
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
    // Where no window is expected, none is taken.
    let (frames, mut plain) = super::sent_handoff();
    plain.window = sealed.window;
    let (_, mut receiver) = super::pair();
    feed(&mut receiver, &frames);
    assert_eq!(feed(&mut receiver, &[seal(plain)]), CORRUPT);
}

// Invariant: I58.
#[test]
fn nothing_lands_without_the_whole_window() {
    // A sender that gave up block 1 too early seals less than the next token reads.
    let (frames, sealed) = sent_from(2);
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames);
    assert_eq!(feed(&mut receiver, &[seal(sealed)]), CORRUPT);
    let (frames, sealed) = sent_from(1);
    for missing in 3..7 {
        let (_, mut receiver) = pair();
        let mut some = frames.clone();
        let late = some.remove(missing);
        feed(&mut receiver, &some);
        assert!(feed(&mut receiver, &[seal(sealed.clone())]).is_empty());
        let outputs = feed(&mut receiver, &[late]);
        assert_eq!(outputs[1..], ["send landed", "landed [42]"]);
    }
}

// Invariant: I2.
#[test]
fn an_invalid_frame_of_a_window_fails_the_hand_off() {
    let cases = [
        ("another block", window_frame(2, block(1, 2))),
        ("an older generation", window_frame(2, block(2, 1))),
        ("a piece past the reservation", window_frame(6, block(3, 2))),
        ("a block in its place", frame(part(1, 0, 8), block(2, 2))),
    ];
    for (case, input) in cases {
        let (_, mut receiver) = pair();
        feed(&mut receiver, &[window_frame(3, block(2, 2))]);
        let outputs = feed(&mut receiver, &[input]);
        assert_eq!(outputs, ["discard", CORRUPT[0], CORRUPT[1]], "{case}");
    }
}
