//! One sequence of an answer.
//!
//! Owns: from its events to the text, scores and finish that the client sees. Never: waits.
//! Invariant: every token counts once, a gap is an error, and after the finish nothing follows.

use crate::ask::{Ask, Output, Prompt, StopText, Wanted};
use crate::error::ApiError;
use crate::model::ModelText;
use crate::text::{Start, StopStrings, TextStream};
use cleave_domain::{Emission, FinishReason, PromptFacts, Sampled, StopRules, TokenId, Usage};
use std::sync::Arc;

/// The state of one sequence.
pub(crate) struct Choice {
    model: Arc<ModelText>,
    text: TextStream,
    stops: StopStrings,
    output: Output,
    rules: StopRules,
    wanted: Wanted,
    echo: Option<Echo>,
    tokens_count: u32,
    /// Characters decoded so far, echo included: where the next token's text begins.
    chars_count: usize,
    last: Option<TokenId>,
    finish: Option<Finish>,
    cached_tokens: Option<u32>,
}

/// A prompt to repeat.
struct Echo {
    text: String,
    tokens: Arc<[TokenId]>,
}

/// What an event adds to the answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) text: String,
    pub(crate) scores: Vec<TokenScore>,
    pub(crate) finish: Option<Finish>,
}

impl Delta {
    /// Nothing that a client would notice.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.finish.is_none()
    }
}

/// A token with its log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenScore {
    pub(crate) token: TokenId,
    /// `None` for a prompt's first token.
    pub(crate) logprob: Option<f32>,
    /// The most likely tokens, descending.
    pub(crate) top: Vec<(TokenId, f32)>,
    /// Characters of the answer before the token.
    pub(crate) offset: usize,
}

/// Why a sequence is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finish {
    /// `stop` or `length`.
    pub(crate) reason: &'static str,
    pub(crate) cause: StopCause,
}

/// What the client asked to stop at; `stop_reason` in vLLM's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StopCause {
    /// The model's own end, or the length.
    Own,
    Text(String),
    Token(TokenId),
}

impl Choice {
    pub(crate) fn new(ask: &Ask, prompt: &Prompt, model: &Arc<ModelText>) -> Self {
        let echo = prompt.echo.clone();
        Self {
            model: model.clone(),
            text: TextStream::new(model.clone(), ask.output.special, prompt.start),
            stops: StopStrings::new(ask.output.stops.clone()),
            output: ask.output.clone(),
            rules: prompt.stop.clone(),
            wanted: prompt.wanted,
            chars_count: echo.as_ref().map_or(0, |text| text.chars().count()),
            echo: echo.map(|text| Echo {
                text,
                tokens: prompt.tokens.clone(),
            }),
            tokens_count: 0,
            last: None,
            finish: None,
            cached_tokens: None,
        }
    }

    /// Output tokens so far.
    pub(crate) fn tokens_count(&self) -> u32 {
        match self.wanted {
            Wanted::Output => self.tokens_count,
            Wanted::PromptOnly => 0,
        }
    }

    /// Known from the first token on, where the serving side tells.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    pub(crate) fn finish(&self) -> Option<&Finish> {
        self.finish.as_ref()
    }

    /// The next token arrived.
    pub(crate) fn token(&mut self, emission: Emission) -> Result<Delta, ApiError> {
        let Emission {
            index,
            sampled,
            prompt,
        } = emission;
        if index != self.tokens_count {
            let message = format!("Token {} was lost on its way.", self.tokens_count);
            return Err(ApiError::internal("stream_broken", message));
        }
        if index == 0 {
            self.cached_tokens = prompt.as_ref().map(|facts| facts.cached_tokens);
        }
        let mut delta = self.take_echo(prompt.as_ref())?;
        self.tokens_count += 1;
        self.last = Some(sampled.token);
        if self.wanted == Wanted::PromptOnly {
            return Ok(self.close(delta, "length", StopCause::Own));
        }
        if let Some(top) = self.output.logprobs {
            delta.scores.push(score(&sampled, top, self.chars_count)?);
        }
        let ends = self.rules.stop_tokens.contains(&sampled.token);
        if ends && self.output.stop_text == StopText::Cut {
            return Ok(delta);
        }
        let text = self.text.push(sampled.token);
        Ok(self.show(delta, &text))
    }

    /// The flight ended well.
    pub(crate) fn done(&mut self, reason: FinishReason, usage: Usage) -> Delta {
        self.cached_tokens = Some(usage.cached_tokens);
        let text = self.text.finish();
        let mut delta = self.show(Delta::default(), &text);
        if delta.finish.is_some() {
            return delta;
        }
        delta.text += &self.stops.finish();
        let (reason, cause) = match reason {
            FinishReason::Length => ("length", StopCause::Own),
            FinishReason::Stop => ("stop", self.stop_cause()),
        };
        self.close(delta, reason, cause)
    }

    fn stop_cause(&self) -> StopCause {
        match self.last {
            Some(token) if !self.model.eos().contains(&token) => StopCause::Token(token),
            _ => StopCause::Own,
        }
    }

    /// Adds decoded text, up to a stop string.
    fn show(&mut self, mut delta: Delta, text: &str) -> Delta {
        self.chars_count += text.chars().count();
        if self.tokens_count <= self.rules.min_tokens {
            delta.text += text;
            return delta;
        }
        let (text, stopped) = self.stops.push(text);
        delta.text += &text;
        let Some(stopped) = stopped else { return delta };
        let stop = self.stops.get(&stopped).to_owned();
        if self.output.stop_text == StopText::Included {
            delta.text += &stop;
        }
        self.close(delta, "stop", StopCause::Text(stop))
    }

    fn close(&mut self, mut delta: Delta, reason: &'static str, cause: StopCause) -> Delta {
        self.finish = Some(Finish { reason, cause });
        delta.finish.clone_from(&self.finish);
        delta
    }

    /// The prompt, before the first token.
    fn take_echo(&mut self, facts: Option<&PromptFacts>) -> Result<Delta, ApiError> {
        let Some(Echo { text, tokens }) = self.echo.take() else {
            return Ok(Delta::default());
        };
        let mut scores = Vec::new();
        if let Some(top) = self.output.logprobs {
            let scored = facts.map_or(&[][..], |facts| &facts.scores);
            if scored.len() + 1 != tokens.len() {
                return Err(scores_missing());
            }
            let mut stream = TextStream::new(self.model.clone(), self.output.special, Start::Fresh);
            let mut offset = 0;
            for (place, &token) in tokens.iter().enumerate() {
                scores.push(match place.checked_sub(1) {
                    Some(place) => score(&scored[place], top, offset)?,
                    None => TokenScore {
                        token,
                        logprob: None,
                        top: Vec::new(),
                        offset,
                    },
                });
                offset += stream.push(token).chars().count();
            }
        }
        Ok(Delta {
            text,
            scores,
            finish: None,
        })
    }
}

fn scores_missing() -> ApiError {
    ApiError::internal(
        "scores_missing",
        "The worker sent no scores though they were asked for.",
    )
}

/// Logits less their normalizer; what no number can hold is as unlikely as vLLM's -9999.
fn score(sampled: &Sampled, top: u32, offset: usize) -> Result<TokenScore, ApiError> {
    let scores = sampled.scores.as_ref().ok_or_else(scores_missing)?;
    let logprob = |logit: f32| (logit - scores.normalizer).max(-9999.0);
    let top = scores.top.iter().take(top as usize);
    let top = top.map(|&(token, logit)| (token, logprob(logit)));
    Ok(TokenScore {
        token: sampled.token,
        logprob: Some(logprob(scores.chosen)),
        top: top.collect(),
        offset,
    })
}
