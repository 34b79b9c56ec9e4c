//! The measurement of `cleave kv bench`: blocks copied from the pool of one worker into the pool of
//! another, through a link as workers use it.
//!
//! Owns: two minimal ends, each with a pool and one thread that copies blocks, as an engine's
//! thread does. A sample is the time from the request of the first block to the report that the
//! last one is in the other pool.
//! Never: measures a path that no worker uses; every byte is checksummed, credited and copied at
//! both ends.

use crate::config::{LinkEvent, LinkSpeed, LinksConfig};
use crate::link::{Frame, SendPermit};
use crate::links::Links;
use crate::listeners::Listeners;
use crate::payload::ReceivedPayload;
use crate::transports::Transport;
use crate::{LocalNet, Nixl, PeerRoute};
use cleave_domain::{
    BlockIndex, BlockRef, Fingerprint, FlightId, HandoffId, Incarnation, KvPlane, WorkerId,
    WorkerRef,
};
use cleave_kv::{BlockPart, Packet, PayloadCondition, Seal};
use cleave_tls::PeerTls;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc as threads;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Limit of the events that wait for an end.
const EVENTS_MAX: usize = 1024;

/// The size of blocks and pools.
#[derive(Clone, Copy, Debug)]
pub struct BenchPoolShape {
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Blocks of a pool.
    pub blocks_count: u32,
}

/// The reason for which a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferBenchError {
    /// The link broke; the text is the reason.
    #[error("the link was lost: {0}")]
    Lost(String),
    /// A block differs from the one that was sent.
    #[error("block {0} arrived damaged")]
    Damaged(u32),
    /// A copying thread ended.
    #[error("a copying thread ended")]
    Thread,
}

/// The transports of one end.
#[derive(Debug, Default)]
pub struct BenchTransports {
    /// The network of workers in one process.
    pub net: LocalNet,
    /// The listeners for other processes.
    pub listeners: Listeners,
    /// NVIDIA's transfer library, if it is loaded.
    pub nixl: Option<Arc<Nixl>>,
    /// The certificates of links over TCP.
    pub peers: Option<PeerTls>,
}

/// The sending end of the benchmark.
#[derive(Debug)]
pub struct BenchSender {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    reads: threads::Sender<BenchBlockRead>,
    sent: mpsc::UnboundedReceiver<()>,
    shape: BenchPoolShape,
    flights_count: u64,
}

/// The receiving end of the benchmark.
#[derive(Debug)]
pub struct BenchReceiver {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    writes: threads::Sender<BenchBlockWrite>,
    written: mpsc::UnboundedReceiver<(HandoffId, u32)>,
    shape: BenchPoolShape,
}

struct BenchBlockRead {
    permit: SendPermit,
    handoff: HandoffId,
    ordinal: u32,
    block: u32,
}

struct BenchBlockWrite {
    handoff: HandoffId,
    block: BlockIndex,
    part: BlockPart,
    payload: ReceivedPayload,
}

fn worker(worker: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(1),
    }
}

fn links(
    me: u64,
    shape: BenchPoolShape,
    bench_transports: BenchTransports,
) -> (Links, mpsc::Receiver<LinkEvent>) {
    let BenchTransports {
        net,
        listeners,
        nixl,
        peers,
    } = bench_transports;
    let (events, event_receiver) = mpsc::channel(EVENTS_MAX);
    let fingerprint = Fingerprint("bench".into());
    // TCP would be preferred to NIXL without a network card, so only NIXL is allowed here.
    let transports = match nixl {
        Some(_) => [Transport::Nixl].into(),
        None => Transport::ALL.into(),
    };
    let config = LinksConfig {
        nixl,
        peer_tls: peers,
        transports,
        ..LinksConfig::new(worker(me), fingerprint, shape.block_bytes)
    };
    let links = Links::new(config, events, net);
    tokio::spawn(links.clone().serve(listeners));
    (links, event_receiver)
}

impl BenchPoolShape {
    /// A pool with data, so that its pages are mapped.
    pub fn filled_pool(self) -> Vec<u8> {
        let bytes = self.block_bytes as usize * self.blocks_count as usize;
        (0..bytes).map(|index| (index * 31) as u8).collect()
    }

    fn range(self, block: u32, part: BlockPart) -> std::ops::Range<usize> {
        let start = block as usize * self.block_bytes as usize + part.offset as usize;
        start..start + part.len as usize
    }
}

impl BenchSender {
    /// Starts the end, and listens for the answers of the receiver.
    pub fn start(shape: BenchPoolShape, transports: BenchTransports) -> Self {
        let (links, events) = links(1, shape, transports);
        let (reads, queued_reads) = threads::channel::<BenchBlockRead>();
        let (done_sender, sent) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let pool = shape.filled_pool();
            for read in queued_reads {
                if read.perform(&pool, shape).is_none() || done_sender.send(()).is_err() {
                    return;
                }
            }
        });
        Self {
            links,
            events,
            reads,
            sent,
            shape,
            flights_count: 0,
        }
    }

    /// Dials the receiver; returns the speed that the link measured itself.
    ///
    /// # Errors
    /// If no link is made, or only over a transport that was not requested.
    pub async fn dial(&mut self, route: PeerRoute) -> Result<LinkSpeed, TransferBenchError> {
        self.links.add_peer(worker(2), route);
        loop {
            match self.events.recv().await {
                Some(LinkEvent::Measured { speed, .. }) => return Ok(speed),
                Some(LinkEvent::FellBack { reason, .. } | LinkEvent::Lost { reason, .. }) => {
                    return Err(TransferBenchError::Lost(reason));
                }
                Some(_) => {}
                None => return Err(TransferBenchError::Thread),
            }
        }
    }

    /// Sends `count` blocks from `first` on, wrapping around the pool; returns the time until all
    /// have landed.
    ///
    /// # Errors
    /// If the link broke.
    pub async fn transfer(
        &mut self,
        first: u32,
        count: u32,
    ) -> Result<Duration, TransferBenchError> {
        self.flights_count += 1;
        let handoff = HandoffId {
            flight: FlightId(self.flights_count),
            attempt: 0,
        };
        let start = Instant::now();
        let link = self.links.link(worker(2));
        let link = link.map_err(|down| TransferBenchError::Lost(down.to_string()))?;
        let (mut queued_count, mut sent_count) = (0, 0);
        loop {
            while queued_count < count
                && let Some(permit) = link.reserve(handoff, self.shape.block_bytes)
            {
                let read = BenchBlockRead {
                    permit,
                    handoff,
                    ordinal: queued_count,
                    block: first.wrapping_add(queued_count) % self.shape.blocks_count,
                };
                self.reads
                    .send(read)
                    .map_err(|_| TransferBenchError::Thread)?;
                queued_count += 1;
            }
            tokio::select! {
                sent = self.sent.recv() => {
                    sent.ok_or(TransferBenchError::Thread)?;
                    sent_count += 1;
                    if sent_count == count {
                        let sealed = link.send(seal(handoff, count));
                        sealed.map_err(|down| TransferBenchError::Lost(down.to_string()))?;
                    }
                }
                event = self.events.recv() => match event {
                    Some(LinkEvent::Arrived { packet: Packet::Landed { handoff: landed }, .. })
                        if landed == handoff => return Ok(start.elapsed()),
                    Some(LinkEvent::Lost { reason, .. }) => return Err(TransferBenchError::Lost(reason)),
                    Some(_) => {}
                    None => return Err(TransferBenchError::Thread),
                },
            }
        }
    }
}

fn seal(handoff: HandoffId, blocks_count: u32) -> Packet {
    Packet::Seal(Seal {
        handoff,
        blocks_count,
        digest: 0,
        content: Default::default(),
        output: vec![0],
        state: None,
        window: None,
    })
}

impl BenchBlockRead {
    /// Reads a block as the thread of an engine does.
    fn perform(mut self, pool: &[u8], shape: BenchPoolShape) -> Option<()> {
        let mut offset = 0;
        while offset < shape.block_bytes {
            let len = self
                .permit
                .frame_bytes_max()
                .min(shape.block_bytes - offset);
            let part = BlockPart {
                plane: KvPlane::Blocks,
                ordinal: self.ordinal,
                offset,
                len,
            };
            let block = BlockRef {
                block: BlockIndex(self.block),
                ..BlockRef::default()
            };
            let frame = Frame {
                handoff: self.handoff,
                block,
                part,
            };
            let bytes = &pool[shape.range(self.block, part)];
            self.permit.send_copy(frame, bytes).ok()?;
            offset += len;
        }
        Some(())
    }
}

impl BenchReceiver {
    /// Starts the end; its answers go to `near`.
    pub fn start(shape: BenchPoolShape, transports: BenchTransports, near: PeerRoute) -> Self {
        let (links, events) = links(2, shape, transports);
        links.add_peer(worker(1), near);
        let (writes, queued_writes) = threads::channel::<BenchBlockWrite>();
        let (done_sender, written) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let mut pool = shape.filled_pool();
            for write in queued_writes {
                let BenchBlockWrite {
                    handoff,
                    block,
                    part,
                    payload,
                } = write;
                let destination = &mut pool[shape.range(block.0, part)];
                if payload.write_verified(destination) != Ok(true) {
                    return;
                }
                drop(payload);
                if done_sender.send((handoff, part.len)).is_err() {
                    return;
                }
            }
        });
        Self {
            links,
            events,
            writes,
            written,
            shape,
        }
    }

    /// Receives until no sender is left.
    ///
    /// # Errors
    /// If a block arrived damaged, or an answer cannot be sent.
    pub async fn run(mut self) -> Result<(), TransferBenchError> {
        // Bytes written, and the total once the seal has named it.
        let mut flights: BTreeMap<HandoffId, (u64, Option<u64>)> = BTreeMap::new();
        loop {
            let handoff = tokio::select! {
                written = self.written.recv() => {
                    let (handoff, len) = written.ok_or(TransferBenchError::Thread)?;
                    flights.entry(handoff).or_default().0 += u64::from(len);
                    handoff
                }
                event = self.events.recv() => match event {
                    None => return Ok(()),
                    Some(LinkEvent::Arrived { packet: Packet::Seal(seal), .. }) => {
                        let bytes = u64::from(seal.blocks_count) * u64::from(self.shape.block_bytes);
                        flights.entry(seal.handoff).or_default().1 = Some(bytes);
                        seal.handoff
                    }
                    Some(LinkEvent::Arrived { packet, condition, payload, .. }) => {
                        let intact = payload.filter(|_| condition == PayloadCondition::Intact);
                        self.import(&packet, intact)?;
                        continue;
                    }
                    Some(_) => continue,
                },
            };
            if let Some((bytes, Some(sealed_bytes))) = flights.get(&handoff)
                && bytes == sealed_bytes
            {
                flights.remove(&handoff);
                let near = self.links.link(worker(1));
                let landed = near.and_then(|link| link.send(Packet::Landed { handoff }));
                landed.map_err(|down| TransferBenchError::Lost(down.to_string()))?;
            }
        }
    }

    fn import(
        &self,
        packet: &Packet,
        payload: Option<ReceivedPayload>,
    ) -> Result<(), TransferBenchError> {
        let &Packet::Frame {
            handoff,
            block,
            part,
            ..
        } = packet
        else {
            return Ok(());
        };
        let write = BenchBlockWrite {
            handoff,
            block: block.block,
            part,
            payload: payload.ok_or(TransferBenchError::Damaged(block.block.0))?,
        };
        self.writes
            .send(write)
            .map_err(|_| TransferBenchError::Thread)
    }
}

/// The lower bound for a transport: blocks copied from pool to pool within this process.
#[derive(Debug)]
pub struct MemoryFloor {
    shape: BenchPoolShape,
    from: Arc<[u8]>,
    to: Vec<u8>,
}

impl MemoryFloor {
    /// Allocates and fills two pools of this shape.
    pub fn new(shape: BenchPoolShape) -> Self {
        Self {
            shape,
            from: shape.filled_pool().into(),
            to: shape.filled_pool(),
        }
    }

    /// Copies `count` blocks from `first` on, wrapping around the pool.
    pub fn copy(&mut self, first: u32, count: u32) -> Duration {
        let start = Instant::now();
        for index in 0..count {
            let block = first.wrapping_add(index) % self.shape.blocks_count;
            let range = self.shape.range(block, whole_block(self.shape));
            self.to[range.clone()].copy_from_slice(&self.from[range]);
            std::hint::black_box(&self.to);
        }
        start.elapsed()
    }
}

/// The whole of a block.
fn whole_block(shape: BenchPoolShape) -> BlockPart {
    BlockPart {
        plane: KvPlane::Blocks,
        ordinal: 0,
        offset: 0,
        len: shape.block_bytes,
    }
}

/// The lower bound for TCP: the same blocks over plain blocking sockets, from pool to pool, without
/// frames, checksums or credit; the receiver answers with one byte when all have arrived.
#[derive(Debug)]
pub struct SocketFloor {
    shape: BenchPoolShape,
    pool: Vec<u8>,
    stream: std::net::TcpStream,
}

impl SocketFloor {
    /// Connects to a [`SocketFloor::answer`].
    ///
    /// # Errors
    /// If no listener accepts.
    pub fn connect(shape: BenchPoolShape, address: &str) -> std::io::Result<Self> {
        let stream = std::net::TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            shape,
            pool: shape.filled_pool(),
            stream,
        })
    }

    /// Sends `count` blocks from `first` on, wrapping around the pool.
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn copy(&mut self, first: u32, count: u32) -> std::io::Result<Duration> {
        use std::io::{Read as _, Write as _};
        let start = Instant::now();
        self.stream.write_all(&first.to_le_bytes())?;
        self.stream.write_all(&count.to_le_bytes())?;
        for index in 0..count {
            let block = first.wrapping_add(index) % self.shape.blocks_count;
            self.stream
                .write_all(&self.pool[self.shape.range(block, whole_block(self.shape))])?;
        }
        self.stream.read_exact(&mut [0])?;
        Ok(start.elapsed())
    }

    /// The receiving end: serves one connection until it closes.
    ///
    /// # Errors
    /// If the connection breaks in the middle of a block.
    pub fn answer(shape: BenchPoolShape, listener: &std::net::TcpListener) -> std::io::Result<()> {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut pool = shape.filled_pool();
        let mut head = [0; 8];
        while stream.read_exact(&mut head).is_ok() {
            let [first, count] = [0, 4].map(|at| {
                let word = head[at..at + 4].try_into().expect("four bytes");
                u32::from_le_bytes(word)
            });
            for index in 0..count {
                let block = first.wrapping_add(index) % shape.blocks_count;
                stream.read_exact(&mut pool[shape.range(block, whole_block(shape))])?;
            }
            stream.write_all(&[1])?;
        }
        Ok(())
    }
}
