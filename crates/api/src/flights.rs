//! The running sequences of one answer.
//!
//! Owns: waiting for the next event of any of them. Never: formats JSON. Invariant: dropping it
//! cancels every flight that has not ended; a flight whose text reached a stop string is cancelled
//! at once; of an answer of vectors at most a window of flights is open.

use crate::choice::AnswerChoice;
use crate::error::ApiError;
use crate::frontend::{FlightEvent, FlightStream, Frontend, StopSignal, SubmissionContext};
use crate::input_turns::INPUT_WINDOW;
use crate::metrics::RequestMeter;
use crate::output_piece::OutputPieces;
use crate::quota::QuotaPermit;
use crate::request::GenerateRequest;
use crate::timing::SequenceTiming;
use cleave_domain::{Ending, Request, RequestSlo};
use cleave_text::ModelText;
use futures::StreamExt;
use futures::stream::{self, AbortHandle, AbortRegistration, Abortable, BoxStream};
use std::sync::Arc;
use tokio::time::Instant;

pub(crate) struct AnswerFlights {
    events: FlightEvents,
    aborts: Vec<(StopSignal, AbortHandle)>,
    choices: Vec<AnswerChoice>,
    choices_per_prompt: usize,
    prompt_tokens: u64,
    open: usize,
    meter: RequestMeter,
    permit: Option<Arc<QuotaPermit>>,
    /// Path of the field that constrains the output, if there is one.
    constraint: Option<String>,
    submitted: Instant,
    timings: Vec<SequenceTiming>,
}

/// Sources of events. Most answers have one sequence, which is polled directly.
enum FlightEvents {
    One(Abortable<FlightStream>),
    /// Events with the index of the sequence; `None` marks the end of its stream.
    Many(BoxStream<'static, (usize, Option<FlightEvent>)>),
}

/// A sequence that was not submitted yet.
struct FlightSubmission {
    request: Request,
    caller: SubmissionContext,
    abort: AbortRegistration,
}

impl FlightSubmission {
    fn submit(self, frontend: &dyn Frontend) -> Abortable<FlightStream> {
        let Self {
            request,
            caller,
            abort,
        } = self;
        Abortable::new(frontend.submit_for(request, caller), abort)
    }
}

impl FlightEvents {
    async fn next(&mut self) -> Option<(usize, Option<FlightEvent>)> {
        match self {
            Self::One(events) => events.next().await.map(|event| (0, Some(event))),
            Self::Many(events) => events.next().await,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    pub(crate) prompt_tokens: u64,
    pub(crate) output_tokens: u64,
    /// Output tokens that are reasoning.
    pub(crate) reasoning_tokens: u64,
    /// `None` while some prompt has no flight that reported its cached tokens.
    pub(crate) cached_tokens: Option<u64>,
}

impl AnswerFlights {
    pub(crate) fn start(
        frontend: Arc<dyn Frontend>,
        ask: &GenerateRequest,
        model: &Arc<ModelText>,
        slos: &[RequestSlo],
        mut meter: RequestMeter,
        permit: Option<Arc<QuotaPermit>>,
    ) -> Self {
        meter.observe_read_time();
        let submitted = Instant::now();
        let (mut submissions, mut aborts) = (Vec::new(), Vec::new());
        let (request_id, trace) = meter.ids();
        let model_name: Arc<str> = Arc::from(model.base_name());
        for mut request in ask.requests(slos) {
            request.adapter = model.adapter();
            let stop_signal = StopSignal::default();
            let (handle, abort) = AbortHandle::new_pair();
            let caller = SubmissionContext {
                stop_signal: stop_signal.clone(),
                model: Arc::clone(&model_name),
                request_id: Arc::clone(&request_id),
                trace,
                workers: meter.workers(),
            };
            submissions.push(FlightSubmission {
                request,
                caller,
                abort,
            });
            aborts.push((stop_signal, handle));
        }
        let events = if submissions.len() == 1 {
            FlightEvents::One(submissions.remove(0).submit(&*frontend))
        } else if ask.pooling.is_some() {
            FlightEvents::Many(submit_in_window(submissions, frontend))
        } else {
            FlightEvents::Many(submit_at_once(submissions, &*frontend))
        };
        let choices_per_prompt = ask.choices as usize;
        let prompts = ask.prompts.iter();
        let prompts = prompts.flat_map(|prompt| std::iter::repeat_n(prompt, choices_per_prompt));
        let choices: Vec<AnswerChoice> = prompts
            .map(|prompt| AnswerChoice::new(ask, prompt, model))
            .collect();
        let prompt_tokens = ask.prompt_tokens();
        let class = slos.first().map_or("", |slo| slo.class.as_str());
        meter.submitted(model.base_name(), class, prompt_tokens, choices.len());
        let timings = vec![SequenceTiming::default(); choices.len()];
        Self {
            events,
            aborts,
            open: choices.len(),
            choices,
            choices_per_prompt,
            prompt_tokens,
            meter,
            permit,
            constraint: ask.constraint.as_ref().map(|asked| asked.path.clone()),
            submitted,
            timings,
        }
    }

    /// Returns the next pieces and the index of their sequence; `None` after all have finished. An
    /// error ends the answer.
    pub(crate) async fn next(&mut self) -> Option<Result<(usize, OutputPieces), ApiError>> {
        if self.open == 0 {
            return None;
        }
        let broken = || ApiError::internal("stream_broken", "The answer's stream broke off.");
        let result = loop {
            match self.events.next().await {
                Some((index, Some(event))) => {
                    break self.apply_event(index, event).map(|pieces| (index, pieces));
                }
                Some((index, None)) if self.choices[index].has_ended() => {}
                Some((_, None)) | None => break Err(broken()),
            }
        };
        match &result {
            Ok((index, pieces)) => {
                if let Some(end) = pieces.end() {
                    self.open -= 1;
                    let choice = &self.choices[*index];
                    let tokens_count = (!choice.is_vector()).then(|| choice.tokens_count());
                    self.meter.finished(end.reason_word(), tokens_count);
                    if self.open == 0 {
                        self.meter.completed();
                    }
                }
            }
            Err(error) => self.end_with_error(error),
        }
        Some(result)
    }

    /// Ends the answer with an error and cancels the flights that still run.
    pub(crate) fn end_with_error(&mut self, error: &ApiError) {
        self.events = FlightEvents::Many(stream::empty().boxed());
        self.meter.failed(error);
        if let Some(permit) = self.permit.as_ref().filter(|_| error.is_refusal()) {
            permit.refund_prompt();
        }
    }

    fn apply_event(&mut self, index: usize, event: FlightEvent) -> Result<OutputPieces, ApiError> {
        let of_prompt = index - index % self.choices_per_prompt;
        let choices = &self.choices[of_prompt..][..self.choices_per_prompt];
        let is_first = choices.iter().all(|one| one.cached_tokens().is_none());
        let choice = &mut self.choices[index];
        match event {
            FlightEvent::Token(token) => {
                if let Some(facts) = token.prompt.as_ref().filter(|_| is_first) {
                    self.meter.cached(facts.cached_tokens);
                }
                self.meter.token(index);
                if let Some(permit) = self.permit.as_ref().filter(|_| !choice.is_vector()) {
                    permit.count_output_token();
                }
                if let Some(facts) = &token.prompt {
                    self.timings[index].set_first_token(self.submitted.elapsed(), facts.timing);
                }
                let pieces = choice.token(token)?;
                if choice.has_ended() {
                    let (stop_signal, abort) = &self.aborts[index];
                    stop_signal.signal();
                    abort.abort();
                    let e2e = self.submitted.elapsed();
                    self.timings[index].set_stopped(e2e, choice.tokens_count());
                }
                Ok(pieces)
            }
            FlightEvent::Ended {
                ending: Ending::Done { reason },
                usage,
                timing,
            } => {
                self.timings[index].set_ended(timing, usage.output_tokens);
                Ok(choice.finish_flight(reason, usage))
            }
            FlightEvent::Ended {
                ending,
                usage: _,
                timing: _,
            } => {
                let lost =
                    || ApiError::internal("stream_broken", "A sequence ended without a reason.");
                let field = self.constraint.as_deref();
                Err(ApiError::from_ending(&ending, field).unwrap_or_else(lost))
            }
        }
    }

    /// Returns the timing of the slowest sequence, as far as it is known.
    pub(crate) fn timing(&self) -> SequenceTiming {
        SequenceTiming::slowest(&self.timings)
    }

    pub(crate) fn count(&self) -> usize {
        self.choices.len()
    }

    pub(crate) fn counts(&self) -> TokenCounts {
        let per_prompt = self.choices.chunks(self.choices_per_prompt);
        let cached = per_prompt.map(|choices| choices.iter().find_map(AnswerChoice::cached_tokens));
        TokenCounts {
            prompt_tokens: self.prompt_tokens,
            output_tokens: self
                .choices
                .iter()
                .map(|c| u64::from(c.tokens_count()))
                .sum(),
            reasoning_tokens: self
                .choices
                .iter()
                .map(|c| u64::from(c.reasoning_tokens()))
                .sum(),
            cached_tokens: cached.map(|tokens| tokens.map(u64::from)).sum(),
        }
    }
}

/// Submits all sequences, and merges their events.
fn submit_at_once(
    submissions: Vec<FlightSubmission>,
    frontend: &dyn Frontend,
) -> BoxStream<'static, (usize, Option<FlightEvent>)> {
    let submissions = submissions.into_iter().enumerate();
    let flights = submissions.map(|(index, next)| indexed_events(index, next.submit(frontend)));
    stream::select_all(flights).boxed()
}

/// Submits a window of sequences, and the next one whenever the stream of one has ended: all of
/// them at once would fill the router's queue, in which each has a time limit.
fn submit_in_window(
    submissions: Vec<FlightSubmission>,
    frontend: Arc<dyn Frontend>,
) -> BoxStream<'static, (usize, Option<FlightEvent>)> {
    let submissions = stream::iter(submissions).enumerate();
    let flights =
        submissions.map(move |(index, next)| indexed_events(index, next.submit(&*frontend)));
    flights.flatten_unordered(INPUT_WINDOW).boxed()
}

fn indexed_events(
    index: usize,
    flight: Abortable<FlightStream>,
) -> BoxStream<'static, (usize, Option<FlightEvent>)> {
    let events_then_end = flight.map(Some).chain(stream::iter([None]));
    events_then_end.map(move |event| (index, event)).boxed()
}
