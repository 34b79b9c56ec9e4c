//! Both ends against each other, with a link in between that the test plays.

mod seals;

use super::{Digest, Writer, receiver, sender};
use crate::{BlockPart, Packet, Seal};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Cause, Failure, FlightId, Generation, HandoffId, Incarnation,
    Target, WorkerId, WorkerRef,
};
use receiver::{Expected, Receiver};
use sender::Sender;

const VOCAB_SIZE: u32 = 100;
const CONTENT: BlockHash = BlockHash([3; 16]);

const HANDOFF: HandoffId = HandoffId {
    flight: FlightId(1),
    attempt: 0,
};

fn worker(id: u64, life: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(id),
        incarnation: Incarnation(life),
    }
}

fn block(block: u32, generation: u32) -> BlockRef {
    BlockRef {
        block: BlockIndex(block),
        generation: Generation(generation),
    }
}

/// Ten tokens in blocks of four; block 0 is there already, 1 and 2 are to come, 3 is room to grow.
fn pair() -> (Sender, Receiver) {
    pair_with(Writer::Receiver)
}

fn pair_with(writer: Writer) -> (Sender, Receiver) {
    let blocks = vec![block(5, 3), block(7, 0), block(8, 0)];
    let target = Target {
        worker: worker(2, 1),
        present: 1,
        blocks: blocks.clone(),
    };
    let expected = Expected {
        handoff: HANDOFF,
        sender: worker(1, 1),
        present: 1,
        blocks,
        block_bytes: 8,
        block_tokens: 4,
        vocab_size: VOCAB_SIZE,
        tokens: 10,
        content: CONTENT,
        writer,
    };
    (Sender::new(HANDOFF, target), Receiver::new(expected))
}

fn part(ordinal: u32, offset: u32, len: u32) -> BlockPart {
    BlockPart {
        ordinal,
        offset,
        len,
    }
}

fn checksum(part: BlockPart) -> u64 {
    u64::from(part.ordinal) * 100 + u64::from(part.offset)
}

fn frame(part: BlockPart, block: BlockRef) -> receiver::Input {
    receiver::Input::Frame {
        from: worker(1, 1),
        block,
        part,
        checksum: Some(checksum(part)),
    }
}

fn seal(seal: Seal) -> receiver::Input {
    let from = worker(1, 1);
    receiver::Input::Seal { from, seal }
}

/// The frames of a whole hand-off, and its seal, as the sender makes them.
fn sent() -> (Vec<receiver::Input>, Seal) {
    let (mut sender, _) = pair();
    let mut frames = Vec::new();
    let mut sealed = None;
    for ordinal in 0..3 {
        let from = BlockIndex(ordinal);
        sender.handle(sender::Input::Computed { ordinal, from });
    }
    let (content, output) = (CONTENT, vec![42]);
    sender.handle(sender::Input::Sampled { content, output });
    while let Some(output) = sender.poll() {
        match output {
            sender::Output::Export { ordinal, block, .. } => {
                assert!(sealed.is_none(), "sealed too early");
                let mut digest = Digest::default();
                for part in [part(ordinal, 0, 6), part(ordinal, 6, 2)] {
                    digest.add(part, checksum(part));
                    frames.push(frame(part, block));
                }
                let outcome = Ok((digest.value(), 8));
                sender.handle(sender::Input::Exported { ordinal, outcome });
            }
            sender::Output::Send(Packet::Seal(seal)) => sealed = Some(seal),
            other => panic!("unexpected {other:?}"),
        }
        sender.check();
    }
    (frames, sealed.expect("sealed"))
}

fn written(part: BlockPart) -> receiver::Input {
    let outcome = Ok(());
    receiver::Input::Imported { part, outcome }
}

/// Feeds, then lists what comes out; imports are done at once.
fn feed(receiver: &mut Receiver, inputs: &[receiver::Input]) -> Vec<String> {
    let mut said = Vec::new();
    for input in inputs {
        receiver.handle(input.clone());
        while let Some(output) = receiver.poll() {
            said.push(match &output {
                receiver::Output::Import { part, block } => {
                    let (from, to) = (part.offset, part.offset + part.len);
                    format!("import {}[{from}..{to}] to {}", part.ordinal, block.block)
                }
                receiver::Output::Discard { .. } => "discard".into(),
                receiver::Output::Send(Packet::Landed { .. }) => "send landed".into(),
                receiver::Output::Send(Packet::Abandoned { cause, .. }) => {
                    format!("send abandoned {cause:?}")
                }
                receiver::Output::Send(Packet::Stop { .. }) => "send stop".into(),
                receiver::Output::Send(packet) => panic!("unexpected {packet:?}"),
                receiver::Output::Landed { output } => format!("landed {output:?}"),
                receiver::Output::Ended(cause) => format!("ended {cause:?}"),
            });
            if let receiver::Output::Import { part, .. } = output {
                receiver.handle(written(part));
            }
        }
        receiver.check();
    }
    said
}

const CORRUPT: [&str; 2] = ["send abandoned Failed(Corrupt)", "ended Failed(Corrupt)"];

#[test]
fn a_whole_hand_off_lands_and_says_so_again_when_asked_again() {
    let (frames, sealed) = sent();
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

#[test]
fn no_order_of_frames_and_seal_matters() {
    let (mut inputs, sealed) = sent();
    inputs.push(seal(sealed));
    // Every order of five inputs: the number, read in factorial base, picks each next one.
    for mut number in 0..120_usize {
        let mut left = inputs.clone();
        let mut order = Vec::new();
        for base in (1..=5).rev() {
            order.push(left.remove(number % base));
            number /= base;
        }
        let (_, mut receiver) = pair();
        let said = feed(&mut receiver, &order);
        let imports = said.iter().filter(|said| said.starts_with("import"));
        assert_eq!(imports.count(), 4);
        assert_eq!(said[4..], ["send landed", "landed [42]"]);
    }
}

#[test]
fn nothing_lands_before_the_last_import() {
    let (frames, sealed) = sent();
    let (_, mut receiver) = pair();
    for frame in &frames {
        receiver.handle(frame.clone());
        while receiver.poll().is_some() {}
    }
    assert!(feed(&mut receiver, &[seal(sealed)]).is_empty());
    for part in [part(1, 0, 6), part(1, 6, 2), part(2, 6, 2)] {
        assert!(feed(&mut receiver, &[written(part)]).is_empty());
    }
    assert!(!receiver.settled());
    let said = feed(&mut receiver, &[written(part(2, 0, 6))]);
    assert_eq!(said, ["send landed", "landed [42]"]);
}

#[test]
fn doubled_and_foreign_packets_do_no_harm() {
    let (frames, sealed) = sent();
    let (_, mut receiver) = pair();
    for from in [worker(1, 2), worker(3, 1)] {
        let foreign = receiver::Input::Frame {
            from,
            block: block(5, 3),
            part: part(1, 0, 6),
            checksum: None,
        };
        assert_eq!(feed(&mut receiver, &[foreign]), ["discard"]);
        let seal = sealed.clone();
        let foreign = receiver::Input::Seal { from, seal };
        assert!(feed(&mut receiver, &[foreign]).is_empty());
        let cause = Cause::Cancelled;
        let foreign = receiver::Input::Abandoned { from, cause };
        assert!(feed(&mut receiver, &[foreign]).is_empty());
    }
    assert!(receiver.open() && receiver.bytes() == 0);
    assert_eq!(feed(&mut receiver, &frames).len(), 4);
    assert_eq!(feed(&mut receiver, &frames[..2]), ["discard", "discard"]);
}

#[test]
fn lesson_02_a_frame_that_does_not_fit_fails_closed() {
    let good = part(1, 2, 4);
    let damaged = receiver::Input::Frame {
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
    for (what, input) in cases {
        let (_, mut receiver) = pair();
        feed(&mut receiver, &[frame(part(2, 2, 4), block(7, 0))]);
        let said = feed(&mut receiver, &[input]);
        assert_eq!(said, ["discard", CORRUPT[0], CORRUPT[1]], "{what}");
        let late = frame(good, block(5, 3));
        assert_eq!(feed(&mut receiver, &[late]), ["discard"], "{what}");
    }
}

#[test]
fn giving_up_is_said_once_and_to_the_other_end() {
    let cause = Cause::Failed(Failure::LeaseExpired);
    let (_, mut receiver) = pair();
    feed(&mut receiver, &[]);
    let up = receiver::Input::GivenUp { cause };
    let said = feed(&mut receiver, &[up.clone(), up, receiver::Input::LinkLost]);
    assert_eq!(
        said,
        [
            "send abandoned Failed(LeaseExpired)",
            "ended Failed(LeaseExpired)"
        ]
    );

    let (mut sender, _) = pair();
    sender.handle(sender::Input::LinkLost);
    let cause = Cause::Cancelled;
    sender.handle(sender::Input::GivenUp { cause });
    let cause = Cause::Failed(Failure::LinkLost);
    let said: Vec<_> = std::iter::from_fn(|| sender.poll()).collect();
    assert_eq!(said, [sender::Output::Ended(cause)]);
}

#[test]
fn lesson_05_a_block_that_could_not_be_copied_ends_both_ends() {
    let broken = || Failure::Engine("cannot".into());
    let (mut sender, mut receiver) = pair();
    let (ordinal, from) = (1, BlockIndex(0));
    sender.handle(sender::Input::Computed { ordinal, from });
    assert!(!sender.settled());
    let outcome = Err(broken());
    sender.handle(sender::Input::Exported { ordinal, outcome });
    assert!(sender.settled() && !sender.open());

    receiver.handle(frame(part(1, 0, 8), block(5, 3)));
    let (part, outcome) = (part(1, 0, 8), Err(broken()));
    receiver.handle(receiver::Input::Imported { part, outcome });
    assert!(receiver.settled() && !receiver.open());
}

#[test]
fn a_block_stays_with_its_writer_until_the_write_is_over() {
    let (_, mut receiver) = pair();
    receiver.handle(frame(part(1, 0, 8), block(5, 3)));
    receiver.handle(receiver::Input::LinkLost);
    assert!(!receiver.settled());
    receiver.handle(written(part(1, 0, 8)));
    assert!(receiver.settled());
}

#[test]
fn a_sender_believes_only_its_receiver_and_only_after_the_seal() {
    let (mut sender, _) = pair();
    let landed = |from| sender::Input::Landed { from };
    sender.handle(landed(worker(2, 2)));
    assert_eq!(sender.poll(), None);
    sender.handle(landed(worker(2, 1)));
    let said: Vec<_> = std::iter::from_fn(|| sender.poll()).collect();
    let cause = Cause::Failed(Failure::Corrupt);
    assert_eq!(said.last(), Some(&sender::Output::Ended(cause)));
}

/// A sequence that moves seals the tokens drawn on the way too: for every number of them, with room
/// for eight more than the ten that were told of.
#[test]
fn blocks_reserved_ahead_may_be_filled_or_not() {
    for present in 0..3 {
        for drawn in 1..=9_u32 {
            let blocks: Vec<_> = (present..5).map(|i| block(i, 0)).collect();
            let target = Target {
                worker: worker(2, 1),
                present,
                blocks: blocks.clone(),
            };
            let mut sender = Sender::new(HANDOFF, target);
            let mut receiver = Receiver::new(Expected {
                handoff: HANDOFF,
                sender: worker(1, 1),
                present,
                blocks,
                block_bytes: 8,
                block_tokens: 4,
                vocab_size: VOCAB_SIZE,
                tokens: 10,
                content: CONTENT,
                writer: Writer::Receiver,
            });
            // The last token drawn has no KV.
            let due = (10 + drawn - 1).div_ceil(4);
            for ordinal in 0..due {
                let from = BlockIndex(ordinal);
                sender.handle(sender::Input::Computed { ordinal, from });
            }
            let (content, output) = (CONTENT, vec![7; drawn as usize]);
            sender.handle(sender::Input::Sampled { content, output });
            let mut said = Vec::new();
            while let Some(output) = sender.poll() {
                match output {
                    sender::Output::Export { ordinal, block, .. } => {
                        let whole = part(ordinal, 0, 8);
                        let mut digest = Digest::default();
                        digest.add(whole, checksum(whole));
                        said.extend(feed(&mut receiver, &[frame(whole, block)]));
                        let outcome = Ok((digest.value(), 8));
                        sender.handle(sender::Input::Exported { ordinal, outcome });
                    }
                    sender::Output::Send(Packet::Seal(sealed)) => {
                        for off in [-1_i32, 1] {
                            let mut wrong = sealed.clone();
                            wrong.blocks_count = sealed.blocks_count.wrapping_add_signed(off);
                            let said = feed(&mut receiver.clone(), &[seal(wrong)]);
                            assert_eq!(said, CORRUPT, "{present} {drawn} {off}");
                        }
                        said.extend(feed(&mut receiver, &[seal(sealed)]));
                    }
                    other => panic!("unexpected {other:?}"),
                }
            }
            let imports = said.iter().filter(|said| said.starts_with("import"));
            assert_eq!(imports.count() as u32, due - present, "{present} {drawn}");
            assert!(receiver.landed(), "{present} {drawn}: {said:?}");
        }
    }
}

#[test]
fn lesson_02_a_writer_of_its_own_is_waited_for() {
    let up = || {
        let cause = Cause::Cancelled;
        receiver::Input::GivenUp { cause }
    };
    let stopped = |from| receiver::Input::Stopped { from };
    let (_, mut receiver) = pair_with(Writer::Sender);
    // Nobody asked yet.
    assert!(feed(&mut receiver, &[stopped(worker(1, 1))]).is_empty());
    assert_eq!(
        feed(&mut receiver, &[up()]),
        ["send abandoned Cancelled", "send stop", "ended Cancelled"]
    );
    assert!(receiver.quarantined() && !receiver.settled() && receiver.idle());
    let again = receiver::Input::StoodStill;
    assert_eq!(
        feed(&mut receiver, std::slice::from_ref(&again)),
        ["send stop"]
    );
    feed(
        &mut receiver,
        &[stopped(worker(1, 2)), receiver::Input::LinkLost],
    );
    assert!(!receiver.settled());
    feed(&mut receiver, &[stopped(worker(1, 1))]);
    assert!(receiver.settled());
    assert!(feed(&mut receiver, &[again]).is_empty());

    // However it ends, but for landing; and a sender that is cut off has stopped.
    let cause = Cause::Finished;
    let from = worker(1, 1);
    let abandoned = receiver::Input::Abandoned { from, cause };
    for end in [abandoned, receiver::Input::LinkLost] {
        let (_, mut receiver) = pair_with(Writer::Sender);
        assert_eq!(feed(&mut receiver, &[end])[0], "send stop");
        assert!(!receiver.settled());
        assert!(feed(&mut receiver, &[receiver::Input::Severed]).is_empty());
        assert!(receiver.settled());
    }
    let (frames, sealed) = sent();
    let (_, mut receiver) = pair_with(Writer::Sender);
    feed(&mut receiver, &frames);
    feed(&mut receiver, &[seal(sealed)]);
    assert!(receiver.landed() && receiver.settled());

    // What this worker writes itself has no other writer.
    let (_, mut receiver) = pair();
    feed(&mut receiver, &[up()]);
    assert!(receiver.settled() && !receiver.quarantined());
}

#[test]
fn lesson_02_stopped_is_said_once_nothing_is_written_any_more() {
    let (mut sender, _) = pair();
    let stop = |from| sender::Input::Stop { from };
    let said = |sender: &mut Sender| -> Vec<_> {
        sender.check();
        std::iter::from_fn(|| sender.poll()).collect()
    };
    let (ordinal, from) = (1, BlockIndex(0));
    sender.handle(sender::Input::Computed { ordinal, from });
    said(&mut sender);
    sender.handle(stop(worker(2, 2)));
    assert!(sender.open());
    sender.handle(stop(worker(2, 1)));
    assert_eq!(
        said(&mut sender),
        [sender::Output::Ended(Cause::Cancelled)],
        "a block is being written"
    );
    let outcome = Err(Failure::LinkLost);
    sender.handle(sender::Input::Exported { ordinal, outcome });
    let handoff = HANDOFF;
    let stopped = [sender::Output::Send(Packet::Stopped { handoff })];
    assert_eq!(said(&mut sender), stopped);
    sender.handle(stop(worker(2, 1)));
    assert_eq!(said(&mut sender), stopped, "the answer may have been lost");
}
