//! `/v1/chat/completions` and `/v1/completions`, from the body to the answer.

use crate::answer::{Frame, Kind, Live, stream};
use crate::app::{App, PromptLog, Work};
use crate::ask::{self, Ask, Delivery};
use crate::body::turn_away;
use crate::caller::Caller;
use crate::choice::Delta;
use crate::error::ApiError;
use crate::flights::Flights;
use crate::json::Document;
use crate::metrics::Meter;
use crate::model::ModelText;
use crate::record::{Asked, Record};
use crate::timing::{TIMING, TimingShown};
use crate::trace_parent::TraceParent;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use cleave_domain::Slo;
use std::sync::Arc;
use tokio::time::timeout;
use tracing::field::display;

/// Serves one request. Dropping the future, which is what a client's leaving does, drops the
/// flights, and that cancels them.
pub(crate) async fn generate(
    app: &App,
    asked: Asked,
    (caller, headers, body): (Caller, &HeaderMap, Body),
) -> Result<Response, ApiError> {
    let kind = asked.kind;
    let (request_id, trace) = (Arc::clone(&asked.request_id), asked.trace);
    let mut meter = Meter::start(app.metrics(), Record::begin(app.frontend_shared(), asked));
    let prepared = prepare(app, kind, (&caller, headers, body), (&request_id, trace)).await;
    let (ask, model, promises, timing) = prepared.inspect_err(|error| meter.failed(error))?;
    app.wait_for_worker()
        .await
        .and_then(|()| caller.begin((ask.sequences_count(), ask.prompt_tokens())))
        .inspect_err(|error| meter.failed(error))?;
    app.metrics().warned(&ask.warnings);
    let frame = Frame::new(kind, &request_id, model.clone(), ask.warnings.clone());
    let seat = caller.seat();
    let mut flights = Flights::start(app.frontend(), &ask, &model, (&promises, meter, seat));
    match ask.delivery {
        Delivery::Whole => {
            let first = begun(flights.next().await)?;
            whole(&frame, flights, (first, timing)).await
        }
        Delivery::Stream(usage) => {
            let keep_alive = app.options().keep_alive;
            // Headers wait for the first event, since until then an error can be a status; but not for
            // so long that somebody on the way would take the connection for dead.
            let first = match keep_alive {
                None => Some(flights.next().await),
                Some(span) => timeout(span, flights.next()).await.ok(),
            };
            let first = first.map(begun).transpose()?;
            Ok(stream(
                Live {
                    frame,
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

/// The first addition of an answer, which has one.
fn begun(first: Option<Result<(usize, Delta), ApiError>>) -> Result<(usize, Delta), ApiError> {
    let nothing = || ApiError::internal("stream_broken", "There was nothing to answer.");
    first.unwrap_or_else(|| Err(nothing()))
}

/// A request that can be served.
type Prepared = (Ask, Arc<ModelText>, Vec<Slo>, TimingShown);

async fn prepare(
    app: &App,
    kind: Kind,
    (caller, headers, body): (&Caller, &HeaderMap, Body),
    (request_id, trace): (&str, Option<TraceParent>),
) -> Result<Prepared, ApiError> {
    if let Err(error) = caller.enter() {
        turn_away(headers, body).await;
        return Err(error);
    }
    let timing = ask::timing(headers)?;
    let mut held = app.read_body(headers, body).await?;
    if app.options().prompts == PromptLog::Shown {
        let body = String::from_utf8_lossy(held.bytes());
        let trace_id = trace.map(display);
        tracing::info!(request_id, trace_id, route = kind.route(), ?body, "prompt");
    }
    if app.served().is_none() {
        // For minutes, where a fleet starts with the first request.
        held.rest();
    }
    let model = app.wait_for_model().await?;
    type Read = fn(&Document, &ModelText) -> Result<Ask, ApiError>;
    let (work, read): (Work, Read) = match kind {
        Kind::Chat => (Work::Renders, ask::chat),
        Kind::Completion => (Work::Reads, ask::completion),
    };
    let mut ask = app.parse(held, model.clone(), work, read).await?;
    let Caller {
        policy,
        origin,
        tenant,
        ..
    } = caller;
    let promises = ask::promises(policy, origin, &ask, &model)?;
    ask::confine(policy, tenant, &mut ask);
    Ok((ask, model, promises, timing))
}

async fn whole(
    frame: &Frame,
    mut flights: Flights,
    (first, timing): ((usize, Delta), TimingShown),
) -> Result<Response, ApiError> {
    let mut answers = vec![Delta::default(); flights.count()];
    let mut next = Some(Ok(first));
    while let Some(added) = next {
        let (
            index,
            Delta {
                text,
                scores,
                finish,
            },
        ) = added?;
        let answer = &mut answers[index];
        answer.text += &text;
        answer.scores.extend(scores);
        answer.finish = finish;
        next = flights.next().await;
    }
    let counts = flights.counts();
    let mut answer = frame.whole(answers, counts);
    if timing == TimingShown::Never {
        return Ok(axum::Json(answer).into_response());
    }
    let known = flights.timing();
    answer["timing"] = known.object();
    let mut response = axum::Json(answer).into_response();
    let headers = response.headers_mut();
    headers.extend(known.header().map(|value| (TIMING, value)));
    Ok(response)
}
