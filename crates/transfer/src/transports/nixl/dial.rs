//! The handshake of a link over NIXL: a hello that asks for a ring, a welcome, the offer of the
//! ring.
//!
//! Each end creates an agent in it, which takes half a second, or for ever if a device hangs. An
//! end that is creating one sends a keep-alive once per heartbeat interval; the receiver times out
//! first and sends the reason, so that the dialler has time for another transport.
//!
//! Never: writes a slot. Invariant: no ring is larger than the window of its receiver requires, the
//! number of rings is limited, and the creation of a ring does not delay a newer link of the peer.

use super::receiver::RdmaReceiverParts;
use super::writer::RdmaWriterParts;
use super::{AgentNames, Nixl, PendingWrites, RdmaReceiver, RdmaWriter, RingOffer, failure};
use crate::config::LinksConfig;
use crate::credit::CreditAccount;
use crate::handshake::{DialledLink, RequestedLink, perform_handshake};
use crate::incoming::{
    IdentifiedPeer, LinkReceiver, PayloadSource, ReceiveSession, SlotReadiness, receive_heads,
};
use crate::incoming_links::IncomingLinks;
use crate::link::{PayloadStore, SlotDelivery};
use crate::socket::{LinkError, write_message};
use crate::transports::Transport;
use crate::transports::shm::{self, ReceiverRing};
use crate::transports::tcp::{self, TcpLinkStream, TcpReader, TcpWriter};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWrite;
use tokio::sync::{OwnedSemaphorePermit, TryAcquireError};
use tokio::time::{MissedTickBehavior, interval};

/// Creates a ring for a peer and receives through it until the link ends. Returns the reason for
/// the end.
pub(super) async fn receive(
    identified: IdentifiedPeer<TcpReader, TcpWriter>,
    mut session: ReceiveSession,
    nixl: &Arc<Nixl>,
    links: &IncomingLinks,
) -> LinkError {
    let IdentifiedPeer { peer, mut stream } = identified;
    let config = &links.config;
    let shape = shm::ring_shape(config);
    let welcome = LinkMessage::Welcome {
        me: config.me,
        credit: shape.window(),
        key: session.key,
        frame_bytes: shape.slot_bytes,
    };
    if let Err(error) = write_message(&mut stream.writer, &welcome, &[]).await {
        return error;
    }
    let ring = ring_permit(links).map_err(failure);
    let opened = match ring {
        Ok(permit) => {
            let parts = RdmaReceiverParts {
                name: AgentNames::of(peer, config.me, session.key).receiver,
                shape,
                beat: config.beat,
                permit,
            };
            open(nixl, config, parts, &mut stream, &mut session).await
        }
        Err(error) => Err(error),
    };
    let (receiver, mirror, RingOffer { start, metadata }) = match opened {
        Ok(opened) => opened,
        Err(LinkError::Transport(Transport::Nixl, reason)) => {
            let refusal = LinkMessage::NoRing(reason.clone());
            return match write_message(&mut stream.writer, &refusal, &[]).await {
                Ok(()) => failure(reason),
                Err(error) => error,
            };
        }
        Err(error) => return error,
    };
    let offer = LinkMessage::RingOffer { start, metadata };
    if let Err(error) = write_message(&mut stream.writer, &offer, &[]).await {
        return error;
    }
    let pending_writes = PendingWrites {
        receiver,
        silence_max: config.silence_max,
        grace: config.beat,
    };
    let link_receiver = LinkReceiver {
        peer,
        block_bytes: config.block_bytes,
        account: CreditAccount::of_slots(shape.slots_count),
        grants: config.grants.clone(),
        payload_source: PayloadSource::Ring(mirror, SlotReadiness::AfterWrite(pending_writes)),
        events: links.events.clone(),
    };
    receive_heads(stream, link_receiver, session).await
}

/// Creates the ring; stops when the peer closes the stream or a newer link of the peer arrives.
async fn open(
    nixl: &Arc<Nixl>,
    config: &LinksConfig,
    parts: RdmaReceiverParts,
    stream: &mut TcpLinkStream,
    session: &mut ReceiveSession,
) -> Result<(RdmaReceiver, ReceiverRing, RingOffer), LinkError> {
    let mut opened = pin!(RdmaReceiver::open(nixl, parts, agent_timeout(config)));
    let mut beats = keep_alive_interval(config.beat);
    loop {
        tokio::select! {
            opened = &mut opened => return opened.map_err(failure),
            () = session.replaced.notified() => return Err(LinkError::Replaced),
            // The dialler sends nothing before the offer, not even a keep-alive.
            received = stream.reader.message() => match received {
                Err(LinkError::SilenceTimedOut(_)) => {}
                Err(error) => return Err(error),
                Ok(_) => return Err(LinkError::Unexpected("before the ring was offered")),
            },
            _ = beats.tick() => write_message(&mut stream.writer, &LinkMessage::KeepAlive, &[]).await?,
        }
    }
}

/// The time limit for creating one agent, which opens every device of its host first.
fn agent_timeout(config: &LinksConfig) -> Duration {
    config.connect_timeout * 2
}

fn ring_permit(links: &IncomingLinks) -> Result<OwnedSemaphorePermit, String> {
    let permit = Arc::clone(&links.ring_permits).try_acquire_owned();
    permit.map_err(|error| match error {
        TryAcquireError::NoPermits => {
            let count = links.config.rings_max;
            format!("this worker has {count} rings for peers already, which is the most")
        }
        TryAcquireError::Closed => unreachable!("the semaphore is never closed"),
    })
}

fn keep_alive_interval(beat: Duration) -> tokio::time::Interval {
    let mut beats = interval(beat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}

/// Connects, shakes hands and prepares writes into the peer's ring.
pub(super) async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    nixl: &Arc<Nixl>,
    address: &str,
) -> Result<(DialledLink<TcpReader, TcpWriter>, PayloadStore), LinkError> {
    let mut stream = tcp::connect(config, address).await?;
    let terms = perform_handshake(config, peer, RequestedLink::RdmaRing, &mut stream).await?;
    let shape = shm::agreed_ring_shape(config, terms)?;
    let offer = loop {
        match stream.reader.message().await? {
            LinkMessage::RingOffer { start, metadata } => break RingOffer { start, metadata },
            LinkMessage::NoRing(reason) => return Err(failure(reason)),
            LinkMessage::KeepAlive => {}
            _ => return Err(LinkError::Unexpected("in place of a ring to write to")),
        }
    };
    let parts = RdmaWriterParts {
        names: AgentNames::of(config.me, peer, terms.key),
        shape,
        beat: config.beat,
        offer,
    };
    let opened = RdmaWriter::open(nixl, parts, agent_timeout(config));
    let writer = with_keep_alives(&mut stream.writer, config.beat, opened).await?;
    let writer = writer.map_err(failure)?;
    let ring = Arc::clone(writer.ring());
    let store = PayloadStore::Ring(ring, SlotDelivery::RdmaWrite(Arc::new(writer)));
    let streams = vec![stream];
    Ok((DialledLink { streams, terms }, store))
}

/// Waits for `work`, and sends keep-alives meanwhile.
async fn with_keep_alives<W: AsyncWrite + Unpin, T>(
    writer: &mut W,
    beat: Duration,
    work: impl Future<Output = T>,
) -> Result<T, LinkError> {
    let mut work = pin!(work);
    let mut beats = keep_alive_interval(beat);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            _ = beats.tick() => write_message(writer, &LinkMessage::KeepAlive, &[]).await?,
        }
    }
}
