//! Tests of seals: damaged, repeated, and with tokens or blocks that do not match.

use super::super::{HandoffDigest, receiver, sender};
use super::{
    CONTENT, CORRUPT, VOCAB_SIZE, block, checksum, feed, frame, pair, part, seal, sent_handoff,
    worker,
};
use crate::{Packet, Seal};
use cleave_domain::{AbandonCause, BlockHash, BlockIndex, KvUnit};
use receiver::HandoffReceiver;
use sender::HandoffSender;

// Invariant: I4.
// Lesson: 16.
#[test]
fn a_seal_that_does_not_match_fails_the_hand_off() {
    let (frames, sealed) = sent_handoff();
    let wrong = |change: fn(&mut Seal)| {
        let mut sealed = sealed.clone();
        change(&mut sealed);
        seal(sealed)
    };
    for sealed in [
        wrong(|seal| seal.digest ^= 1),
        wrong(|seal| seal.blocks_count += 1),
        wrong(|seal| seal.blocks_count -= 1),
        wrong(|seal| seal.output.clear()),
        // The KV belongs to another text.
        wrong(|seal| seal.content.0[7] ^= 1),
        // Twelve tokens fill the two blocks, thirteen need a third, eighteen do not fit at all.
        wrong(|seal| seal.output = vec![0; 4]),
        wrong(|seal| seal.output = vec![0; 9]),
    ] {
        let (_, mut receiver) = pair();
        feed(&mut receiver, &frames);
        assert_eq!(feed(&mut receiver, &[sealed]), CORRUPT);
    }
    // With a block missing the receiver waits, because its frame may still be on the way.
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames[..3]);
    assert!(feed(&mut receiver, &[seal(sealed.clone())]).is_empty());
    assert!(receiver.is_sealed());
    let other = wrong(|seal| seal.output = vec![0]);
    assert_eq!(feed(&mut receiver, &[other]), CORRUPT);
}

/// All seals that differ from this one in one bit of one field.
fn flipped(seal: &Seal) -> Vec<Seal> {
    let mut all = Vec::new();
    let mut flip = |bits: u32, field: &dyn Fn(&mut Seal, u32)| {
        for bit in 0..bits {
            let mut other = seal.clone();
            field(&mut other, bit);
            all.push(other);
        }
    };
    flip(64, &|seal, bit| seal.handoff.flight.0 ^= 1 << bit);
    flip(32, &|seal, bit| seal.handoff.attempt ^= 1 << bit);
    flip(32, &|seal, bit| seal.blocks_count ^= 1 << bit);
    flip(64, &|seal, bit| seal.digest ^= 1 << bit);
    flip(128, &|seal, bit| {
        seal.content.0[bit as usize / 8] ^= 1 << (bit % 8);
    });
    for place in 0..seal.output.len() {
        flip(32, &move |seal, bit| seal.output[place] ^= 1 << bit);
    }
    let mut with_state = seal.clone();
    with_state.state = Some(0);
    let mut shorter = seal.clone();
    shorter.output.pop();
    let mut longer = seal.clone();
    longer.output.push(0);
    all.extend([shorter, longer, with_state]);
    all
}

// Invariant: I4.
#[test]
fn a_flipped_bit_in_a_seal_fails_the_hand_off() {
    let (frames, sealed) = sent_handoff();
    for wrong in flipped(&sealed) {
        let mismatch = format!("{wrong:?}");
        let (_, mut receiver) = pair();
        feed(&mut receiver, &frames);
        assert_eq!(feed(&mut receiver, &[seal(wrong)]), CORRUPT, "{mismatch}");
    }
}

// Invariant: I51.
#[test]
fn a_token_outside_the_vocabulary_fails_the_hand_off() {
    for (token, lands) in [(VOCAB_SIZE - 1, true), (VOCAB_SIZE, false)] {
        let (mut sender, mut receiver) = pair();
        let (content, output) = (CONTENT, vec![token]);
        let outputs = run_handoff(&mut sender, &mut receiver, (content, output));
        assert_eq!(receiver.has_landed(), lands, "{token}: {outputs:?}");
        if !lands {
            assert_eq!(outputs[outputs.len() - 2..], CORRUPT);
        }
    }
}

#[test]
fn an_unanswered_seal_is_repeated_and_answered_again() {
    let (mut sender, mut receiver) = pair();
    sender.handle(sender::SenderInput::Unanswered);
    assert_eq!(sender.poll(), None, "nothing was sealed");
    run_handoff(&mut sender, &mut receiver, (CONTENT, vec![42]));
    let again = |sender: &mut HandoffSender| {
        sender.handle(sender::SenderInput::Unanswered);
        match sender.poll() {
            Some(sender::SenderOutput::Send(Packet::Seal(again))) => Some(seal(again)),
            None => None,
            other => panic!("{other:?}"),
        }
    };
    let repeated = again(&mut sender).expect("it waits for its answer");
    assert_eq!(feed(&mut receiver, &[repeated]), ["send landed"]);
    let from = worker(2, 1);
    sender.handle(sender::SenderInput::Landed { from });
    assert_eq!(sender.poll(), Some(sender::SenderOutput::Done));
    assert!(again(&mut sender).is_none(), "it has its answer");
}

/// The answer of a receiver that gave up may be lost, too.
#[test]
fn a_receiver_that_ended_answers_a_repeated_seal() {
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames[..1]);
    let up = receiver::ReceiverInput::GiveUp {
        cause: AbandonCause::Cancelled,
    };
    feed(&mut receiver, &[up]);
    let outputs = feed(&mut receiver, &[seal(sealed)]);
    assert_eq!(outputs, ["send abandoned Cancelled"]);
    assert!(!receiver.is_open() && !receiver.has_landed());
}

/// Runs a hand-off from the first block to the seal; returns the outputs of the receiver.
fn run_handoff(
    sender: &mut HandoffSender,
    receiver: &mut HandoffReceiver,
    drawn: (BlockHash, Vec<u32>),
) -> Vec<String> {
    for ordinal in 0..3 {
        let (unit, from) = (KvUnit::block(ordinal), BlockIndex(ordinal));
        sender.handle(sender::SenderInput::Computed { unit, from });
    }
    let (content, output) = drawn;
    sender.handle(sender::SenderInput::Sampled { content, output });
    let mut outputs = Vec::new();
    while let Some(output) = sender.poll() {
        match output {
            sender::SenderOutput::Export { unit, block, .. } => {
                let ordinal = unit.ordinal;
                let whole = part(ordinal, 0, 8);
                let mut digest = HandoffDigest::default();
                digest.add_frame(whole, checksum(whole));
                outputs.extend(feed(receiver, &[frame(whole, block)]));
                let outcome = Ok((digest.value(), 8));
                sender.handle(sender::SenderInput::Exported { unit, outcome });
            }
            sender::SenderOutput::Send(Packet::Seal(sealed)) => {
                outputs.extend(feed(receiver, &[seal(sealed)]));
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    outputs
}

#[test]
fn a_repeated_seal_changes_nothing_while_frames_are_missing() {
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames[..3]);
    for _ in 0..3 {
        assert!(feed(&mut receiver, &[seal(sealed.clone())]).is_empty());
    }
    let outputs = feed(&mut receiver, &frames[3..]);
    assert_eq!(outputs[1..], ["send landed", "landed [42]"]);
}

#[test]
fn a_block_beyond_the_seal_fails_before_all_frames_arrive() {
    let (frames, sealed) = sent_handoff();
    let (_, mut receiver) = pair();
    // One frame is missing, and another can never match.
    feed(&mut receiver, &frames[..3]);
    feed(&mut receiver, &[frame(part(3, 0, 8), block(8, 0))]);
    assert_eq!(feed(&mut receiver, &[seal(sealed)]), CORRUPT);
}

#[test]
fn a_block_beyond_the_seal_fails_the_hand_off() {
    let (mut frames, sealed) = sent_handoff();
    frames.push(frame(part(3, 0, 8), block(8, 0)));
    let (_, mut receiver) = pair();
    feed(&mut receiver, &frames);
    assert_eq!(feed(&mut receiver, &[seal(sealed)]), CORRUPT);
}
