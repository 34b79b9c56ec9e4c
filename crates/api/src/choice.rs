//! One sequence of an answer.
//!
//! Owns: the conversion of its events into the pieces that the client sees. Never: waits, or knows
//! an API. Invariant: every token counts once, a gap in the indices is an error, and nothing
//! follows the end.

use crate::answer_division::AnswerDivision;
use crate::error::ApiError;
use crate::output_piece::{ChoiceEnd, OutputPiece, OutputPieces, StopCause, TokenScore};
use crate::request::{
    GenerateRequest, OutputFormat, OutputWanted, ScoredTokens, StopText, TokenizedPrompt,
};
use cleave_domain::{
    Emission, FinishReason, PromptFacts, SampledToken, StopRules, TokenId, TokenUsage,
};
use cleave_text::{ModelText, OutputPlace, StopStrings, TextStart, TextStream};
use std::sync::Arc;

pub(crate) struct AnswerChoice {
    model: Arc<ModelText>,
    text: TextStream,
    stops: StopStrings,
    parts: Option<AnswerDivision>,
    output: OutputFormat,
    rules: StopRules,
    output_wanted: OutputWanted,
    prompt_echo: Option<PromptEcho>,
    /// The prompt, if the answer has its tokens' scores, until these have come.
    scored_prompt: Option<Arc<[TokenId]>>,
    tokens_count: u32,
    /// Characters decoded so far, including the echoed prompt; the offset of the next token's text.
    chars_count: usize,
    last: Option<TokenId>,
    end: Option<ChoiceEnd>,
    cached_tokens: Option<u32>,
}

/// A prompt that the answer repeats before its output.
struct PromptEcho {
    text: String,
    tokens: Arc<[TokenId]>,
}

impl AnswerChoice {
    pub(crate) fn new(
        ask: &GenerateRequest,
        prompt: &TokenizedPrompt,
        model: &Arc<ModelText>,
    ) -> Self {
        let echo = prompt.echo.clone();
        let text = TextStream::new(model.clone(), ask.output.special, prompt.start);
        let shown = ask.reading.iter().flat_map(|reading| reading.marks());
        let shown = shown.filter_map(|mark| model.tokenizer().id_of(mark));
        Self {
            model: model.clone(),
            text: text.showing(shown.collect()),
            parts: ask
                .reading
                .as_ref()
                .map(|reading| AnswerDivision::new(reading, &ask.output)),
            stops: StopStrings::new(ask.output.stops.clone()),
            output: ask.output.clone(),
            rules: prompt.stop.clone(),
            output_wanted: prompt.output_wanted,
            chars_count: echo.as_ref().map_or(0, |text| text.chars().count()),
            prompt_echo: echo.map(|text| PromptEcho {
                text,
                tokens: prompt.tokens.clone(),
            }),
            scored_prompt: (ask.output.prompt_logprobs.is_some()).then(|| prompt.tokens.clone()),
            tokens_count: 0,
            last: None,
            end: None,
            cached_tokens: None,
        }
    }

    pub(crate) fn tokens_count(&self) -> u32 {
        match self.output_wanted {
            OutputWanted::Output => self.tokens_count,
            OutputWanted::PromptOnly | OutputWanted::Vector => 0,
        }
    }

    /// The part of the output to which its next character belongs.
    fn place(&self) -> OutputPlace {
        let parts = self.parts.as_ref();
        parts.map_or(OutputPlace::Answer, AnswerDivision::place)
    }

    /// Output tokens that are reasoning, with its marks.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        let parts = self.parts.as_ref();
        parts.map_or(0, AnswerDivision::reasoning_tokens)
    }

    /// Prompt tokens found in the prefix cache; known from the first token on, if the frontend
    /// reports them.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Takes the next token.
    pub(crate) fn token(&mut self, emission: Emission) -> Result<OutputPieces, ApiError> {
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
        if self.output_wanted == OutputWanted::Vector {
            return self.vector(prompt);
        }
        let mut pieces = OutputPieces::default();
        if let (Some(tokens), Some(top)) = (self.scored_prompt.take(), self.output.prompt_logprobs)
        {
            let scores = self.prompt_scores(prompt.as_ref(), &tokens, top)?;
            pieces.push(OutputPiece::PromptScores(scores));
        }
        pieces.append(self.take_echo(prompt.as_ref())?);
        self.tokens_count += 1;
        self.last = Some(sampled.token);
        if self.output_wanted == OutputWanted::PromptOnly {
            self.close(&mut pieces, FinishReason::Length, StopCause::EosOrLength);
            return Ok(pieces);
        }
        let top = self.output.logprobs;
        let mut score = top
            .map(|top| score(&sampled, top, self.chars_count))
            .transpose()?;
        if self.output.scored == ScoredTokens::All {
            pieces.push(OutputPiece::Scores(score.take().into_iter().collect()));
        }
        // A cut stop token adds no text; the ending of the flight follows it.
        let ends = self.rules.stop_tokens.contains(&sampled.token);
        if ends && self.output.stop_text == StopText::Cut {
            return Ok(pieces);
        }
        let before = self.place();
        let text = self.text.push(sampled.token);
        self.push_text(&mut pieces, text);
        if let Some(parts) = &mut self.parts {
            parts.count_token(before);
        }
        let is_of_answer = before != OutputPlace::Reasoning && self.place() == OutputPlace::Answer;
        // Nothing follows the end.
        if let Some(score) = score.filter(|_| is_of_answer && !self.has_ended()) {
            pieces.push(OutputPiece::Scores(vec![score]));
        }
        Ok(pieces)
    }

    /// Takes the vector, which comes with the one token that stands for it.
    fn vector(&mut self, facts: Option<PromptFacts>) -> Result<OutputPieces, ApiError> {
        self.tokens_count += 1;
        let vector = facts.and_then(|facts| facts.pooled);
        let vector = vector.ok_or_else(|| {
            ApiError::internal(
                "vector_missing",
                "The worker sent no vector though it was asked.",
            )
        })?;
        let mut pieces = OutputPieces::default();
        pieces.push(OutputPiece::Vector(vector));
        Ok(pieces)
    }

    /// Whether it has a vector instead of tokens.
    pub(crate) fn is_vector(&self) -> bool {
        self.output_wanted == OutputWanted::Vector
    }

    /// Takes the successful end of the flight.
    pub(crate) fn finish_flight(
        &mut self,
        reason: FinishReason,
        usage: TokenUsage,
    ) -> OutputPieces {
        self.cached_tokens = Some(usage.cached_tokens);
        let text = self.text.finish();
        let mut pieces = OutputPieces::default();
        self.push_text(&mut pieces, text);
        if self.has_ended() {
            return pieces;
        }
        let held = self.stops.finish();
        self.add_text(&mut pieces, held);
        let cause = match reason {
            FinishReason::Length => StopCause::EosOrLength,
            FinishReason::Stop => self.stop_cause(),
        };
        self.close(&mut pieces, reason, cause);
        pieces
    }

    fn stop_cause(&self) -> StopCause {
        match self.last {
            Some(token) if !self.model.eos().contains(&token) => StopCause::Token(token),
            _ => StopCause::EosOrLength,
        }
    }

    /// Adds decoded text, up to the first stop string.
    fn push_text(&mut self, pieces: &mut OutputPieces, text: String) {
        self.chars_count += text.chars().count();
        if self.tokens_count <= self.rules.min_tokens {
            return self.add_text(pieces, text);
        }
        let (text, stopped) = self.stops.push(&text);
        self.add_text(pieces, text);
        let Some(stopped) = stopped else { return };
        let stop = self.stops.get(&stopped).to_owned();
        if self.output.stop_text == StopText::Included {
            self.add_text(pieces, stop.clone());
        }
        self.close(pieces, FinishReason::Stop, StopCause::Text(stop));
    }

    /// Adds text of the output, divided into its parts.
    fn add_text(&mut self, pieces: &mut OutputPieces, text: String) {
        match &mut self.parts {
            Some(parts) => parts.push(&text, pieces),
            None => pieces.push(OutputPiece::Text(text)),
        }
    }

    fn close(&mut self, pieces: &mut OutputPieces, reason: FinishReason, cause: StopCause) {
        let mut whole_calls = None;
        if let Some(parts) = &mut self.parts {
            parts.finish(pieces);
            // A client must not execute a call that its own stop condition cut.
            let is_cut = parts.is_call_cut() && cause != StopCause::EosOrLength;
            let has_whole_calls = parts.has_calls() && !is_cut;
            whole_calls = has_whole_calls.then_some(self.output.call_reason);
        }
        let end = ChoiceEnd {
            reason,
            cause,
            whole_calls,
        };
        self.end = Some(end.clone());
        pieces.push(OutputPiece::End(end));
    }

    /// Takes the echoed prompt, which is sent before the first token.
    fn take_echo(&mut self, facts: Option<&PromptFacts>) -> Result<OutputPieces, ApiError> {
        let Some(PromptEcho { text, tokens }) = self.prompt_echo.take() else {
            return Ok(OutputPieces::default());
        };
        let scores = match self.output.logprobs {
            Some(top) => self.prompt_scores(facts, &tokens, top)?,
            None => Vec::new(),
        };
        let mut pieces = OutputPieces::default();
        pieces.push(OutputPiece::Text(text));
        pieces.push(OutputPiece::Scores(scores));
        Ok(pieces)
    }

    /// The scores of a prompt's tokens; the first token has none.
    fn prompt_scores(
        &self,
        facts: Option<&PromptFacts>,
        tokens: &[TokenId],
        top: u32,
    ) -> Result<Vec<TokenScore>, ApiError> {
        let scored = facts.map_or(&[][..], |facts| &facts.scores);
        if scored.len() + 1 != tokens.len() {
            return Err(scores_missing());
        }
        let mut stream = TextStream::new(self.model.clone(), self.output.special, TextStart::Fresh);
        let mut offset = 0;
        let mut scores = Vec::with_capacity(tokens.len());
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
        Ok(scores)
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
