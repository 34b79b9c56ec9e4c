//! `/v1/chat/completions` and `/v1/completions`, from the body to the answer.

use crate::answer::{Frame, Kind, Live, stream};
use crate::app::App;
use crate::ask::{self, Ask, Delivery};
use crate::choice::Delta;
use crate::error::ApiError;
use crate::flights::Flights;
use crate::metrics::Meter;
use crate::model::ModelText;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::sync::Arc;

/// Serves one request. Dropping the future, which is what a client's leaving does, drops the
/// flights, and that cancels them.
pub(crate) async fn generate(
    app: &App,
    kind: Kind,
    request_id: &str,
    (headers, body): (&HeaderMap, Body),
) -> Result<Response, ApiError> {
    let mut meter = Meter::start(app.metrics());
    let prepared = prepare(app, kind, (headers, body)).await;
    let (ask, model, slo) = prepared.inspect_err(|error| meter.failed(error))?;
    app.wait_for_worker()
        .await
        .inspect_err(|error| meter.failed(error))?;
    let frame = Frame::new(kind, request_id, model.clone());
    let mut flights = Flights::start(app.frontend(), &ask, &model, (&slo, meter));
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
        Delivery::Whole => whole(&frame, flights, first).await,
        Delivery::Stream(usage) => {
            let keep_alive = app.options().keep_alive;
            Ok(stream(
                Live {
                    frame,
                    flights,
                    usage,
                    keep_alive,
                },
                first,
            ))
        }
    }
}

async fn prepare(
    app: &App,
    kind: Kind,
    (headers, body): (&HeaderMap, Body),
) -> Result<(Ask, Arc<ModelText>, cleave_domain::Slo), ApiError> {
    let slo = ask::slo(headers)?;
    let bytes = app.read_body(headers, body).await?;
    let model = app.wait_for_model().await?;
    let read: fn(&Value, &ModelText) -> Result<Ask, ApiError> = match kind {
        Kind::Chat => ask::chat,
        Kind::Completion => ask::completion,
    };
    let ask = app.parse(bytes, model.clone(), read).await?;
    Ok((ask, model, slo))
}

async fn whole(
    frame: &Frame,
    mut flights: Flights,
    first: (usize, Delta),
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
    Ok(axum::Json(frame.whole(answers, counts)).into_response())
}
