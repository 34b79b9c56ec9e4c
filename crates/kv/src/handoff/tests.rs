//! Tests of both ends against each other, over a link that the test simulates.

mod seals;
mod states;
mod windows;

use super::{HandoffDigest, PoolWriter, receiver, sender};
use crate::{BlockPart, Packet, Seal};
use cleave_domain::{
    AbandonCause, BlockHash, BlockIndex, BlockRef, Capacity, Failure, FlightId, Generation,
    HandoffId, HandoffTarget, Incarnation, KvPlane, KvUnit, StateCapacity, WorkerId, WorkerRef,
};
use receiver::{ExpectedHandoff, HandoffReceiver};
use sender::HandoffSender;

const VOCAB_SIZE: u32 = 100;
const CONTENT: BlockHash = BlockHash([3; 16]);

const HANDOFF: HandoffId = HandoffId {
    flight: FlightId(1),
    attempt: 0,
};

fn worker(id: u64, incarnation: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(id),
        incarnation: Incarnation(incarnation),
    }
}

fn block(block: u32, generation: u32) -> BlockRef {
    BlockRef {
        block: BlockIndex(block),
        generation: Generation(generation),
    }
}

/// Blocks of four tokens and eight bytes, and slots of these bytes.
fn capacity(state_bytes: Option<u32>) -> Capacity {
    Capacity {
        block_tokens: 4,
        block_bytes: 8,
        blocks_count: 10,
        slots_count: 1,
        step_tokens_max: 4,
        context_tokens_max: 40,
        states: state_bytes.map(|bytes| StateCapacity { bytes, count: 10 }),
        windows: None,
    }
}

/// Ten tokens in blocks of four; block 0 is present, blocks 1 and 2 are to be sent, block 3 is
/// reserved for growth.
fn pair() -> (HandoffSender, HandoffReceiver) {
    pair_with(PoolWriter::Receiver)
}

fn pair_with(writer: PoolWriter) -> (HandoffSender, HandoffReceiver) {
    let blocks = vec![block(5, 3), block(7, 0), block(8, 0)];
    let target = HandoffTarget {
        worker: worker(2, 1),
        present: 1,
        blocks: blocks.clone(),
        state: None,
        window: None,
    };
    let expected = ExpectedHandoff {
        handoff: HANDOFF,
        sender: worker(1, 1),
        present: 1,
        blocks,
        state: None,
        window: None,
        capacity: capacity(None),
        vocab_size: VOCAB_SIZE,
        tokens: 10,
        content: CONTENT,
        writer,
    };
    (
        HandoffSender::new(HANDOFF, target, &capacity(None)),
        HandoffReceiver::new(expected),
    )
}

fn part(ordinal: u32, offset: u32, len: u32) -> BlockPart {
    BlockPart {
        plane: KvPlane::Blocks,
        ordinal,
        offset,
        len,
    }
}

fn checksum(part: BlockPart) -> u64 {
    u64::from(part.ordinal) * 100 + u64::from(part.offset)
}

fn frame(part: BlockPart, block: BlockRef) -> receiver::ReceiverInput {
    receiver::ReceiverInput::Frame {
        from: worker(1, 1),
        block,
        part,
        checksum: Some(checksum(part)),
    }
}

fn seal(seal: Seal) -> receiver::ReceiverInput {
    let from = worker(1, 1);
    receiver::ReceiverInput::Seal { from, seal }
}

/// The frames and the seal of a whole hand-off, as the sender makes them.
fn sent_handoff() -> (Vec<receiver::ReceiverInput>, Seal) {
    let (mut sender, _) = pair();
    let mut frames = Vec::new();
    let mut sealed = None;
    for ordinal in 0..3 {
        let (unit, from) = (KvUnit::block(ordinal), BlockIndex(ordinal));
        sender.handle(sender::SenderInput::Computed { unit, from });
    }
    let (content, output) = (CONTENT, vec![42]);
    sender.handle(sender::SenderInput::Sampled { content, output });
    while let Some(output) = sender.poll() {
        match output {
            sender::SenderOutput::Export { unit, block, .. } => {
                let ordinal = unit.ordinal;
                assert!(sealed.is_none(), "sealed too early");
                let mut digest = HandoffDigest::default();
                for part in [part(ordinal, 0, 6), part(ordinal, 6, 2)] {
                    digest.add_frame(part, checksum(part));
                    frames.push(frame(part, block));
                }
                let outcome = Ok((digest.value(), 8));
                sender.handle(sender::SenderInput::Exported { unit, outcome });
            }
            sender::SenderOutput::Send(Packet::Seal(seal)) => sealed = Some(seal),
            other => panic!("unexpected {other:?}"),
        }
        sender.check();
    }
    (frames, sealed.expect("sealed"))
}

fn written(part: BlockPart) -> receiver::ReceiverInput {
    let outcome = Ok(());
    receiver::ReceiverInput::Imported { part, outcome }
}

/// Feeds inputs and lists the outputs; imports complete at once.
fn feed(receiver: &mut HandoffReceiver, inputs: &[receiver::ReceiverInput]) -> Vec<String> {
    let mut outputs = Vec::new();
    for input in inputs {
        receiver.handle(input.clone());
        while let Some(output) = receiver.poll() {
            outputs.push(match &output {
                receiver::ReceiverOutput::Import { part, block } => {
                    let (from, to) = (part.offset, part.offset + part.len);
                    format!("import {}[{from}..{to}] to {}", part.ordinal, block.block)
                }
                receiver::ReceiverOutput::Discard { .. } => "discard".into(),
                receiver::ReceiverOutput::Send(Packet::Landed { .. }) => "send landed".into(),
                receiver::ReceiverOutput::Send(Packet::Abandoned { cause, .. }) => {
                    format!("send abandoned {cause:?}")
                }
                receiver::ReceiverOutput::Send(Packet::Stop { .. }) => "send stop".into(),
                receiver::ReceiverOutput::Send(packet) => panic!("unexpected {packet:?}"),
                receiver::ReceiverOutput::Landed { output } => format!("landed {output:?}"),
                receiver::ReceiverOutput::Ended(cause) => format!("ended {cause:?}"),
            });
            if let receiver::ReceiverOutput::Import { part, .. } = output {
                receiver.handle(written(part));
            }
        }
        receiver.check();
    }
    outputs
}

const CORRUPT: [&str; 2] = ["send abandoned Failed(Corrupt)", "ended Failed(Corrupt)"];

#[test]
fn a_landed_hand_off_repeats_its_answer_to_a_repeated_seal() {
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair();
    assert_eq!(
        feed(&mut receiver, &frames),
        [
            "import 1[0..6] to b5",
            "import 1[6..8] to b5",
            "import 2[0..6] to b7",
            "import 2[6..8] to b7"
        ]
    );
    let sealed = seal(sealed);
    let landed = ["send landed", "landed [42]"];
    assert_eq!(feed(&mut receiver, std::slice::from_ref(&sealed)), landed);
    assert_eq!(feed(&mut receiver, &[sealed]), ["send landed"]);
    assert_eq!(feed(&mut receiver, &frames[..1]), ["discard"]);
}

// Invariant: I4.
#[test]
fn frames_and_seal_land_in_any_order() {
    let (mut inputs, sealed) = sent_handoff();
    inputs.push(seal(sealed));
    // Every order of five inputs: the digits of the number in factorial base select the next one.
    for mut number in 0..120_usize {
        let mut left = inputs.clone();
        let mut order = Vec::new();
        for base in (1..=5).rev() {
            order.push(left.remove(number % base));
            number /= base;
        }
        let (_, mut receiver) = pair();
        let outputs = feed(&mut receiver, &order);
        let imports = outputs.iter().filter(|output| output.starts_with("import"));
        assert_eq!(imports.count(), 4);
        assert_eq!(outputs[4..], ["send landed", "landed [42]"]);
    }
}

// Invariant: I4.
#[test]
fn nothing_lands_before_the_last_import() {
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair();
    for frame in &frames {
        receiver.handle(frame.clone());
        while receiver.poll().is_some() {}
    }
    assert!(feed(&mut receiver, &[seal(sealed)]).is_empty());
    for part in [part(1, 0, 6), part(1, 6, 2), part(2, 6, 2)] {
        assert!(feed(&mut receiver, &[written(part)]).is_empty());
    }
    assert!(!receiver.is_settled());
    let outputs = feed(&mut receiver, &[written(part(2, 0, 6))]);
    assert_eq!(outputs, ["send landed", "landed [42]"]);
}

// Invariant: I2.
#[test]
fn duplicate_and_foreign_packets_are_discarded() {
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair();
    for from in [worker(1, 2), worker(3, 1)] {
        let foreign = receiver::ReceiverInput::Frame {
            from,
            block: block(5, 3),
            part: part(1, 0, 6),
            checksum: None,
        };
        assert_eq!(feed(&mut receiver, &[foreign]), ["discard"]);
        let seal = sealed.clone();
        let foreign = receiver::ReceiverInput::Seal { from, seal };
        assert!(feed(&mut receiver, &[foreign]).is_empty());
        let cause = AbandonCause::Cancelled;
        let foreign = receiver::ReceiverInput::Abandoned { from, cause };
        assert!(feed(&mut receiver, &[foreign]).is_empty());
    }
    assert!(receiver.is_open() && receiver.bytes() == 0);
    assert_eq!(feed(&mut receiver, &frames).len(), 4);
    assert_eq!(feed(&mut receiver, &frames[..2]), ["discard", "discard"]);
}

// Invariant: I2.
// Lesson: 2.
#[test]
fn an_invalid_frame_fails_the_hand_off() {
    let good = part(1, 2, 4);
    let damaged = receiver::ReceiverInput::Frame {
        from: worker(1, 1),
        block: block(5, 3),
        part: good,
        checksum: None,
    };
    let cases = [
        ("an older generation", frame(good, block(5, 2))),
        ("another block", frame(good, block(7, 0))),
        ("a block not asked for", frame(part(0, 0, 6), block(5, 3))),
        ("a block past the end", frame(part(4, 0, 6), block(5, 3))),
        ("overlap in front", frame(part(2, 0, 3), block(7, 0))),
        ("overlap behind", frame(part(2, 5, 3), block(7, 0))),
        ("overlap around", frame(part(2, 0, 8), block(7, 0))),
        ("overlap within", frame(part(2, 3, 2), block(7, 0))),
        ("the same start", frame(part(2, 2, 1), block(7, 0))),
        ("too much", frame(part(1, 1, 8), block(5, 3))),
        ("wrapping", frame(part(1, 1, u32::MAX), block(5, 3))),
        ("nothing", frame(part(1, 0, 0), block(5, 3))),
        ("damage", damaged),
    ];
    for (case, input) in cases {
        let (_, mut receiver) = pair();
        feed(&mut receiver, &[frame(part(2, 2, 4), block(7, 0))]);
        let outputs = feed(&mut receiver, &[input]);
        assert_eq!(outputs, ["discard", CORRUPT[0], CORRUPT[1]], "{case}");
        let late = frame(good, block(5, 3));
        assert_eq!(feed(&mut receiver, &[late]), ["discard"], "{case}");
    }
}

#[test]
fn giving_up_is_sent_to_the_other_end_once() {
    let cause = AbandonCause::Failed(Failure::LeaseExpired);
    let (_, mut receiver) = pair();
    feed(&mut receiver, &[]);
    let up = receiver::ReceiverInput::GiveUp { cause };
    let outputs = feed(
        &mut receiver,
        &[up.clone(), up, receiver::ReceiverInput::LinkLost],
    );
    assert_eq!(
        outputs,
        [
            "send abandoned Failed(LeaseExpired)",
            "ended Failed(LeaseExpired)"
        ]
    );

    let (mut sender, _) = pair();
    sender.handle(sender::SenderInput::LinkLost);
    let cause = AbandonCause::Cancelled;
    sender.handle(sender::SenderInput::GiveUp { cause });
    let cause = AbandonCause::Failed(Failure::LinkLost);
    let outputs: Vec<_> = std::iter::from_fn(|| sender.poll()).collect();
    assert_eq!(outputs, [sender::SenderOutput::Ended(cause)]);
}

// Lesson: 5.
#[test]
fn a_failed_copy_ends_the_hand_off_at_its_end() {
    let broken = || Failure::Engine("cannot".into());
    let (mut sender, mut receiver) = pair();
    let (unit, from) = (KvUnit::block(1), BlockIndex(0));
    sender.handle(sender::SenderInput::Computed { unit, from });
    assert!(!sender.is_settled());
    let outcome = Err(broken());
    sender.handle(sender::SenderInput::Exported { unit, outcome });
    assert!(sender.is_settled() && !sender.is_open());

    receiver.handle(frame(part(1, 0, 8), block(5, 3)));
    let (part, outcome) = (part(1, 0, 8), Err(broken()));
    receiver.handle(receiver::ReceiverInput::Imported { part, outcome });
    assert!(receiver.is_settled() && !receiver.is_open());
}

// Invariant: I3.
#[test]
fn a_receiver_is_settled_only_after_its_last_import() {
    let (_, mut receiver) = pair();
    receiver.handle(frame(part(1, 0, 8), block(5, 3)));
    receiver.handle(receiver::ReceiverInput::LinkLost);
    assert!(!receiver.is_settled());
    receiver.handle(written(part(1, 0, 8)));
    assert!(receiver.is_settled());
}

#[test]
fn landed_counts_only_from_the_receiver_after_the_seal() {
    let (mut sender, _) = pair();
    let landed = |from| sender::SenderInput::Landed { from };
    sender.handle(landed(worker(2, 2)));
    assert_eq!(sender.poll(), None);
    sender.handle(landed(worker(2, 1)));
    let outputs: Vec<_> = std::iter::from_fn(|| sender.poll()).collect();
    let cause = AbandonCause::Failed(Failure::Corrupt);
    assert_eq!(outputs.last(), Some(&sender::SenderOutput::Ended(cause)));
}

/// A migrated sequence also seals the tokens drawn during the migration: for every number of them,
/// with room for eight more than the ten known to the receiver.
#[test]
fn blocks_reserved_for_growth_may_be_unused() {
    for present in 0..3 {
        for drawn in 1..=9_u32 {
            let blocks: Vec<_> = (present..5).map(|i| block(i, 0)).collect();
            let target = HandoffTarget {
                worker: worker(2, 1),
                present,
                blocks: blocks.clone(),
                state: None,
                window: None,
            };
            let mut sender = HandoffSender::new(HANDOFF, target, &capacity(None));
            let mut receiver = HandoffReceiver::new(ExpectedHandoff {
                handoff: HANDOFF,
                sender: worker(1, 1),
                present,
                blocks,
                state: None,
                window: None,
                capacity: capacity(None),
                vocab_size: VOCAB_SIZE,
                tokens: 10,
                content: CONTENT,
                writer: PoolWriter::Receiver,
            });
            // The last drawn token has no KV.
            let due = (10 + drawn - 1).div_ceil(4);
            for ordinal in 0..due {
                let (unit, from) = (KvUnit::block(ordinal), BlockIndex(ordinal));
                sender.handle(sender::SenderInput::Computed { unit, from });
            }
            let (content, output) = (CONTENT, vec![7; drawn as usize]);
            sender.handle(sender::SenderInput::Sampled { content, output });
            let mut outputs = Vec::new();
            while let Some(output) = sender.poll() {
                match output {
                    sender::SenderOutput::Export { unit, block, .. } => {
                        let ordinal = unit.ordinal;
                        let whole = part(ordinal, 0, 8);
                        let mut digest = HandoffDigest::default();
                        digest.add_frame(whole, checksum(whole));
                        outputs.extend(feed(&mut receiver, &[frame(whole, block)]));
                        let outcome = Ok((digest.value(), 8));
                        sender.handle(sender::SenderInput::Exported { unit, outcome });
                    }
                    sender::SenderOutput::Send(Packet::Seal(sealed)) => {
                        for off in [-1_i32, 1] {
                            let mut wrong = sealed.clone();
                            wrong.blocks_count = sealed.blocks_count.wrapping_add_signed(off);
                            let outputs = feed(&mut receiver.clone(), &[seal(wrong)]);
                            assert_eq!(outputs, CORRUPT, "{present} {drawn} {off}");
                        }
                        outputs.extend(feed(&mut receiver, &[seal(sealed)]));
                    }
                    other => panic!("unexpected {other:?}"),
                }
            }
            let imports = outputs.iter().filter(|output| output.starts_with("import"));
            assert_eq!(imports.count() as u32, due - present, "{present} {drawn}");
            assert!(receiver.has_landed(), "{present} {drawn}: {outputs:?}");
        }
    }
}

// Invariant: I21.
// Lesson: 2.
#[test]
fn blocks_stay_in_quarantine_until_the_sender_stopped() {
    let up = || {
        let cause = AbandonCause::Cancelled;
        receiver::ReceiverInput::GiveUp { cause }
    };
    let stopped = |from| receiver::ReceiverInput::Stopped { from };
    let (_, mut receiver) = pair_with(PoolWriter::Sender);
    // `Stop` was not sent yet.
    assert!(feed(&mut receiver, &[stopped(worker(1, 1))]).is_empty());
    assert_eq!(
        feed(&mut receiver, &[up()]),
        ["send abandoned Cancelled", "send stop", "ended Cancelled"]
    );
    assert!(receiver.is_quarantined() && !receiver.is_settled() && receiver.is_idle());
    let again = receiver::ReceiverInput::Stalled;
    assert_eq!(
        feed(&mut receiver, std::slice::from_ref(&again)),
        ["send stop"]
    );
    feed(
        &mut receiver,
        &[stopped(worker(1, 2)), receiver::ReceiverInput::LinkLost],
    );
    assert!(!receiver.is_settled());
    feed(&mut receiver, &[stopped(worker(1, 1))]);
    assert!(receiver.is_settled());
    assert!(feed(&mut receiver, &[again]).is_empty());

    // The same holds for every end but landing, and a fenced sender counts as stopped.
    let cause = AbandonCause::Finished;
    let from = worker(1, 1);
    let abandoned = receiver::ReceiverInput::Abandoned { from, cause };
    for end in [abandoned, receiver::ReceiverInput::LinkLost] {
        let (_, mut receiver) = pair_with(PoolWriter::Sender);
        assert_eq!(feed(&mut receiver, &[end])[0], "send stop");
        assert!(!receiver.is_settled());
        assert!(feed(&mut receiver, &[receiver::ReceiverInput::Fenced]).is_empty());
        assert!(receiver.is_settled());
    }
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair_with(PoolWriter::Sender);
    feed(&mut receiver, &frames);
    feed(&mut receiver, &[seal(sealed)]);
    assert!(receiver.has_landed() && receiver.is_settled());

    // With `PoolWriter::Receiver` no other worker writes.
    let (_, mut receiver) = pair();
    feed(&mut receiver, &[up()]);
    assert!(receiver.is_settled() && !receiver.is_quarantined());
}

// Lesson: 2.
#[test]
fn stopped_is_sent_only_after_the_last_export() {
    let (mut sender, _) = pair();
    let stop = |from| sender::SenderInput::Stop { from };
    let emitted = |sender: &mut HandoffSender| -> Vec<_> {
        sender.check();
        std::iter::from_fn(|| sender.poll()).collect()
    };
    let (unit, from) = (KvUnit::block(1), BlockIndex(0));
    sender.handle(sender::SenderInput::Computed { unit, from });
    emitted(&mut sender);
    sender.handle(stop(worker(2, 2)));
    assert!(sender.is_open());
    sender.handle(stop(worker(2, 1)));
    assert_eq!(
        emitted(&mut sender),
        [sender::SenderOutput::Ended(AbandonCause::Cancelled)],
        "a block is being written"
    );
    let outcome = Err(Failure::LinkLost);
    sender.handle(sender::SenderInput::Exported { unit, outcome });
    let handoff = HANDOFF;
    let stopped = [sender::SenderOutput::Send(Packet::Stopped { handoff })];
    assert_eq!(emitted(&mut sender), stopped);
    sender.handle(stop(worker(2, 1)));
    assert_eq!(
        emitted(&mut sender),
        stopped,
        "the answer may have been lost"
    );
}
