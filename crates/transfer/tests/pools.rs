//! Links whose senders write into the receiver's pool themselves. The pools are this process's own memory; what is
//! shown is who gets one, what travels, and when nobody can write any more.
#![allow(missing_docs, clippy::unwrap_used)]

mod pair;

use cleave_domain::{BlockIndex, WorkerRef};
use cleave_kv::{Condition, Packet};
use cleave_transfer::{
    Addresses, DirectPart, LinkEvent, LinksConfig, LocalNet, PeerPool, Permit, Pools, Reach, Route,
    Transport, checksum,
};
use pair::*;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

const BLOCKS: u32 = 8;

/// Blocks, one after the other.
type Memory = Arc<Mutex<Vec<u8>>>;

/// Pools of this process, by the number that is their handle.
static POOLS: Mutex<BTreeMap<u64, Memory>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct HostPool {
    number: u64,
    memory: Memory,
    /// Whether it finds the pools of others.
    opens: bool,
}

impl HostPool {
    fn new(opens: bool) -> Arc<Self> {
        let memory = Memory::default();
        memory.lock().unwrap().resize((BLOCKS * BLOCK) as usize, 0);
        let mut pools = POOLS.lock().unwrap();
        let number = pools.len() as u64;
        pools.insert(number, Arc::clone(&memory));
        Arc::new(Self {
            number,
            memory,
            opens,
        })
    }

    fn block(&self, block: u32) -> Vec<u8> {
        let start = (block * BLOCK) as usize;
        self.memory.lock().unwrap()[start..start + BLOCK as usize].to_vec()
    }

    fn fill(&self, block: u32, bytes: &[u8]) {
        let start = (block * BLOCK) as usize;
        self.memory.lock().unwrap()[start..start + BLOCK as usize].copy_from_slice(bytes);
    }
}

#[derive(Debug)]
struct Opened {
    near: Memory,
    far: Memory,
}

impl Pools for HostPool {
    fn handle(&self) -> Result<Vec<u8>, String> {
        Ok(self.number.to_le_bytes().to_vec())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerPool>, String> {
        let number = u64::from_le_bytes(handle.try_into().unwrap());
        // Another process's is nowhere here: it is written to in vain.
        let far = POOLS.lock().unwrap().get(&number).cloned();
        match self.opens {
            true => Ok(Arc::new(Opened {
                near: Arc::clone(&self.memory),
                far: far.unwrap_or_default(),
            })),
            false => Err("the memory is out of reach".to_owned()),
        }
    }
}

impl PeerPool for Opened {
    fn write(&self, parts: &[DirectPart]) -> Result<Vec<u64>, String> {
        let mut sums = Vec::new();
        for DirectPart { from, to, part } in parts {
            let span = |block: BlockIndex| {
                let start = (block.0 * BLOCK + part.offset) as usize;
                start..start + part.len as usize
            };
            let bytes = self.near.lock().unwrap()[span(*from)].to_vec();
            self.far.lock().unwrap()[span(*to)].copy_from_slice(&bytes);
            sums.push(checksum(&bytes));
        }
        Ok(sums)
    }

    fn probe(&self) -> Result<usize, String> {
        Ok(1 << 20)
    }
}

fn with_pool(me: WorkerRef, pool: &Arc<HostPool>) -> LinksConfig {
    LinksConfig {
        pools: Some(Arc::clone(pool) as Arc<dyn Pools>),
        ..config(me, "f")
    }
}

/// Two workers with pools, the first of which knows the way to the second.
struct Two {
    sender: Worker,
    receiver: Worker,
    from: Arc<HostPool>,
    to: Arc<HostPool>,
}

async fn two(transport: Transport, opens: bool) -> Two {
    let net = LocalNet::default();
    let (from, to) = (HostPool::new(opens), HostPool::new(true));
    let sender = Worker::on(net.clone(), with_pool(worker_ref(1, 1), &from)).await;
    let receiver = Worker::on(net, with_pool(worker_ref(2, 1), &to)).await;
    sender.links.know(receiver.me, receiver.route(transport));
    Two {
        sender,
        receiver,
        from,
        to,
    }
}

async fn permit(worker: &mut Worker, to: WorkerRef) -> Permit {
    loop {
        let link = worker.links.link(to).unwrap();
        match link.reserve(frame(1, 0).handoff, BLOCK) {
            Some(permit) => return permit,
            None => drop(worker.next().await),
        }
    }
}

#[tokio::test]
async fn a_block_lies_in_the_peers_pool_before_its_frame_is_heard_of() {
    for transport in [Transport::Local, Transport::CudaIpc] {
        let mut two = two(transport, true).await;
        assert_eq!(two.sender.measured().await.transport, transport);
        // More than the window holds: the credit comes back.
        for round in 0..3 * u64::from(BLOCKS) {
            let block = (round % u64::from(BLOCKS)) as u32;
            let bytes = block_bytes(round, block);
            two.from.fill(block, &bytes);
            let mut permit = permit(&mut two.sender, two.receiver.me).await;
            let frame = frame(round, block);
            let pool = Arc::clone(permit.pool().expect("it is open"));
            let direct = DirectPart {
                from: BlockIndex(block),
                to: frame.block.block,
                part: frame.part,
            };
            let sums = pool.write(&[direct]).unwrap();
            permit.tell(frame, sums[0]).unwrap();
            let arrived = two.receiver.arrived().await;
            assert_eq!(arrived.condition, Condition::Intact);
            assert_eq!(two.to.block(block), bytes);
            let payload = arrived.payload.unwrap();
            assert!(payload.bytes().is_none(), "nothing travelled");
            assert_eq!(payload.checksum_due(), Some(checksum(&bytes)));
            assert_eq!(payload.land(&mut two.to.block(block)[..]), Ok(true));
            let Packet::Frame { part, .. } = arrived.packet else {
                panic!("{:?}", arrived.packet);
            };
            assert_eq!(part, frame.part);
            // Damage in place is found in place.
            assert_eq!(payload.land(&mut vec![0; BLOCK as usize][..]), Ok(false));
        }
        assert_eq!(two.receiver.links.reach(two.sender.me), Reach::Given);
    }
}

#[tokio::test]
async fn lesson_18_a_pool_that_does_not_open_is_told_of_before_bytes_travel() {
    let mut two = two(Transport::CudaIpc, false).await;
    let (peer, from, to, reason) = loop {
        if let LinkEvent::FellBack {
            peer,
            from,
            to,
            reason,
        } = two.sender.next().await
        {
            break (peer, from, to, reason);
        }
    };
    assert_eq!(peer, two.receiver.me);
    assert_eq!((from, to), (Transport::CudaIpc, Transport::SharedMemory));
    assert!(reason.contains("out of reach"), "{reason}");
    let transport = two.sender.measured().await.transport;
    assert_eq!(transport, Transport::SharedMemory);
    two.sender.send_block(two.receiver.me, 1, 0).await;
    let payload = two.receiver.arrived().await.payload.unwrap();
    assert_eq!(payload.bytes().unwrap(), block_bytes(1, 0));
}

#[tokio::test]
async fn who_has_no_pool_gets_bytes_and_no_complaint() {
    for transport in [Transport::Local, Transport::CudaIpc] {
        let net = LocalNet::default();
        let pool = HostPool::new(true);
        let mut with = Worker::on(net.clone(), with_pool(worker_ref(1, 1), &pool)).await;
        let mut without = Worker::on(net, config(worker_ref(2, 1), "f")).await;
        with.links.know(without.me, without.route(transport));
        without.links.know(with.me, with.route(transport));
        let expected = match transport {
            Transport::CudaIpc => Transport::SharedMemory,
            other => other,
        };
        for (one, other) in [(&mut with, &mut without)] {
            // `arrived` panics at a fall-back.
            assert_eq!(one.measured().await.transport, expected);
            assert_eq!(other.measured().await.transport, expected);
            one.send_block(other.me, 1, 0).await;
            other.send_block(one.me, 1, 1).await;
            assert!(one.arrived().await.payload.unwrap().bytes().is_some());
            assert!(other.arrived().await.payload.unwrap().bytes().is_some());
        }
        assert_ne!(with.links.reach(without.me), Reach::Given);
        assert_eq!(without.links.reach(with.me), Reach::Never);
    }
}

#[tokio::test]
async fn who_is_known_to_be_elsewhere_never_gets_the_pool() {
    let pool = HostPool::new(true);
    let receiver = Worker::on(LocalNet::default(), with_pool(worker_ref(2, 1), &pool)).await;
    let far = worker_ref(1, 1);
    assert_eq!(receiver.links.reach(far), Reach::NotYet);
    receiver.links.know(far, Route::tcp("192.0.2.1:9"));
    assert_eq!(receiver.links.reach(far), Reach::Never);
    // It is here after all: what was said of it holds.
    let mut sender = Worker::on(LocalNet::default(), with_pool(far, &HostPool::new(true))).await;
    sender
        .links
        .know(receiver.me, receiver.route(Transport::CudaIpc));
    let transport = sender.measured().await.transport;
    assert_eq!(transport, Transport::SharedMemory);
    assert_eq!(receiver.links.reach(far), Reach::Never);
    receiver.server.abort();
}

#[tokio::test]
async fn lesson_02_a_neighbour_that_left_was_severed_while_it_could_still_write() {
    let Two {
        mut sender,
        mut receiver,
        ..
    } = two(Transport::Local, true).await;
    let permit = permit(&mut sender, receiver.me).await;
    let pool = Arc::clone(permit.pool().unwrap());
    let left = sender.me;
    sender.server.abort();
    assert!(sender.server.await.is_err());
    drop((permit, sender.links, sender.events));
    // It holds the pool: what is said of another worker comes first.
    let other = Worker::on(LocalNet::default(), config(worker_ref(3, 1), "f")).await;
    other
        .links
        .know(receiver.me, receiver.route(Transport::Tcp));
    other
        .links
        .link(receiver.me)
        .unwrap()
        .send(seal(9))
        .unwrap();
    assert_eq!(receiver.arrived().await.from, other.me);
    drop(pool);
    match receiver.next().await {
        LinkEvent::Severed { peer } => assert_eq!(peer, left),
        event => panic!("{event:?}"),
    }
    assert_eq!(receiver.links.reach(left), Reach::Never);
}

const CHILD: &str = "CLEAVE_TEST_SENDER";

/// Not a test of its own: the sender's process, when the other one starts it. It opens the pool and stays.
#[tokio::test]
async fn sender_process() {
    let Ok(address) = std::env::var(CHILD) else {
        return;
    };
    let pool = HostPool::new(true);
    let mut sender = Worker::on(LocalNet::default(), with_pool(worker_ref(1, 1), &pool)).await;
    let route = Route::Remote(Addresses::parse(&address).unwrap());
    sender.links.know(worker_ref(2, 1), route);
    println!("by: {}", sender.measured().await.transport);
    while sender.events.recv().await.is_some() {}
}

fn sender(to: &Worker) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sender_process", "--nocapture"])
        .env(CHILD, to.addresses().to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut lines = lines.map_while(Result::ok);
    let by = lines.find_map(|line| Some(line.split_once("by: ")?.1.to_owned()));
    assert_eq!(by.as_deref(), Some("cuda-ipc"));
    child
}

/// A link that broke says nothing of the process at its other end; its end does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lesson_02_a_sender_is_severed_when_its_process_has_ended_and_not_before() {
    let pool = HostPool::new(true);
    let mut receiver = Worker::on(LocalNet::default(), with_pool(worker_ref(2, 1), &pool)).await;
    let mut child = sender(&receiver);
    let peer = worker_ref(1, 1);
    let signal = |name: &str| {
        let pid = child.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.unwrap().success());
    };
    // Stopped it is silent, and its link is given up; but it could go on.
    signal("-STOP");
    assert_eq!(receiver.lost().await.0, peer);
    assert_eq!(receiver.links.reach(peer), Reach::Given);
    receiver.hears_nothing_more();
    signal("-KILL");
    match receiver.next().await {
        LinkEvent::Severed { peer: severed } => assert_eq!(severed, peer),
        event => panic!("{event:?}"),
    }
    assert_eq!(receiver.links.reach(peer), Reach::Never);
    child.wait().unwrap();
}
