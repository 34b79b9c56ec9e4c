//! An established link: measures it, opens its credit, and sends messages until it breaks.
//!
//! Invariant: the end of a link is recorded before the link is seen to be broken.

use super::OutboundLink;
use super::stream::{CreditReceiver, StreamSendState, receive_credit, send_messages};
use crate::config::{LinkEvent, LinkSpeed};
use crate::handshake::{DialledLink, LinkTerms};
use crate::incoming::LinkStream;
use crate::link::{LinkCarrier, PayloadStore};
use crate::measure::measure;
use crate::socket::LinkError;
use crate::transports::nixl::RdmaWriter;
use crate::transports::{Transport, TransportFuture};
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A link that was dialled. One call per link enters the code for its type of stream.
pub(crate) trait EstablishedLink: Send {
    /// Carries messages until the link ends, and returns the reason for the end.
    fn carry<'a>(
        self: Box<Self>,
        link: OutboundLink<'a>,
        carrier: LinkCarrier,
    ) -> TransportFuture<'a, LinkError>;
}

/// Connections over a transport, and the memory for its payloads. A failed measurement ends the
/// link.
pub(crate) struct DialledTransport<R, W> {
    pub(crate) dialled: DialledLink<R, W>,
    pub(crate) transport: Transport,
    pub(crate) store: PayloadStore,
}

/// A link with its measurement.
pub(crate) struct MeasuredLink<R, W> {
    dialled: DialledLink<R, W>,
    store: PayloadStore,
    writer_guard: RdmaWriterGuard,
    speed: LinkSpeed,
    /// Credit that the probe still holds.
    probe_credit: u32,
}

impl<R, W> EstablishedLink for DialledTransport<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn carry<'a>(
        self: Box<Self>,
        link: OutboundLink<'a>,
        carrier: LinkCarrier,
    ) -> TransportFuture<'a, LinkError> {
        let Self {
            dialled,
            transport,
            store,
        } = *self;
        Box::pin(async move {
            match measure_link(dialled, transport, store).await {
                Ok(measured) => link.run(measured, carrier).await,
                Err(error) => error,
            }
        })
    }
}

impl<R, W> EstablishedLink for MeasuredLink<R, W>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
{
    fn carry<'a>(
        self: Box<Self>,
        link: OutboundLink<'a>,
        carrier: LinkCarrier,
    ) -> TransportFuture<'a, LinkError> {
        Box::pin(link.run(*self, carrier))
    }
}

impl OutboundLink<'_> {
    /// Opens the link and carries it until it ends.
    async fn run<R, W>(self, measured: MeasuredLink<R, W>, carrier: LinkCarrier) -> LinkError
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let Self {
            config,
            peer,
            events,
            ..
        } = self;
        let MeasuredLink {
            dialled,
            store,
            writer_guard: writing,
            speed,
            probe_credit: lent,
        } = measured;
        let (since, transport) = (Instant::now(), speed.transport);
        let LinkTerms { window, .. } = dialled.terms;
        let LinkCarrier { credit, queue } = carrier;
        // The slots of the probe are returned by the receiver.
        credit.open(store, window - lent);
        for event in [
            LinkEvent::Measured { peer, speed },
            LinkEvent::CreditGranted { peer },
        ] {
            if events.send(event).await.is_err() {
                return LinkError::Closing;
            }
        }
        let queue = Arc::new(Mutex::new(queue));
        let mut writers = JoinSet::new();
        let mut readers = JoinSet::new();
        for LinkStream { reader, writer } in dialled.streams {
            let state = StreamSendState::new(writing.writer.clone());
            writers.spawn(send_messages(
                Arc::clone(&queue),
                writer,
                state,
                config.beat,
            ));
            readers.spawn(receive_credit(
                reader,
                CreditReceiver {
                    peer,
                    window,
                    credit: Arc::clone(&credit),
                    events: events.clone(),
                },
            ));
        }
        drop(queue);
        let error = loop {
            tokio::select! {
                ended = writers.join_next() => match ended {
                    // No sender is left; the other streams finish what they still carry.
                    Some(Ok(Ok(()))) => {}
                    Some(Ok(Err(error))) => break error,
                    Some(Err(_)) | None => break LinkError::Closing,
                },
                ended = readers.join_next() => {
                    let ended = ended.expect("readers end only with the link");
                    break ended.unwrap_or(LinkError::Closing);
                }
                error = writing.failed() => break error,
            }
        };
        self.record_end(transport, since, &error);
        // One lost stream loses the link.
        writers.shutdown().await;
        readers.shutdown().await;
        error
    }
}

/// Measures an established link.
pub(crate) async fn measure_link<R, W>(
    mut dialled: DialledLink<R, W>,
    transport: Transport,
    store: PayloadStore,
) -> Result<MeasuredLink<R, W>, LinkError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let writing = RdmaWriterGuard {
        writer: store.writer(),
        transport,
    };
    let (speed, lent) = tokio::select! {
        measured = measure(&mut dialled.streams, transport, &store) => measured?,
        error = writing.failed() => return Err(error),
    };
    Ok(MeasuredLink {
        dialled,
        store,
        writer_guard: writing,
        speed,
        probe_credit: lent,
    })
}

/// The RDMA writer of a link; closed when this is dropped.
struct RdmaWriterGuard {
    writer: Option<Arc<RdmaWriter>>,
    transport: Transport,
}

impl RdmaWriterGuard {
    async fn failed(&self) -> LinkError {
        match &self.writer {
            Some(writer) => LinkError::Transport(self.transport, writer.wait_until_failed().await),
            None => std::future::pending().await,
        }
    }
}

impl Drop for RdmaWriterGuard {
    fn drop(&mut self) {
        if let Some(writer) = &self.writer {
            writer.close();
        }
    }
}
