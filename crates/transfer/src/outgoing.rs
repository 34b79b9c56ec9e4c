//! The sending end over sockets: dials by the best transport that works, shakes hands, measures,
//! then sends messages until the link breaks.
//!
//! Owns: the order of transports, and the terms on which a link is made. Never: decides which
//! messages are sent, or keeps anything of a link that has ended.
//! Invariant: a transport that both ends announced and that does not work is reported
//! ([`LinkEvent::FellBack`]) before the next one is tried. NIXL that only one end has is reported,
//! too.

mod stream;

pub(crate) use stream::{CREDIT_BEYOND_WINDOW, lend_slot};

use crate::address::{DataAddresses, HostAddress};
use crate::buffer::BufferPool;
use crate::config::{LinkEvent, LinkSpeed, LinksConfig};
use crate::dial_backoff::{BACKOFF_MIN, DialBackoff};
use crate::handshake::{self, DialledLink, LinkTerms};
use crate::incoming::LinkStream;
use crate::link::{LinkCarrier, PayloadStore};
use crate::measure::measure;
use crate::socket::LinkError;
use crate::transports::Transport;
use crate::transports::nixl::{self, Nixl, RdmaWriter};
use crate::transports::shm::{self, HostDialled};
use crate::transports::tcp::{TcpReader, TcpWriter};
use cleave_domain::WorkerRef;
use std::sync::Arc;
use stream::{CreditReceiver, StreamSendState, receive_credit, send_messages};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// The channel for payloads between processes of one host.
pub(crate) struct PayloadChannel {
    pub(crate) store: PayloadStore,
    /// The reason for which the peer's pool is not open, if both ends would share pools.
    pub(crate) pool_unopened: Option<String>,
}

/// An outgoing link: its two ends, and the receiver of its events.
#[derive(Clone, Copy)]
pub(crate) struct OutboundLink<'a> {
    pub(crate) config: &'a LinksConfig,
    pub(crate) peer: WorkerRef,
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    /// Recent failures of NIXL to this peer.
    pub(crate) dial_backoff: &'a DialBackoff,
}

/// A transport that both ends announced, with its address.
enum DialOption<'a> {
    Host(&'a HostAddress),
    Nixl(&'a Arc<Nixl>, &'a str),
    Tcp(&'a str),
}

impl DialOption<'_> {
    fn transport(&self) -> Transport {
        match self {
            Self::Host(_) => Transport::SharedMemory,
            Self::Nixl(..) => Transport::Nixl,
            Self::Tcp(_) => Transport::Tcp,
        }
    }
}

/// Established connections, and the channel for payloads.
enum DialledTransport {
    SameHost(HostDialled, Transport, PayloadStore),
    Network(DialledLink<TcpReader, TcpWriter>, Transport, PayloadStore),
    /// NIXL, whose writes may fail although its agents were created. The link counts as established
    /// only after it was measured.
    Rdma(MeasuredLink<TcpReader, TcpWriter>),
}

/// An established link with its measurement.
struct MeasuredLink<R, W> {
    dialled: DialledLink<R, W>,
    store: PayloadStore,
    writer_guard: RdmaWriterGuard,
    speed: LinkSpeed,
    /// Credit that the probe still holds.
    probe_credit: u32,
}

impl OutboundLink<'_> {
    /// Carries one link from dialling to its end, by the best transport that works. Returns the
    /// reason for the end.
    pub(crate) async fn carry(self, addresses: &DataAddresses, carrier: LinkCarrier) -> LinkError {
        let options = self.dial_options(addresses);
        for (index, option) in options.iter().enumerate() {
            if let Some(reason) = self.nixl_skip_reason(option, addresses) {
                let fallback = self.report_fallback(Transport::Nixl, Transport::Tcp, reason);
                if let Err(closing) = fallback.await {
                    return closing;
                }
            }
            let next = options.get(index + 1);
            let error = match self.backoff_error(option, next) {
                Some(error) => error,
                None => match self.dial(option).await {
                    Ok(DialledTransport::SameHost(dialled, transport, store)) => {
                        return self
                            .measure_and_run(dialled, transport, store, carrier)
                            .await;
                    }
                    Ok(DialledTransport::Network(dialled, transport, store)) => {
                        return self
                            .measure_and_run(dialled, transport, store, carrier)
                            .await;
                    }
                    Ok(DialledTransport::Rdma(measured)) => {
                        return self.run(measured, carrier).await;
                    }
                    Err(error) => self.record_failure(option, error),
                },
            };
            let is_needed = !carrier.queue.is_closed() || !carrier.queue.is_empty();
            let next = next.filter(|_| is_needed && !error.is_independent_of_transport());
            let Some(next) = next else {
                return error;
            };
            let (from, to) = (option.transport(), next.transport());
            if let Err(closing) = self.report_fallback(from, to, error.to_string()).await {
                return closing;
            }
        }
        let peer = self.peer;
        let reason = match addresses.tcp {
            None => "it can be reached only from its own host, and this is another host",
            Some(_) => "none of the transports that this worker may use reaches it",
        };
        LinkError::RejectedHere(format!("worker {peer}: {reason}"))
    }

    /// The transports to try, the preferred first.
    fn dial_options<'a>(&'a self, addresses: &'a DataAddresses) -> Vec<DialOption<'a>> {
        let Self { config, .. } = self;
        let DataAddresses {
            tcp,
            shared_memory,
            nixl,
        } = addresses;
        let host = shared_memory.as_ref().filter(|address| {
            config.transports.contains(&Transport::SharedMemory) && shm::is_this_host(address)
        });
        let library = config.nixl().filter(|_| *nixl);
        let is_tcp = config.transports.contains(&Transport::Tcp);
        let nixl = library.zip(tcp.as_deref());
        let nixl = nixl.map(|(library, address)| DialOption::Nixl(library, address));
        let tcp = tcp.as_deref().filter(|_| is_tcp).map(DialOption::Tcp);
        let host = host.map(DialOption::Host);
        // Without a network card NIXL is no faster than TCP, and within a host shared memory is
        // better; so it comes last.
        let (before, after) = if self.uses_network_card() {
            (nixl, None)
        } else {
            (None, nixl)
        };
        let options = host.into_iter().chain(before);
        options.chain(tcp).chain(after).collect()
    }

    fn uses_network_card(&self) -> bool {
        self.config
            .nixl()
            .is_some_and(|nixl| nixl.uses_network_card())
    }

    /// The reason for which NIXL is skipped after recent failures, unless it is the last transport.
    fn backoff_error(
        &self,
        option: &DialOption<'_>,
        next: Option<&DialOption<'_>>,
    ) -> Option<LinkError> {
        let (DialOption::Nixl(..), Some(_)) = (option, next) else {
            return None;
        };
        self.dial_backoff
            .reason_to_wait(self.peer)
            .map(LinkError::Nixl)
    }

    /// Records a failure of NIXL, unless the peer cannot be reached at all or refuses the link.
    fn record_failure(&self, option: &DialOption<'_>, error: LinkError) -> LinkError {
        let is_no_peer = matches!(error, LinkError::Connect(..) | LinkError::NotAPeer(_));
        if let DialOption::Nixl(..) = option
            && !is_no_peer
            && !error.is_independent_of_transport()
        {
            let reason = match &error {
                LinkError::Nixl(reason) => reason.clone(),
                other => other.to_string(),
            };
            self.dial_backoff.record_failure(self.peer, reason);
        }
        error
    }

    /// The reason for which NIXL is not tried before TCP, if only one of the two ends could use it.
    fn nixl_skip_reason(
        self,
        option: &DialOption<'_>,
        addresses: &DataAddresses,
    ) -> Option<String> {
        let DialOption::Tcp(_) = option else {
            return None;
        };
        let is_allowed = self.config.transports.contains(&Transport::Nixl);
        match (self.config.nixl(), addresses.nixl) {
            (None, true) if is_allowed => Some("this worker has no NIXL library".to_owned()),
            (Some(_), false) if self.uses_network_card() => {
                Some("the peer has no NIXL library".to_owned())
            }
            _ => None,
        }
    }

    async fn dial(self, option: &DialOption<'_>) -> Result<DialledTransport, LinkError> {
        let Self { config, peer, .. } = self;
        let within = match option {
            DialOption::Nixl(..) => config.rdma_handshake_timeout(),
            DialOption::Host(_) | DialOption::Tcp(_) => config.connect_timeout,
        };
        let dialled = async {
            match option {
                DialOption::Host(address) => {
                    let (dialled, channel) = shm::dial(config, peer, address).await?;
                    let PayloadChannel {
                        store,
                        pool_unopened: unopened,
                    } = channel;
                    let transport = match store {
                        PayloadStore::Pool { .. } => Transport::CudaIpc,
                        PayloadStore::Buffers(_) | PayloadStore::Ring(..) => {
                            Transport::SharedMemory
                        }
                    };
                    if let Some(reason) = unopened {
                        self.report_fallback(Transport::CudaIpc, transport, reason)
                            .await?;
                    }
                    Ok(DialledTransport::SameHost(dialled, transport, store))
                }
                DialOption::Nixl(library, address) => {
                    let (dialled, store) = nixl::dial(config, peer, library, address).await?;
                    Ok(DialledTransport::Network(dialled, Transport::Nixl, store))
                }
                DialOption::Tcp(address) => {
                    let dialled = handshake::dial(config, peer, address).await?;
                    let LinkTerms {
                        window,
                        frame_bytes,
                        ..
                    } = dialled.terms;
                    let frame_bytes = frame_bytes.min(config.stream_frame_bytes());
                    let store = PayloadStore::Buffers(BufferPool::new(frame_bytes, window));
                    Ok(DialledTransport::Network(dialled, Transport::Tcp, store))
                }
            }
        };
        let dialled = timeout(within, dialled).await;
        match dialled.unwrap_or(Err(LinkError::HandshakeTimedOut(within)))? {
            DialledTransport::Network(dialled, Transport::Nixl, store) => {
                let within = config.first_writes_timeout();
                let measured = timeout(within, measure_link(dialled, Transport::Nixl, store));
                measured
                    .await
                    .unwrap_or(Err(LinkError::WriteTimedOut(within)))
                    .map(DialledTransport::Rdma)
            }
            made => Ok(made),
        }
    }

    async fn report_fallback(
        self,
        from: Transport,
        to: Transport,
        reason: String,
    ) -> Result<(), LinkError> {
        let sent = self.events.send(LinkEvent::FellBack {
            peer: self.peer,
            from,
            to,
            reason,
        });
        sent.await.map_err(|_| LinkError::Closing)
    }

    /// Measures the link, opens it and carries it until it ends.
    async fn measure_and_run<R, W>(
        self,
        dialled: DialledLink<R, W>,
        transport: Transport,
        store: PayloadStore,
        carrier: LinkCarrier,
    ) -> LinkError
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        match measure_link(dialled, transport, store).await {
            Ok(measured) => self.run(measured, carrier).await,
            Err(error) => error,
        }
    }

    /// Records the end of a link over NIXL. If writes fail soon after the measured ones succeeded,
    /// the next dial uses another transport. This must run before the link is seen to be broken,
    /// because the next dial may begin then.
    fn record_nixl_end(self, since: Instant, error: &LinkError) {
        match error {
            LinkError::Nixl(reason) if since.elapsed() < BACKOFF_MIN => {
                self.dial_backoff.record_failure(self.peer, reason.clone());
            }
            _ => self.dial_backoff.clear(self.peer),
        }
    }

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
            let state = StreamSendState::new(writing.0.clone());
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
        if transport == Transport::Nixl {
            self.record_nixl_end(since, &error);
        }
        // One lost stream loses the link.
        writers.shutdown().await;
        readers.shutdown().await;
        error
    }
}

/// Measures an established link.
async fn measure_link<R, W>(
    mut dialled: DialledLink<R, W>,
    transport: Transport,
    store: PayloadStore,
) -> Result<MeasuredLink<R, W>, LinkError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let writing = RdmaWriterGuard(store.writer());
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
struct RdmaWriterGuard(Option<Arc<RdmaWriter>>);

impl RdmaWriterGuard {
    async fn failed(&self) -> LinkError {
        match &self.0 {
            Some(writer) => LinkError::Nixl(writer.wait_until_failed().await),
            None => std::future::pending().await,
        }
    }
}

impl Drop for RdmaWriterGuard {
    fn drop(&mut self) {
        if let Some(writer) = &self.0 {
            writer.close();
        }
    }
}
