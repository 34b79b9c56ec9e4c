//! What `cleave kv bench` measures: blocks from one worker's pool into another's, through a link as
//! workers use it.
//!
//! Owns: two ends as small as they can be, each with a pool and one thread that copies blocks, as an
//! engine's does. A sample is the time from asking for the first block to hearing that the last one
//! is in the other pool.
//! Never: measures what no worker does: every byte is checksummed, credited and copied at both ends.

use crate::config::{LinkEvent, LinkSpeed, LinksConfig};
use crate::link::{Frame, Permit};
use crate::links::{Links, Listeners};
use crate::payload::Payload;
use crate::transport::Transport;
use crate::{LocalNet, Nixl, Route};
use cleave_domain::{
    BlockIndex, BlockRef, Fingerprint, FlightId, HandoffId, Incarnation, WorkerId, WorkerRef,
};
use cleave_kv::{BlockPart, Condition, Packet, Seal};
use cleave_tls::PeerTls;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc as threads;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Facts that wait for an end.
const EVENTS_MAX: usize = 1024;

/// How large blocks and pools are.
#[derive(Clone, Copy, Debug)]
pub struct PoolShape {
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Blocks of a pool.
    pub blocks_count: u32,
}

/// Why a measurement came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The link broke.
    #[error("the link was lost: {0}")]
    Lost(String),
    /// What arrived was not what was sent.
    #[error("block {0} arrived damaged")]
    Damaged(u32),
    /// A copying thread ended.
    #[error("a copying thread ended")]
    Thread,
}

/// How one end can be reached, and reaches the other.
#[derive(Debug, Default)]
pub struct Ways {
    /// For workers of one process.
    pub net: LocalNet,
    /// For those of others.
    pub listeners: Listeners,
    /// NVIDIA's transfer library.
    pub nixl: Option<Arc<Nixl>>,
    /// Over TCP, by which the ends know each other.
    pub peers: Option<PeerTls>,
}

/// The sending end.
#[derive(Debug)]
pub struct Near {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    reads: threads::Sender<Read>,
    sent: mpsc::UnboundedReceiver<()>,
    shape: PoolShape,
    flights_count: u64,
}

/// The receiving end.
#[derive(Debug)]
pub struct Far {
    links: Links,
    events: mpsc::Receiver<LinkEvent>,
    writes: threads::Sender<Write>,
    written: mpsc::UnboundedReceiver<(HandoffId, u32)>,
    shape: PoolShape,
}

struct Read {
    permit: Permit,
    handoff: HandoffId,
    ordinal: u32,
    block: u32,
}

struct Write {
    handoff: HandoffId,
    block: BlockIndex,
    part: BlockPart,
    payload: Payload,
}

fn worker(worker: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(1),
    }
}

fn links(me: u64, shape: PoolShape, ways: Ways) -> (Links, mpsc::Receiver<LinkEvent>) {
    let Ways {
        net,
        listeners,
        nixl,
        peers,
    } = ways;
    let (events, heard) = mpsc::channel(EVENTS_MAX);
    let fingerprint = Fingerprint("bench".into());
    // What no card carries would be left for TCP.
    let transports = match nixl {
        Some(_) => [Transport::Nixl].into(),
        None => Transport::ALL.into(),
    };
    let config = LinksConfig {
        nixl,
        peers,
        transports,
        ..LinksConfig::new(worker(me), fingerprint, shape.block_bytes)
    };
    let links = Links::new(config, events, net);
    tokio::spawn(links.clone().serve(listeners));
    (links, heard)
}

impl PoolShape {
    /// A pool with something in it, so that its pages are there.
    pub fn pool(self) -> Vec<u8> {
        let bytes = self.block_bytes as usize * self.blocks_count as usize;
        (0..bytes).map(|index| (index * 31) as u8).collect()
    }

    fn range(self, block: u32, part: BlockPart) -> std::ops::Range<usize> {
        let start = block as usize * self.block_bytes as usize + part.offset as usize;
        start..start + part.len as usize
    }
}

impl Near {
    /// Listens for the far end's answers.
    pub fn start(shape: PoolShape, ways: Ways) -> Self {
        let (links, events) = links(1, shape, ways);
        let (reads, asked) = threads::channel::<Read>();
        let (tell, sent) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let pool = shape.pool();
            for read in asked {
                if read.perform(&pool, shape).is_none() || tell.send(()).is_err() {
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

    /// Dials the far end; says what the link's own measurement found.
    ///
    /// # Errors
    /// If there is no link, or a worse one than was asked for.
    pub async fn dial(&mut self, route: Route) -> Result<LinkSpeed, BenchError> {
        self.links.know(worker(2), route);
        loop {
            match self.events.recv().await {
                Some(LinkEvent::Measured { speed, .. }) => return Ok(speed),
                Some(LinkEvent::FellBack { reason, .. } | LinkEvent::Lost { reason, .. }) => {
                    return Err(BenchError::Lost(reason));
                }
                Some(_) => {}
                None => return Err(BenchError::Thread),
            }
        }
    }

    /// Sends `count` blocks from `first` on, round the pool; how long it took until they had landed.
    ///
    /// # Errors
    /// If the link broke.
    pub async fn transfer(&mut self, first: u32, count: u32) -> Result<Duration, BenchError> {
        self.flights_count += 1;
        let handoff = HandoffId {
            flight: FlightId(self.flights_count),
            attempt: 0,
        };
        let start = Instant::now();
        let link = self.links.link(worker(2));
        let link = link.map_err(|down| BenchError::Lost(down.to_string()))?;
        let (mut asked_count, mut sent_count) = (0, 0);
        loop {
            while asked_count < count
                && let Some(permit) = link.reserve(handoff, self.shape.block_bytes)
            {
                let read = Read {
                    permit,
                    handoff,
                    ordinal: asked_count,
                    block: first.wrapping_add(asked_count) % self.shape.blocks_count,
                };
                self.reads.send(read).map_err(|_| BenchError::Thread)?;
                asked_count += 1;
            }
            tokio::select! {
                sent = self.sent.recv() => {
                    sent.ok_or(BenchError::Thread)?;
                    sent_count += 1;
                    if sent_count == count {
                        let sealed = link.send(seal(handoff, count));
                        sealed.map_err(|down| BenchError::Lost(down.to_string()))?;
                    }
                }
                event = self.events.recv() => match event {
                    Some(LinkEvent::Arrived { packet: Packet::Landed { handoff: landed }, .. })
                        if landed == handoff => return Ok(start.elapsed()),
                    Some(LinkEvent::Lost { reason, .. }) => return Err(BenchError::Lost(reason)),
                    Some(_) => {}
                    None => return Err(BenchError::Thread),
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
    })
}

impl Read {
    /// As an engine's thread does it.
    fn perform(mut self, pool: &[u8], shape: PoolShape) -> Option<()> {
        let mut offset = 0;
        while offset < shape.block_bytes {
            let len = self
                .permit
                .frame_bytes_max()
                .min(shape.block_bytes - offset);
            let part = BlockPart {
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
            self.permit.copy(frame, bytes).ok()?;
            offset += len;
        }
        Some(())
    }
}

impl Far {
    /// Listens; answers go to `near`.
    pub fn start(shape: PoolShape, ways: Ways, near: Route) -> Self {
        let (links, events) = links(2, shape, ways);
        links.know(worker(1), near);
        let (writes, asked) = threads::channel::<Write>();
        let (tell, written) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let mut pool = shape.pool();
            for write in asked {
                let Write {
                    handoff,
                    block,
                    part,
                    payload,
                } = write;
                let place = &mut pool[shape.range(block.0, part)];
                if payload.land(place) != Ok(true) {
                    return;
                }
                drop(payload);
                if tell.send((handoff, part.len)).is_err() {
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

    /// Receives until nobody sends any more.
    ///
    /// # Errors
    /// If a block arrived damaged, or nothing can be answered.
    pub async fn run(mut self) -> Result<(), BenchError> {
        // Bytes written, and bytes to come once the seal said so.
        let mut flights: BTreeMap<HandoffId, (u64, Option<u64>)> = BTreeMap::new();
        loop {
            let handoff = tokio::select! {
                written = self.written.recv() => {
                    let (handoff, len) = written.ok_or(BenchError::Thread)?;
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
                        let intact = payload.filter(|_| condition == Condition::Intact);
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
                landed.map_err(|down| BenchError::Lost(down.to_string()))?;
            }
        }
    }

    fn import(&self, packet: &Packet, payload: Option<Payload>) -> Result<(), BenchError> {
        let &Packet::Frame {
            handoff,
            block,
            part,
            ..
        } = packet
        else {
            return Ok(());
        };
        let write = Write {
            handoff,
            block: block.block,
            part,
            payload: payload.ok_or(BenchError::Damaged(block.block.0))?,
        };
        self.writes.send(write).map_err(|_| BenchError::Thread)
    }
}

/// What a transport is compared with: blocks copied from pool to pool in this process.
#[derive(Debug)]
pub struct MemoryFloor {
    shape: PoolShape,
    from: Arc<[u8]>,
    to: Vec<u8>,
}

impl MemoryFloor {
    /// Two pools.
    pub fn new(shape: PoolShape) -> Self {
        Self {
            shape,
            from: shape.pool().into(),
            to: shape.pool(),
        }
    }

    /// Copies `count` blocks from `first` on, round the pool.
    pub fn copy(&mut self, first: u32, count: u32) -> Duration {
        let start = Instant::now();
        for index in 0..count {
            let block = first.wrapping_add(index) % self.shape.blocks_count;
            let range = self.shape.range(block, whole(self.shape));
            self.to[range.clone()].copy_from_slice(&self.from[range]);
            std::hint::black_box(&self.to);
        }
        start.elapsed()
    }
}

/// All of a block.
fn whole(shape: PoolShape) -> BlockPart {
    BlockPart {
        ordinal: 0,
        offset: 0,
        len: shape.block_bytes,
    }
}

/// What TCP is compared with: the same blocks over plain blocking sockets, from pool to pool, without
/// frames, checksums or credit; an answer of one byte when all have arrived.
#[derive(Debug)]
pub struct SocketFloor {
    shape: PoolShape,
    pool: Vec<u8>,
    stream: std::net::TcpStream,
}

impl SocketFloor {
    /// Connects to a [`SocketFloor::answer`].
    ///
    /// # Errors
    /// If nobody is there.
    pub fn connect(shape: PoolShape, address: &str) -> std::io::Result<Self> {
        let stream = std::net::TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            shape,
            pool: shape.pool(),
            stream,
        })
    }

    /// Sends `count` blocks from `first` on, round the pool.
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
                .write_all(&self.pool[self.shape.range(block, whole(self.shape))])?;
        }
        self.stream.read_exact(&mut [0])?;
        Ok(start.elapsed())
    }

    /// The other end: serves one connection until it closes.
    ///
    /// # Errors
    /// If the connection breaks in the middle of a block.
    pub fn answer(shape: PoolShape, listener: &std::net::TcpListener) -> std::io::Result<()> {
        use std::io::{Read as _, Write as _};
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut pool = shape.pool();
        let mut head = [0; 8];
        while stream.read_exact(&mut head).is_ok() {
            let [first, count] = [0, 4].map(|at| {
                let word = head[at..at + 4].try_into().expect("four bytes");
                u32::from_le_bytes(word)
            });
            for index in 0..count {
                let block = first.wrapping_add(index) % shape.blocks_count;
                stream.read_exact(&mut pool[shape.range(block, whole(shape))])?;
            }
            stream.write_all(&[1])?;
        }
        Ok(())
    }
}
