//! The sequences of one answer, in the air.
//!
//! Owns: waiting for whichever of them has an event. Never: shapes JSON. Invariant: dropping it
//! cancels what has not ended; a flight whose text has met a stop string is cancelled at once.

use crate::ask::Ask;
use crate::choice::{Choice, Delta};
use crate::error::ApiError;
use crate::frontend::{FlightEvent, Frontend};
use crate::metrics::Meter;
use crate::model::ModelText;
use cleave_domain::{Ending, Slo};
use futures::StreamExt;
use futures::stream::{self, AbortHandle, BoxStream, SelectAll};
use std::sync::Arc;

/// All sequences of an answer.
pub(crate) struct Flights {
    /// `None` is the stream's end.
    events: SelectAll<BoxStream<'static, (usize, Option<FlightEvent>)>>,
    aborts: Vec<AbortHandle>,
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    prompt_tokens: u64,
    open: usize,
    meter: Meter,
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    /// `None` when no flight of some prompt has told.
    pub(crate) cached_tokens: Option<u64>,
}

impl Flights {
    /// Starts every sequence.
    pub(crate) fn start(
        frontend: &dyn Frontend,
        ask: &Ask,
        model: &Arc<ModelText>,
        (slo, mut meter): (&Slo, Meter),
    ) -> Self {
        let mut events = SelectAll::new();
        let mut aborts = Vec::new();
        for (index, request) in ask.requests(slo).into_iter().enumerate() {
            let (flight, abort) = stream::abortable(frontend.submit(request));
            let events_then_end = flight.map(Some).chain(stream::iter([None]));
            events.push(events_then_end.map(move |event| (index, event)).boxed());
            aborts.push(abort);
        }
        let choices_per_prompt = ask.choices as usize;
        let prompts = ask.prompts.iter();
        let prompts = prompts.flat_map(|prompt| std::iter::repeat_n(prompt, choices_per_prompt));
        let choices: Vec<Choice> = prompts
            .map(|prompt| Choice::new(ask, prompt, model))
            .collect();
        let prompt_tokens = ask.prompt_tokens();
        meter.submitted(prompt_tokens, choices.len());
        Self {
            events,
            aborts,
            open: choices.len(),
            choices,
            choices_per_prompt,
            prompt_tokens,
            meter,
        }
    }

    /// The next addition and whose it is; `None` when all have finished. An error ends the answer.
    pub(crate) async fn next(&mut self) -> Option<Result<(usize, Delta), ApiError>> {
        if self.open == 0 {
            return None;
        }
        let broken = || ApiError::internal("stream_broken", "A flight broke off without an end.");
        let result = loop {
            match self.events.next().await {
                Some((index, Some(event))) => {
                    break self.take(index, event).map(|delta| (index, delta));
                }
                Some((index, None)) if self.choices[index].finish().is_some() => {}
                Some((_, None)) | None => break Err(broken()),
            }
        };
        match &result {
            Ok((
                index,
                Delta {
                    finish: Some(finish),
                    ..
                },
            )) => {
                self.open -= 1;
                self.meter
                    .finished(*index, finish.reason, self.choices[*index].tokens_count());
                if self.open == 0 {
                    self.meter.completed();
                }
            }
            Ok(_) => {}
            Err(error) => self.fail(error),
        }
        Some(result)
    }

    /// The answer is over: cancels what still flies.
    pub(crate) fn fail(&mut self, error: &ApiError) {
        self.events = SelectAll::new();
        self.meter.failed(error);
    }

    fn take(&mut self, index: usize, event: FlightEvent) -> Result<Delta, ApiError> {
        let choice = &mut self.choices[index];
        match event {
            FlightEvent::Token(token) => {
                self.meter.token(index);
                let delta = choice.token(token)?;
                if choice.finish().is_some() {
                    self.aborts[index].abort();
                }
                Ok(delta)
            }
            FlightEvent::Ended {
                ending: Ending::Done { reason },
                usage,
            } => Ok(choice.done(reason, usage)),
            FlightEvent::Ended { ending, usage: _ } => {
                let lost = || ApiError::internal("stream_broken", "A flight ended without reason.");
                Err(ApiError::of_ending(&ending).unwrap_or_else(lost))
            }
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.choices.len()
    }

    pub(crate) fn counts(&self) -> Counts {
        let per_prompt = self.choices.chunks(self.choices_per_prompt);
        let cached = per_prompt.map(|choices| choices.iter().find_map(Choice::cached_tokens));
        Counts {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self
                .choices
                .iter()
                .map(|c| u64::from(c.tokens_count()))
                .sum(),
            cached_tokens: cached.map(|tokens| tokens.map(u64::from)).sum(),
        }
    }
}
