//! Tests of links whose senders write into the receiver's pool. The pools are memory of this
//! process; the tests show who gets access, which bytes travel, and when access ends.

use crate::pair::*;
use cleave_domain::{BlockIndex, WorkerRef};
use cleave_kv::{Packet, PayloadCondition};
use cleave_transfer::{
    DataAddresses, DirectCopy, LinkEvent, LinksConfig, LocalNet, PeerPool, PeerRoute, PoolAccess,
    PoolSharing, SendPermit, Transport, checksum,
};
use std::collections::BTreeMap;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

const BLOCKS: u32 = 8;

/// Bytes of a pool: consecutive blocks.
type PoolMemory = Arc<Mutex<Vec<u8>>>;

/// The pools of this process, by the number that is their handle.
static POOLS: Mutex<BTreeMap<u64, PoolMemory>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct HostMemoryPool {
    number: u64,
    memory: PoolMemory,
    /// Whether it can open the pools of others.
    opens: bool,
}

impl HostMemoryPool {
    fn new(opens: bool) -> Arc<Self> {
        let memory = PoolMemory::default();
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
struct OpenedHostPool {
    near: PoolMemory,
    far: PoolMemory,
}

impl PoolSharing for HostMemoryPool {
    fn handle(&self) -> Result<Vec<u8>, String> {
        Ok(self.number.to_le_bytes().to_vec())
    }

    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerPool>, String> {
        let number = u64::from_le_bytes(handle.try_into().unwrap());
        // A pool of another process is not here; writes to it are lost.
        let far = POOLS.lock().unwrap().get(&number).cloned();
        if self.opens {
            Ok(Arc::new(OpenedHostPool {
                near: Arc::clone(&self.memory),
                far: far.unwrap_or_default(),
            }))
        } else {
            Err("the memory is out of reach".to_owned())
        }
    }
}

impl PeerPool for OpenedHostPool {
    fn write(&self, parts: &[DirectCopy]) -> Result<Vec<u64>, String> {
        let mut sums = Vec::new();
        for DirectCopy { from, to, part } in parts {
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

fn with_pool(me: WorkerRef, pool: &Arc<HostMemoryPool>) -> LinksConfig {
    LinksConfig {
        pools: Some(Arc::clone(pool) as Arc<dyn PoolSharing>),
        ..config(me, "f")
    }
}

/// Two workers with pools; the first has a route to the second.
struct PoolWorkers {
    sender: LinkedWorker,
    receiver: LinkedWorker,
    from: Arc<HostMemoryPool>,
    to: Arc<HostMemoryPool>,
}

async fn pool_workers(transport: Transport, opens: bool) -> PoolWorkers {
    let net = LocalNet::default();
    let (from, to) = (HostMemoryPool::new(opens), HostMemoryPool::new(true));
    let sender = LinkedWorker::on(net.clone(), with_pool(worker_ref(1, 1), &from)).await;
    let receiver = LinkedWorker::on(net, with_pool(worker_ref(2, 1), &to)).await;
    sender.add_peer(&receiver, transport);
    PoolWorkers {
        sender,
        receiver,
        from,
        to,
    }
}

async fn permit(worker: &mut LinkedWorker, to: WorkerRef) -> SendPermit {
    loop {
        let link = worker.links.link(to).unwrap();
        match link.reserve(frame(1, 0).handoff, BLOCK) {
            Some(permit) => return permit,
            None => drop(worker.next().await),
        }
    }
}

#[tokio::test]
async fn a_block_is_in_the_peers_pool_before_its_frame_arrives() {
    for transport in [Transport::Local, Transport::CudaIpc] {
        let mut two = pool_workers(transport, true).await;
        assert_eq!(two.sender.next_measured().await.transport, transport);
        // More than the window holds, so the credit must return.
        for round in 0..3 * u64::from(BLOCKS) {
            let block = (round % u64::from(BLOCKS)) as u32;
            let bytes = block_bytes(round, block);
            two.from.fill(block, &bytes);
            let mut permit = permit(&mut two.sender, two.receiver.me).await;
            let frame = frame(round, block);
            let pool = Arc::clone(permit.peer_pool().expect("it is open"));
            let direct = DirectCopy {
                from: BlockIndex(block),
                to: frame.block.block,
                part: frame.part,
            };
            let sums = pool.write(&[direct]).unwrap();
            permit.send_written(frame, sums[0]).unwrap();
            let arrived = two.receiver.next_packet().await;
            assert_eq!(arrived.condition, PayloadCondition::Intact);
            assert_eq!(two.to.block(block), bytes);
            let payload = arrived.payload.unwrap();
            assert!(payload.bytes().is_none(), "nothing travelled");
            assert_eq!(payload.checksum_unverified(), Some(checksum(&bytes)));
            assert_eq!(
                payload.write_verified(&mut two.to.block(block)[..]),
                Ok(true)
            );
            let Packet::Frame { part, .. } = arrived.packet else {
                panic!("{:?}", arrived.packet);
            };
            assert_eq!(part, frame.part);
            // Damage in place is detected in place.
            assert_eq!(
                payload.write_verified(&mut vec![0; BLOCK as usize][..]),
                Ok(false)
            );
        }
        assert_eq!(
            two.receiver.links.pool_access(two.sender.me),
            PoolAccess::Given
        );
    }
}

// Lesson: 18.
#[tokio::test]
async fn a_pool_that_cannot_be_opened_is_reported_as_a_fallback() {
    let mut two = pool_workers(Transport::CudaIpc, false).await;
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
    let transport = two.sender.next_measured().await.transport;
    assert_eq!(transport, Transport::SharedMemory);
    two.sender.send_block(two.receiver.me, 1, 0).await;
    let payload = two.receiver.next_packet().await.payload.unwrap();
    assert_eq!(payload.bytes().unwrap(), block_bytes(1, 0));
}

#[tokio::test]
async fn a_worker_without_a_pool_receives_bytes_without_fallback() {
    for transport in [Transport::Local, Transport::CudaIpc] {
        let net = LocalNet::default();
        let pool = HostMemoryPool::new(true);
        let mut with = LinkedWorker::on(net.clone(), with_pool(worker_ref(1, 1), &pool)).await;
        let mut without = LinkedWorker::on(net, config(worker_ref(2, 1), "f")).await;
        with.add_peer(&without, transport);
        without.add_peer(&with, transport);
        let expected = match transport {
            Transport::CudaIpc => Transport::SharedMemory,
            other => other,
        };
        for (one, other) in [(&mut with, &mut without)] {
            // `arrived` panics at a fallback.
            assert_eq!(one.next_measured().await.transport, expected);
            assert_eq!(other.next_measured().await.transport, expected);
            one.send_block(other.me, 1, 0).await;
            other.send_block(one.me, 1, 1).await;
            assert!(one.next_packet().await.payload.unwrap().bytes().is_some());
            assert!(other.next_packet().await.payload.unwrap().bytes().is_some());
        }
        assert_ne!(with.links.pool_access(without.me), PoolAccess::Given);
        assert_eq!(without.links.pool_access(with.me), PoolAccess::Never);
    }
}

#[tokio::test]
async fn a_peer_on_another_host_never_gets_the_pool() {
    let pool = HostMemoryPool::new(true);
    let receiver = LinkedWorker::on(LocalNet::default(), with_pool(worker_ref(2, 1), &pool)).await;
    let far = worker_ref(1, 1);
    assert_eq!(receiver.links.pool_access(far), PoolAccess::NotYet);
    receiver.links.add_peer(far, PeerRoute::tcp("192.0.2.1:9"));
    assert_eq!(receiver.links.pool_access(far), PoolAccess::Never);
    // The peer is on this host after all; the denial stays in force.
    let mut sender = LinkedWorker::on(
        LocalNet::default(),
        with_pool(far, &HostMemoryPool::new(true)),
    )
    .await;
    sender.add_peer(&receiver, Transport::CudaIpc);
    let transport = sender.next_measured().await.transport;
    assert_eq!(transport, Transport::SharedMemory);
    assert_eq!(receiver.links.pool_access(far), PoolAccess::Never);
    receiver.server.abort();
}

// Lesson: 2.
#[tokio::test]
async fn a_local_peer_is_fenced_only_when_its_pool_is_dropped() {
    let PoolWorkers {
        mut sender,
        mut receiver,
        ..
    } = pool_workers(Transport::Local, true).await;
    let permit = permit(&mut sender, receiver.me).await;
    let pool = Arc::clone(permit.peer_pool().unwrap());
    let left = sender.me;
    sender.server.abort();
    assert!(sender.server.await.is_err());
    drop((permit, sender.links, sender.events));
    // The test still holds the pool: an event of another worker comes first.
    let other = LinkedWorker::on(LocalNet::default(), config(worker_ref(3, 1), "f")).await;
    other.add_peer(&receiver, Transport::Tcp);
    other
        .links
        .link(receiver.me)
        .unwrap()
        .send(seal(9))
        .unwrap();
    assert_eq!(receiver.next_packet().await.from, other.me);
    drop(pool);
    match receiver.next().await {
        LinkEvent::Fenced { peer } => assert_eq!(peer, left),
        event => panic!("{event:?}"),
    }
    assert_eq!(receiver.links.pool_access(left), PoolAccess::Never);
}

const CHILD: &str = "CLEAVE_TEST_SENDER";

/// Not a test: the sender's process, started by the other test. It opens the pool and stays.
#[tokio::test]
async fn sender_process() {
    let Ok(address) = std::env::var(CHILD) else {
        return;
    };
    let pool = HostMemoryPool::new(true);
    let mut sender =
        LinkedWorker::on(LocalNet::default(), with_pool(worker_ref(1, 1), &pool)).await;
    let route = PeerRoute::Remote(DataAddresses::parse(&address).unwrap());
    sender.links.add_peer(worker_ref(2, 1), route);
    println!("by: {}", sender.next_measured().await.transport);
    while sender.events.recv().await.is_some() {}
}

fn sender(to: &LinkedWorker) -> Child {
    let address = to.addresses().to_string();
    let (child, by) = start_process("pools::sender_process", (CHILD, &address), "by: ");
    assert_eq!(by, "cuda-ipc");
    child
}

// Lesson: 2.
/// A broken link says nothing about the process at its other end; the end of the process is
/// reported separately.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_is_fenced_only_when_its_process_has_ended() {
    let pool = HostMemoryPool::new(true);
    let mut receiver =
        LinkedWorker::on(LocalNet::default(), with_pool(worker_ref(2, 1), &pool)).await;
    let mut child = sender(&receiver);
    let peer = worker_ref(1, 1);
    let signal = |name: &str| {
        let pid = child.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.unwrap().success());
    };
    // The stopped process is silent, and its link is lost; but the process could continue.
    signal("-STOP");
    assert_eq!(receiver.next_lost().await.0, peer);
    assert_eq!(receiver.links.pool_access(peer), PoolAccess::Given);
    receiver.assert_no_event_but_credit();
    signal("-KILL");
    match receiver.next().await {
        LinkEvent::Fenced { peer: severed } => assert_eq!(severed, peer),
        event => panic!("{event:?}"),
    }
    assert_eq!(receiver.links.pool_access(peer), PoolAccess::Never);
    child.wait().unwrap();
}
