//! `/v1/chat/completions` and `/v1/completions`, from the body to the answer.

use crate::answer::{Frame, Kind, Live, stream};
use crate::app::{App, turn_away};
use crate::ask::{self, Ask, Delivery};
use crate::caller::Caller;
use crate::choice::Delta;
use crate::error::ApiError;
use crate::flights::Flights;
use crate::metrics::Meter;
use crate::model::ModelText;
use crate::timing::{TIMING, TimingShown};
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use cleave_domain::Slo;
use serde_json::Value;
use std::sync::Arc;

/// Serves one request. Dropping the future, which is what a client's leaving does, drops the
/// flights, and that cancels them.
pub(crate) async fn generate(
    app: &App,
    kind: Kind,
    request_id: &str,
    (caller, headers, body): (Caller, &HeaderMap, Body),
) -> Result<Response, ApiError> {
    let mut meter = Meter::start(app.metrics());
    let prepared = prepare(app, kind, (&caller, headers, body)).await;
    let (ask, model, promises, timing) = prepared.inspect_err(|error| meter.failed(error))?;
    app.wait_for_worker()
        .await
        .and_then(|()| caller.begin((ask.sequences_count(), ask.prompt_tokens())))
        .inspect_err(|error| meter.failed(error))?;
    let frame = Frame::new(kind, request_id, model.clone());
    let seat = caller.seat();
    let mut flights = Flights::start(app.frontend(), &ask, &model, (&promises, meter, seat));
    // Headers wait for the first event: until then an error can be a status.
    let first = match flights.next().await {
        Some(first) => first?,
        None => {
            return Err(ApiError::internal(
                "stream_broken",
                "There was nothing to answer.",
            ));
        }
    };
    match ask.delivery {
        Delivery::Whole => whole(&frame, flights, (first, timing)).await,
        Delivery::Stream(usage) => {
            let keep_alive = app.options().keep_alive;
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

/// A request that can be served.
type Prepared = (Ask, Arc<ModelText>, Vec<Slo>, TimingShown);

async fn prepare(
    app: &App,
    kind: Kind,
    (caller, headers, body): (&Caller, &HeaderMap, Body),
) -> Result<Prepared, ApiError> {
    if let Err(error) = caller.enter() {
        turn_away(headers, body).await;
        return Err(error);
    }
    let timing = ask::timing(headers)?;
    let bytes = app.read_body(headers, body).await?;
    let model = app.wait_for_model().await?;
    let read: fn(&Value, &ModelText) -> Result<Ask, ApiError> = match kind {
        Kind::Chat => ask::chat,
        Kind::Completion => ask::completion,
    };
    let mut ask = app.parse(bytes, model.clone(), read).await?;
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
