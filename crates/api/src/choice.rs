//! One sequence of an answer.
//!
//! Owns: the conversion of its events into the text, scores and finish that the client sees. Never:
//! waits. Invariant: every token counts once, a gap in the indices is an error, and nothing follows
//! the finish.

use crate::error::ApiError;
use crate::request::{CompletionRequest, OutputFormat, OutputWanted, StopText, TokenizedPrompt};
use cleave_domain::{
    Emission, FinishReason, PromptFacts, SampledToken, StopRules, TokenId, TokenUsage,
};
use cleave_text::{ModelText, StopStrings, TextStart, TextStream};
use std::sync::Arc;

pub(crate) struct AnswerChoice {
    model: Arc<ModelText>,
    text: TextStream,
    stops: StopStrings,
    output: OutputFormat,
    rules: StopRules,
    output_wanted: OutputWanted,
    prompt_echo: Option<PromptEcho>,
    tokens_count: u32,
    /// Characters decoded so far, including the echoed prompt; the offset of the next token's text.
    chars_count: usize,
    last: Option<TokenId>,
    finish: Option<ChoiceFinish>,
    cached_tokens: Option<u32>,
}

/// A prompt that the answer repeats before its output.
struct PromptEcho {
    text: String,
    tokens: Arc<[TokenId]>,
}

/// The part of the answer that one event adds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ChoiceDelta {
    pub(crate) text: String,
    pub(crate) scores: Vec<TokenScore>,
    pub(crate) finish: Option<ChoiceFinish>,
}

impl ChoiceDelta {
    /// Whether the addition has nothing that a client would notice.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.finish.is_none()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenScore {
    pub(crate) token: TokenId,
    /// `None` for a prompt's first token.
    pub(crate) logprob: Option<f32>,
    /// The most likely tokens, descending.
    pub(crate) top: Vec<(TokenId, f32)>,
    /// Characters of the answer before this token.
    pub(crate) offset: usize,
}

/// The end of a sequence as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChoiceFinish {
    /// Finish reason: `stop` or `length`.
    pub(crate) reason: &'static str,
    pub(crate) cause: StopCause,
}

/// The cause of the end among the client's own stop conditions; `stop_reason` in vLLM's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StopCause {
    /// The model's end token or the length limit.
    EosOrLength,
    Text(String),
    Token(TokenId),
}

impl AnswerChoice {
    pub(crate) fn new(
        ask: &CompletionRequest,
        prompt: &TokenizedPrompt,
        model: &Arc<ModelText>,
    ) -> Self {
        let echo = prompt.echo.clone();
        Self {
            model: model.clone(),
            text: TextStream::new(model.clone(), ask.output.special, prompt.start),
            stops: StopStrings::new(ask.output.stops.clone()),
            output: ask.output.clone(),
            rules: prompt.stop.clone(),
            output_wanted: prompt.output_wanted,
            chars_count: echo.as_ref().map_or(0, |text| text.chars().count()),
            prompt_echo: echo.map(|text| PromptEcho {
                text,
                tokens: prompt.tokens.clone(),
            }),
            tokens_count: 0,
            last: None,
            finish: None,
            cached_tokens: None,
        }
    }

    pub(crate) fn tokens_count(&self) -> u32 {
        match self.output_wanted {
            OutputWanted::Output => self.tokens_count,
            OutputWanted::PromptOnly => 0,
        }
    }

    /// Prompt tokens found in the prefix cache; known from the first token on, if the frontend
    /// reports them.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    pub(crate) fn finish(&self) -> Option<&ChoiceFinish> {
        self.finish.as_ref()
    }

    /// Takes the next token.
    pub(crate) fn token(&mut self, emission: Emission) -> Result<ChoiceDelta, ApiError> {
        let Emission {
            index,
            sampled,
            prompt,
        } = emission;
        // A gap means a lost token: the answer fails instead of continuing without it (lesson 16).
        if index != self.tokens_count {
            let message = format!(
                "Token {} of the answer is missing in the stream from the worker.",
                self.tokens_count
            );
            return Err(ApiError::internal("stream_broken", message));
        }
        if index == 0 {
            self.cached_tokens = prompt.as_ref().map(|facts| facts.cached_tokens);
        }
        let mut delta = self.take_echo(prompt.as_ref())?;
        self.tokens_count += 1;
        self.last = Some(sampled.token);
        if self.output_wanted == OutputWanted::PromptOnly {
            return Ok(self.close(delta, "length", StopCause::EosOrLength));
        }
        if let Some(top) = self.output.logprobs {
            delta.scores.push(score(&sampled, top, self.chars_count)?);
        }
        // A cut stop token adds no text; the ending of the flight follows it.
        let ends = self.rules.stop_tokens.contains(&sampled.token);
        if ends && self.output.stop_text == StopText::Cut {
            return Ok(delta);
        }
        let text = self.text.push(sampled.token);
        Ok(self.push_text(delta, &text))
    }

    /// Takes the successful end of the flight.
    pub(crate) fn finish_flight(&mut self, reason: FinishReason, usage: TokenUsage) -> ChoiceDelta {
        self.cached_tokens = Some(usage.cached_tokens);
        let text = self.text.finish();
        let mut delta = self.push_text(ChoiceDelta::default(), &text);
        if delta.finish.is_some() {
            return delta;
        }
        delta.text += &self.stops.finish();
        let (reason, cause) = match reason {
            FinishReason::Length => ("length", StopCause::EosOrLength),
            FinishReason::Stop => ("stop", self.stop_cause()),
        };
        self.close(delta, reason, cause)
    }

    fn stop_cause(&self) -> StopCause {
        match self.last {
            Some(token) if !self.model.eos().contains(&token) => StopCause::Token(token),
            _ => StopCause::EosOrLength,
        }
    }

    /// Adds decoded text, up to the first stop string.
    fn push_text(&mut self, mut delta: ChoiceDelta, text: &str) -> ChoiceDelta {
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

    fn close(
        &mut self,
        mut delta: ChoiceDelta,
        reason: &'static str,
        cause: StopCause,
    ) -> ChoiceDelta {
        self.finish = Some(ChoiceFinish { reason, cause });
        delta.finish.clone_from(&self.finish);
        delta
    }

    /// Takes the echoed prompt, which is sent before the first token.
    fn take_echo(&mut self, facts: Option<&PromptFacts>) -> Result<ChoiceDelta, ApiError> {
        let Some(PromptEcho { text, tokens }) = self.prompt_echo.take() else {
            return Ok(ChoiceDelta::default());
        };
        let mut scores = Vec::new();
        if let Some(top) = self.output.logprobs {
            let scored = facts.map_or(&[][..], |facts| &facts.scores);
            if scored.len() + 1 != tokens.len() {
                return Err(scores_missing());
            }
            let mut stream =
                TextStream::new(self.model.clone(), self.output.special, TextStart::Fresh);
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
        Ok(ChoiceDelta {
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

/// Log-probabilities are logits minus the normalizer. An unrepresentable one becomes -9999, as in
/// vLLM.
fn score(sampled: &SampledToken, top: u32, offset: usize) -> Result<TokenScore, ApiError> {
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
