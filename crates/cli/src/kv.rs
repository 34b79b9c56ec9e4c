//! `cleave kv bench`: how fast KV blocks travel, by each transport, beside what the machine can do.
//!
//! Owns: the two processes, the turns of transport and floor, medians. Never: takes part in serving.
//! Invariant: a transport's samples and its floor's are taken by turns, so that whatever else the
//! machine does falls on both.

use crate::args::{FarTransport, KvBenchArgs, KvFarArgs, TransportArg};
use crate::bench::Form;
use anyhow::Context;
use cleave_tls::PeerTls;
use cleave_transfer::bench::{Far, MemoryFloor, Near, PoolShape, SocketFloor, Ways};
use cleave_transfer::{Addresses, HostListener, Listeners, Nixl, Route, Transport};
use serde::Serialize;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

#[derive(Serialize)]
struct Table {
    block_bytes: u32,
    rounds: u32,
    transports: Vec<Measured>,
}

#[derive(Serialize)]
struct Measured {
    transport: &'static str,
    /// What the floor is.
    floor: &'static str,
    /// What the link's own measurement found when it was made.
    link_bytes_per_second: u64,
    link_latency_seconds: f64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    blocks: u32,
    /// Until all blocks have landed, median.
    seconds: f64,
    bytes_per_second: f64,
    floor_seconds: f64,
    floor_bytes_per_second: f64,
    /// Of the two bandwidths.
    ratio: f64,
}

/// Of one pool; there are up to four of them.
const POOL_BYTES_MAX: u64 = 8 << 30;

/// Runs the measurement and prints it.
pub(crate) fn bench(args: &KvBenchArgs) -> anyhow::Result<()> {
    let blocks_max = args.blocks.iter().copied().max().unwrap_or(1);
    let pool_bytes = u64::from(blocks_max) * u64::from(args.block_bytes);
    anyhow::ensure!(
        pool_bytes <= POOL_BYTES_MAX,
        "--blocks {blocks_max} of --block-bytes {} are pools of {pool_bytes} bytes: at most {} GiB",
        args.block_bytes,
        POOL_BYTES_MAX >> 30
    );
    let runtime = Runtime::new()?;
    let transports = match args.transport {
        TransportArg::All => all(args),
        TransportArg::Local => vec![Transport::Local],
        TransportArg::Shm => vec![Transport::SharedMemory],
        TransportArg::Nixl => vec![Transport::Nixl],
        TransportArg::Tcp => vec![Transport::Tcp],
    };
    let measure = |transport| runtime.block_on(measure(args, transport));
    let table = Table {
        block_bytes: args.block_bytes,
        rounds: args.rounds,
        transports: transports
            .into_iter()
            .map(measure)
            .collect::<Result<_, _>>()?,
    };
    let form = if args.json { Form::Json } else { Form::Table };
    print(&table, form)
}

/// Those that can be had here: NIXL only where its library is, unless it was named.
fn all(args: &KvBenchArgs) -> Vec<Transport> {
    let library = args.nixl_library.as_deref();
    let has_nixl = library.is_some() || Nixl::load(library).is_ok();
    let nixl = has_nixl.then_some(Transport::Nixl);
    let before = [Transport::Local, Transport::SharedMemory];
    before
        .into_iter()
        .chain(nixl)
        .chain([Transport::Tcp])
        .collect()
}

/// The library, where links are to go over it.
fn library(transport: Transport, path: Option<&Path>) -> anyhow::Result<Option<Arc<Nixl>>> {
    match transport {
        Transport::Nixl => Ok(Some(Nixl::load(path)?)),
        _ => Ok(None),
    }
}

/// The process that receives: says where it listens, and ends when its standard input does.
pub(crate) fn far_end(args: &KvFarArgs) -> anyhow::Result<()> {
    let shape = PoolShape {
        block_bytes: args.block_bytes,
        blocks_count: args.blocks_count,
    };
    let floor = std::net::TcpListener::bind("127.0.0.1:0")?;
    let floor_address = floor.local_addr()?;
    std::thread::spawn(move || SocketFloor::answer(shape, &floor));
    std::thread::spawn(|| {
        // Its end is that of the process that started this one, however that ended.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    Runtime::new()?.block_on(async {
        let transport = match args.transport {
            FarTransport::Shm => Transport::SharedMemory,
            FarTransport::Nixl => Transport::Nixl,
            FarTransport::Tcp => Transport::Tcp,
        };
        let (listeners, addresses) = listen(transport).await?;
        let ways = Ways {
            listeners,
            nixl: library(transport, args.nixl_library.as_deref())?,
            peers: peers(args.peer_tls.as_deref())?,
            ..Ways::default()
        };
        let far = Far::start(shape, ways, Route::parse(&args.near)?);
        writeln!(std::io::stdout(), "{addresses} {floor_address}")?;
        Ok(far.run().await?)
    })
}

fn peers(folder: Option<&Path>) -> anyhow::Result<Option<PeerTls>> {
    Ok(folder.map(PeerTls::open).transpose()?)
}

/// One transport's listener alone, and how it is reached.
async fn listen(transport: Transport) -> anyhow::Result<(Listeners, Addresses)> {
    let (mut listeners, mut addresses) = (Listeners::default(), Addresses::default());
    match transport {
        // Pools of host memory are nobody's to write into from outside.
        Transport::Local | Transport::CudaIpc => {}
        Transport::SharedMemory => {
            let host = HostListener::bind().context("no shared memory between processes here")?;
            addresses.shared_memory = Some(host.address().clone());
            listeners.host = Some(host);
        }
        Transport::Nixl | Transport::Tcp => {
            let tcp = TcpListener::bind("127.0.0.1:0").await?;
            addresses.nixl = transport == Transport::Nixl;
            addresses.tcp = Some(tcp.local_addr()?.to_string());
            listeners.tcp = Some(tcp);
        }
    }
    Ok((listeners, addresses))
}

/// What a transport is compared with.
enum Floor {
    Memory(Box<MemoryFloor>),
    Socket(SocketFloor),
}

impl Floor {
    fn name(&self) -> &'static str {
        match self {
            Self::Memory(_) => "memory copy",
            Self::Socket(_) => "plain socket",
        }
    }

    fn copy(&mut self, first: u32, count: u32) -> anyhow::Result<Duration> {
        Ok(match self {
            Self::Memory(floor) => floor.copy(first, count),
            Self::Socket(floor) => floor.copy(first, count)?,
        })
    }
}

/// The process that receives; killed when dropped.
struct FarProcess(Child);

impl Drop for FarProcess {
    fn drop(&mut self) {
        // It may be gone already; then there is nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl FarProcess {
    /// Starts it; says where it listens for blocks, and for the plain socket.
    fn start(
        args: &KvBenchArgs,
        (transport, shape): (Transport, PoolShape),
        near: &Addresses,
    ) -> anyhow::Result<(Self, String, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["kv", "far-end", "--transport", transport.name()]);
        if let Some(path) = &args.nixl_library {
            command.arg("--nixl-library").arg(path);
        }
        let mut child = command
            .args(["--block-bytes", &shape.block_bytes.to_string()])
            .args(["--blocks-count", &shape.blocks_count.to_string()])
            .args(["--near", &near.to_string()])
            .args(
                args.peer_tls
                    .iter()
                    .flat_map(|folder| [OsStr::new("--peer-tls"), folder.as_os_str()]),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the receiving process")?;
        let said = child.stdout.take().context("its output is piped")?;
        let process = Self(child);
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let (data, floor) = line
            .trim()
            .split_once(' ')
            .context("the receiving process ended before it listened")?;
        Ok((process, data.to_owned(), floor.to_owned()))
    }
}

async fn measure(args: &KvBenchArgs, transport: Transport) -> anyhow::Result<Measured> {
    let shape = PoolShape {
        block_bytes: args.block_bytes,
        blocks_count: args.blocks.iter().copied().max().unwrap_or(1),
    };
    let (listeners, addresses) = listen(transport).await?;
    let ways = Ways {
        listeners,
        nixl: library(transport, args.nixl_library.as_deref())?,
        peers: peers(args.peer_tls.as_deref())?,
        ..Ways::default()
    };
    let net = ways.net.clone();
    let mut near = Near::start(shape, ways);
    let (_process, route, mut floor) = match transport {
        Transport::Local => {
            let ways = Ways {
                net,
                ..Ways::default()
            };
            let far = Far::start(shape, ways, Route::Local);
            tokio::spawn(far.run());
            let floor = Floor::Memory(Box::new(MemoryFloor::new(shape)));
            (None, Route::Local, floor)
        }
        Transport::CudaIpc | Transport::SharedMemory | Transport::Nixl | Transport::Tcp => {
            let (process, data, socket) = FarProcess::start(args, (transport, shape), &addresses)?;
            let floor = match transport {
                Transport::Nixl | Transport::Tcp => {
                    Floor::Socket(SocketFloor::connect(shape, &socket)?)
                }
                Transport::Local | Transport::CudaIpc | Transport::SharedMemory => {
                    Floor::Memory(Box::new(MemoryFloor::new(shape)))
                }
            };
            (Some(process), Route::parse(&data)?, floor)
        }
    };
    let speed = near.dial(route).await?;
    // Once through all of both pools before anything counts.
    near.transfer(0, shape.blocks_count).await?;
    floor.copy(0, shape.blocks_count)?;
    let mut rows = Vec::new();
    for &blocks in &args.blocks {
        rows.push(row(args, blocks, (&mut near, &mut floor)).await?);
    }
    Ok(Measured {
        transport: speed.transport.name(),
        floor: floor.name(),
        link_bytes_per_second: speed.bytes_per_second,
        link_latency_seconds: speed.latency.as_secs_f64(),
        rows,
    })
}

async fn row(
    args: &KvBenchArgs,
    blocks: u32,
    (near, floor): (&mut Near, &mut Floor),
) -> anyhow::Result<Row> {
    let (mut took, mut floor_took) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        // Elsewhere in the pool each time: what was copied last is in the cache.
        let first = round.wrapping_mul(blocks);
        floor_took.push(floor.copy(first, blocks)?);
        took.push(near.transfer(first, blocks).await?);
    }
    let bytes = f64::from(blocks) * f64::from(args.block_bytes);
    let (seconds, floor_seconds) = (median(took), median(floor_took));
    Ok(Row {
        blocks,
        seconds,
        bytes_per_second: bytes / seconds,
        floor_seconds,
        floor_bytes_per_second: bytes / floor_seconds,
        ratio: floor_seconds / seconds,
    })
}

fn median(mut took: Vec<Duration>) -> f64 {
    took.sort();
    took[took.len() / 2].as_secs_f64()
}

fn print(table: &Table, form: Form) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let Form::Json = form {
        writeln!(out, "{}", serde_json::to_string(table)?)?;
        return Ok(());
    }
    writeln!(
        out,
        "blocks of {} KiB, medians of {}\n\n\
         | transport | blocks | GB/s | latency, us | floor | GB/s | ratio |\n\
         |---|---|---|---|---|---|---|",
        f64::from(table.block_bytes) / 1024.0,
        table.rounds
    )?;
    for measured in &table.transports {
        for row in &measured.rows {
            writeln!(
                out,
                "| {} | {} | {:.2} | {:.0} | {} | {:.2} | {:.2} |",
                measured.transport,
                row.blocks,
                row.bytes_per_second / 1e9,
                row.seconds * 1e6,
                measured.floor,
                row.floor_bytes_per_second / 1e9,
                row.ratio
            )?;
        }
    }
    Ok(())
}
