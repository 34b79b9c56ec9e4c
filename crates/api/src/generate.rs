//! One request to generate, in any API, from the body to the answer.

use crate::app::{App, PromptLog};
use crate::body::{ReservedBody, drain_refused_body};
use crate::caller::AuthenticatedCaller;
use crate::error::ApiError;
use crate::flights::AnswerFlights;
use crate::metrics::RequestMeter;
use crate::models::ModelChoice;
use crate::output_piece::OutputPieces;
use crate::request::{self, GenerateRequest, OutputLimit, ResponseMode, UsageShown};
use crate::request_record::{RequestMeta, RequestRecord};
use crate::response_store::{EarlierConversation, RequestPlace, StoredNames, whole_response};
use crate::sse::{StreamSetup, stream};
use crate::surface::{AnswerEnd, AnswerHead, BodyParts, Surface, SurfaceTask};
use crate::timing::{TIMING_HEADER, TimingShown};
use crate::trace_parent::TraceParent;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use cleave_domain::RequestSlo;
use cleave_text::json::Document;
use cleave_text::{ModelTask, ModelText};
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tracing::field::display;

/// Serves one request. A client that disconnects drops this future, which drops the flights and so
/// cancels them.
pub(crate) async fn generate(
    app: &App,
    meta: RequestMeta,
    caller: AuthenticatedCaller,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let surface = meta.surface;
    let (request_id, trace) = (Arc::clone(&meta.request_id), meta.trace);
    let mut meter = RequestMeter::start(
        app.metrics(),
        RequestRecord::begin(app.frontend_shared(), meta),
    );
    let prepared = prepare(app, surface, &caller, headers, body, &request_id, trace).await;
    let (mut ask, model, slos, timing) = prepared.inspect_err(|error| meter.failed(error))?;
    app.wait_for_worker(&model)
        .await
        .and_then(|()| caller.admit_sequences(ask.sequences_count(), ask.prompt_tokens()))
        .inspect_err(|error| meter.failed(error))?;
    let turn = app.wait_for_turn(&ask, &model).await;
    let _turn = turn.inspect_err(|error| meter.failed(error))?;
    let vectors = app.reserve_vectors(&ask, &model).await;
    let vectors = vectors.inspect_err(|error| meter.failed(error))?;
    if ask.output_limit == OutputLimit::Default
        && let Some(tokens_max) = app.sequence_tokens_max(&model).await
    {
        ask.fit_default_output(tokens_max);
    }
    app.metrics().count_warnings(&ask.warnings);
    let head = AnswerHead::new(request_id, model.clone(), &ask);
    let permit = caller.permit();
    let frontend = app.frontend_shared();
    let mut flights = AnswerFlights::start(frontend, &ask, &model, &slos, meter, permit);
    match ask.delivery {
        ResponseMode::Whole => {
            let first = require_first(flights.next().await)?;
            let collected = collect_answer(surface, head, flights, first, timing).await;
            collected.map(|answer| answer.into_response(vectors))
        }
        ResponseMode::Background => {
            let none = || ApiError::internal("no_background", "This API has no such answers.");
            let facts = &head.facts;
            let recorder = facts.recorder.clone().zip(facts.response_id.clone());
            let (recorder, id) = recorder.ok_or_else(none)?;
            let events = surface.events(head).ok_or_else(none)?;
            let queued = events.queued().ok_or_else(none)?;
            let setup = StreamSetup {
                events,
                flights,
                usage: UsageShown::AtEnd,
                timing,
                keep_alive: None,
            };
            let answer = whole_response(&queued, "[]");
            recorder.run(id, queued.into(), stream(setup, None).into_body());
            let kind = (header::CONTENT_TYPE, "application/json");
            Ok(([kind], answer).into_response())
        }
        ResponseMode::Stream(usage) => {
            let keep_alive = app.options().keep_alive;
            // The response headers wait for the first event, because until then an error can still
            // be an HTTP status. The wait ends after the keep-alive span, before a proxy would
            // close the silent connection.
            let first = match keep_alive {
                None => Some(flights.next().await),
                Some(span) => timeout(span, flights.next()).await.ok(),
            };
            let first = first.map(require_first).transpose()?;
            let none = || ApiError::internal("no_stream", "This API has no streams.");
            Ok(stream(
                StreamSetup {
                    events: surface.events(head).ok_or_else(none)?,
                    flights,
                    usage,
                    timing,
                    keep_alive,
                },
                first,
            ))
        }
    }
}

/// Returns the first pieces; an answer without any is an internal error.
fn require_first(
    first: Option<Result<(usize, OutputPieces), ApiError>>,
) -> Result<(usize, OutputPieces), ApiError> {
    let nothing = || ApiError::internal("stream_broken", "The answer ended before it began.");
    first.unwrap_or_else(|| Err(nothing()))
}

/// A request that was checked and can be served.
type PreparedRequest = (
    GenerateRequest,
    Arc<ModelText>,
    Vec<RequestSlo>,
    TimingShown,
);

async fn prepare(
    app: &App,
    surface: &'static dyn Surface,
    caller: &AuthenticatedCaller,
    headers: &HeaderMap,
    body: Body,
    request_id: &str,
    trace: Option<TraceParent>,
) -> Result<PreparedRequest, ApiError> {
    if let Err(error) = caller.admit_request() {
        drain_refused_body(headers, body).await;
        return Err(error);
    }
    let timing = request::timing(headers)?;
    let held = app.read_body(headers, body).await?;
    if app.options().prompts == PromptLog::Shown {
        let body = String::from_utf8_lossy(held.bytes());
        let trace_id = trace.map(display);
        tracing::info!(
            request_id,
            trace_id,
            route = surface.route(),
            ?body,
            "prompt"
        );
    }
    let (mut held, requested) = app.requested_model(held).await?;
    if !matches!(app.choose_model(&requested), ModelChoice::Found(_)) {
        // The model may take minutes to arrive where a fleet starts with the first request, so only
        // the body's own bytes stay reserved.
        held.release_parse_memory();
    }
    let model = app.wait_for_model(&requested).await?;
    check_task(surface.task(), &model)?;
    let (held, earlier) = earlier_conversation(app, surface, caller, headers, held).await?;
    let conversation = earlier.clone();
    let read =
        move |body: &Document, model: &ModelText| surface.parse_after(body, model, &conversation);
    let (earlier_bytes, work) = (earlier.bytes(), surface.body_work());
    let kept = move |ask: &GenerateRequest| match ask.facts.kept_bytes() {
        0 => 0,
        bytes => bytes + earlier_bytes,
    };
    let parsed = app.parse_keeping(held, model.clone(), work, read, kept);
    let (mut ask, memory) = parsed.await?;
    app.responses().prepare(
        &mut ask.facts,
        &caller.tenant,
        earlier,
        app.frontend().router_number(),
    );
    ask.facts.memory = memory.map(Arc::new);
    if ask.delivery == ResponseMode::Background && ask.facts.recorder.is_none() {
        return Err(ApiError::unsupported(
            "background",
            "`background`: no response is stored here (--response-store-memory is 0).",
        ));
    }
    let AuthenticatedCaller {
        policy,
        origin,
        tenant,
        ..
    } = caller;
    if let Some(asked) = &ask.constraint {
        let checks = app.constraint_checks();
        checks.check(tenant, asked, &model).await?;
    }
    let slos = request::resolve_slos(policy, origin, &ask, &model)?;
    request::apply_tenant_limits(policy, tenant, &mut ask);
    Ok((ask, model, slos, timing))
}

/// Finds what a body names of stored responses, and counts it as a part of the body.
pub(crate) async fn earlier_conversation(
    app: &App,
    surface: &'static dyn Surface,
    caller: &AuthenticatedCaller,
    headers: &HeaderMap,
    body: ReservedBody,
) -> Result<(ReservedBody, EarlierConversation), ApiError> {
    let is_long = body.is_long();
    let search = move || {
        let named = surface.stored_names(body.bytes());
        (body, named)
    };
    let (mut body, named) = if is_long {
        let searched = tokio::task::spawn_blocking(search).await;
        searched
            .map_err(|_| ApiError::internal("panicked", "The server failed on this request."))?
    } else {
        search()
    };
    if named == StoredNames::default() {
        return Ok((body, EarlierConversation::default()));
    }
    let bytes_max = app.options().body_bytes_max.saturating_sub(body.len());
    let router = app.router_digits();
    let place = RequestPlace {
        caller,
        headers,
        router: &router,
        bytes_max,
    };
    let mut earlier = match &named.previous {
        Some(id) => app.responses().previous(place, id).await?,
        None => EarlierConversation::default(),
    };
    earlier.items = app.responses().items(place, &named.items).await?;
    if earlier.bytes() > bytes_max {
        return Err(ApiError::context_exceeded(
            "previous_response_id",
            "The stored conversation and the body together are longer than a body may be.",
        ));
    }
    body.add_earlier(earlier.bytes());
    Ok((body, earlier))
}

/// Refuses a request for answers that the model is not served for.
fn check_task(task: SurfaceTask, model: &ModelText) -> Result<(), ApiError> {
    let served = match (task, model.task()) {
        (SurfaceTask::Generate, ModelTask::Generate)
        | (SurfaceTask::Embed, ModelTask::Embed(_))
        | (SurfaceTask::Score, ModelTask::Embed(_) | ModelTask::Rerank(_)) => return Ok(()),
        (_, ModelTask::Generate) => {
            "generates text; to serve its vectors, start it with --runner pooling"
        }
        (_, ModelTask::Embed(_)) => {
            "is served for embeddings: /v1/embeddings, /v1/rerank and /v1/score answer"
        }
        (_, ModelTask::Rerank(_)) => "is served as a reranker: /v1/rerank and /v1/score answer",
    };
    let message = format!("The model `{}` {served}.", model.name());
    Err(ApiError::unsupported("model", message))
}

/// An answer that is not streamed as events.
struct WholeAnswer {
    parts: BodyParts,
    timing: Option<HeaderValue>,
}

impl WholeAnswer {
    /// Writes its parts as its client takes them. `memory` is what they are made of.
    fn into_response(self, memory: Option<OwnedSemaphorePermit>) -> Response {
        let Self { mut parts, timing } = self;
        let first = parts.next().unwrap_or_default();
        let body = match parts.next() {
            None => Body::from(first),
            Some(second) => {
                let all = [first, second].into_iter().chain(parts);
                let kept = all.map(move |part| {
                    let _held = &memory;
                    Ok::<_, Infallible>(part)
                });
                Body::from_stream(futures::stream::iter(kept))
            }
        };
        let kind = (header::CONTENT_TYPE, "application/json");
        let mut response = ([kind], body).into_response();
        if let Some(value) = timing {
            response.headers_mut().insert(TIMING_HEADER, value);
        }
        response
    }
}

async fn collect_answer(
    surface: &'static dyn Surface,
    head: AnswerHead,
    mut flights: AnswerFlights,
    first: (usize, OutputPieces),
    timing: TimingShown,
) -> Result<WholeAnswer, ApiError> {
    let mut choices = vec![OutputPieces::default(); flights.count()];
    let mut next = Some(Ok(first));
    while let Some(added) = next {
        let (index, pieces) = added?;
        choices[index].append(pieces);
        next = flights.next().await;
    }
    let counts = flights.counts();
    let timing = (timing == TimingShown::Asked).then(|| flights.timing());
    let end = AnswerEnd {
        counts,
        timing: timing.map(|timing| timing.object()),
    };
    Ok(WholeAnswer {
        parts: surface.parts(head, &choices, end),
        timing: timing.and_then(|timing| timing.header()),
    })
}
