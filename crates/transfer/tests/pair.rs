//! Two workers, and helpers to observe their links.
#![allow(unreachable_pub, reason = "a test binary has no API")]

use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Fingerprint, FlightId, Generation, HandoffId, Incarnation,
    KvPlane, WorkerId, WorkerRef,
};
use cleave_kv::{BlockPart, Packet, PayloadCondition, Seal};
use cleave_transfer::{
    DataAddresses, Frame, LinkEvent, LinkSpeed, Links, LinksConfig, ListenOptions, Listeners,
    LocalNet, PeerRoute, ReceivedPayload, Transport, checksum,
};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

pub const BLOCK: u32 = 4096;
pub const ALL: [Transport; 3] = [Transport::Local, Transport::SharedMemory, Transport::Tcp];
/// The transports between processes.
pub const REMOTE: [Transport; 2] = [Transport::SharedMemory, Transport::Tcp];

pub struct ReceivedPacket {
    pub from: WorkerRef,
    pub packet: Packet,
    pub condition: PayloadCondition,
    pub payload: Option<ReceivedPayload>,
}

pub struct LinkedWorker {
    pub me: WorkerRef,
    pub links: Links,
    pub events: mpsc::Receiver<LinkEvent>,
    pub address: String,
    pub addresses: DataAddresses,
    pub server: JoinHandle<()>,
}

pub fn worker_ref(worker: u64, incarnation: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
    }
}

pub fn config(me: WorkerRef, fingerprint: &str) -> LinksConfig {
    LinksConfig {
        credit_bytes: 4 * BLOCK,
        beat: Duration::from_millis(50),
        silence_max: Duration::from_millis(500),
        ..LinksConfig::new(me, Fingerprint(fingerprint.into()), BLOCK)
    }
}

impl LinkedWorker {
    pub async fn start(me: WorkerRef, fingerprint: &str) -> Self {
        Self::on(LocalNet::default(), config(me, fingerprint)).await
    }

    pub async fn on(net: LocalNet, config: LinksConfig) -> Self {
        let (sender, events) = mpsc::channel(256);
        let me = config.me;
        let links = Links::new(config, sender, net);
        let (listeners, address, addresses) = listeners().await;
        let server = tokio::spawn(links.clone().serve(listeners));
        Self {
            me,
            links,
            events,
            address,
            addresses,
            server,
        }
    }

    /// Listens again after the server was aborted.
    pub async fn listen(&mut self) {
        let (listeners, address, addresses) = listeners().await;
        (self.address, self.addresses) = (address, addresses);
        self.server = tokio::spawn(self.links.clone().serve(listeners));
    }

    /// Asserts that no event but credit is left.
    pub fn assert_no_event_but_credit(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            assert!(
                matches!(event, LinkEvent::CreditGranted { .. }),
                "{event:?}"
            );
        }
    }

    pub fn addresses(&self) -> DataAddresses {
        self.addresses.clone()
    }

    pub fn route(&self, transport: Transport) -> PeerRoute {
        match transport {
            Transport::Local => PeerRoute::Local,
            Transport::SharedMemory | Transport::CudaIpc => PeerRoute::Remote(self.addresses()),
            Transport::Tcp | Transport::Nixl => PeerRoute::tcp(&self.address),
        }
    }

    pub fn add_peer(&self, peer: &Self, transport: Transport) {
        self.links.add_peer(peer.me, peer.route(transport));
    }

    pub async fn next_measured(&mut self) -> LinkSpeed {
        loop {
            match self.next().await {
                LinkEvent::Measured { speed, .. } => return speed,
                LinkEvent::Lost { reason, .. } => panic!("{reason}"),
                _ => {}
            }
        }
    }

    pub async fn next(&mut self) -> LinkEvent {
        let next = timeout(Duration::from_secs(20), self.events.recv()).await;
        next.expect("an event in time").expect("links are open")
    }

    pub async fn next_packet(&mut self) -> ReceivedPacket {
        loop {
            match self.next().await {
                LinkEvent::Arrived {
                    from,
                    packet,
                    condition,
                    payload,
                } => {
                    return ReceivedPacket {
                        from,
                        packet,
                        condition,
                        payload,
                    };
                }
                LinkEvent::Lost { peer, reason } => panic!("{peer} lost: {reason}"),
                LinkEvent::FellBack { reason, .. } => panic!("{reason}"),
                LinkEvent::InvalidGrant { peer } => panic!("{peer} had no grant"),
                LinkEvent::Fenced { peer } => panic!("{peer} has ended"),
                LinkEvent::CreditGranted { .. } | LinkEvent::Measured { .. } => {}
            }
        }
    }

    pub async fn next_lost(&mut self) -> (WorkerRef, String) {
        loop {
            if let LinkEvent::Lost { peer, reason } = self.next().await {
                return (peer, reason);
            }
        }
    }

    /// Sends one block of a hand-off; waits for credit.
    pub async fn send_block(&mut self, to: WorkerRef, flight: u64, ordinal: u32) -> u64 {
        let link = self.links.link(to).unwrap();
        let mut permit = loop {
            match link.reserve(frame(flight, ordinal).handoff, BLOCK) {
                Some(permit) => break permit,
                None => match self.next().await {
                    LinkEvent::Lost { reason, .. } => panic!("{reason}"),
                    _ => continue,
                },
            }
        };
        let (frame, bytes) = (frame(flight, ordinal), block_bytes(flight, ordinal));
        // Copies and buffers alternate.
        if ordinal.is_multiple_of(2) {
            return permit.send_copy(frame, &bytes).unwrap();
        }
        permit.buffer(BLOCK).copy_from_slice(&bytes);
        permit.send(frame).unwrap()
    }
}

/// Starts a test of this program in a process of its own, with this variable, and returns what the
/// process prints after the mark.
pub fn start_process(test: &str, variable: (&str, &str), mark: &str) -> (Child, String) {
    let (name, value) = variable;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(name, value)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let printed = printed_after(mark, &mut child);
    (child, printed)
}

/// Waits until a process prints the mark, and returns the rest of that line.
pub fn printed_after(mark: &str, child: &mut Child) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let printed = lines.find_map(|line| Some(line.split_once(mark)?.1.to_owned()));
    printed.unwrap()
}

/// Sends blocks until the window is used up; the receiver keeps their payloads.
pub async fn fill_window(
    sender: &mut LinkedWorker,
    receiver: &mut LinkedWorker,
) -> Vec<ReceivedPayload> {
    let mut held = Vec::new();
    for ordinal in 0..4 {
        sender.send_block(receiver.me, 1, ordinal).await;
        held.push(receiver.next_packet().await.payload.unwrap());
    }
    let link = sender.links.link(receiver.me).unwrap();
    let reserved = link.reserve(frame(1, 0).handoff, 1);
    assert!(reserved.is_none(), "the window is used up");
    held
}

pub async fn listeners() -> (Listeners, String, DataAddresses) {
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    let opened = Listeners::open(ListenOptions {
        transports: Transport::ALL.into(),
        tcp: Some((tcp, address.clone())),
        has_nixl: false,
    });
    assert!(opened.failures.is_empty(), "{:?}", opened.failures);
    (opened.listeners, address, opened.addresses)
}

/// Two workers; the sender knows a route to the receiver over this transport.
pub async fn pair(transport: Transport) -> (LinkedWorker, LinkedWorker) {
    let net = LocalNet::default();
    let sender = LinkedWorker::on(net.clone(), config(worker_ref(1, 1), "f")).await;
    let receiver = LinkedWorker::on(net, config(worker_ref(2, 1), "f")).await;
    sender.add_peer(&receiver, transport);
    (sender, receiver)
}

pub fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 0,
    }
}

pub fn block_bytes(flight: u64, ordinal: u32) -> Vec<u8> {
    let seed = checksum(&[flight.to_le_bytes(), u64::from(ordinal).to_le_bytes()].concat());
    (0..BLOCK as usize)
        .map(|i| seed.rotate_left(i as u32 % 64) as u8 ^ i as u8)
        .collect()
}

pub fn frame(flight: u64, ordinal: u32) -> Frame {
    Frame {
        handoff: handoff(flight),
        block: BlockRef {
            block: BlockIndex(ordinal),
            generation: Generation(1),
        },
        part: BlockPart {
            plane: KvPlane::Blocks,
            ordinal,
            offset: 0,
            len: BLOCK,
        },
    }
}

pub fn seal(flight: u64) -> Packet {
    Packet::Seal(Seal {
        handoff: handoff(flight),
        blocks_count: 1,
        digest: 5,
        content: BlockHash([8; 16]),
        output: vec![6, 7],
        state: None,
        window: None,
    })
}
