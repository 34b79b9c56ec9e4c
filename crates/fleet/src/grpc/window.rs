//! Flow control of one stream, by messages.
//!
//! Owns: how many messages one end may have under way, and the making of one message from those
//! that wait. Never: knows what a message says. Invariant: at most [`UNCONFIRMED_MAX`] messages
//! beside beats are under way to an end that has not confirmed them, and messages keep their order.
//!
//! HTTP/2 bounds bytes under way, not messages. An end that was stopped for seconds finds thousands
//! of small messages in its socket, and its HTTP/2 library ends a connection on which too many
//! small frames wait at once (`too_many_data_frames`: 256 bytes less its length for each frame,
//! 25,600 in all at least). Bounded here, the rest waits in the sender's line and travels as few
//! large messages.

use super::service::StreamError;
use crate::connection::{FromWorker, ToWorker};
use crate::wire::{BATCH_BYTES_MAX, encode, proto};
use prost::Message;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

/// Messages under way at most; a third of what the smallest budget for small frames allows.
pub(super) const UNCONFIRMED_MAX: u64 = 32;
/// Received messages after which they are confirmed at once, not with the next beat.
const CONFIRM_EVERY: u64 = 8;
/// Messages that travel as one, at most.
const BATCH_ITEMS_MAX: usize = 1024;

/// One end's counts of messages in both directions of a stream, shared by its sending and its
/// receiving half.
#[derive(Debug, Default)]
pub(super) struct MessageWindow {
    sent: watch::Sender<u64>,
    confirmed: watch::Sender<u64>,
    received: watch::Sender<u64>,
}

impl MessageWindow {
    /// A message that is no beat was received and handled.
    pub(super) fn count_received(&self) {
        self.received.send_modify(|count| *count += 1);
    }

    /// The other end has received so many messages.
    ///
    /// # Errors
    /// If fewer were sent.
    pub(super) fn confirm(&self, beat: proto::Beat) -> Result<(), StreamError> {
        let proto::Beat { received } = beat;
        if received > *self.sent.borrow() {
            return Err(StreamError::Unexpected(
                "confirmation of messages that were never sent",
            ));
        }
        self.confirmed
            .send_modify(|count| *count = received.max(*count));
        Ok(())
    }
}

/// A message of one direction, as it travels.
pub(crate) trait OutboundMessage: Message + Sized {
    /// As the line has it.
    type Word;
    /// As the stream takes it.
    type Item;

    fn of(word: Self::Word) -> Self;
    /// One message of several.
    fn batch(messages: Vec<Self>) -> Self;
    fn beat(beat: proto::Beat) -> Self;
    fn item(self) -> Self::Item;
}

/// Sends what the line gives, and beats, until either end is gone.
pub(super) async fn send_all<M: OutboundMessage>(
    outgoing: &mut mpsc::Receiver<M::Word>,
    out: &mpsc::Sender<M::Item>,
    beat: Duration,
    window: &MessageWindow,
) -> StreamError {
    let mut beats = interval(beat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut confirmed = window.confirmed.subscribe();
    let mut received = window.received.subscribe();
    // Of the received messages, those that the other end knows of.
    let mut confirmed_count = 0;
    // Taken from the line, and too long for the batch before it.
    let mut held = None;
    loop {
        let unconfirmed_count = *window.sent.borrow() - *confirmed.borrow_and_update();
        let is_open = unconfirmed_count < UNCONFIRMED_MAX;
        let message = tokio::select! {
            message = next(&mut held, outgoing), if is_open => match message {
                Some(message) => {
                    window.sent.send_modify(|count| *count += 1);
                    fill_batch(message, outgoing, &mut held)
                }
                None => return StreamError::Stopped,
            },
            _ = confirmed.changed(), if !is_open => continue,
            _ = received.wait_for(|count| *count >= confirmed_count + CONFIRM_EVERY) => {
                confirmed_count = *window.received.borrow();
                M::beat(proto::Beat { received: confirmed_count })
            }
            _ = beats.tick() => {
                confirmed_count = *window.received.borrow();
                M::beat(proto::Beat { received: confirmed_count })
            }
        };
        if out.send(message.item()).await.is_err() {
            return StreamError::Closed;
        }
    }
}

/// The message that is held back, or the next of the line. Loses none if it is dropped while it
/// waits.
async fn next<M: OutboundMessage>(
    held: &mut Option<M>,
    outgoing: &mut mpsc::Receiver<M::Word>,
) -> Option<M> {
    match held.take() {
        Some(message) => Some(message),
        None => outgoing.recv().await.map(M::of),
    }
}

/// The first message, and behind it those that wait and fit; one that does not fit is held back.
fn fill_batch<M: OutboundMessage>(
    first: M,
    outgoing: &mut mpsc::Receiver<M::Word>,
    held: &mut Option<M>,
) -> M {
    let mut bytes = framed_bytes(&first);
    let mut messages = vec![first];
    while messages.len() < BATCH_ITEMS_MAX && bytes < BATCH_BYTES_MAX {
        let Ok(item) = outgoing.try_recv() else {
            break;
        };
        let message = M::of(item);
        bytes += framed_bytes(&message);
        if bytes > BATCH_BYTES_MAX {
            *held = Some(message);
            break;
        }
        messages.push(message);
    }
    match messages.len() {
        1 => messages.swap_remove(0),
        _ => M::batch(messages),
    }
}

/// The bytes that a message takes within a batch, with its key and its length.
fn framed_bytes(message: &impl Message) -> usize {
    let bytes = message.encoded_len();
    1 + prost::length_delimiter_len(bytes) + bytes
}

impl OutboundMessage for proto::Upward {
    type Word = FromWorker;
    type Item = Self;

    fn of(message: FromWorker) -> Self {
        use proto::upward::Kind;
        let kind = match message {
            FromWorker::Report(report) => Kind::Report(encode(&report)),
            FromWorker::Emissions(tokens) => Kind::Emissions(encode(&tokens)),
            FromWorker::Grant { handoff, grant } => Kind::Pass(encode(&(handoff, grant.0))),
            FromWorker::Link(link) => Kind::Link(encode(&link)),
            FromWorker::AdapterAnswer { request, outcome } => {
                Kind::AdapterAnswer(encode(&(request, outcome)))
            }
        };
        Self { kind: Some(kind) }
    }

    fn batch(messages: Vec<Self>) -> Self {
        let batch = proto::UpwardBatch { messages };
        Self {
            kind: Some(proto::upward::Kind::Batch(batch)),
        }
    }

    fn beat(beat: proto::Beat) -> Self {
        Self {
            kind: Some(proto::upward::Kind::Beat(beat)),
        }
    }

    fn item(self) -> Self {
        self
    }
}

impl OutboundMessage for proto::Downward {
    type Word = ToWorker;
    type Item = Result<Self, tonic::Status>;

    fn of(message: ToWorker) -> Self {
        use proto::downward::Kind;
        let kind = match message {
            ToWorker::Order { order, context } => Kind::Order(encode(&(order, context))),
            ToWorker::Peer {
                worker,
                data_address,
            } => Kind::Peer(encode(&(worker, data_address))),
            ToWorker::Grant { handoff, grant } => Kind::Pass(encode(&(handoff, grant.0))),
            ToWorker::Adapter {
                request,
                change,
                command,
            } => Kind::Adapter(encode(&((request, change), command))),
            ToWorker::PeerGone { worker } => Kind::PeerGone(encode(&worker)),
            ToWorker::NameTaken { data_address } => Kind::NameTaken(encode(&data_address)),
        };
        Self { kind: Some(kind) }
    }

    fn batch(messages: Vec<Self>) -> Self {
        let batch = proto::DownwardBatch { messages };
        Self {
            kind: Some(proto::downward::Kind::Batch(batch)),
        }
    }

    fn beat(beat: proto::Beat) -> Self {
        Self {
            kind: Some(proto::downward::Kind::Beat(beat)),
        }
    }

    fn item(self) -> Self::Item {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::decode;
    use cleave_domain::{Emission, FlightId, HandoffId, SampledToken};
    use proto::upward::Kind;

    const NEVER: Duration = Duration::from_secs(1 << 30);

    fn token(index: u32) -> FromWorker {
        let handoff = HandoffId {
            flight: FlightId(1),
            attempt: 0,
        };
        let emission = Emission {
            index,
            sampled: SampledToken {
                token: index,
                scores: None,
            },
            prompt: None,
        };
        FromWorker::Emissions(vec![(handoff, emission)])
    }

    /// Output tokens' indices within a message, in their order.
    fn indices(message: proto::Upward) -> Vec<u32> {
        match message.kind.unwrap() {
            Kind::Emissions(tokens) => {
                let tokens: Vec<(HandoffId, Emission)> = decode("emissions", &tokens).unwrap();
                tokens.iter().map(|(_, emission)| emission.index).collect()
            }
            Kind::Batch(batch) => batch.messages.into_iter().flat_map(indices).collect(),
            Kind::Beat(_) => Vec::new(),
            kind => panic!("{kind:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stopped_receiver_finds_few_messages_and_all_tokens() {
        const TOKENS: u32 = 5000;
        let window = MessageWindow::default();
        let (line, mut outgoing) = mpsc::channel(TOKENS as usize);
        let (out, mut stream) = mpsc::channel(TOKENS as usize);
        let sender = send_all::<proto::Upward>(&mut outgoing, &out, NEVER, &window);
        let reader = async {
            // One at a time, as a busy worker's steps give them, and nobody confirms.
            for index in 0..TOKENS {
                line.send(token(index)).await.unwrap();
                tokio::task::yield_now().await;
            }
            let mut messages = Vec::new();
            while let Ok(message) = stream.try_recv() {
                messages.push(message);
            }
            // The first beat is one of them.
            assert_eq!(messages.len() as u64, UNCONFIRMED_MAX + 1);
            let received = UNCONFIRMED_MAX;
            window.confirm(proto::Beat { received }).unwrap();
            let mut tokens: Vec<u32> = messages.into_iter().flat_map(indices).collect();
            let mut rest = 0;
            while tokens.len() < TOKENS as usize {
                tokens.extend(indices(stream.recv().await.unwrap()));
                rest += 1;
            }
            assert!(rest < 20, "{rest} messages for what waited");
            assert!(tokens.into_iter().eq(0..TOKENS), "tokens out of order");
        };
        tokio::select! {
            ended = sender => panic!("{ended}"),
            () = reader => {}
        }
    }

    #[test]
    fn no_batch_is_longer_than_a_reader_takes() {
        let (line, mut outgoing) = mpsc::channel(100_000);
        let large = (0..20_000).map(|index| match token(index) {
            FromWorker::Emissions(tokens) => tokens[0].clone(),
            other => panic!("{other:?}"),
        });
        // Between many small messages one that no batch has room for.
        for index in 0..20_000 {
            line.try_send(token(index)).unwrap();
        }
        line.try_send(FromWorker::Emissions(large.collect()))
            .unwrap();
        line.try_send(token(20_000)).unwrap();
        let mut held = None;
        let (mut count, mut alone) = (0, 0);
        while let Some(first) = held
            .take()
            .or_else(|| outgoing.try_recv().ok().map(proto::Upward::of))
        {
            let message = fill_batch(first, &mut outgoing, &mut held);
            if message.encoded_len() > BATCH_BYTES_MAX + 8 {
                assert!(matches!(message.kind, Some(Kind::Emissions(_))));
                alone += 1;
            }
            let bytes = crate::wire::close_message(&message);
            assert!(crate::wire::open_message::<proto::Upward>(&bytes).is_ok());
            count += indices(message).len();
        }
        assert_eq!((count, alone), (40_001, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn received_messages_are_confirmed_before_the_next_beat() {
        let window = MessageWindow::default();
        let (_line, mut outgoing) = mpsc::channel(1);
        let (out, mut stream) = mpsc::channel(8);
        let sender = send_all::<proto::Upward>(&mut outgoing, &out, NEVER, &window);
        let reader = async {
            assert!(indices(stream.recv().await.unwrap()).is_empty());
            for _ in 0..CONFIRM_EVERY {
                window.count_received();
            }
            let beat = stream.recv().await.unwrap().kind.unwrap();
            let received = CONFIRM_EVERY;
            assert_eq!(beat, Kind::Beat(proto::Beat { received }));
        };
        tokio::select! {
            ended = sender => panic!("{ended}"),
            () = reader => {}
        }
    }

    #[test]
    fn more_than_was_sent_is_never_confirmed() {
        let window = MessageWindow::default();
        window.confirm(proto::Beat { received: 0 }).unwrap();
        let error = window.confirm(proto::Beat { received: 1 }).unwrap_err();
        assert!(error.to_string().contains("never sent"), "{error}");
    }
}
