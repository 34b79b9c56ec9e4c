//! The span of an HTTP request.
//!
//! Attributes are OpenTelemetry's, of HTTP servers and generative models, where it has them:
//! <https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/>.

use super::SpanBuilder;
use cleave_api::RequestSpan;
use opentelemetry::trace::{Event, SpanKind};
use opentelemetry::{Array, StringValue, Value};

/// The span of a request that is over.
pub(super) fn request_span(request: &RequestSpan) -> SpanBuilder {
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
    let mut piece = SpanBuilder::under(*span, "", *began);
    piece.span = *span;
    piece.parent = *client;
    piece.name = format!("POST {route}").into();
    piece.kind = SpanKind::Server;
    piece.ended = *ended;
    piece.set("http.request.method", "POST");
    piece.set("http.route", *route);
    if let Some(status) = status {
        piece.set_count("http.response.status_code", *status);
    }
    piece.set("gen_ai.operation.name", *operation);
    piece.set("gen_ai.provider.name", "cleave");
    if let Some(model) = model {
        piece.set("gen_ai.request.model", model.clone());
        piece.set("gen_ai.response.model", model.clone());
    }
    piece.set_count("gen_ai.request.choice.count", *sequences);
    piece.set_count("gen_ai.usage.input_tokens", *prompt_tokens);
    piece.set_count("gen_ai.usage.output_tokens", *output_tokens);
    if !finish_reasons.is_empty() {
        let reasons = finish_reasons
            .iter()
            .map(|reason| StringValue::from(*reason));
        let reasons = Value::Array(Array::String(reasons.collect()));
        piece.set("gen_ai.response.finish_reasons", reasons);
    }
    piece.set("cleave.request_id", request_id.to_string());
    piece.set("cleave.ending", *ending);
    if let Some(at) = first_token {
        let first = Event::new("first_token", *at, Vec::new(), 0);
        piece.events.push(first);
    }
    match (*ending, *error) {
        ("failed", reason) => piece.fail(reason.unwrap_or("failed")),
        // The client's fault, or none: the span itself did not fail.
        (_, Some(reason)) => piece.set("error.type", reason),
        _ => {}
    }
    piece
}
