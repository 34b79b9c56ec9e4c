//! Orders at the gate of adapters.

use super::*;
use cleave_domain::{
    AdapterPlace, FlightId, HandoffId, Order, Refusal, Request, RequestSlo, RunOrder,
    SamplingParams, StopRules,
};
use cleave_sched::AdapterLoads;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::time::Duration;

/// A memory that loads whatever was opened, but for adapters that are to fail.
#[derive(Default)]
struct StubMemory {
    /// Adapters with a copy in host memory.
    copies: Mutex<BTreeSet<AdapterId>>,
    /// Adapters that were read from a disk, in order.
    reads: Mutex<Vec<AdapterId>>,
    loaded: Mutex<BTreeSet<AdapterId>>,
    closed: Mutex<Vec<AdapterId>>,
    fails: BTreeSet<AdapterId>,
}

impl AdapterMemory for StubMemory {
    fn open(&self, _: &Path) -> Result<AdapterFacts, AdapterError> {
        Ok(facts(4))
    }

    fn load(&self, adapter: AdapterId) -> Result<(), AdapterError> {
        if self.fails.contains(&adapter) {
            return Err(AdapterError::Unknown(adapter));
        }
        if !self.copies.lock().contains(&adapter) {
            self.reads.lock().push(adapter);
        }
        self.loaded.lock().insert(adapter);
        Ok(())
    }

    fn copy_to_host(&self, adapter: AdapterId) -> Result<(), AdapterError> {
        if self.copies.lock().insert(adapter) {
            self.reads.lock().push(adapter);
        }
        Ok(())
    }

    fn drop_host_copy(&self, adapter: AdapterId) {
        self.copies.lock().remove(&adapter);
    }

    fn unload(&self, adapter: AdapterId) {
        assert!(
            self.loaded.lock().remove(&adapter),
            "{adapter} is not loaded"
        );
    }

    fn close(&self, adapter: AdapterId) {
        self.loaded.lock().remove(&adapter);
        self.copies.lock().remove(&adapter);
        self.closed.lock().push(adapter);
    }
}

fn id(number: u8) -> AdapterId {
    AdapterId([number; 16])
}

fn facts(number: u8) -> AdapterFacts {
    AdapterFacts {
        adapter: id(number),
        rank_max: 8,
        bytes: 1,
    }
}

/// A gate of adapters 1 to 3 without copies in host memory.
fn gate(
    places: usize,
    memory: &Arc<StubMemory>,
) -> (AdapterGate, mpsc::UnboundedReceiver<AdapterEvent>) {
    gate_of([places, places], 3, memory)
}

/// A gate of so many adapters, named `a1`, `a2` …, with limits of loaded ones and of host memory.
fn gate_of(
    [loaded_max, host_max]: [usize; 2],
    count: u8,
    memory: &Arc<StubMemory>,
) -> (AdapterGate, mpsc::UnboundedReceiver<AdapterEvent>) {
    let shared = Arc::clone(memory) as Arc<dyn AdapterMemory>;
    let limits = AdapterLimits {
        loaded_max,
        host_max,
    };
    let (mut gate, loads) = AdapterGate::new(Some(shared), limits, None);
    for number in 1..=count {
        let name = format!("a{number}");
        gate.serve(&name, Path::new("/adapters"), facts(number));
    }
    (gate, loads)
}

fn handoff(flight: u64) -> HandoffId {
    HandoffId {
        flight: FlightId(flight),
        attempt: 1,
    }
}

fn run(flight: u64, adapter: Option<u8>) -> RouterOrder {
    let request = Request {
        prompt: [1].into(),
        generated: [].into(),
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens: 1,
            min_tokens: 0,
            stop_tokens: [].into(),
        },
        priority: 0,
        cache_salt: 0,
        adapter: adapter.map(id),
        pooling: None,
        slo: RequestSlo::default(),
    };
    sent(Order::Run(RunOrder {
        handoff: handoff(flight),
        request: Arc::new(request),
        expected_output_tokens: 1,
        waited: Duration::ZERO,
        due: None,
    }))
}

fn sent(order: Order) -> RouterOrder {
    RouterOrder {
        router: RouterId(0),
        order,
        context: None,
    }
}

fn released(flight: u64) -> Report {
    Report::Released {
        handoff: handoff(flight),
    }
}

fn is_open(passage: &Passage) -> bool {
    matches!(passage, Passage::Open(_))
}

fn no_adapter(reason: &str) -> Refusal {
    let reason = reason.to_owned();
    Refusal::NoAdapter { reason }
}

/// The change of this number, by router 0.
fn change(number: u64) -> AdapterChangeId {
    AdapterChangeId {
        number,
        router: RouterId(0),
    }
}

fn refusal(passage: Passage) -> Option<Refusal> {
    match passage {
        Passage::Refused(_, Report::Refused { refusal, .. }) => Some(refusal),
        _ => None,
    }
}

/// The orders that wait for the next load to end.
async fn loaded(
    gate: &mut AdapterGate,
    loads: &mut mpsc::UnboundedReceiver<AdapterEvent>,
) -> Vec<Passage> {
    match loads.recv().await {
        Some(AdapterEvent::Loaded { adapter, outcome }) => gate.loaded(adapter, &outcome),
        other => panic!("{other:?}"),
    }
}

/// Lets an order pass whose adapter is in its folder.
async fn load(
    gate: &mut AdapterGate,
    loads: &mut mpsc::UnboundedReceiver<AdapterEvent>,
    order: RouterOrder,
) {
    assert!(matches!(gate.pass(order), Passage::Held));
    let passed = loaded(gate, loads).await;
    assert!(passed.len() == 1 && is_open(&passed[0]), "{passed:?}");
}

#[tokio::test]
async fn an_order_waits_for_its_adapter_alone() {
    let memory = Arc::default();
    let (mut gate, mut loads) = gate(2, &memory);
    assert!(matches!(gate.pass(run(1, Some(1))), Passage::Held));
    assert!(matches!(gate.pass(run(2, Some(1))), Passage::Held));
    assert!(is_open(&gate.pass(run(3, None))), "others pass");
    let cancel = Order::Cancel {
        handoff: handoff(1),
    };
    assert!(
        matches!(gate.pass(sent(cancel)), Passage::Held),
        "it stays behind its order"
    );
    let passed = loaded(&mut gate, &mut loads).await;
    assert_eq!(passed.iter().filter(|passage| is_open(passage)).count(), 3);
    assert!(is_open(&gate.pass(run(4, Some(1)))), "it is loaded now");
    assert!(loads.try_recv().is_err(), "it was loaded once");
    assert_eq!(gate.offers()[0].place, AdapterPlace::Resident);
    assert_eq!(gate.offers()[1].place, AdapterPlace::OnDisk);
}

#[tokio::test]
async fn the_least_recently_used_adapter_leaves() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate(2, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    load(&mut gate, &mut loads, run(2, Some(2))).await;
    assert!(is_open(&gate.pass(run(3, Some(1)))));
    (1..=3).for_each(|flight| gate.reported(&released(flight)));
    load(&mut gate, &mut loads, run(4, Some(3))).await;
    assert_eq!(*memory.loaded.lock(), BTreeSet::from([id(1), id(3)]));
}

#[tokio::test]
async fn the_end_of_a_use_counts_as_one() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate(2, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    load(&mut gate, &mut loads, run(2, Some(2))).await;
    // The stream that began first ends last.
    gate.reported(&released(2));
    gate.reported(&released(1));
    load(&mut gate, &mut loads, run(3, Some(3))).await;
    assert_eq!(*memory.loaded.lock(), BTreeSet::from([id(1), id(3)]));
}

// Invariant: I56.
#[tokio::test]
async fn an_adapter_in_use_never_leaves() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate(1, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    let refused = refusal(gate.pass(run(2, Some(2))));
    assert!(
        matches!(refused, Some(Refusal::QueueFull { .. })),
        "{refused:?}"
    );
    assert!(memory.loaded.lock().contains(&id(1)));
    gate.reported(&released(1));
    load(&mut gate, &mut loads, run(2, Some(2))).await;
    assert_eq!(*memory.loaded.lock(), BTreeSet::from([id(2)]));
}

/// Uses these adapters in turn, one at a time.
async fn use_in_turn(
    gate: &mut AdapterGate,
    loads: &mut mpsc::UnboundedReceiver<AdapterEvent>,
    adapters: &[u8],
) {
    for (flight, adapter) in (1000..).zip(adapters) {
        if !is_open(&gate.pass(run(flight, Some(*adapter)))) {
            let passed = loaded(gate, loads).await;
            assert!(passed.len() == 1 && is_open(&passed[0]), "{passed:?}");
        }
        gate.reported(&released(flight));
    }
}

#[tokio::test]
async fn an_adapter_in_host_memory_reads_no_disk() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate_of([1, 3], 4, &memory);
    use_in_turn(&mut gate, &mut loads, &[1, 2, 3, 1]).await;
    assert_eq!(*memory.reads.lock(), [1, 2, 3].map(id));
    let places: Vec<_> = gate.offers().iter().map(|offer| offer.place).collect();
    use AdapterPlace::{InHost, OnDisk, Resident};
    assert_eq!(places, [Resident, InHost, InHost, OnDisk]);
    let now = gate.in_use();
    assert_eq!((now.loaded, now.in_host), (1, 2));
    let expected = AdapterLoads {
        loaded: 4,
        evicted: 3,
        from_host: 1,
        ..AdapterLoads::default()
    };
    assert_eq!(now.loads, expected);
    // The one that was used before the others is dropped, and read again.
    use_in_turn(&mut gate, &mut loads, &[4, 3, 2]).await;
    assert_eq!(*memory.reads.lock(), [1, 2, 3, 4, 2].map(id));
    assert_eq!(gate.in_use().loads.dropped, 2);
    assert_eq!(*memory.copies.lock(), [2, 3, 4].map(id).into());
}

// Invariant: I56.
#[tokio::test]
async fn host_memory_never_drops_an_adapter_in_use() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate_of([2, 3], 6, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    for round in 0..4 {
        use_in_turn(&mut gate, &mut loads, &[2, 3, 4, 5, 6]).await;
        assert!(memory.loaded.lock().contains(&id(1)), "round {round}");
        assert!(memory.copies.lock().contains(&id(1)), "round {round}");
        assert!(memory.loaded.lock().len() <= 2 && memory.copies.lock().len() <= 3);
    }
    assert!(!memory.reads.lock()[1..].contains(&id(1)));
}

#[tokio::test]
async fn a_failed_load_leaves_no_copy_in_host_memory() {
    let memory = Arc::new(StubMemory {
        fails: BTreeSet::from([id(1)]),
        ..StubMemory::default()
    });
    let (mut gate, mut loads) = gate_of([1, 3], 3, &memory);
    assert!(matches!(gate.pass(run(1, Some(1))), Passage::Held));
    let passed = loaded(&mut gate, &mut loads).await;
    assert!(!is_open(&passed[0]) && memory.copies.lock().is_empty());
    assert_eq!(gate.in_use().loads.failed, 1);
}

#[tokio::test]
async fn a_failed_load_refuses_its_requests_alone() {
    let memory = Arc::new(StubMemory {
        fails: BTreeSet::from([id(1)]),
        ..StubMemory::default()
    });
    let (mut gate, mut loads) = gate(1, &memory);
    assert_eq!(
        refusal(gate.pass(run(9, Some(9)))),
        Some(no_adapter(&format!(
            "adapter {} is not served by this worker any more",
            id(9)
        ))),
        "unknown"
    );
    assert!(matches!(gate.pass(run(1, Some(1))), Passage::Held));
    let mut passed = loaded(&mut gate, &mut loads).await;
    let reason = AdapterError::Unknown(id(1)).to_string();
    assert_eq!(refusal(passed.remove(0)), Some(no_adapter(&reason)));
    assert_eq!(gate.in_use().running.len() + gate.in_use().waiting.len(), 0);
    load(&mut gate, &mut loads, run(2, Some(2))).await;
}

#[tokio::test]
async fn a_replaced_adapter_stays_for_its_hand_offs() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate(2, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    gate.serve("a1", Path::new("/new"), facts(7));
    assert_eq!(gate.offers()[0].adapter, id(7));
    assert!(memory.loaded.lock().contains(&id(1)), "a stream has it");
    gate.reported(&released(1));
    assert_eq!(*memory.closed.lock(), [id(1)]);
    let gone = refusal(gate.pass(run(2, Some(1))));
    let is_gone = matches!(gone, Some(Refusal::NoAdapter { .. }));
    assert!(is_gone, "the old content is gone: {gone:?}");
}

#[tokio::test]
async fn a_lost_router_gives_its_adapters_back() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate(1, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    gate.router_lost(handoff(1).flight.router());
    load(&mut gate, &mut loads, run(2, Some(2))).await;
}

#[test]
fn folders_outside_the_root_are_refused() {
    let memory = StubMemory::default();
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("a")).unwrap();
    std::fs::create_dir(dir.path().join("secret")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("secret"), root.join("link")).unwrap();
    let open = |folder: &str| open_below(Some(&memory), Some(&root), folder);
    assert_eq!(open("a").unwrap().1, facts(4));
    let absolute = root.join("a").display().to_string();
    assert!(open(&absolute).is_ok(), "an absolute path below the root");
    let secret = dir.path().join("secret").display().to_string();
    let absent = open("../absent").unwrap_err().replace("absent", "secret");
    for outside in ["../secret", "a/../../secret", "link", &secret] {
        let error = open(outside).unwrap_err();
        assert!(error.contains("not a folder below --lora-root"), "{error}");
    }
    assert_eq!(open("../secret").unwrap_err(), absent, "it tells nothing");
    assert!(
        open_below(Some(&memory), None, "a")
            .unwrap_err()
            .contains("--lora-root")
    );
}

#[test]
fn a_folder_of_another_content_is_not_served() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, _loads) = gate(2, &memory);
    let mut open = |content: Option<u8>, found: u8| {
        let request = OpenRequest {
            router: RouterId(0),
            number: 0,
            change: change(1),
            name: "a1".to_owned(),
            folder: "f".to_owned(),
            content: content.map(id),
        };
        let outcome = gate.opened(&request, Ok(("/root/f".into(), facts(found))));
        (outcome, gate.offers()[0].clone())
    };
    let (refused, offer) = open(Some(6), 5);
    let reason = refused.unwrap_err();
    let ids = [id(6), id(5)].map(|id| id.to_string());
    assert!(reason.starts_with("/root/f: ") && ids.iter().all(|id| reason.contains(id)));
    assert_eq!((offer.adapter, offer.loaded_from), (id(1), None));
    assert_eq!(*memory.closed.lock(), [id(5)], "nothing has it");
    // One that another name stands for stays open.
    assert!(open(Some(6), 2).0.is_err());
    assert_eq!(*memory.closed.lock(), [id(5)]);
    let (served, offer) = open(Some(6), 6);
    assert!(served.is_ok());
    let expected = (id(6), Some("f".to_owned()));
    assert_eq!((offer.adapter, offer.loaded_from), expected);
    assert_eq!(open(None, 7).1.adapter, id(7), "whatever the folder has");
}

#[tokio::test]
async fn an_unloaded_adapter_stays_for_its_hand_offs() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, mut loads) = gate(2, &memory);
    load(&mut gate, &mut loads, run(1, Some(1))).await;
    assert!(gate.unload("a1", change(1)) && !gate.unload("a1", change(2)));
    assert_eq!(gate.offers().len(), 2);
    assert!(memory.loaded.lock().contains(&id(1)), "a stream has it");
    gate.reported(&released(1));
    assert_eq!(*memory.closed.lock(), [id(1)]);
}

/// Its requests are refused with the reason; it is not tried again until its name is loaded again.
#[tokio::test]
async fn an_adapter_whose_file_changed_is_given_up() {
    let memory = Arc::new(StubMemory {
        fails: BTreeSet::from([id(1)]),
        ..StubMemory::default()
    });
    let (mut gate, mut loads) = gate(2, &memory);
    // Another name of the same content.
    gate.serve("b", Path::new("/adapters"), facts(1));
    assert!(matches!(gate.pass(run(1, Some(1))), Passage::Held));
    loaded(&mut gate, &mut loads).await;
    let problems = |gate: &AdapterGate| {
        let offers = gate.offers().into_iter();
        let broken = offers.filter(|offer| offer.problem.is_some());
        broken.map(|offer| offer.name).collect::<Vec<_>>()
    };
    assert_eq!(problems(&gate), ["a1", "b"]);
    assert_eq!(*memory.closed.lock(), [id(1)]);
    assert_eq!(gate.in_use().served, 2, "the others");
    let refused = refusal(gate.pass(run(2, Some(1))));
    assert!(matches!(refused, Some(Refusal::NoAdapter { .. })));
    assert!(loads.try_recv().is_err(), "no load begins");
    gate.serve("a1", Path::new("/new"), facts(7));
    assert_eq!(problems(&gate), ["b"]);
    load(&mut gate, &mut loads, run(3, Some(7))).await;
    assert!(gate.unload("b", change(1)));
    assert_eq!(problems(&gate), [""; 0]);
}

fn open_request(name: &str, content: Option<u8>, number: u64) -> OpenRequest {
    OpenRequest {
        router: RouterId(0),
        number: 0,
        change: change(number),
        name: name.to_owned(),
        folder: "f".to_owned(),
        content: content.map(id),
    }
}

/// Routers and clients learn why a worker lacks an adapter of the fleet.
#[test]
fn a_name_that_cannot_be_served_has_its_reason() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, _loads) = gate_of([2, 2], 0, &memory);
    let wrong = gate.opened(&open_request("a", Some(6), 1), Err("no folder".to_owned()));
    assert_eq!(wrong, Err("no folder".to_owned()));
    let offer = gate.offers().remove(0);
    assert_eq!((offer.adapter, offer.change), (id(6), Some(change(1))));
    assert_eq!(offer.problem.as_deref(), Some("no folder"));
    let found = Ok(("/root/f".into(), facts(6)));
    assert_eq!(gate.opened(&open_request("a", Some(6), 2), found), Ok(()));
    assert_eq!(gate.offers()[0].problem, None);
    // An operator's own command says why it failed, and leaves no name behind.
    let wrong = gate.opened(&open_request("b", None, 3), Err("no folder".to_owned()));
    assert!(wrong.is_err() && gate.offers().len() == 1);
}

#[test]
fn an_earlier_change_of_a_name_has_no_effect() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, _loads) = gate(2, &memory);
    let found = || Ok(("/root/f".into(), facts(7)));
    assert_eq!(gate.opened(&open_request("a1", None, 5), found()), Ok(()));
    let earlier = gate.check_order("a1", change(4)).unwrap_err();
    assert!(earlier.contains("change 5 of"), "{earlier}");
    assert_eq!(gate.check_order("a1", change(5)), Ok(()), "a repetition");
    let other = AdapterChangeId {
        router: RouterId(1),
        ..change(5)
    };
    assert_eq!(gate.check_order("a1", other), Ok(()), "the higher router");
    assert_eq!(gate.check_order("a2", change(1)), Ok(()), "by a flag");
    assert!(gate.keep("a1", "g", id(7), change(6)));
    assert!(!gate.keep("a1", "g", id(8), change(6)), "another content");
    assert!(gate.check_order("a1", change(5)).is_err());
    // An unloaded name is remembered, be it one that was never served.
    for name in ["a1", "x"] {
        gate.unload(name, change(8));
        assert!(gate.check_order(name, change(7)).is_err(), "{name}");
    }
    let report = gate.report();
    let unloaded: Vec<&str> = report.unloaded.iter().map(|of| &*of.name).collect();
    assert_eq!(unloaded, ["a1", "x"]);
    assert_eq!(gate.opened(&open_request("x", None, 9), found()), Ok(()));
    assert_eq!(gate.report().unloaded.len(), 1);
}

#[test]
fn the_first_unloads_are_forgotten_first() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, _loads) = gate_of([2, 2], 0, &memory);
    for number in 0..=UNLOADED_MAX as u64 {
        gate.unload(&format!("a{number}"), change(number + 1));
    }
    assert_eq!(gate.report().unloaded.len(), UNLOADED_MAX);
    assert!(gate.check_order("a0", change(0)).is_ok());
    assert!(gate.check_order("a1", change(0)).is_err());
}

/// A refused opening of one router leaves the same content of another one open.
#[test]
fn a_refused_load_closes_no_adapter_of_another_router() {
    let memory: Arc<StubMemory> = Arc::default();
    let (mut gate, _loads) = gate_of([2, 2], 0, &memory);
    let found = || Ok(("/root/f".into(), facts(5)));
    assert!(
        gate.opened(&open_request("a", Some(6), 1), found())
            .is_err()
    );
    assert_eq!(*memory.closed.lock(), [id(5)], "nothing has it");
    assert_eq!(gate.opened(&open_request("b", None, 2), found()), Ok(()));
    assert!(
        gate.opened(&open_request("a", Some(6), 3), found())
            .is_err()
    );
    assert_eq!(memory.closed.lock().len(), 1, "b has it");
}

#[test]
fn a_worker_serves_no_more_names_than_a_report_has_room_for() {
    let (mut gate, _loads) = gate(1, &Arc::default());
    let load = |name: String| AdapterCommand::Load {
        name,
        folder: "a".to_owned(),
        content: None,
    };
    for number in 4..=NAMES_MAX {
        assert_eq!(gate.check_room(&load(format!("a{number}"))), Ok(()));
        gate.serve(&format!("a{number}"), Path::new("/adapters"), facts(4));
    }
    let error = gate.check_room(&load("another".to_owned())).unwrap_err();
    assert!(error.contains("4096 adapters"), "{error}");
    assert_eq!(gate.check_room(&load("a7".to_owned())), Ok(()), "replaced");
    let name = "another".to_owned();
    assert_eq!(gate.check_room(&AdapterCommand::Unload { name }), Ok(()));
}
