//! An OTLP collector in this process, in place of an operator's.
//!
//! Owns: its port, and every received span. Never: drops a span.

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};

#[derive(Clone, Debug, Default)]
pub(crate) struct ReceivedSpan {
    pub(crate) trace: String,
    pub(crate) span: String,
    pub(crate) parent: String,
    pub(crate) name: String,
    pub(crate) began: u64,
    pub(crate) ended: u64,
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) events: Vec<String>,
    pub(crate) is_error: bool,
    /// Attributes of the process that it came from.
    pub(crate) resource: BTreeMap<String, String>,
}

impl ReceivedSpan {
    pub(crate) fn get(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }
}

pub(crate) struct OtlpCollector {
    pub(crate) url: String,
    spans: Arc<Mutex<Vec<ReceivedSpan>>>,
    _runtime: Runtime,
}

impl OtlpCollector {
    pub(crate) fn start() -> Self {
        Self::serve("http://127.0.0.1", Server::builder())
    }

    /// As [`Self::start`], over TLS with this certificate for `localhost` and its key, in PEM.
    pub(crate) fn start_tls(certificate: &str, key: &str) -> Self {
        let identity = Identity::from_pem(certificate, key);
        let server = Server::builder().tls_config(ServerTlsConfig::new().identity(identity));
        Self::serve("https://localhost", server.expect("a certificate"))
    }

    fn serve(host: &str, mut server: Server) -> Self {
        let spans = Arc::new(Mutex::new(Vec::new()));
        let runtime = Runtime::new().expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let receiver = TraceServiceServer::new(TraceReceiver(Arc::clone(&spans)));
        let served = server.add_service(receiver);
        runtime.spawn(served.serve_with_incoming(TcpIncoming::from(listener)));
        Self {
            url: format!("{host}:{port}"),
            spans,
            _runtime: runtime,
        }
    }

    /// All spans received so far.
    pub(crate) fn spans(&self) -> Vec<ReceivedSpan> {
        self.spans.lock().expect("no panic holds it").clone()
    }
}

struct TraceReceiver(Arc<Mutex<Vec<ReceivedSpan>>>);

#[tonic::async_trait]
impl TraceService for TraceReceiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut received = self.0.lock().expect("no panic holds it");
        for of_process in request.into_inner().resource_spans {
            let resource = of_process.resource.unwrap_or_default();
            let resource = attribute_map(resource.attributes);
            let spans = of_process.scope_spans.into_iter();
            for span in spans.flat_map(|scope| scope.spans) {
                received.push(ReceivedSpan {
                    trace: hex(&span.trace_id),
                    span: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    name: span.name,
                    began: span.start_time_unix_nano,
                    ended: span.end_time_unix_nano,
                    attributes: attribute_map(span.attributes),
                    events: span.events.into_iter().map(|event| event.name).collect(),
                    is_error: span.status.is_some_and(|status| status.code == 2),
                    resource: resource.clone(),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute_map(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let pair = |one: KeyValue| (one.key, attribute_text(one.value));
    attributes.into_iter().map(pair).collect()
}

fn attribute_text(value: Option<AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(word)) => word.to_string(),
        Some(Value::ArrayValue(list)) => {
            let words: Vec<_> = list
                .values
                .into_iter()
                .map(|one| attribute_text(Some(one)))
                .collect();
            words.join(",")
        }
        _ => String::new(),
    }
}
