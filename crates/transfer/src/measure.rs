//! Measures a link before its first frame.
//!
//! Owns: the round trips, the probe and their evaluation. Never: sends a frame. Invariant: a probe
//! uses the path of frames, takes credit as they do, and returns it.

use crate::config::LinkSpeed;
use crate::incoming::LinkStream;
use crate::link::{PayloadStore, SlotDelivery};
use crate::outgoing::{CREDIT_BEYOND_WINDOW, lend_slot};
use crate::pools;
use crate::socket::{LinkError, write_message};
use crate::transports::Transport;
use crate::transports::nixl::RdmaWriter;
use crate::transports::shm::{RingShape, SenderRing};
use crate::wire::{LinkMessage, PROBE_BYTES};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

/// Number of round trips for the latency; the shortest counts.
const PINGS_COUNT: u64 = 3;
/// The last nonce of a measurement; heartbeats continue from it.
pub(crate) const NONCE_LAST: u64 = PINGS_COUNT + 1;

/// Measures latency and bandwidth before the first frame; also returns the credit that the probe
/// still holds. No link falls back silently to a slow transport: log and metric have the result for
/// each pair.
pub(crate) async fn measure<R, W>(
    streams: &mut [LinkStream<R, W>],
    transport: Transport,
    store: &PayloadStore,
) -> Result<(LinkSpeed, u32), LinkError>
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
    if let PayloadStore::Buffers(_) = store {
        // A warm-up: a new TCP connection is slow at first, which is not the rate to measure.
        probe(streams).await?;
        for stream in streams.iter_mut() {
            ping(stream, PINGS_COUNT).await?;
            pong(stream, PINGS_COUNT, store).await?;
        }
    }
    if let PayloadStore::Ring(ring, SlotDelivery::RdmaWrite(_)) = store {
        // A warm-up: the first write connects the network cards.
        let (_, lent) = probe_ring(&mut streams[0].writer, ring, store.writer()).await?;
        ping(&mut streams[0], PINGS_COUNT).await?;
        let back = pong(&mut streams[0], PINGS_COUNT, store).await?;
        wait_for_credit(&mut streams[0], store, lent - back).await?;
    }
    if let PayloadStore::Pool { pool, .. } = store {
        let probed = pools::measure(Arc::clone(pool)).await;
        let (bytes, elapsed) = probed.map_err(|reason| LinkError::Transport(transport, reason))?;
        return Ok((LinkSpeed::of(transport, latency, bytes, elapsed), 0));
    }
    let start = Instant::now();
    let (bytes, mut lent) = match store {
        PayloadStore::Buffers(_) | PayloadStore::Pool { .. } => (probe(streams).await?, 0),
        PayloadStore::Ring(ring, _) => {
            probe_ring(&mut streams[0].writer, ring, store.writer()).await?
        }
    };
    for stream in streams.iter_mut() {
        ping(stream, NONCE_LAST).await?;
    }
    for stream in streams.iter_mut() {
        lent -= pong(stream, NONCE_LAST, store).await?;
    }
    let elapsed = start.elapsed();
    // The way of the answer is subtracted. At least half of the time is kept, because a latency
    // measured in a bad moment could exceed the rest and make the link appear infinitely fast.
    let took = elapsed.saturating_sub(latency).max(elapsed / 2);
    Ok((LinkSpeed::of(transport, latency, bytes, took), lent))
}

/// Sends a probe over each stream; returns the number of bytes.
async fn probe<R, W>(streams: &mut [LinkStream<R, W>]) -> Result<usize, LinkError>
where
    W: AsyncWrite + Unpin,
{
    let nothing = vec![0; PROBE_BYTES];
    let probe = LinkMessage::Probe(u32::try_from(PROBE_BYTES).expect("a probe is small"));
    for stream in streams.iter_mut() {
        write_message(&mut stream.writer, &probe, &nothing).await?;
    }
    Ok(PROBE_BYTES * streams.len())
}

/// Sends slots of meaningless bytes; returns the number of bytes, and the credit that they took.
async fn probe_ring<W: AsyncWrite + Unpin>(
    writer: &mut W,
    ring: &Arc<SenderRing>,
    rdma_writer: Option<Arc<RdmaWriter>>,
) -> Result<(usize, u32), LinkError> {
    let RingShape {
        slot_bytes,
        slots_count,
    } = ring.shape();
    let probe_bytes = u32::try_from(PROBE_BYTES).expect("a probe is small");
    let slots_count = probe_bytes.div_ceil(slot_bytes).min(slots_count);
    for _ in 0..slots_count {
        let mut slot = ring.take(slot_bytes);
        slot.fill(0);
        let number = lend_slot(slot, rdma_writer.as_deref());
        write_message(writer, &LinkMessage::SlotProbe(number), &[]).await?;
    }
    let bytes = slots_count * slot_bytes;
    Ok((bytes as usize, bytes))
}

async fn ping<R, W>(stream: &mut LinkStream<R, W>, nonce: u64) -> Result<(), LinkError>
where
    W: AsyncWrite + Unpin,
{
    write_message(&mut stream.writer, &LinkMessage::Ping(nonce), &[]).await
}

/// Waits for the answer; slots of the probe may be returned before it. Returns the credit of those.
async fn pong<R, W>(
    stream: &mut LinkStream<R, W>,
    nonce: u64,
    store: &PayloadStore,
) -> Result<u32, LinkError>
where
    R: AsyncRead + Unpin,
{
    let mut bytes = 0;
    loop {
        match stream.reader.message().await? {
            LinkMessage::Pong(answer) if answer == nonce => return Ok(bytes),
            other => bytes += credit_returned(other, store).await?,
        }
    }
}

/// Waits until the other slots of a probe are returned.
async fn wait_for_credit<R, W>(
    stream: &mut LinkStream<R, W>,
    store: &PayloadStore,
    lent: u32,
) -> Result<(), LinkError>
where
    R: AsyncRead + Unpin,
{
    let mut lent = lent;
    while lent > 0 {
        let back = credit_returned(stream.reader.message().await?, store).await?;
        lent = lent.checked_sub(back).ok_or(CREDIT_BEYOND_WINDOW)?;
    }
    Ok(())
}

/// The credit that a message returns; any other message is an error.
async fn credit_returned(message: LinkMessage, store: &PayloadStore) -> Result<u32, LinkError> {
    let (LinkMessage::CreditSlots(slots), PayloadStore::Ring(ring, _)) = (message, store) else {
        return Err(LinkError::Unexpected("in place of a pong"));
    };
    store.wait_until_unread(&slots).await;
    if !slots.iter().all(|slot| ring.return_slot(*slot)) {
        return Err(CREDIT_BEYOND_WINDOW);
    }
    let count = u32::try_from(slots.len()).expect("at most a ring of them");
    Ok(count * ring.shape().slot_bytes)
}
