//! The sending end over TCP: dial, shake hands, measure, then carry parcels until it breaks.

use crate::config::{LinkEvent, LinkSpeed, LinksConfig};
use crate::link::{Carrier, Parcel};
use crate::socket::{Reader, SocketError, write};
use crate::wire::{FrameHead, Hello, Message, PROBE_BYTES};
use bytes::Bytes;
use cleave_domain::WorkerRef;
use cleave_kv::Packet;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// Round trips tried for the latency; the shortest counts.
const PINGS_COUNT: u64 = 3;

/// Carries one link from dial to end. Returns why it ended.
pub(crate) async fn carry(
    config: &LinksConfig,
    peer: WorkerRef,
    address: &str,
    carrier: Carrier,
    events: &mpsc::Sender<LinkEvent>,
) -> SocketError {
    let dialled = timeout(config.connect_timeout, dial(config, peer, address)).await;
    let (mut reader, mut writer, window) = match dialled {
        Ok(Ok(dialled)) => dialled,
        Ok(Err(error)) => return error,
        Err(_) => return SocketError::Slow(config.connect_timeout),
    };
    let speed = match measure(&mut reader, &mut writer).await {
        Ok(speed) => speed,
        Err(error) => return error,
    };
    let Carrier { credit, queue } = carrier;
    credit.add_permits(window as usize);
    for event in [
        LinkEvent::Measured { peer, speed },
        LinkEvent::Granted { peer },
    ] {
        if events.send(event).await.is_err() {
            return SocketError::Closing;
        }
    }
    let granted = Granted {
        peer,
        window,
        credit,
        events,
    };
    tokio::select! {
        error = send_parcels(queue, &mut writer, config.beat) => error,
        error = hear_grants(&mut reader, granted) => error,
    }
}

type Halves = (
    Reader<tokio::net::tcp::OwnedReadHalf>,
    tokio::net::tcp::OwnedWriteHalf,
    u32,
);

/// Connects and shakes hands; the credit granted comes with the halves.
async fn dial(config: &LinksConfig, peer: WorkerRef, address: &str) -> Result<Halves, SocketError> {
    let stream = TcpStream::connect(address).await;
    let stream = stream.map_err(|error| SocketError::Connect(address.to_owned(), error))?;
    stream.set_nodelay(true)?;
    let (reader, mut writer) = stream.into_split();
    let mut reader = Reader::new(reader, config.silence_max, config.block_bytes);
    let hello = Message::Hello(Hello {
        from: config.me,
        to: peer,
        block_bytes: config.block_bytes,
        fingerprint: config.fingerprint.0.clone(),
    });
    write(&mut writer, &hello, Bytes::new()).await?;
    match reader.message().await? {
        Message::Welcome { me, .. } if me != peer => Err(SocketError::Refused(format!(
            "{address} is worker {me}, and worker {peer} was to be there"
        ))),
        Message::Welcome { credit, .. } => {
            let window = u32::try_from(credit).unwrap_or(u32::MAX);
            Ok((reader, writer, window))
        }
        Message::Reject(reason) => Err(SocketError::Rejected(reason)),
        _ => Err(SocketError::Unexpected("in place of a welcome")),
    }
}

/// Latency and bandwidth, before the first frame. Nothing falls back silently to a slow link:
/// whoever reads the log or the metric sees what each pair got.
async fn measure<R, W>(reader: &mut Reader<R>, writer: &mut W) -> Result<LinkSpeed, SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut latency = Duration::MAX;
    for nonce in 0..PINGS_COUNT {
        let start = Instant::now();
        round_trip(reader, writer, nonce).await?;
        latency = latency.min(start.elapsed());
    }
    let start = Instant::now();
    let bytes = u32::try_from(PROBE_BYTES).expect("a probe is small");
    let probe = Message::Probe(bytes);
    write(writer, &probe, Bytes::from(vec![0; PROBE_BYTES])).await?;
    round_trip(reader, writer, PINGS_COUNT).await?;
    let took = start.elapsed().saturating_sub(latency);
    let nanos = took.max(Duration::from_nanos(1)).as_nanos();
    let per_second = u128::from(bytes) * 1_000_000_000 / nanos;
    Ok(LinkSpeed {
        latency,
        bytes_per_second: u64::try_from(per_second).unwrap_or(u64::MAX),
    })
}

async fn round_trip<R, W>(
    reader: &mut Reader<R>,
    writer: &mut W,
    nonce: u64,
) -> Result<(), SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    write(writer, &Message::Ping(nonce), Bytes::new()).await?;
    match reader.message().await? {
        Message::Pong(answer) if answer == nonce => Ok(()),
        _ => Err(SocketError::Unexpected("in place of a pong")),
    }
}

async fn send_parcels<W: AsyncWrite + Unpin>(
    mut queue: mpsc::UnboundedReceiver<Parcel>,
    writer: &mut W,
    beat: Duration,
) -> SocketError {
    let mut beats = interval(beat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut nonce = PINGS_COUNT;
    loop {
        let (message, payload) = tokio::select! {
            parcel = queue.recv() => match parcel {
                Some(parcel) => (message_of(parcel.packet), parcel.payload),
                None => return SocketError::Closing,
            },
            _ = beats.tick() => {
                nonce += 1;
                (Message::Ping(nonce), Bytes::new())
            }
        };
        if let Err(error) = write(writer, &message, payload).await {
            return error;
        }
    }
}

fn message_of(packet: Packet) -> Message {
    match packet {
        Packet::Frame {
            handoff,
            block,
            part,
            checksum,
        } => Message::Frame(FrameHead {
            handoff,
            block,
            part,
            checksum,
        }),
        Packet::Seal(seal) => Message::Seal(seal),
        Packet::Landed { handoff } => Message::Landed(handoff),
        Packet::Abandoned { handoff, cause } => Message::Abandoned(handoff, cause),
    }
}

/// Where grants go.
struct Granted<'a> {
    peer: WorkerRef,
    window: u32,
    credit: Arc<Semaphore>,
    events: &'a mpsc::Sender<LinkEvent>,
}

async fn hear_grants<R: AsyncRead + Unpin>(
    reader: &mut Reader<R>,
    granted: Granted<'_>,
) -> SocketError {
    loop {
        let bytes = match reader.message().await {
            Ok(Message::Grant(bytes)) => bytes,
            Ok(Message::Pong(_)) => continue,
            Ok(_) => return SocketError::Unexpected("from the receiver of a link"),
            Err(error) => return error,
        };
        // A receiver can only give back what it got: more than its window is nonsense.
        let free = granted.credit.available_permits() as u64;
        if free.saturating_add(bytes) > u64::from(granted.window) {
            return SocketError::Unexpected("grant beyond the window");
        }
        granted
            .credit
            .add_permits(usize::try_from(bytes).expect("bounded by a u32 window"));
        let peer = granted.peer;
        if granted
            .events
            .send(LinkEvent::Granted { peer })
            .await
            .is_err()
        {
            return SocketError::Closing;
        }
    }
}
