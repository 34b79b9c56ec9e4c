//! The sequences of one answer, in the air.
//!
//! Owns: waiting for whichever of them has an event. Never: shapes JSON. Invariant: dropping it
//! cancels what has not ended; a flight whose text has met a stop string is cancelled at once.

use crate::ask::Ask;
use crate::choice::{Choice, Delta};
use crate::error::ApiError;
use crate::frontend::{Caller, Enough, FlightEvent, FlightStream, Frontend};
use crate::metrics::Meter;
use crate::model::ModelText;
use crate::quota::Seat;
use crate::timing::Known;
use cleave_domain::{Ending, Slo};
use futures::StreamExt;
use futures::stream::{self, AbortHandle, Abortable, BoxStream, SelectAll};
use std::sync::Arc;
use tokio::time::Instant;

/// All sequences of an answer.
pub(crate) struct Flights {
    events: Events,
    aborts: Vec<(Enough, AbortHandle)>,
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    prompt_tokens: u64,
    open: usize,
    meter: Meter,
    seat: Option<Arc<Seat>>,
    submitted: Instant,
    timings: Vec<Known>,
}

/// Where events come from. Most answers are one sequence, which is asked without a detour.
enum Events {
    One(Abortable<FlightStream>),
    /// With the number of the sequence; `None` is its stream's end.
    Many(SelectAll<BoxStream<'static, (usize, Option<FlightEvent>)>>),
}

impl Events {
    async fn next(&mut self) -> Option<(usize, Option<FlightEvent>)> {
        match self {
            Self::One(events) => events.next().await.map(|event| (0, Some(event))),
            Self::Many(events) => events.next().await,
        }
    }
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
        (promises, mut meter, seat): (&[Slo], Meter, Option<Arc<Seat>>),
    ) -> Self {
        meter.read();
        let submitted = Instant::now();
        let (mut flights, mut aborts) = (Vec::new(), Vec::new());
        let (request_id, trace) = meter.mark();
        for request in ask.requests(promises) {
            let enough = Enough::default();
            let caller = Caller {
                enough: enough.clone(),
                request_id: Arc::clone(&request_id),
                trace,
            };
            let (flight, abort) = stream::abortable(frontend.submit_for(request, caller));
            flights.push(flight);
            aborts.push((enough, abort));
        }
        let events = match flights.len() {
            1 => Events::One(flights.remove(0)),
            _ => Events::Many(together(flights)),
        };
        let choices_per_prompt = ask.choices as usize;
        let prompts = ask.prompts.iter();
        let prompts = prompts.flat_map(|prompt| std::iter::repeat_n(prompt, choices_per_prompt));
        let choices: Vec<Choice> = prompts
            .map(|prompt| Choice::new(ask, prompt, model))
            .collect();
        let prompt_tokens = ask.prompt_tokens();
        meter.submitted(model.name(), prompt_tokens, choices.len());
        let timings = vec![Known::default(); choices.len()];
        Self {
            events,
            aborts,
            open: choices.len(),
            choices,
            choices_per_prompt,
            prompt_tokens,
            meter,
            seat,
            submitted,
            timings,
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
                let tokens_count = self.choices[*index].tokens_count();
                self.meter.finished(finish.reason, tokens_count);
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
        self.events = Events::Many(SelectAll::new());
        self.meter.failed(error);
        if let Some(seat) = self.seat.as_ref().filter(|_| error.is_refusal()) {
            seat.turned_away();
        }
    }

    fn take(&mut self, index: usize, event: FlightEvent) -> Result<Delta, ApiError> {
        let choice = &mut self.choices[index];
        match event {
            FlightEvent::Token(token) => {
                self.meter.token(index);
                if let Some(seat) = &self.seat {
                    seat.drew();
                }
                if let Some(facts) = &token.prompt {
                    self.timings[index].first(self.submitted.elapsed(), facts.timing);
                }
                let delta = choice.token(token)?;
                if choice.finish().is_some() {
                    let (enough, abort) = &self.aborts[index];
                    enough.say();
                    abort.abort();
                    let e2e = self.submitted.elapsed();
                    self.timings[index].stopped(e2e, choice.tokens_count());
                }
                Ok(delta)
            }
            FlightEvent::Ended {
                ending: Ending::Done { reason },
                usage,
                timing,
            } => {
                self.timings[index].ended(timing, usage.output_tokens);
                Ok(choice.done(reason, usage))
            }
            FlightEvent::Ended {
                ending,
                usage: _,
                timing: _,
            } => {
                let lost = || ApiError::internal("stream_broken", "A flight ended without reason.");
                Err(ApiError::of_ending(&ending).unwrap_or_else(lost))
            }
        }
    }

    /// Where the time of the slowest sequence went, as far as is known.
    pub(crate) fn timing(&self) -> Known {
        Known::slowest(&self.timings)
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

fn together(
    flights: Vec<Abortable<FlightStream>>,
) -> SelectAll<BoxStream<'static, (usize, Option<FlightEvent>)>> {
    let flights = flights.into_iter().enumerate().map(|(index, flight)| {
        let events_then_end = flight.map(Some).chain(stream::iter([None]));
        events_then_end.map(move |event| (index, event)).boxed()
    });
    stream::select_all(flights)
}
