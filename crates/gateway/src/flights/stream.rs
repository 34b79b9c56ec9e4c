//! One flight's tokens on their way to its client, past the router's brain.
//!
//! Owns: the order of tokens, and which of them the client was given. Connections pass them in as
//! they arrive: a token of the decode worker may overtake one of the prefill worker, and while a
//! sequence migrates two workers emit; so early tokens wait here.
//! Never decides which attempts are over. Invariant: a client sees every index once, in order, and
//! then one ending. The tokens that the brain counts as given are exactly those that the client was
//! given, since nothing of an attempt below the fence goes out after it.

use crate::backlog::ClientBacklog;
use cleave_api::FlightEvent;
use cleave_domain::{Emission, Ending, Request, RequestStageTimes, TokenId, TokenUsage};
use cleave_router::TokenStream;
use cleave_telemetry::AttemptChange;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct ClientTokens {
    client: ClientBacklog,
    /// The limit on its tokens; further ones from a worker neither wait nor go out.
    tokens_max: u32,
    /// Received tokens, each with the attempt that emitted it.
    tokens: TokenStream<(u32, Emission)>,
    /// All output tokens that the client was given.
    generated: Vec<TokenId>,
    /// The attempt that emitted the last of them, and when it went out.
    last: Option<(u32, Instant)>,
    prompt_tokens: u32,
    /// As found by the attempt that drew the first token.
    cached_tokens: u32,
}

/// A token that is the client's next.
#[derive(Debug)]
pub(super) struct NextToken {
    pub(super) emission: Emission,
    /// The gap before it, if the token before came from another attempt.
    pub(super) pause: Option<StreamPause>,
}

/// A pause that a client saw while another attempt took over.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamPause {
    pub(super) change: AttemptChange,
    pub(super) attempt: u32,
    /// Tokens that the client had before it.
    pub(super) tokens: usize,
    pub(super) took: Duration,
}

impl ClientTokens {
    pub(super) fn new(request: &Request, client: ClientBacklog) -> Self {
        Self {
            client,
            tokens_max: request.stop.max_tokens,
            tokens: TokenStream::default(),
            generated: Vec::new(),
            last: None,
            prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
            cached_tokens: 0,
        }
    }

    /// Whether the request asked for fewer tokens.
    pub(super) fn is_beyond_limit(&self, emission: &Emission) -> bool {
        emission.index >= self.tokens_max
    }

    /// Takes a token within the limit from a worker. Tokens of fenced attempts and duplicates are
    /// dropped: two attempts draw equal tokens, and the first one that goes out counts.
    pub(super) fn accept(&mut self, attempt: u32, emission: Emission) {
        let index = emission.index;
        self.tokens.accept(attempt, index, (attempt, emission));
    }

    /// The next token, which counts as given from now on.
    pub(super) fn poll(&mut self) -> Option<NextToken> {
        let (_, (attempt, mut emission)) = self.tokens.poll()?;
        // Every attempt runs the prompt; only the facts that come with the first token count.
        match &emission.prompt {
            Some(facts) if emission.index == 0 => self.cached_tokens = facts.cached_tokens,
            _ => emission.prompt = None,
        }
        self.generated.push(emission.sampled.token);
        let pause = self.pause_before(attempt);
        Some(NextToken { emission, pause })
    }

    /// The pause before a token of this attempt, which goes out now.
    fn pause_before(&mut self, attempt: u32) -> Option<StreamPause> {
        let now = Instant::now();
        let (before, at) = self.last.replace((attempt, now))?;
        (before != attempt).then(|| StreamPause {
            change: if self.tokens.is_fenced(before) {
                AttemptChange::Resumed
            } else {
                AttemptChange::Migrated
            },
            attempt,
            tokens: self.generated.len() - 1,
            took: now - at,
        })
    }

    /// Gives the client a token that was polled. A client that has left is cancelled by its
    /// stream's drop.
    pub(super) fn send(&self, emission: Emission) {
        self.client.send(FlightEvent::Token(emission));
    }

    pub(super) fn fence(&mut self, attempt: u32) {
        self.tokens.fence(attempt);
    }

    /// The tokens that the client was given so far; those behind a gap are not among them.
    pub(super) fn given(&self) -> Arc<[TokenId]> {
        self.generated.as_slice().into()
    }

    /// Whether tokens are missing: before one that waits, or of the number drawn.
    pub(super) fn lacks_tokens(&self, drawn: Option<u32>) -> bool {
        self.tokens.has_gap() || drawn.is_some_and(|drawn| self.tokens.count() < drawn)
    }

    pub(super) fn usage(&self) -> TokenUsage {
        TokenUsage {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.tokens.count(),
            cached_tokens: self.cached_tokens,
        }
    }

    pub(super) fn send_end(self, ending: Ending, timing: RequestStageTimes) {
        let usage = self.usage();
        let event = FlightEvent::Ended {
            ending,
            usage,
            timing,
        };
        self.client.send(event);
    }
}
