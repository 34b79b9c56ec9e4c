//! The handshake of a link over NIXL: a hello that asks for a ring, a welcome, the ring's whereabouts.
//!
//! Either end makes an agent in it, which takes half a second, or for ever where a device hangs. Whoever makes one says
//! once in a beat that it still does; the receiver gives up first, and says so, so that the dialler hears a reason and has
//! time for another way.
//!
//! Never: writes a slot. Invariant: no ring is larger than its receiver's window warrants, none is made beyond those that
//! the receiver has memory for, and none keeps a newer link of the peer waiting.

use super::landing::LandingParts;
use super::writer::WriterParts;
use super::{Landing, Names, Nixl, Offer, Writer};
use crate::announced::Announced;
use crate::config::{LinkEvent, LinksConfig};
use crate::credit::Account;
use crate::handshake::{Dialled, Wish, shake_hands};
use crate::host;
use crate::incoming::{self, Arrivals, Hearing, Places, Seat, Visitor};
use crate::link::{Delivery, Store};
use crate::shared_memory::{Mirror, Shape};
use crate::socket::{SocketError, write};
use crate::tcp::{self, TcpEnd, TcpReader, TcpWriter};
use crate::wire::Message;
use cleave_domain::WorkerRef;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWrite;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc};
use tokio::time::{MissedTickBehavior, interval};

/// What a worker makes rings with.
pub(crate) struct Means<'a> {
    pub(crate) config: &'a LinksConfig,
    pub(crate) nixl: &'a Arc<Nixl>,
    /// One for each ring that there may be.
    pub(crate) rings: &'a Arc<Semaphore>,
}

/// Makes a ring for a visitor and receives that way until the link ends. Returns why it ended.
pub(crate) async fn receive(
    visitor: Visitor<TcpReader, TcpWriter>,
    mut seat: Seat,
    means: Means<'_>,
    events: &mpsc::Sender<LinkEvent>,
) -> SocketError {
    let Visitor { peer, mut stream } = visitor;
    let config = means.config;
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
    let opened = open(peer, (&mut stream, &mut seat), &means, shape).await;
    let (landing, mirror, Offer { start, metadata }) = match opened {
        Ok(opened) => opened,
        Err(SocketError::Nixl(reason)) => {
            let refusal = Message::NoLanding(reason.clone());
            return match write(&mut stream.writer, &refusal, &[]).await {
                Ok(()) => SocketError::Nixl(reason),
                Err(error) => error,
            };
        }
        Err(error) => return error,
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

/// Makes the ring, for as long as the peer wants it and no newer link of it has come.
async fn open(
    peer: WorkerRef,
    (stream, seat): (&mut TcpEnd, &mut Seat),
    means: &Means<'_>,
    shape: Shape,
) -> Result<(Landing, Mirror, Offer), SocketError> {
    let config = means.config;
    let permit = permit(means).map_err(SocketError::Nixl)?;
    let parts = LandingParts {
        name: Names::of((peer, config.me), seat.key).receiver,
        shape,
        beat: config.beat,
        permit,
    };
    let mut opened = pin!(Landing::open(means.nixl, parts, config.landing_timeout()));
    let mut beats = beats(config.beat);
    loop {
        tokio::select! {
            opened = &mut opened => return opened.map_err(SocketError::Nixl),
            () = seat.replaced.notified() => return Err(SocketError::Replaced),
            // Nothing comes before the offer was made, not even a sign of life.
            heard = stream.reader.message() => match heard {
                Err(SocketError::Silent(_)) => {}
                Err(error) => return Err(error),
                Ok(_) => return Err(SocketError::Unexpected("before its ring was there")),
            },
            _ = beats.tick() => write(&mut stream.writer, &Message::Wait, &[]).await?,
        }
    }
}

fn permit(means: &Means<'_>) -> Result<OwnedSemaphorePermit, String> {
    let permit = Arc::clone(means.rings).try_acquire_owned();
    permit.map_err(|error| match error {
        TryAcquireError::NoPermits => {
            let count = means.config.rings_max;
            format!("this worker has {count} rings for peers already, which is the most")
        }
        TryAcquireError::Closed => unreachable!("the semaphore is never closed"),
    })
}

fn beats(beat: Duration) -> tokio::time::Interval {
    let mut beats = interval(beat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
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
    let offer = loop {
        match stream.reader.message().await? {
            Message::Landing { start, metadata } => break Offer { start, metadata },
            Message::NoLanding(reason) => return Err(SocketError::Nixl(reason)),
            Message::Wait => {}
            _ => return Err(SocketError::Unexpected("in place of a ring to write to")),
        }
    };
    let parts = WriterParts {
        names: Names::of((config.me, peer), terms.key),
        shape,
        beat: config.beat,
        offer,
    };
    let opened = Writer::open(nixl, parts, config.landing_timeout());
    let writer = beating(&mut stream.writer, config.beat, opened).await?;
    let writer = writer.map_err(SocketError::Nixl)?;
    let ring = Arc::clone(writer.ring());
    let store = Store::Ring(ring, Delivery::Written(Arc::new(writer)));
    let streams = vec![stream];
    Ok((Dialled { streams, terms }, store))
}

/// Waits for `work`, and says meanwhile that it is under way.
async fn beating<W: AsyncWrite + Unpin, T>(
    writer: &mut W,
    beat: Duration,
    work: impl Future<Output = T>,
) -> Result<T, SocketError> {
    let mut work = pin!(work);
    let mut beats = beats(beat);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            _ = beats.tick() => write(writer, &Message::Wait, &[]).await?,
        }
    }
}
