//! How fast a link is, before its first frame.
//!
//! Owns: the round trips and the probe, and what they say. Never: sends a frame. Invariant: a probe goes the way that
//! frames will go, takes credit as they do, and gives it back.

use crate::config::LinkSpeed;
use crate::incoming::Stream;
use crate::link::{Delivery, Store};
use crate::nixl::Writer;
use crate::outgoing::{BEYOND_WINDOW, lend};
use crate::pools;
use crate::shared_memory::{Ring, Shape};
use crate::socket::{SocketError, write};
use crate::transport::Transport;
use crate::wire::{Message, PROBE_BYTES};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

/// Round trips tried for the latency; the shortest counts.
const PINGS_COUNT: u64 = 3;
/// The last nonce of a measurement; beats go on from there.
pub(crate) const NONCE_LAST: u64 = PINGS_COUNT + 1;

/// Latency and bandwidth, before the first frame, and how much credit the probe still has. Nothing
/// falls back silently to a slow link: whoever reads the log or the metric sees what each pair got.
pub(crate) async fn measure<R, W>(
    streams: &mut [Stream<R, W>],
    transport: Transport,
    store: &Store,
) -> Result<(LinkSpeed, u32), SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut latency = Duration::MAX;
    for nonce in 0..PINGS_COUNT {
        let start = Instant::now();
        ping(&mut streams[0], nonce).await?;
        pong(&mut streams[0], nonce, store).await?;
        latency = latency.min(start.elapsed());
    }
    if let Store::Buffers(_) = store {
        // A new connection is slow at first, and that is not what is to be known.
        probe(streams).await?;
        for stream in streams.iter_mut() {
            ping(stream, PINGS_COUNT).await?;
            pong(stream, PINGS_COUNT, store).await?;
        }
    }
    if let Store::Ring(ring, Delivery::Written(_)) = store {
        // The first write connects the cards.
        let (_, lent) = probe_ring(&mut streams[0].writer, (ring, store.writer())).await?;
        ping(&mut streams[0], PINGS_COUNT).await?;
        let back = pong(&mut streams[0], PINGS_COUNT, store).await?;
        regain(&mut streams[0], store, lent - back).await?;
    }
    if let Store::Pool { pool, .. } = store {
        let probed = pools::measure(Arc::clone(pool)).await;
        let probed = probed.map_err(SocketError::Pool)?;
        return Ok((LinkSpeed::of(transport, latency, probed), 0));
    }
    let start = Instant::now();
    let (bytes, mut lent) = match store {
        Store::Buffers(_) | Store::Pool { .. } => (probe(streams).await?, 0),
        Store::Ring(ring, _) => probe_ring(&mut streams[0].writer, (ring, store.writer())).await?,
    };
    for stream in streams.iter_mut() {
        ping(stream, NONCE_LAST).await?;
    }
    for stream in streams.iter_mut() {
        lent -= pong(stream, NONCE_LAST, store).await?;
    }
    let elapsed = start.elapsed();
    // The answer's way is no part of it. But a latency that was measured in a bad moment would leave
    // almost nothing, and the link would pass for one of any speed.
    let took = elapsed.saturating_sub(latency).max(elapsed / 2);
    Ok((LinkSpeed::of(transport, latency, (bytes, took)), lent))
}

/// Sends a probe over each stream; says how many bytes that was.
async fn probe<R, W>(streams: &mut [Stream<R, W>]) -> Result<usize, SocketError>
where
    W: AsyncWrite + Unpin,
{
    let nothing = vec![0; PROBE_BYTES];
    let probe = Message::Probe(u32::try_from(PROBE_BYTES).expect("a probe is small"));
    for stream in streams.iter_mut() {
        write(&mut stream.writer, &probe, &nothing).await?;
    }
    Ok(PROBE_BYTES * streams.len())
}

/// Fills slots; says how many bytes that was, and how much credit it took.
async fn probe_ring<W: AsyncWrite + Unpin>(
    writer: &mut W,
    (ring, far): (&Arc<Ring>, Option<Arc<Writer>>),
) -> Result<(usize, u32), SocketError> {
    let Shape {
        slot_bytes,
        slots_count,
    } = ring.shape();
    let probe_bytes = u32::try_from(PROBE_BYTES).expect("a probe is small");
    let slots_count = probe_bytes.div_ceil(slot_bytes).min(slots_count);
    for _ in 0..slots_count {
        let mut slot = ring.take(slot_bytes);
        slot.fill(0);
        let number = lend(slot, far.as_deref());
        write(writer, &Message::SlotProbe(number), &[]).await?;
    }
    let bytes = slots_count * slot_bytes;
    Ok((bytes as usize, bytes))
}

async fn ping<R, W>(stream: &mut Stream<R, W>, nonce: u64) -> Result<(), SocketError>
where
    W: AsyncWrite + Unpin,
{
    write(&mut stream.writer, &Message::Ping(nonce), &[]).await
}

/// Waits for the answer; slots of the probe may come back before it. Says how much credit they are.
async fn pong<R, W>(
    stream: &mut Stream<R, W>,
    nonce: u64,
    store: &Store,
) -> Result<u32, SocketError>
where
    R: AsyncRead + Unpin,
{
    let mut bytes = 0;
    loop {
        match stream.reader.message().await? {
            Message::Pong(answer) if answer == nonce => return Ok(bytes),
            other => bytes += granted(other, store).await?,
        }
    }
}

/// Waits until the rest of a probe's slots is back.
async fn regain<R, W>(
    stream: &mut Stream<R, W>,
    store: &Store,
    lent: u32,
) -> Result<(), SocketError>
where
    R: AsyncRead + Unpin,
{
    let mut lent = lent;
    while lent > 0 {
        let back = granted(stream.reader.message().await?, store).await?;
        lent = lent.checked_sub(back).ok_or(BEYOND_WINDOW)?;
    }
    Ok(())
}

/// How much credit a message gives back, which can be nothing else.
async fn granted(message: Message, store: &Store) -> Result<u32, SocketError> {
    let (Message::GrantSlots(slots), Store::Ring(ring, _)) = (message, store) else {
        return Err(SocketError::Unexpected("in place of a pong"));
    };
    store.settled(&slots).await;
    if !slots.iter().all(|slot| ring.give_back(*slot)) {
        return Err(BEYOND_WINDOW);
    }
    let count = u32::try_from(slots.len()).expect("at most a ring of them");
    Ok(count * ring.shape().slot_bytes)
}
