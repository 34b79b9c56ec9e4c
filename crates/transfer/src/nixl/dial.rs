//! The handshake of a link over NIXL: a hello that asks for a ring, a welcome, the ring's whereabouts.
//!
//! Never: writes a slot. Invariant: no ring is larger than its receiver's window warrants, and no agent is told of
//! metadata that was damaged on the way (`wire`).

use super::{Landing, Nixl, Offer, Writer};
use crate::config::{LinkEvent, LinksConfig};
use crate::credit::Account;
use crate::host;
use crate::incoming::{self, Announced, Arrivals, Hearing, Places, Seat, Visitor};
use crate::link::{Delivery, Store};
use crate::outgoing::{Dialled, Wish, shake_hands};
use crate::socket::{SocketError, write};
use crate::tcp::{self, TcpReader, TcpWriter};
use crate::wire::Message;
use cleave_domain::WorkerRef;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Makes a ring for a visitor and receives that way until the link ends. Returns why it ended.
pub(crate) async fn receive(
    visitor: Visitor<TcpReader, TcpWriter>,
    seat: Seat,
    (config, nixl): (&LinksConfig, &Arc<Nixl>),
    events: &mpsc::Sender<LinkEvent>,
) -> SocketError {
    let Visitor { peer, mut stream } = visitor;
    let shape = host::shape(config);
    let welcome = Message::Welcome {
        me: config.me,
        credit: shape.window(),
        key: seat.key,
        frame_bytes: shape.slot_bytes,
    };
    if let Err(error) = write(&mut stream.writer, &welcome, &[]).await {
        return error;
    }
    // No two agents that a peer hears of have one name: it may have links to several lives of this worker.
    let name = format!("cleave-{}-from-{peer}-{}", config.me, seat.key);
    let opened = Landing::open(nixl, (name, shape), config.beat);
    let opened = match timeout(config.agents_timeout(), opened).await {
        Ok(opened) => opened,
        Err(_) => Err(SocketError::Slow(config.agents_timeout()).to_string()),
    };
    let (landing, mirror, Offer { start, metadata }) = match opened {
        Ok(opened) => opened,
        Err(reason) => {
            let refusal = Message::NoLanding(reason.clone());
            return match write(&mut stream.writer, &refusal, &[]).await {
                Ok(()) => SocketError::Nixl(reason),
                Err(error) => error,
            };
        }
    };
    let offer = Message::Landing { start, metadata };
    if let Err(error) = write(&mut stream.writer, &offer, &[]).await {
        return error;
    }
    let announced = Announced {
        landing,
        silence_max: config.silence_max,
        grace: config.beat,
    };
    let hearing = Hearing {
        peer,
        block_bytes: config.block_bytes,
        account: Account::of_slots(shape.slots_count),
        passes: config.passes.clone(),
        places: Places::Ring(mirror, Arrivals::Announced(announced)),
        events: events.clone(),
    };
    incoming::receive_heads(stream, hearing, seat).await
}

/// Connects, shakes hands and makes ready to write into the peer's ring.
pub(crate) async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    (nixl, address): (&Arc<Nixl>, &str),
) -> Result<(Dialled<TcpReader, TcpWriter>, Store), SocketError> {
    let mut stream = tcp::dial(config, address).await?;
    let terms = shake_hands(config, (peer, Wish::Landing), &mut stream).await?;
    let shape = host::agreed_shape(config, terms)?;
    let offer = match stream.reader.message().await? {
        Message::Landing { start, metadata } => Offer { start, metadata },
        Message::NoLanding(reason) => return Err(SocketError::Nixl(reason)),
        _ => return Err(SocketError::Unexpected("in place of a ring to write to")),
    };
    let name = format!("cleave-{}-to-{peer}", config.me);
    let writer = Writer::open(nixl, (name, shape), (offer, config.beat)).await;
    let writer = writer.map_err(SocketError::Nixl)?;
    let ring = Arc::clone(writer.ring());
    let store = Store::Ring(ring, Delivery::Written(Arc::new(writer)));
    let streams = vec![stream];
    Ok((Dialled { streams, terms }, store))
}
