//! `cleave kv bench`: the speed of each transport of KV blocks, compared with the machine's own.
//!
//! Owns: the two processes, the alternation of transport and floor, and medians. Never: takes part
//! in serving. Invariant: samples of a transport and of its floor alternate, so that other load on
//! the machine affects both.

use crate::args::{FarTransportArg, KvBenchArgs, KvFarArgs, TransportArg};
use crate::bench::PrintFormat;
use anyhow::Context;
use cleave_tls::PeerTls;
use cleave_transfer::bench::{
    BenchPoolShape, BenchReceiver, BenchSender, BenchTransports, MemoryFloor, SocketFloor,
};
use cleave_transfer::{
    DataAddresses, ListenOptions, Listeners, Nixl, OpenedListeners, PeerRoute, Transport,
    TransportReach,
};
use serde::Serialize;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

#[derive(Serialize)]
struct TransferTable {
    block_bytes: u32,
    rounds: u32,
    transports: Vec<TransportResult>,
}

#[derive(Serialize)]
struct TransportResult {
    transport: &'static str,
    /// Kind of the floor.
    floor: &'static str,
    /// Result of the link's own measurement when it was made.
    link_bytes_per_second: u64,
    link_latency_seconds: f64,
    rows: Vec<TransferRow>,
}

#[derive(Serialize)]
struct TransferRow {
    blocks: u32,
    /// Median time until all blocks have landed.
    seconds: f64,
    bytes_per_second: f64,
    floor_seconds: f64,
    floor_bytes_per_second: f64,
    /// Ratio of the two bandwidths.
    ratio: f64,
}

/// Limit of one pool; there are up to four of them.
const POOL_BYTES_MAX: u64 = 8 << 30;

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
        TransportArg::All => available_transports(args),
        TransportArg::Local => vec![Transport::Local],
        TransportArg::Shm => vec![Transport::SharedMemory],
        TransportArg::Nixl => vec![Transport::Nixl],
        TransportArg::Tcp => vec![Transport::Tcp],
    };
    let measure = |transport| runtime.block_on(measure(args, transport));
    let table = TransferTable {
        block_bytes: args.block_bytes,
        rounds: args.rounds,
        transports: transports
            .into_iter()
            .map(measure)
            .collect::<Result<_, _>>()?,
    };
    let form = if args.json {
        PrintFormat::Json
    } else {
        PrintFormat::Table
    };
    print(&table, form)
}

/// Transports that are available here; NIXL only if its library is found or named.
fn available_transports(args: &KvBenchArgs) -> Vec<Transport> {
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

/// Runs the receiving process: it prints its addresses, and ends when its standard input does.
pub(crate) fn far_end(args: &KvFarArgs) -> anyhow::Result<()> {
    let shape = BenchPoolShape {
        block_bytes: args.block_bytes,
        blocks_count: args.blocks_count,
    };
    let floor = std::net::TcpListener::bind("127.0.0.1:0")?;
    let floor_address = floor.local_addr()?;
    std::thread::spawn(move || SocketFloor::answer(shape, &floor));
    std::thread::spawn(|| {
        // The end of standard input is the end of the process that started this one, for whatever
        // reason.
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    Runtime::new()?.block_on(async {
        let transport = match args.transport {
            FarTransportArg::Shm => Transport::SharedMemory,
            FarTransportArg::Nixl => Transport::Nixl,
            FarTransportArg::Tcp => Transport::Tcp,
        };
        let (nixl, tls) = (args.nixl_library.as_deref(), args.peer_tls.as_deref());
        let (transports, addresses) = open_transport(transport, nixl, tls).await?;
        let far = BenchReceiver::start(shape, transports, PeerRoute::parse(&args.near)?);
        writeln!(std::io::stdout(), "{addresses} {floor_address}")?;
        Ok(far.run().await?)
    })
}

/// Listens for one transport only, and returns its addresses. NIXL's library is loaded from its
/// path if the transport needs it; the folder has the files of mutual TLS.
async fn open_transport(
    transport: Transport,
    nixl_library: Option<&Path>,
    peer_tls: Option<&Path>,
) -> anyhow::Result<(BenchTransports, DataAddresses)> {
    let tcp = match transport.reach() {
        TransportReach::Process | TransportReach::Host => None,
        TransportReach::Network => {
            let tcp = TcpListener::bind("127.0.0.1:0").await?;
            let address = tcp.local_addr()?.to_string();
            Some((tcp, address))
        }
    };
    let opened = Listeners::open(ListenOptions {
        transports: [transport].into(),
        tcp,
        has_nixl: transport == Transport::Nixl,
    });
    let OpenedListeners {
        listeners,
        addresses,
        failures,
    } = opened;
    if let Some((_, error)) = failures.into_iter().next() {
        return Err(error).context("cannot share memory between processes");
    }
    let nixl = match transport {
        Transport::Nixl => Some(Nixl::load(nixl_library)?),
        _ => None,
    };
    let transports = BenchTransports {
        listeners,
        nixl,
        peers: peer_tls.map(PeerTls::open).transpose()?,
        ..BenchTransports::default()
    };
    Ok((transports, addresses))
}

/// The floor that a transport is compared with.
enum TransferFloor {
    Memory(Box<MemoryFloor>),
    Socket(SocketFloor),
}

impl TransferFloor {
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

/// The receiving process; killed when dropped.
struct ReceiverProcess(Child);

impl Drop for ReceiverProcess {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl ReceiverProcess {
    /// Starts the process; returns its addresses for blocks and for the plain socket.
    fn start(
        args: &KvBenchArgs,
        transport: Transport,
        shape: BenchPoolShape,
        near: &DataAddresses,
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
        let stdout = child.stdout.take().context("its output is piped")?;
        let process = Self(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let (data, floor) = line
            .trim()
            .split_once(' ')
            .context("the receiving process ended before it printed its addresses")?;
        Ok((process, data.to_owned(), floor.to_owned()))
    }
}

async fn measure(args: &KvBenchArgs, transport: Transport) -> anyhow::Result<TransportResult> {
    let shape = BenchPoolShape {
        block_bytes: args.block_bytes,
        blocks_count: args.blocks.iter().copied().max().unwrap_or(1),
    };
    let (nixl, tls) = (args.nixl_library.as_deref(), args.peer_tls.as_deref());
    let (transports, addresses) = open_transport(transport, nixl, tls).await?;
    let net = transports.net.clone();
    let mut near = BenchSender::start(shape, transports);
    let (_process, route, mut floor) = match transport.reach() {
        TransportReach::Process => {
            let transports = BenchTransports {
                net,
                ..BenchTransports::default()
            };
            let far = BenchReceiver::start(shape, transports, PeerRoute::Local);
            tokio::spawn(far.run());
            let floor = TransferFloor::Memory(Box::new(MemoryFloor::new(shape)));
            (None, PeerRoute::Local, floor)
        }
        reach => {
            let (process, data, socket) =
                ReceiverProcess::start(args, transport, shape, &addresses)?;
            let floor = if reach == TransportReach::Network {
                TransferFloor::Socket(SocketFloor::connect(shape, &socket)?)
            } else {
                TransferFloor::Memory(Box::new(MemoryFloor::new(shape)))
            };
            (Some(process), PeerRoute::parse(&data)?, floor)
        }
    };
    let speed = near.dial(route).await?;
    // The first transfer touches all of both pools and does not count.
    near.transfer(0, shape.blocks_count).await?;
    floor.copy(0, shape.blocks_count)?;
    let mut rows = Vec::new();
    for &blocks in &args.blocks {
        rows.push(row(args, blocks, &mut near, &mut floor).await?);
    }
    Ok(TransportResult {
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
    near: &mut BenchSender,
    floor: &mut TransferFloor,
) -> anyhow::Result<TransferRow> {
    let (mut took, mut floor_took) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        // Each round uses another part of the pool, because the last one is in the cache.
        let first = round.wrapping_mul(blocks);
        floor_took.push(floor.copy(first, blocks)?);
        took.push(near.transfer(first, blocks).await?);
    }
    let bytes = f64::from(blocks) * f64::from(args.block_bytes);
    let (seconds, floor_seconds) = (median(took), median(floor_took));
    Ok(TransferRow {
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

fn print(table: &TransferTable, form: PrintFormat) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    if let PrintFormat::Json = form {
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
