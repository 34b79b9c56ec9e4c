//! The router's end of a worker's stream.
//!
//! Owns: the exchange at the start, and refusing workers, with the reason. Never handles a message
//! of a worker before it was welcomed. Invariant: all welcomed workers have one tokenizer and one
//! context, and registrations that passed every check.

use super::inbound::{InboundMessage, MessageFraming, MessageHandler, receive_all};
use super::message_limit::limited;
use super::turned_away::TurnedAwayLog;
use super::window::{MessageWindow, send_all};
use super::{HELLO_MAX, STREAM_ITEMS_MAX, UPWARD_BYTES_MAX, heartbeat_interval, with_causes};
use crate::acceptor::{DriverStopped, RouterAcceptor, WorkerSession};
use crate::connection::{FromWorker, Registration};
use crate::wire::proto::fleet_server::{Fleet, FleetServer};
use crate::wire::{FleetWireError, PROTOCOL, decode, nanos, proto};
use axum::Router;
use axum::extract::ConnectInfo;
use axum::middleware::map_request;
use cleave_telemetry::LogLimit;
use cleave_text::ModelFiles;
use cleave_transfer::WriteGrant;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::field::display;
use tracing::{debug, warn};

/// Decides which workers join a router, by the text files of their models.
pub trait ModelAdmission: Clone + Send + Sync + 'static {
    /// One worker's use of a model; ended by [`ModelAdmission::leave`].
    type Membership: Copy + Send + Sync;

    /// Lets a worker with these files in.
    ///
    /// # Errors
    /// The reason to turn the worker away.
    fn accept(
        &self,
        worker: &str,
        files: &Arc<ModelFiles>,
    ) -> impl Future<Output = Result<Self::Membership, String>> + Send;

    /// The worker's stream is over, or it serves no longer.
    fn leave(&self, membership: Self::Membership);
}

/// The gRPC service, to be served at this path.
pub fn fleet_routes(path: &str, acceptor: RouterAcceptor, models: impl ModelAdmission) -> Router {
    let service = FleetServer::new(FleetService {
        acceptor,
        models,
        log: Arc::default(),
    });
    let service = service.max_decoding_message_size(UPWARD_BYTES_MAX);
    let limit = map_request(async |request: axum::extract::Request| request.map(limited));
    Router::new().route_service(path, service).layer(limit)
}

#[derive(Clone)]
struct FleetService<A> {
    acceptor: RouterAcceptor,
    models: A,
    log: Arc<JoinLog>,
}

/// Limits of the lines that a connection costs: anybody who reaches the port may cause them.
#[derive(Debug, Default)]
struct JoinLog {
    hellos: LogLimit,
    endings: LogLimit,
    turned_away: TurnedAwayLog,
}

#[tonic::async_trait]
impl<A: ModelAdmission> Fleet for FleetService<A> {
    type JoinStream = ReceiverStream<Result<proto::Downward, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<proto::Upward>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let (out, messages) = mpsc::channel(STREAM_ITEMS_MAX);
        let from = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let from = from.map(|ConnectInfo(from)| *from);
        let mut end = WorkerStream {
            service: self.clone(),
            name: String::new(),
            has_joined: false,
            messages: request.into_inner(),
            out,
        };
        tokio::spawn(async move {
            if let Err(error) = end.run().await {
                end.log_ending(&error, from);
                end.report_damage(&error);
            }
        });
        Ok(Response::new(ReceiverStream::new(messages)))
    }
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("the other side closed it")]
    Closed,
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    #[error("{}", with_causes(.0.message(), .0.as_ref()))]
    Status(Box<Status>),
    #[error("{0}")]
    Wire(#[from] FleetWireError),
    #[error("turned away: {0}")]
    Rejected(String),
    #[error("another worker has the name of this one")]
    NameTaken,
    #[error("unexpected {0}")]
    Unexpected(&'static str),
    #[error("this process is stopping")]
    Stopped,
}

impl From<Status> for StreamError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl From<DriverStopped> for StreamError {
    fn from(_: DriverStopped) -> Self {
        Self::Stopped
    }
}

struct WorkerStream<A> {
    service: FleetService<A>,
    /// The worker's name; empty until its hello.
    name: String,
    /// Whether the router's driver knows the worker.
    has_joined: bool,
    messages: Streaming<proto::Upward>,
    out: mpsc::Sender<Result<proto::Downward, Status>>,
}

impl<A: ModelAdmission> WorkerStream<A> {
    async fn run(&mut self) -> Result<(), StreamError> {
        use proto::downward::Kind;
        let silence = self.service.acceptor.silence;
        let greeting = proto::Greeting {
            protocol: PROTOCOL,
            router: self.service.acceptor.router.0,
            silence_nanos: nanos(silence),
        };
        send(&self.out, Kind::Greeting(greeting)).await?;
        let registration = match self.receive_hello().await {
            Ok(registration) => registration,
            Err(StreamError::Rejected(reason)) => return self.reject(reason).await,
            Err(error) => return Err(error),
        };
        if registration.description.model != registration.files.name {
            let (named, files) = (&registration.description.model, &registration.files.name);
            let reason =
                format!("it says that it serves \"{named}\", and its files are of \"{files}\"");
            return self.reject(reason).await;
        }
        let models = self.service.models.clone();
        let accepted = models.accept(&registration.name, &registration.files);
        let membership = match accepted.await {
            Ok(membership) => membership,
            Err(reason) => return self.reject(reason).await,
        };
        let ended = self.serve_worker(registration, membership).await;
        models.leave(membership);
        ended
    }

    /// Serves a welcomed worker until its stream ends.
    async fn serve_worker(
        &mut self,
        registration: Registration,
        membership: A::Membership,
    ) -> Result<(), StreamError> {
        use proto::downward::Kind;
        let silence = self.service.acceptor.silence;
        send(&self.out, Kind::Welcome(proto::Welcome {})).await?;
        let beat = heartbeat_interval(registration.silence);
        let (session, mut downward) = self.service.acceptor.join(registration).await?;
        self.has_joined = true;
        let window = MessageWindow::default();
        let stands_by = async {
            session.waits_for_name().await;
            // A worker that waits for its name decides nothing about the model.
            self.service.models.leave(membership);
            std::future::pending().await
        };
        let ended = tokio::select! {
            error = send_all::<proto::Downward>(&mut downward, &self.out, beat, &window) => error,
            error = receive_all(&mut self.messages, &session, silence, &window) => error,
            error = stands_by => error,
        };
        session.close(ended.to_string()).await;
        match ended {
            StreamError::Closed | StreamError::Stopped => Ok(()),
            error => Err(error),
        }
    }

    /// Logs the end of a stream, unless the router's driver does: of a worker that has joined.
    fn log_ending(&self, error: &StreamError, from: Option<SocketAddr>) {
        if self.has_joined {
            return;
        }
        let (log, now) = (&self.service.log, Instant::now());
        if let StreamError::Rejected(_) = error
            && !log.turned_away.admits(&self.name, now)
        {
            return;
        }
        if let Some(left_out) = log.endings.admit(now) {
            let from = from.map(display);
            warn!(name = self.name, from, %error, left_out, "a worker's stream ended");
        }
    }

    async fn receive_hello(&mut self) -> Result<Registration, StreamError> {
        use proto::upward::Kind;
        let first = timeout(HELLO_MAX, self.messages.message()).await;
        let first = first.map_err(|_| StreamError::Silent(HELLO_MAX))??;
        let Some(Kind::Hello(hello)) = first.ok_or(StreamError::Closed)?.kind else {
            return Err(StreamError::Unexpected("message in place of a hello"));
        };
        let proto::Hello {
            protocol,
            version,
            name,
            registration,
        } = hello;
        if protocol != PROTOCOL {
            return Err(StreamError::Rejected(format!(
                "worker {name} {version} speaks protocol {protocol}, this router {} speaks {PROTOCOL}",
                env!("CARGO_PKG_VERSION"),
            )));
        }
        let registration: Registration = decode("hello.registration", &registration)
            .map_err(|error| StreamError::Rejected(error.to_string()))?;
        if registration.name != name {
            let reason = "the names of the hello and of its registration differ";
            return Err(StreamError::Rejected(reason.to_owned()));
        }
        if let Some(left_out) = self.service.log.hellos.admit(Instant::now()) {
            debug!(name, version, left_out, "a worker says hello");
        }
        self.name = name;
        Ok(registration)
    }

    /// Sends the worker the reason why its stream ends, if there is room: it cannot see damage to
    /// its own messages.
    fn report_damage(&self, error: &StreamError) {
        if let StreamError::Status(status) = error
            && status.code() == Code::DataLoss
        {
            let _ = self.out.try_send(Err(status.as_ref().clone()));
        }
    }

    async fn reject(&self, reason: String) -> Result<(), StreamError> {
        let rejection = proto::Rejection {
            reason: reason.clone(),
        };
        send(&self.out, proto::downward::Kind::Rejection(rejection)).await?;
        Err(StreamError::Rejected(reason))
    }
}

async fn send(
    out: &mpsc::Sender<Result<proto::Downward, Status>>,
    kind: proto::downward::Kind,
) -> Result<(), StreamError> {
    let message = proto::Downward { kind: Some(kind) };
    out.send(Ok(message)).await.map_err(|_| StreamError::Closed)
}

impl MessageHandler<proto::Upward> for WorkerSession {
    async fn handle(&self, content: FromWorker) -> Result<(), StreamError> {
        Ok(self.receive(content).await?)
    }
}

impl InboundMessage for proto::Upward {
    type Content = FromWorker;

    fn framing(self) -> MessageFraming<Self> {
        use proto::upward::Kind;
        match self.kind {
            Some(Kind::Beat(beat)) => MessageFraming::Beat(beat),
            Some(Kind::Batch(batch)) => MessageFraming::Batch(batch.messages),
            _ => MessageFraming::One(self),
        }
    }

    fn content(self) -> Result<FromWorker, StreamError> {
        use proto::upward::Kind;
        match self.kind {
            Some(Kind::Report(report)) => Ok(FromWorker::Report(decode("report", &report)?)),
            Some(Kind::Emissions(tokens)) => {
                Ok(FromWorker::Emissions(decode("emissions", &tokens)?))
            }
            Some(Kind::Pass(pass)) => {
                let (handoff, grant) = decode("pass", &pass)?;
                let grant = WriteGrant(grant);
                Ok(FromWorker::Grant { handoff, grant })
            }
            Some(Kind::AdapterAnswer(answer)) => {
                let (request, outcome) = decode("adapter_answer", &answer)?;
                Ok(FromWorker::AdapterAnswer { request, outcome })
            }
            Some(Kind::Link(link)) => Ok(FromWorker::Link(decode("link", &link)?)),
            Some(Kind::Hello(_)) => Err(StreamError::Unexpected("second hello")),
            Some(Kind::Beat(_) | Kind::Batch(_)) => {
                Err(StreamError::Unexpected("beat or batch within a batch"))
            }
            None => Err(FleetWireError::Missing("upward.kind").into()),
        }
    }
}
