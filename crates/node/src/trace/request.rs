//! The span of an HTTP request.
//!
//! Attributes are OpenTelemetry's, of HTTP servers and generative models, where it has them:
//! <https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/>.

use super::Piece;
use cleave_api::RequestSpan;
use opentelemetry::trace::{Event, SpanKind};
use opentelemetry::{Array, StringValue, Value};

/// Of a request that is over.
pub(super) fn piece(request: &RequestSpan) -> Piece {
    let RequestSpan {
        span,
        client,
        request_id,
        route,
        operation,
        began,
        first_token,
        ended,
        model,
        prompt_tokens,
        output_tokens,
        sequences,
        finish_reasons,
        ending,
        status,
        error,
    } = request;
    let mut piece = Piece::under(*span, "", *began);
    piece.span = *span;
    piece.parent = *client;
    piece.name = format!("POST {route}").into();
    piece.kind = SpanKind::Server;
    piece.ended = *ended;
    piece.put("http.request.method", "POST");
    piece.put("http.route", *route);
    if let Some(status) = status {
        piece.count("http.response.status_code", *status);
    }
    piece.put("gen_ai.operation.name", *operation);
    piece.put("gen_ai.provider.name", "cleave");
    if let Some(model) = model {
        piece.put("gen_ai.request.model", model.clone());
        piece.put("gen_ai.response.model", model.clone());
    }
    piece.count("gen_ai.request.choice.count", *sequences);
    piece.count("gen_ai.usage.input_tokens", *prompt_tokens);
    piece.count("gen_ai.usage.output_tokens", *output_tokens);
    if !finish_reasons.is_empty() {
        let reasons = finish_reasons
            .iter()
            .map(|reason| StringValue::from(*reason));
        let reasons = Value::Array(Array::String(reasons.collect()));
        piece.put("gen_ai.response.finish_reasons", reasons);
    }
    piece.put("cleave.request_id", request_id.to_string());
    piece.put("cleave.ending", *ending);
    if let Some(at) = first_token {
        let first = Event::new("first_token", *at, Vec::new(), 0);
        piece.events.push(first);
    }
    match (*ending, *error) {
        ("failed", reason) => piece.fail(reason.unwrap_or("failed")),
        // Its sender's fault, or nobody's: the span is sound.
        (_, Some(reason)) => piece.put("error.type", reason),
        _ => {}
    }
    piece
}
