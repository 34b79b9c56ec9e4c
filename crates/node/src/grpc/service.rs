//! The router's end of a worker's stream.
//!
//! Owns: the conversation, and who is turned away, with the reason. Never: hears a
//! worker before it was welcomed. Invariant: all workers that are welcome have one tokenizer and one
//! context, and say nothing of themselves that could not be.

use super::desk::ModelDesk;
use super::window::{Window, speak};
use super::{HELLO_MAX, STREAM_ITEMS_MAX, UPWARD_BYTES_MAX, beat_for, heard, with_causes};
use crate::door::{RouterDoor, Visit};
use crate::line::{Introduction, Upward};
use crate::wire::proto::fleet_server::{Fleet, FleetServer};
use crate::wire::{PROTOCOL, WireError, nanos, proto};
use axum::extract::ConnectInfo;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};
use tracing::{info, warn};

/// The gRPC service, to be mounted where HTTP is served.
pub(crate) fn fleet_service(door: RouterDoor, desk: ModelDesk) -> FleetServer<FleetService> {
    FleetServer::new(FleetService { door, desk }).max_decoding_message_size(UPWARD_BYTES_MAX)
}

/// See [`fleet_service`].
#[derive(Clone)]
pub(crate) struct FleetService {
    door: RouterDoor,
    desk: ModelDesk,
}

#[tonic::async_trait]
impl Fleet for FleetService {
    type JoinStream = ReceiverStream<Result<proto::Downward, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<proto::Upward>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        let (out, words) = mpsc::channel(STREAM_ITEMS_MAX);
        let from = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let from = from.map(|ConnectInfo(from)| *from);
        let mut end = RouterEnd {
            service: self.clone(),
            name: String::new(),
            words: request.into_inner(),
            out,
        };
        tokio::spawn(async move {
            if let Err(error) = end.converse().await {
                warn!(name = end.name, ?from, %error, "a worker's stream ended");
                end.tell_of_damage(&error);
            }
        });
        Ok(Response::new(ReceiverStream::new(words)))
    }
}

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    #[error("the other side closed it")]
    Closed,
    #[error("nothing was heard for {0:?}")]
    Silent(Duration),
    #[error("{}", with_causes(.0.message(), .0.as_ref()))]
    Status(Box<Status>),
    #[error("{0}")]
    Wire(#[from] WireError),
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

impl From<crate::door::Stopped> for StreamError {
    fn from(_: crate::door::Stopped) -> Self {
        Self::Stopped
    }
}

/// One worker's stream.
struct RouterEnd {
    service: FleetService,
    /// As it calls itself; empty until it has said hello.
    name: String,
    words: Streaming<proto::Upward>,
    out: mpsc::Sender<Result<proto::Downward, Status>>,
}

impl RouterEnd {
    async fn converse(&mut self) -> Result<(), StreamError> {
        use proto::downward::Kind;
        let silence = self.service.door.silence;
        let greeting = proto::Greeting {
            protocol: PROTOCOL,
            router: self.service.door.router.0,
            silence_nanos: nanos(silence),
        };
        say(&self.out, Kind::Greeting(greeting)).await?;
        let introduction = match self.hello().await {
            Ok(introduction) => introduction,
            Err(StreamError::Rejected(reason)) => return self.reject(reason).await,
            Err(error) => return Err(error),
        };
        let desk = self.service.desk.clone();
        let ticket = match desk.accept(&introduction.name, &introduction.files).await {
            Ok(ticket) => ticket,
            Err(reason) => return self.reject(reason).await,
        };
        let ended = self.attend(introduction).await;
        desk.leave(ticket).await;
        ended
    }

    /// Hears a worker that is welcome, until its stream ends.
    async fn attend(&mut self, introduction: Introduction) -> Result<(), StreamError> {
        use proto::downward::Kind;
        let silence = self.service.door.silence;
        say(&self.out, Kind::Welcome(proto::Welcome {})).await?;
        let beat = beat_for(introduction.silence);
        let (visit, downward) = self.service.door.join(introduction).await?;
        let window = Window::default();
        let ended = tokio::select! {
            error = speak::<proto::Downward>(downward, &self.out, beat, &window) => error,
            error = listen(&mut self.words, &visit, silence, &window) => error,
        };
        visit.leave().await;
        match ended {
            StreamError::Closed | StreamError::Stopped => Ok(()),
            error => Err(error),
        }
    }

    async fn hello(&mut self) -> Result<Introduction, StreamError> {
        use proto::upward::Kind;
        let first = timeout(HELLO_MAX, self.words.message()).await;
        let first = first.map_err(|_| StreamError::Silent(HELLO_MAX))??;
        let Some(Kind::Hello(hello)) = first.ok_or(StreamError::Closed)?.kind else {
            return Err(StreamError::Unexpected("message in place of a hello"));
        };
        if hello.protocol != PROTOCOL {
            return Err(StreamError::Rejected(format!(
                "worker {} {} speaks protocol {}, this router {} speaks {PROTOCOL}",
                hello.name,
                hello.version,
                hello.protocol,
                env!("CARGO_PKG_VERSION"),
            )));
        }
        self.name.clone_from(&hello.name);
        info!(
            name = hello.name,
            version = hello.version,
            "a worker says hello"
        );
        let introduction = hello.try_into();
        introduction.map_err(|error: WireError| StreamError::Rejected(error.to_string()))
    }

    /// The worker learns why its stream ends, if there is room for it: it cannot see damage to its own
    /// messages.
    fn tell_of_damage(&self, error: &StreamError) {
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
        say(&self.out, proto::downward::Kind::Rejection(rejection)).await?;
        Err(StreamError::Rejected(reason))
    }
}

async fn say(
    out: &mpsc::Sender<Result<proto::Downward, Status>>,
    kind: proto::downward::Kind,
) -> Result<(), StreamError> {
    let word = proto::Downward { kind: Some(kind) };
    out.send(Ok(word)).await.map_err(|_| StreamError::Closed)
}

async fn listen(
    words: &mut Streaming<proto::Upward>,
    visit: &Visit,
    silence: Duration,
    window: &Window,
) -> StreamError {
    loop {
        let heard = match heard(words, silence).await {
            Ok(message) => receive(message, visit, window).await,
            Err(error) => Err(error),
        };
        if let Err(error) = heard {
            return error;
        }
    }
}

/// Handles one message of the stream.
async fn receive(
    message: proto::Upward,
    visit: &Visit,
    window: &Window,
) -> Result<(), StreamError> {
    use proto::upward::Kind;
    match message.kind {
        Some(Kind::Beat(beat)) => return window.confirm(beat),
        Some(Kind::Batch(batch)) => {
            for message in batch.messages {
                visit.hear(word(message)?).await?;
            }
        }
        _ => visit.hear(word(message)?).await?,
    }
    window.receive();
    Ok(())
}

/// The content of a message that is neither a beat nor a batch.
fn word(message: proto::Upward) -> Result<Upward, StreamError> {
    use proto::upward::Kind;
    match message.kind {
        Some(Kind::Report(report)) => Ok(Upward::Report(report.try_into()?)),
        Some(Kind::Emissions(proto::Emissions { tokens })) => {
            let tokens = tokens.into_iter().map(TryInto::try_into);
            Ok(Upward::Emissions(tokens.collect::<Result<_, _>>()?))
        }
        Some(Kind::Pass(pass)) => {
            let (handoff, pass) = pass.try_into()?;
            Ok(Upward::Pass { handoff, pass })
        }
        Some(Kind::Link(link)) => Ok(Upward::Link(link.try_into()?)),
        Some(Kind::Hello(_)) => Err(StreamError::Unexpected("second hello")),
        Some(Kind::Beat(_) | Kind::Batch(_)) => {
            Err(StreamError::Unexpected("beat or batch within a batch"))
        }
        None => Err(WireError::Missing("upward.kind").into()),
    }
}
