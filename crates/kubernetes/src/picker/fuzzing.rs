//! Messages of a proxy to a picker, for tests and libFuzzer.
//!
//! Owns: reading drawn bytes as the messages of one conversation, and what must hold for its
//! answers. Never opens a socket, or knows how an answer is made. Invariant: any bytes are some
//! conversation, and each message goes through the decoder that a proxy's messages do.

use super::conversation::ExtProcConversation;
use super::proto::processing_request::Request as Word;
use super::proto::processing_response::Response as Answer;
use super::proto::{BodyResponse, ProcessingRequest, body_mutation};
use cleave_telemetry::PickerChoice;
use prost::Message;
use std::net::SocketAddr;

/// The messages and answers of one conversation.
#[derive(Default)]
struct ExtProcTranscript {
    request_body: Vec<u8>,
    body_returned: Vec<u8>,
    heads: usize,
    refused: bool,
}

/// Messages of one conversation, length-delimited, after a byte that sets the choice.
///
/// # Panics
/// If headers are answered twice, a refusal is followed by anything, or a body comes back as
/// another.
pub(crate) fn conversation(bytes: &[u8]) {
    let Some((choice, mut words)) = bytes.split_first() else {
        return;
    };
    let choice = match choice % 4 {
        0 => PickerChoice::NoneReady,
        1 => PickerChoice::Full,
        _ => PickerChoice::Endpoint(SocketAddr::from(([127, 0, 0, 1], 8001))),
    };
    let (mut conversation, mut transcript) =
        (ExtProcConversation::default(), ExtProcTranscript::default());
    while let Ok(message) = ProcessingRequest::decode_length_delimited(&mut words) {
        if let Some(Word::RequestBody(body)) = &message.request {
            transcript.request_body.extend_from_slice(&body.body);
        }
        for answer in conversation.handle(message, |_| choice) {
            assert!(!transcript.refused, "something was said after a refusal");
            match answer.response.expect("an answer says something") {
                Answer::RequestHeaders(_) => transcript.heads += 1,
                Answer::ImmediateResponse(_) => transcript.refused = true,
                Answer::RequestBody(body) => transcript.add_returned(&body),
                _ => {}
            }
        }
    }
    let answers = transcript.heads + usize::from(transcript.refused);
    assert!(answers <= 1, "headers were answered {answers} times");
    assert!(
        transcript
            .request_body
            .starts_with(&transcript.body_returned),
        "another body"
    );
}

impl ExtProcTranscript {
    fn add_returned(&mut self, body: &BodyResponse) {
        assert_eq!(self.heads, 1, "a body before its headers");
        let mutation = body.response.as_ref();
        let mutation = mutation.and_then(|it| it.body_mutation.as_ref()?.mutation.as_ref());
        match mutation {
            Some(body_mutation::Mutation::StreamedResponse(piece)) => {
                self.body_returned.extend_from_slice(&piece.body);
            }
            Some(body_mutation::Mutation::Body(_)) => panic!("a body was replaced"),
            // As it is: the proxy has it.
            None => self.request_body.clear(),
        }
    }
}

/// Conversations as proxies hold them, for [`conversation`].
#[cfg(test)]
pub(crate) fn samples() -> Vec<Vec<u8>> {
    use super::proto::{
        BodySendMode, HeaderMap, HeaderValue, HttpBody, HttpHeaders, HttpTrailers, Metadata,
        ProtocolConfiguration,
    };
    use prost_types::{Struct, Value, value::Kind};
    let header = |key: &str, value: &str| HeaderValue {
        key: key.to_owned(),
        value: String::new(),
        raw_value: value.to_owned().into(),
    };
    let named = header("x-session-id", "s-1");
    let headers = HttpHeaders {
        headers: Some(HeaderMap {
            headers: vec![header(":path", "/v1/completions"), named],
        }),
        end_of_stream: false,
    };
    let body = |text: &str, end_of_stream| HttpBody {
        body: text.to_owned().into(),
        end_of_stream,
    };
    let hint = Value {
        kind: Some(Kind::StringValue("127.0.0.1:8001,[::1]:8002".to_owned())),
    };
    let hint = Struct {
        fields: [("x-gateway-destination-endpoint-subset".to_owned(), hint)].into(),
    };
    let metadata = Metadata {
        filter_metadata: [("envoy.lb.subset_hint".to_owned(), hint)].into(),
    };
    let modes = |mode: BodySendMode| ProtocolConfiguration {
        request_body_mode: mode.into(),
        response_body_mode: mode.into(),
    };
    let written = |choice: u8, mode: BodySendMode, words: &[Word]| {
        let mut bytes = vec![choice];
        for word in words {
            let word = ProcessingRequest {
                request: Some(word.clone()),
                metadata_context: Some(metadata.clone()),
                observability_mode: false,
                protocol_config: Some(modes(mode)),
            };
            bytes.extend(word.encode_length_delimited_to_vec());
        }
        bytes
    };
    let whole = [
        Word::RequestHeaders(headers.clone()),
        Word::RequestBody(body(r#"{"model": "m", "prompt""#, false)),
        Word::RequestBody(body(r#": ["a", "b"]}"#, true)),
        Word::ResponseHeaders(headers.clone()),
        Word::ResponseBody(body("data: 1", false)),
        Word::ResponseBody(body("", true)),
        Word::ResponseTrailers(HttpTrailers::default()),
    ];
    let trailed = [
        Word::RequestHeaders(headers),
        Word::RequestBody(body(r#"{"messages": [{"role": "user"}]}"#, false)),
        Word::RequestTrailers(HttpTrailers::default()),
    ];
    vec![
        written(2, BodySendMode::FullDuplexStreamed, &whole),
        written(2, BodySendMode::Buffered, &whole),
        written(2, BodySendMode::FullDuplexStreamed, &trailed),
        written(0, BodySendMode::FullDuplexStreamed, &trailed),
        written(1, BodySendMode::None, &whole),
    ]
}
