//! In which order an engine's work is taken, and what becomes of work that nobody wants any more.

use super::*;
use crate::worker::queue::State;
use crate::worker::swap::Way;
use cleave_domain::{FlightId, StepId, WorkerId, WorkerRef};
use cleave_transfer::{LinkEvent, Links, LinksConfig, LocalNet, Route};

const BLOCK: u32 = 64;

fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 0,
    }
}

fn worker(worker: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(worker),
        ..WorkerRef::default()
    }
}

/// A way to get payloads and permits, which only links make.
struct Pair {
    sender: Links,
    granted: mpsc::Receiver<LinkEvent>,
    arrived: mpsc::Receiver<LinkEvent>,
    _receiver: Links,
}

impl Pair {
    fn new() -> Self {
        let net = LocalNet::default();
        let links = |me| {
            let (events, heard) = mpsc::channel(64);
            let config = LinksConfig::new(me, Default::default(), BLOCK);
            (Links::new(config, events, net.clone()), heard)
        };
        let (sender, granted) = links(worker(1));
        let (receiver, arrived) = links(worker(2));
        sender.know(worker(2), Route::Local);
        Self {
            sender,
            granted,
            arrived,
            _receiver: receiver,
        }
    }

    async fn permit(&mut self) -> Permit {
        loop {
            let link = self.sender.link(worker(2)).unwrap();
            match link.reserve(handoff(9), BLOCK) {
                Some(permit) => return permit,
                None => self.granted.recv().await.unwrap(),
            };
        }
    }

    async fn import(&mut self, flight: u64) -> Work {
        let part = BlockPart {
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
        let payload = loop {
            if let LinkEvent::Arrived { payload, .. } = self.arrived.recv().await.unwrap() {
                break payload;
            }
        };
        Work::Write(Import {
            handoff: handoff(flight),
            part,
            block: BlockRef::default(),
            payload: payload.unwrap(),
        })
    }
}

fn step() -> Work {
    Work::Step(StepPlan {
        step: StepId(1),
        ..StepPlan::default()
    })
}

fn export(flight: u64) -> Export {
    Export {
        handoff: handoff(flight),
        to: worker(2),
        from: Default::default(),
        ordinal: 0,
        block: BlockRef::default(),
    }
}

fn letters(state: &mut State, write_bytes_max: u64) -> String {
    std::iter::from_fn(|| state.take(write_bytes_max))
        .map(|work| match work {
            Work::Step(_) => 'S',
            Work::Read(..) => 'R',
            Work::Write(_) => 'W',
            Work::Swap(_) => 'X',
            Work::SwapDrop(_) => 'D',
            Work::Shelve(_) => 'H',
            Work::Fetch(_) | Work::Bring(_) | Work::FetchStop(_) => 'F',
        })
        .collect()
}

#[tokio::test]
async fn lesson_26_a_step_waits_for_no_more_writes_than_the_limit() {
    let mut pair = Pair::new();
    let mut state = State::default();
    for flight in 0..5 {
        state.work.push_back(pair.import(flight).await);
    }
    state.work.push_back(step());
    assert_eq!(letters(&mut state, u64::from(2 * BLOCK)), "WWSWWW");
}

fn swap(flight: u64) -> Swap {
    let blocks = vec![BlockIndex(0); 3];
    Swap::new(handoff(flight), blocks, Way::Out)
}

#[test]
fn lesson_26_a_step_waited_until_a_whole_sequence_was_copied() {
    let queue = Queue {
        state: Mutex::default(),
        changed: Notify::new(),
        write_bytes_max: u64::from(BLOCK),
    };
    for work in [Work::Swap(swap(1)), Work::Swap(swap(2)), step()] {
        queue.lock().work.push_back(work);
    }
    let mut order = String::new();
    // Each swap takes three goes.
    let mut goes = 0;
    loop {
        let work = queue.lock().take(queue.write_bytes_max);
        let Some(work) = work else {
            break;
        };
        match work {
            Work::Swap(swap) => {
                order.push('X');
                goes += 1;
                if goes < 5 {
                    assert!(queue.put_back(swap).is_none());
                }
            }
            Work::Step(_) => order.push('S'),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(order, "XSXXXXX");
    // What is to be dropped meanwhile does not go on.
    queue.lock().work.push_back(Work::SwapDrop(handoff(1)));
    let answer = queue.put_back(swap(1));
    let dropped = SwapOutcome::Dropped;
    assert!(
        matches!(answer, Some(Input::SwappedOut { outcome, .. }) if outcome == dropped),
        "{answer:?}"
    );
    assert!(queue.put_back(swap(2)).is_none());
}

#[tokio::test]
async fn a_step_never_goes_ahead_of_a_read() {
    let mut pair = Pair::new();
    let mut state = State::default();
    for flight in 0..3 {
        state.work.push_back(pair.import(flight).await);
    }
    let permit = pair.permit().await;
    state.work.push_back(Work::Read(export(9), permit));
    state.work.push_back(step());
    assert_eq!(letters(&mut state, u64::from(BLOCK)), "WWWRS");
}

#[tokio::test]
async fn lesson_02_what_has_not_begun_of_a_forgotten_hand_off_is_dropped_and_answered() {
    let mut pair = Pair::new();
    let queue = Arc::new(Queue {
        state: Mutex::default(),
        changed: Notify::new(),
        write_bytes_max: u64::MAX,
    });
    let thread = EngineHost {
        queue,
        porter: None,
        keeper: None,
        thread: None,
    };
    thread.push(pair.import(1).await);
    thread.push(pair.import(2).await);
    let permit = pair.permit().await;
    thread.push(Work::Read(export(1), permit));
    let answers = thread.forget(handoff(1));
    assert_eq!(answers.len(), 2, "{answers:?}");
    let dropped = |answer: &Input| {
        matches!(
            answer,
            Input::Imported {
                outcome: ImportOutcome::Dropped,
                ..
            } | Input::Exported {
                outcome: ExportOutcome::Dropped,
                ..
            }
        )
    };
    assert!(answers.iter().all(dropped));
    assert_eq!(letters(&mut thread.queue.lock(), 0), "W");
}
