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
    let mut builder = SpanBuilder::under(*span, "", *began);
    builder.span = *span;
    builder.parent = *client;
    builder.name = format!("POST {route}").into();
    builder.kind = SpanKind::Server;
    builder.ended = *ended;
    builder.set("http.request.method", "POST");
    builder.set("http.route", *route);
    if let Some(status) = status {
        builder.set_count("http.response.status_code", *status);
    }
    builder.set("gen_ai.operation.name", *operation);
    builder.set("gen_ai.provider.name", "cleave");
    if let Some(model) = model {
        builder.set("gen_ai.request.model", model.clone());
        builder.set("gen_ai.response.model", model.clone());
    }
    builder.set_count("gen_ai.request.choice.count", *sequences);
    builder.set_count("gen_ai.usage.input_tokens", *prompt_tokens);
    builder.set_count("gen_ai.usage.output_tokens", *output_tokens);
    if !finish_reasons.is_empty() {
        let reasons = finish_reasons
            .iter()
            .map(|reason| StringValue::from(*reason));
        let reasons = Value::Array(Array::String(reasons.collect()));
        builder.set("gen_ai.response.finish_reasons", reasons);
    }
    builder.set("cleave.request_id", request_id.to_string());
    builder.set("cleave.ending", *ending);
    if let Some(at) = first_token {
        let first = Event::new("first_token", *at, Vec::new(), 0);
        builder.events.push(first);
    }
    match (*ending, *error) {
        ("failed", reason) => builder.fail(reason.unwrap_or("failed")),
        // The client's fault, or none: the span itself did not fail.
        (_, Some(reason)) => builder.set("error.type", reason),
        _ => {}
    }
    builder
}
