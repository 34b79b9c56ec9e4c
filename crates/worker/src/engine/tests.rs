//! The order in which an engine's work is taken, and the answers to work that was dropped.

use super::*;
use crate::queue::EngineQueueState;
use crate::swap::SwapDirection;
use cleave_domain::{BlockIndex, FlightId, KvPlane, StepId, WorkerId, WorkerRef};
use cleave_transfer::{LinkEvent, Links, LinksConfig, LocalNet, PeerRoute};

const BLOCK: u32 = 64;

pub(crate) fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 0,
    }
}

pub(crate) fn worker(worker: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        ..WorkerRef::default()
    }
}

/// Two linked workers, since only links make payloads and permits.
pub(crate) struct EngineLinkPair {
    sender: Links,
    granted: mpsc::Receiver<LinkEvent>,
    arrived: mpsc::Receiver<LinkEvent>,
    _receiver: Links,
}

impl EngineLinkPair {
    pub(crate) fn new() -> Self {
        let net = LocalNet::default();
        let links = |me| {
            let (events, link_events) = mpsc::channel(64);
            let config = LinksConfig::new(me, Default::default(), BLOCK);
            (Links::new(config, events, net.clone()), link_events)
        };
        let (sender, granted) = links(worker(1));
        let (receiver, arrived) = links(worker(2));
        sender.add_peer(worker(2), PeerRoute::Local);
        Self {
            sender,
            granted,
            arrived,
            _receiver: receiver,
        }
    }

    pub(crate) async fn permit(&mut self) -> SendPermit {
        loop {
            let link = self.sender.link(worker(2)).unwrap();
            match link.reserve(handoff(9), BLOCK) {
                Some(permit) => return permit,
                None => self.granted.recv().await.unwrap(),
            };
        }
    }

    /// The next payload at the other end.
    pub(crate) async fn arrived_payload(&mut self) -> ReceivedPayload {
        loop {
            if let LinkEvent::Arrived { payload, .. } = self.arrived.recv().await.unwrap() {
                return payload.unwrap();
            }
        }
    }

    async fn import(&mut self, flight: u64) -> EngineWork {
        let part = BlockPart {
            plane: KvPlane::Blocks,
            ordinal: 0,
            offset: 0,
            len: BLOCK,
        };
        let mut permit = self.permit().await;
        permit.buffer(BLOCK).fill(flight as u8);
        let frame = Frame {
            handoff: handoff(flight),
            block: BlockRef::default(),
            part,
        };
        permit.send(frame).unwrap();
        EngineWork::Write(BlockImport {
            handoff: handoff(flight),
            part,
            block: BlockRef::default(),
            payload: self.arrived_payload().await,
        })
    }
}

fn step() -> EngineWork {
    EngineWork::Step(StepPlan {
        step: StepId(1),
        ..StepPlan::default()
    })
}

fn export(flight: u64) -> BlockExport {
    BlockExport {
        handoff: handoff(flight),
        to: worker(2),
        plane: KvPlane::Blocks,
        from: Default::default(),
        ordinal: 0,
        block: BlockRef::default(),
    }
}

fn letters(state: &mut EngineQueueState, write_bytes_max: u64) -> String {
    std::iter::from_fn(|| state.take(write_bytes_max))
        .map(|work| match work {
            EngineWork::Step(_) => 'S',
            EngineWork::Read(..) => 'R',
            EngineWork::Write(_) => 'W',
            EngineWork::Swap(_) => 'X',
            EngineWork::SwapDrop(_) => 'D',
            EngineWork::Offload(_) => 'H',
            EngineWork::Fetch(_) | EngineWork::Load(_) | EngineWork::FetchStop(_) => 'F',
        })
        .collect()
}

// Lesson: 26.
#[tokio::test]
async fn a_step_waits_for_no_more_writes_than_the_limit() {
    let mut pair = EngineLinkPair::new();
    let mut state = EngineQueueState::default();
    for flight in 0..5 {
        state.work.push_back(pair.import(flight).await);
    }
    state.work.push_back(step());
    assert_eq!(letters(&mut state, u64::from(2 * BLOCK)), "WWSWWW");
}

fn swap(flight: u64) -> SwapJob {
    let spans = vec![BlockSpan::of_block(BlockIndex(0), 0, BLOCK as usize); 3];
    SwapJob::new(handoff(flight), spans, SwapDirection::Out)
}

// Lesson: 26.
#[test]
fn a_step_overtakes_the_rest_of_a_swap() {
    let queue = EngineQueue {
        state: Mutex::default(),
        changed: Notify::new(),
        write_bytes_max: u64::from(BLOCK),
    };
    for work in [EngineWork::Swap(swap(1)), EngineWork::Swap(swap(2)), step()] {
        queue.lock().work.push_back(work);
    }
    let mut order = String::new();
    // Each swap takes three goes.
    let mut passes_count = 0;
    loop {
        let work = queue.lock().take(queue.write_bytes_max);
        let Some(work) = work else {
            break;
        };
        match work {
            EngineWork::Swap(swap) => {
                order.push('X');
                passes_count += 1;
                if passes_count < 5 {
                    assert!(queue.requeue(swap).is_none());
                }
            }
            EngineWork::Step(_) => order.push('S'),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(order, "XSXXXXX");
    // A swap whose drop is queued does not go on.
    queue
        .lock()
        .work
        .push_back(EngineWork::SwapDrop(handoff(1)));
    let answer = queue.requeue(swap(1));
    let dropped = SwapOutcome::Dropped;
    assert!(
        matches!(answer, Some(WorkerInput::SwappedOut { outcome, .. }) if outcome == dropped),
        "{answer:?}"
    );
    assert!(queue.requeue(swap(2)).is_none());
}

#[tokio::test]
async fn a_step_never_overtakes_a_read() {
    let mut pair = EngineLinkPair::new();
    let mut state = EngineQueueState::default();
    for flight in 0..3 {
        state.work.push_back(pair.import(flight).await);
    }
    let permit = pair.permit().await;
    state.work.push_back(EngineWork::Read(export(9), permit));
    state.work.push_back(step());
    assert_eq!(letters(&mut state, u64::from(BLOCK)), "WWWRS");
}

// Lesson: 2.
#[tokio::test]
async fn queued_work_of_a_forgotten_hand_off_is_dropped_and_answered() {
    let mut pair = EngineLinkPair::new();
    let queue = Arc::new(EngineQueue {
        state: Mutex::default(),
        changed: Notify::new(),
        write_bytes_max: u64::MAX,
    });
    let thread = EngineHost {
        queue,
        kv_copier: None,
        tier_io: None,
        thread: None,
    };
    thread.push(pair.import(1).await);
    thread.push(pair.import(2).await);
    let permit = pair.permit().await;
    thread.push(EngineWork::Read(export(1), permit));
    let answers = thread.forget(handoff(1));
    assert_eq!(answers.len(), 2, "{answers:?}");
    let dropped = |answer: &WorkerInput| {
        matches!(
            answer,
            WorkerInput::Imported {
                outcome: ImportOutcome::Dropped,
                ..
            } | WorkerInput::Exported {
                outcome: ExportOutcome::Dropped,
                ..
            }
        )
    };
    assert!(answers.iter().all(dropped));
    assert_eq!(letters(&mut thread.queue.lock(), 0), "W");
}
