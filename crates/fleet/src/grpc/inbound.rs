//! The receiving half of a stream, at either end.
//!
//! Owns: waiting for messages, taking batches apart, and counting what was handled. Never: knows
//! what a message says. Invariant: a batch holds neither beats nor batches, and a message counts as
//! received once all of it was handled.

use super::next_message;
use super::service::StreamError;
use super::window::MessageWindow;
use crate::wire::proto;
use std::time::Duration;
use tonic::Streaming;

/// A message of one direction, as it arrives.
pub(crate) trait InboundMessage: Sized + Send {
    /// As a session handles it.
    type Content: Send;

    /// How the message is taken apart.
    fn framing(self) -> MessageFraming<Self>;

    /// The content of a message that is neither a beat nor a batch.
    fn content(self) -> Result<Self::Content, StreamError>;
}

/// A message, or several.
pub(crate) enum MessageFraming<M> {
    Beat(proto::Beat),
    Batch(Vec<M>),
    One(M),
}

/// Handles the messages of one direction.
pub(super) trait MessageHandler<M: InboundMessage>: Sync {
    /// Handles one message, in the order in which they were sent.
    fn handle(&self, content: M::Content) -> impl Future<Output = Result<(), StreamError>> + Send;
}

/// Handles messages until the stream ends, and says why it did.
pub(super) async fn receive_all<M: InboundMessage>(
    messages: &mut Streaming<M>,
    session: &impl MessageHandler<M>,
    silence: Duration,
    window: &MessageWindow,
) -> StreamError {
    loop {
        let received = match next_message(messages, silence).await {
            Ok(message) => receive(message, session, window).await,
            Err(error) => Err(error),
        };
        if let Err(error) = received {
            return error;
        }
    }
}

async fn receive<M: InboundMessage>(
    message: M,
    session: &impl MessageHandler<M>,
    window: &MessageWindow,
) -> Result<(), StreamError> {
    match message.framing() {
        MessageFraming::Beat(beat) => return window.confirm(beat),
        MessageFraming::Batch(messages) => {
            for message in messages {
                session.handle(message.content()?).await?;
            }
        }
        MessageFraming::One(message) => session.handle(message.content()?).await?,
    }
    window.count_received();
    Ok(())
}
