//! The exchange with a proxy about one request.
//!
//! Owns: the order of answers that Envoy demands. Never keeps a byte of the response to the client;
//! each leaves as it came. Invariant: the request's headers are answered once, by an endpoint or by
//! an immediate response; after an endpoint every byte of a body is given back once, in order, and
//! after an immediate response nothing more is sent or kept.
//!
//! Where the request's body is streamed both ways, its headers are answered when it is complete,
//! since its beginning decides where it goes. Otherwise the headers alone must do.

use super::pick_request::{PickRequest, allowed_endpoints, body_key, session_key};
use super::proto::header_value_option::AppendAction;
use super::proto::processing_request::Request as Word;
use super::proto::processing_response::Response as Answer;
use super::proto::{
    BodyMutation, BodyResponse, BodySendMode, CommonResponse, HeaderMutation, HeaderValue,
    HeaderValueOption, HeadersResponse, HttpBody, HttpStatus, ImmediateResponse, ProcessingRequest,
    ProcessingResponse, ProtocolConfiguration, StreamedBodyResponse, TrailersResponse,
    body_mutation,
};
use bytes::{Bytes, BytesMut};
use cleave_telemetry::PickerChoice;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use std::net::SocketAddr;

/// The header and the metadata that name the endpoint.
const DESTINATION: &str = "x-gateway-destination-endpoint";
const NAMESPACE: &str = "envoy.lb";
/// The same as the routers' own limit.
const BODY_BYTES_MAX: usize = 8 << 20;
/// Proxies take pieces of a body up to 64 KiB with their framing.
const PIECE_BYTES_MAX: usize = 60 << 10;

#[derive(Debug)]
pub(crate) struct ExtProcConversation {
    pick: PickRequest,
    /// The request's body, until it is complete.
    body: BytesMut,
    duplex: DuplexBodies,
    state: ExtProcState,
}

/// The state of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExtProcState {
    /// The headers wait for their answer.
    AwaitingBody,
    /// The headers are answered; later parts pass through.
    Routed,
    /// The client got an immediate response; the proxy sends nothing more.
    Over,
}

/// The bodies that are streamed both ways.
#[derive(Clone, Copy, Debug)]
struct DuplexBodies {
    request: bool,
    response: bool,
}

impl Default for ExtProcConversation {
    fn default() -> Self {
        Self {
            pick: PickRequest::default(),
            body: BytesMut::new(),
            // As the endpoint-picker protocol has it.
            duplex: DuplexBodies {
                request: true,
                response: true,
            },
            state: ExtProcState::AwaitingBody,
        }
    }
}

impl ExtProcConversation {
    /// Handles a message; gives the answers, in order.
    pub(crate) fn handle(
        &mut self,
        message: ProcessingRequest,
        choose: impl FnOnce(&PickRequest) -> PickerChoice,
    ) -> Vec<ProcessingResponse> {
        if self.state == ExtProcState::Over {
            return Vec::new();
        }
        // Sent with the first message; the modes do not change later.
        if let Some(modes) = &message.protocol_config
            && self.state == ExtProcState::AwaitingBody
            && self.body.is_empty()
        {
            self.duplex = duplex(modes);
        }
        if let Some(subset) = allowed_endpoints(message.metadata_context.as_ref()) {
            self.pick.subset = Some(subset);
        }
        match message.request {
            Some(Word::RequestHeaders(_)) if self.state != ExtProcState::AwaitingBody => Vec::new(),
            Some(Word::RequestHeaders(headers)) => {
                self.pick.key = session_key(&headers);
                if headers.end_of_stream || !self.duplex.request {
                    self.decide(choose)
                } else {
                    Vec::new()
                }
            }
            Some(Word::RequestBody(body)) if self.duplex.request => match self.state {
                ExtProcState::AwaitingBody => self.append_body(body, choose),
                ExtProcState::Routed | ExtProcState::Over => vec![request_body_response(body)],
            },
            Some(Word::RequestBody(_)) => vec![response_of(Answer::RequestBody(unchanged()))],
            Some(Word::RequestTrailers(_)) => {
                let mut answers = match self.state {
                    ExtProcState::AwaitingBody => self.decide(choose),
                    ExtProcState::Routed | ExtProcState::Over => Vec::new(),
                };
                if self.state == ExtProcState::Routed {
                    answers.extend(self.pieces().into_iter().map(request_body_response));
                    answers.push(response_of(Answer::RequestTrailers(TrailersResponse {})));
                }
                answers
            }
            Some(Word::ResponseHeaders(_)) => {
                vec![response_of(Answer::ResponseHeaders(
                    HeadersResponse::default(),
                ))]
            }
            Some(Word::ResponseBody(body)) if self.duplex.response => {
                vec![response_of(Answer::ResponseBody(streamed_back(body)))]
            }
            Some(Word::ResponseBody(_)) => vec![response_of(Answer::ResponseBody(unchanged()))],
            Some(Word::ResponseTrailers(_)) => {
                vec![response_of(Answer::ResponseTrailers(TrailersResponse {}))]
            }
            None => Vec::new(),
        }
    }

    fn append_body(
        &mut self,
        HttpBody {
            body,
            end_of_stream,
        }: HttpBody,
        choose: impl FnOnce(&PickRequest) -> PickerChoice,
    ) -> Vec<ProcessingResponse> {
        if self.body.len() + body.len() > BODY_BYTES_MAX {
            let message = "The request body is too large.";
            return self.refuse(413, "body_too_large", message);
        }
        self.body.extend_from_slice(&body);
        if !end_of_stream {
            return Vec::new();
        }
        let mut answers = self.decide(choose);
        if self.state == ExtProcState::Routed {
            let mut pieces = self.pieces();
            match pieces.last_mut() {
                Some(last) => last.end_of_stream = true,
                None => pieces.push(HttpBody {
                    end_of_stream,
                    ..HttpBody::default()
                }),
            }
            answers.extend(pieces.into_iter().map(request_body_response));
        }
        answers
    }

    /// The body so far.
    fn pieces(&mut self) -> Vec<HttpBody> {
        let mut body = std::mem::take(&mut self.body).freeze();
        let mut pieces = Vec::new();
        while !body.is_empty() {
            let next = body.split_to(body.len().min(PIECE_BYTES_MAX));
            pieces.push(HttpBody {
                body: next,
                end_of_stream: false,
            });
        }
        pieces
    }

    /// Answers with the endpoint, or with an immediate response.
    fn decide(
        &mut self,
        choose: impl FnOnce(&PickRequest) -> PickerChoice,
    ) -> Vec<ProcessingResponse> {
        if self.pick.key.is_none() {
            self.pick.key = body_key(&self.body);
        }
        match choose(&self.pick) {
            PickerChoice::Endpoint(address) => {
                self.state = ExtProcState::Routed;
                vec![endpoint_response(address)]
            }
            PickerChoice::Full => {
                let message = "All routers are at their limit; try again.";
                self.refuse(429, "queue_full", message)
            }
            PickerChoice::NoneReady => self.refuse(503, "no_endpoint", "No router is ready."),
        }
    }

    fn refuse(&mut self, status: i32, code: &str, message: &str) -> Vec<ProcessingResponse> {
        self.state = ExtProcState::Over;
        self.body = BytesMut::new();
        vec![immediate_response(status, code, message)]
    }
}

fn duplex(modes: &ProtocolConfiguration) -> DuplexBodies {
    let full_duplex = BodySendMode::FullDuplexStreamed;
    DuplexBodies {
        request: modes.request_body_mode() == full_duplex,
        response: modes.response_body_mode() == full_duplex,
    }
}

fn response_of(response: Answer) -> ProcessingResponse {
    ProcessingResponse {
        response: Some(response),
        dynamic_metadata: None,
    }
}

/// Sends the request to this endpoint: named twice, since proxies read either the header or the
/// metadata.
fn endpoint_response(address: SocketAddr) -> ProcessingResponse {
    let address = address.to_string();
    let value = |kind| Value { kind: Some(kind) };
    let inner = Struct {
        fields: [(
            DESTINATION.to_owned(),
            value(Kind::StringValue(address.clone())),
        )]
        .into(),
    };
    let metadata = Struct {
        fields: [(NAMESPACE.to_owned(), value(Kind::StructValue(inner)))].into(),
    };
    let headers = HeadersResponse {
        response: Some(CommonResponse {
            header_mutation: Some(with_header(DESTINATION, &address)),
            clear_route_cache: true,
            ..CommonResponse::default()
        }),
    };
    ProcessingResponse {
        response: Some(Answer::RequestHeaders(headers)),
        dynamic_metadata: Some(metadata),
    }
}

fn with_header(key: &str, value: &str) -> HeaderMutation {
    HeaderMutation {
        set_headers: vec![header(key, value)],
        remove_headers: Vec::new(),
    }
}

/// Replaces what the client sent under this name.
fn header(key: &str, value: &str) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: key.to_owned(),
            value: String::new(),
            raw_value: Bytes::copy_from_slice(value.as_bytes()),
        }),
        append_action: AppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

/// An immediate response to the client, in the format of a router's errors.
fn immediate_response(status: i32, code: &str, message: &str) -> ProcessingResponse {
    let kind = match status {
        429 => "rate_limit_error",
        503 => "service_unavailable_error",
        _ => "invalid_request_error",
    };
    let error = serde_json::json!({"error": {
        "message": message, "type": kind, "param": null, "code": code,
    }});
    let mut headers = with_header("content-type", "application/json");
    if status == 429 || status == 503 {
        let more = [("retry-after", "1"), ("x-cleave-refused-reason", code)];
        headers
            .set_headers
            .extend(more.map(|(key, value)| header(key, value)));
    }
    if status == 429 {
        let reason = header("x-llm-d-request-dropped-reason", "rejected-saturated");
        headers.set_headers.push(reason);
    }
    response_of(Answer::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: status }),
        headers: Some(headers),
        body: error.to_string().into(),
        details: code.to_owned(),
    }))
}

fn unchanged() -> BodyResponse {
    BodyResponse::default()
}

/// Gives a chunk back unchanged.
fn streamed_back(
    HttpBody {
        body,
        end_of_stream,
    }: HttpBody,
) -> BodyResponse {
    let streamed = StreamedBodyResponse {
        body,
        end_of_stream,
    };
    BodyResponse {
        response: Some(CommonResponse {
            body_mutation: Some(BodyMutation {
                mutation: Some(body_mutation::Mutation::StreamedResponse(streamed)),
            }),
            ..CommonResponse::default()
        }),
    }
}

/// Gives back a piece of the request's body.
fn request_body_response(piece: HttpBody) -> ProcessingResponse {
    response_of(Answer::RequestBody(streamed_back(piece)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picker::proto::{HeaderMap, HttpHeaders, HttpTrailers, Metadata};

    const THERE: PickerChoice = PickerChoice::Endpoint(SocketAddr::new(
        std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        8001,
    ));

    fn word(word: Word) -> ProcessingRequest {
        ProcessingRequest {
            request: Some(word),
            ..ProcessingRequest::default()
        }
    }

    fn headers(end_of_stream: bool) -> ProcessingRequest {
        let path = HeaderValue {
            key: ":path".into(),
            value: String::new(),
            raw_value: "/v1/completions".into(),
        };
        word(Word::RequestHeaders(HttpHeaders {
            headers: Some(HeaderMap {
                headers: vec![path],
            }),
            end_of_stream,
        }))
    }

    fn body(text: &str, end_of_stream: bool) -> ProcessingRequest {
        word(Word::RequestBody(HttpBody {
            body: text.to_owned().into(),
            end_of_stream,
        }))
    }

    /// An answer in a word, with a chunk's text and a bar for its end.
    fn summary(answer: &ProcessingResponse) -> String {
        let chunk = |name: &str, body: &BodyResponse| {
            let mutation = body
                .response
                .as_ref()
                .and_then(|it| it.body_mutation.as_ref());
            match mutation.and_then(|it| it.mutation.as_ref()) {
                Some(body_mutation::Mutation::StreamedResponse(one)) => {
                    let end = if one.end_of_stream { "|" } else { "" };
                    format!("{name} {}{end}", String::from_utf8_lossy(&one.body))
                }
                _ => format!("{name} as it is"),
            }
        };
        match answer.response.as_ref().unwrap() {
            Answer::RequestHeaders(headers) => {
                let mutation = headers.response.as_ref().unwrap().header_mutation.as_ref();
                let header = mutation.unwrap().set_headers[0].header.as_ref().unwrap();
                let value = String::from_utf8_lossy(&header.raw_value);
                let metadata = answer.dynamic_metadata.as_ref().unwrap();
                let Some(Kind::StructValue(inner)) = &metadata.fields[NAMESPACE].kind else {
                    panic!("{metadata:?}");
                };
                let destination = &inner.fields[DESTINATION].kind;
                assert_eq!(destination, &Some(Kind::StringValue(value.to_string())));
                assert_eq!(header.key, DESTINATION);
                format!("to {value}")
            }
            Answer::RequestBody(body) => chunk("asked", body),
            Answer::ResponseBody(body) => chunk("answered", body),
            Answer::ResponseHeaders(_) => "answer".into(),
            Answer::RequestTrailers(_) | Answer::ResponseTrailers(_) => "trailers".into(),
            Answer::ImmediateResponse(instead) => {
                format!("instead {}", instead.status.as_ref().unwrap().code)
            }
        }
    }

    #[track_caller]
    fn check(
        conversation: &mut ExtProcConversation,
        message: ProcessingRequest,
        choice: PickerChoice,
        expected: &[&str],
    ) {
        let answers = conversation.handle(message, |_| choice);
        let answers: Vec<String> = answers.iter().map(summary).collect();
        assert_eq!(answers, expected);
    }

    #[test]
    fn headers_are_answered_before_the_body_in_order() {
        let conversation = &mut ExtProcConversation::default();
        check(conversation, headers(false), THERE, &[]);
        check(conversation, body("{\"prompt\"", false), THERE, &[]);
        let all = ["to 127.0.0.1:8001", "asked {\"prompt\": \"a\"}|"];
        check(conversation, body(": \"a\"}", true), THERE, &all);
        assert_eq!(conversation.pick.key.as_deref(), Some(&b"a"[..]));
        let answer = word(Word::ResponseHeaders(HttpHeaders::default()));
        check(conversation, answer, THERE, &["answer"]);
        let chunk = |text: &'static str, end_of_stream| {
            word(Word::ResponseBody(HttpBody {
                body: text.into(),
                end_of_stream,
            }))
        };
        check(
            conversation,
            chunk("data: 1", false),
            THERE,
            &["answered data: 1"],
        );
        check(conversation, chunk("", true), THERE, &["answered |"]);
    }

    #[test]
    fn requests_without_body_or_with_trailers_get_an_endpoint() {
        let conversation = &mut ExtProcConversation::default();
        check(conversation, headers(true), THERE, &["to 127.0.0.1:8001"]);
        let conversation = &mut ExtProcConversation::default();
        check(conversation, headers(false), THERE, &[]);
        check(conversation, body("{}", false), THERE, &[]);
        let trailers = word(Word::RequestTrailers(HttpTrailers::default()));
        let all = ["to 127.0.0.1:8001", "asked {}", "trailers"];
        check(conversation, trailers, THERE, &all);
    }

    #[test]
    fn a_buffering_proxy_is_answered_at_the_headers() {
        let conversation = &mut ExtProcConversation::default();
        let mut first = headers(false);
        first.protocol_config = Some(ProtocolConfiguration {
            request_body_mode: BodySendMode::Buffered.into(),
            response_body_mode: BodySendMode::None.into(),
        });
        check(conversation, first, THERE, &["to 127.0.0.1:8001"]);
        check(conversation, body("{}", true), THERE, &["asked as it is"]);
    }

    #[test]
    fn unservable_requests_get_an_immediate_response() {
        for (choice, status) in [
            (PickerChoice::Full, "instead 429"),
            (PickerChoice::NoneReady, "instead 503"),
        ] {
            let conversation = &mut ExtProcConversation::default();
            check(conversation, headers(false), choice, &[]);
            check(conversation, body("{}", true), choice, &[status]);
        }
        let conversation = &mut ExtProcConversation::default();
        check(conversation, headers(false), THERE, &[]);
        let half = "x".repeat(BODY_BYTES_MAX / 2 + 1);
        check(conversation, body(&half, false), THERE, &[]);
        check(conversation, body(&half, false), THERE, &["instead 413"]);
    }

    #[test]
    fn messages_after_the_final_answer_are_ignored() {
        let conversation = &mut ExtProcConversation::default();
        let half = "x".repeat(BODY_BYTES_MAX / 2 + 1);
        check(conversation, headers(false), THERE, &[]);
        check(conversation, body(&half, false), THERE, &[]);
        check(conversation, body(&half, false), THERE, &["instead 413"]);
        check(conversation, body(&half, true), THERE, &[]);
        check(conversation, headers(true), THERE, &[]);
        assert_eq!(conversation.body.capacity(), 0);
        let conversation = &mut ExtProcConversation::default();
        check(conversation, headers(true), THERE, &["to 127.0.0.1:8001"]);
        check(conversation, headers(true), THERE, &[]);
        check(conversation, body("late", true), THERE, &["asked late|"]);
        assert_eq!(conversation.body.capacity(), 0);
    }

    #[test]
    fn a_long_body_returns_in_pieces_a_proxy_takes() {
        let conversation = &mut ExtProcConversation::default();
        let long = "x".repeat(2 * PIECE_BYTES_MAX);
        let piece = format!("asked {}", "x".repeat(PIECE_BYTES_MAX));
        let last = format!("{piece}|");
        check(conversation, headers(false), THERE, &[]);
        check(
            conversation,
            body(&long, true),
            THERE,
            &["to 127.0.0.1:8001", &piece, &last],
        );
        let conversation = &mut ExtProcConversation::default();
        check(conversation, headers(false), THERE, &[]);
        check(
            conversation,
            body("", true),
            THERE,
            &["to 127.0.0.1:8001", "asked |"],
        );
    }

    #[test]
    fn the_proxys_subset_hint_is_respected() {
        let value = |kind| Value { kind: Some(kind) };
        let listed = ["127.0.0.1:8001", " 127.0.0.1:8002", "no address"];
        let list = listed.map(|one| value(Kind::StringValue(one.into())));
        let list = Kind::ListValue(prost_types::ListValue {
            values: list.into(),
        });
        for hint in [list, Kind::StringValue(listed.join(","))] {
            let key = "x-gateway-destination-endpoint-subset".to_owned();
            let hint = Struct {
                fields: [(key, value(hint))].into(),
            };
            let mut first = headers(true);
            first.metadata_context = Some(Metadata {
                filter_metadata: [("envoy.lb.subset_hint".to_owned(), hint)].into(),
            });
            let mut subset = None;
            ExtProcConversation::default().handle(first, |request| {
                subset.clone_from(&request.subset);
                PickerChoice::NoneReady
            });
            let ports = subset.unwrap().into_iter().map(|address| address.port());
            assert_eq!(ports.collect::<Vec<_>>(), [8001, 8002]);
        }
    }
}
