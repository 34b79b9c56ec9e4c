//! Tests of failures, hangs and excessive requests while a link over NIXL is created: the library
//! runs with functions that behave like a failing device.
//!
//! Owns: those functions, and the expected reaction of both ends. Never: changes the library for
//! other tests; each such test runs in a process of its own. Invariant: whatever the library does,
//! a link is made over another transport or its loss is reported, and no task waits for ever.

use super::*;

/// See the parent module; the path of these tests has another prefix.
fn in_own_process_over(name: &str, transports: &[&str]) -> Option<Arc<Nixl>> {
    super::in_own_process_over(&format!("failing::{name}"), transports)
}

/// The status code of a failed device.
const BACKEND_FAILED: c_int = -2;

extern "C" fn write_that_fails(_: NixlHandle, _: NixlHandle, _: NixlHandle) -> c_int {
    BACKEND_FAILED
}

extern "C" fn write_in_progress(_: NixlHandle, _: NixlHandle, _: NixlHandle) -> c_int {
    IN_PROGRESS
}

extern "C" fn status_in_progress(_: NixlHandle, _: NixlHandle) -> c_int {
    IN_PROGRESS
}

/// Two workers; the first can dial the second over NIXL and over TCP.
async fn pair(
    sender: LinksConfig,
    receiver: LinksConfig,
) -> (CompliantRdmaWorker, CompliantRdmaWorker) {
    let sender = CompliantRdmaWorker::start(sender).await;
    let mut receiver = CompliantRdmaWorker::start(receiver).await;
    receiver.add_unreachable_peer(1).await;
    sender.links.add_peer(worker(2), receiver.route());
    (sender, receiver)
}

// Lesson: 18.
#[tokio::test]
async fn failed_first_writes_fall_back_to_tcp_with_backoff() {
    let name = "failed_first_writes_fall_back_to_tcp_with_backoff";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    let at_once: fn(&mut NixlFunctions) = |functions| functions.post_xfer_req = write_that_fails;
    let never: fn(&mut NixlFunctions) = |functions| {
        functions.post_xfer_req = write_in_progress;
        functions.get_xfer_status = status_in_progress;
    };
    for (fails, expected) in [(at_once, "beginning a write"), (never, "did not come")] {
        let sender = LinksConfig {
            connect_timeout: Duration::from_secs(3),
            ..config(1, Some(nixl_with_functions(&nixl, fails)))
        };
        let (mut sender, mut receiver) =
            pair(sender, config(2, Some(with_network_card(&nixl)))).await;
        let reason = sender.next_fallback().await;
        assert!(reason.contains(expected), "{reason}");
        assert_eq!(sender.next_measured().await, Transport::Tcp);
        receiver.next_lost().await;
        // A newer link replaces the established one; its dial does not try the card again.
        let _replacing = receiver.connect(LinkMessage::Hello(hello(1))).await;
        sender.next_lost().await;
        sender.links.link(worker(2)).unwrap();
        let reason = sender.next_fallback().await;
        assert!(reason.contains("not tried again for"), "{reason}");
        assert!(reason.contains(expected), "{reason}");
        assert_eq!(sender.next_measured().await, Transport::Tcp);
    }
}

// Lesson: 18.
#[tokio::test]
async fn a_peer_without_nixl_is_reported_as_a_fallback() {
    let name = "a_peer_without_nixl_is_reported_as_a_fallback";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    let mut sender = CompliantRdmaWorker::start(config(1, Some(with_network_card(&nixl)))).await;
    let receiver = CompliantRdmaWorker::start(config(2, None)).await;
    sender
        .links
        .add_peer(worker(2), PeerRoute::tcp(&receiver.address));
    let reason = sender.next_fallback().await;
    assert!(reason.contains("the peer has no NIXL library"), "{reason}");
    assert_eq!(sender.next_measured().await, Transport::Tcp);
}

static MAKING: (Mutex<bool>, Condvar) = (Mutex::new(true), Condvar::new());

/// A device that does not answer until the flag is cleared.
extern "C" fn agent_that_hangs(
    _: *const c_char,
    _: *const NixlAgentConfig,
    _: *mut NixlHandle,
) -> c_int {
    let (is_hanging, answered) = &MAKING;
    let mut is_hanging = is_hanging.lock().unwrap();
    while *is_hanging {
        is_hanging = answered.wait(is_hanging).unwrap();
    }
    BACKEND_FAILED
}

fn hanging(nixl: &Nixl) -> Arc<Nixl> {
    nixl_with_functions(nixl, |functions| {
        functions.create_configured_agent = agent_that_hangs;
    })
}

// Lesson: 8.
#[tokio::test]
async fn a_hung_agent_creation_falls_back_to_tcp() {
    let name = "a_hung_agent_creation_falls_back_to_tcp";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    // Shorter than the creation of an agent may take.
    let silence_max = Duration::from_secs(1);
    let receiver = LinksConfig {
        connect_timeout: Duration::from_secs(2),
        silence_max,
        ..config(2, Some(hanging(&nixl)))
    };
    let dialler = |number| LinksConfig {
        silence_max,
        ..config(number, Some(with_network_card(&nixl)))
    };
    let (mut first, mut receiver) = pair(dialler(1), receiver).await;
    let reason = first.next_fallback().await;
    assert!(reason.contains("no agent within 4s"), "{reason}");
    assert_eq!(first.next_measured().await, Transport::Tcp);
    receiver.next_lost().await;
    // The next dialler does not wait for the hung creation.
    receiver.add_unreachable_peer(3).await;
    let mut second = CompliantRdmaWorker::start(dialler(3)).await;
    second.links.add_peer(worker(2), receiver.route());
    let reason = second.next_fallback().await;
    assert!(
        reason.contains("has not finished with an agent"),
        "{reason}"
    );
    assert_eq!(second.next_measured().await, Transport::Tcp);
    receiver.next_lost().await;
    // When the device answers at last the worker works as before.
    *MAKING.0.lock().unwrap() = false;
    MAKING.1.notify_all();
    let mut asking = receiver.connect_for_ring(4).await;
    receiver.add_unreachable_peer(4).await;
    loop {
        match answer(&mut asking).await {
            LinkMessage::NoRing(reason) if reason.contains("not finished") => {
                receiver.next_lost().await;
                asking = receiver.connect_for_ring(4).await;
            }
            LinkMessage::NoRing(reason) => break assert!(reason.contains("making an agent")),
            other => panic!("{other:?}"),
        }
    }
}

// Lesson: 15.
/// The first request may have been given up, and a second must not wait for it.
#[tokio::test]
async fn a_newer_link_does_not_wait_for_a_ring_in_creation() {
    let name = "a_newer_link_does_not_wait_for_a_ring_in_creation";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    let config = LinksConfig {
        connect_timeout: Duration::from_secs(600),
        ..config(2, Some(hanging(&nixl)))
    };
    let mut victim = CompliantRdmaWorker::start(config).await;
    victim.add_unreachable_peer(1).await;
    for is_closed in [false, true] {
        let mut first = victim.connect_for_ring(1).await;
        let welcome = first.reader.message().await.unwrap();
        assert!(
            matches!(welcome, LinkMessage::Welcome { .. }),
            "{welcome:?}"
        );
        let sign = first.reader.message().await.unwrap();
        assert_eq!(sign, LinkMessage::KeepAlive);
        if is_closed {
            drop(first);
            assert!(victim.next_lost().await.contains("closed"));
        }
        let mut second = victim.connect(LinkMessage::Hello(hello(1))).await;
        let welcome = second.reader.message().await.unwrap();
        assert!(
            matches!(welcome, LinkMessage::Welcome { .. }),
            "{welcome:?}"
        );
        if !is_closed {
            assert!(victim.next_lost().await.contains("replaced"));
        }
        drop(second);
        victim.next_lost().await;
    }
}

// Lesson: 10.
#[tokio::test]
async fn rings_are_limited_and_only_for_known_peers() {
    let name = "rings_are_limited_and_only_for_known_peers";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    let config = LinksConfig {
        rings_max: 1,
        connect_timeout: Duration::from_secs(2),
        ..config(2, Some(nixl))
    };
    let mut victim = CompliantRdmaWorker::start(config).await;
    let is_refused = |answer: &LinkMessage, why| matches!(answer, LinkMessage::NoRing(reason) if reason.contains(why));
    let answered = answer(&mut victim.connect_for_ring(9).await).await;
    assert!(is_refused(&answered, "no router has named"), "{answered:?}");
    for number in [1, 3] {
        victim.add_unreachable_peer(number).await;
    }
    let mut first = victim.connect_for_ring(1).await;
    let answered = answer(&mut first).await;
    assert!(
        matches!(answered, LinkMessage::RingOffer { .. }),
        "{answered:?}"
    );
    let answered = answer(&mut victim.connect_for_ring(3).await).await;
    assert!(is_refused(&answered, "1 rings"), "{answered:?}");
    victim.next_lost().await;
    drop(first);
    victim.next_lost().await;
    // The ring is freed when its agent has ended.
    loop {
        match answer(&mut victim.connect_for_ring(3).await).await {
            LinkMessage::RingOffer { .. } => break,
            LinkMessage::NoRing(_) => drop(victim.next_lost().await),
            other => panic!("{other:?}"),
        }
    }
}

/// A peer connects before a router has named it.
#[tokio::test]
async fn a_ring_request_waits_until_the_peer_is_known() {
    let Some(nixl) = in_own_process_over("a_ring_request_waits_until_the_peer_is_known", &["tcp"])
    else {
        return;
    };
    let config = LinksConfig {
        connect_timeout: Duration::from_secs(60),
        ..config(2, Some(nixl))
    };
    let mut victim = CompliantRdmaWorker::start(config).await;
    let mut early = victim.connect_for_ring(1).await;
    victim.add_unreachable_peer(1).await;
    let answer = answer(&mut early).await;
    assert!(
        matches!(answer, LinkMessage::RingOffer { .. }),
        "{answer:?}"
    );
}

/// Both ends of one link, without its connection.
async fn ends(nixl: &Arc<Nixl>) -> (RdmaReceiver, ReceiverRing, RdmaWriter) {
    let shape = RingShape {
        slot_bytes: BLOCK,
        slots_count: 2,
    };
    let (names, beat) = (
        AgentNames::of(worker(1), worker(2), 7),
        Duration::from_millis(20),
    );
    let within = Duration::from_secs(20);
    let rings = Arc::new(Semaphore::new(1));
    let parts = RdmaReceiverParts {
        name: names.receiver.clone(),
        shape,
        beat,
        permit: rings.try_acquire_owned().unwrap(),
    };
    let (receiver, mirror, offer) = RdmaReceiver::open(nixl, parts, within).await.unwrap();
    let parts = RdmaWriterParts {
        names,
        shape,
        beat,
        offer,
    };
    let writer = RdmaWriter::open(nixl, parts, within).await.unwrap();
    (receiver, mirror, writer)
}

// Lesson: 5.
#[tokio::test]
async fn a_panic_of_the_writer_thread_fails_the_link() {
    let name = "a_panic_of_the_writer_thread_fails_the_link";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    let (_landing, _mirror, writer) = ends(&nixl).await;
    // A length beyond the ring makes the agent panic.
    writer.write(0, usize::MAX / 2);
    let failed = timeout(Duration::from_secs(20), writer.wait_until_failed()).await;
    assert!(failed.unwrap().contains("panicked"));
}

static IS_BROKEN: AtomicBool = AtomicBool::new(false);

#[allow(unsafe_code)]
extern "C" fn notes_until_it_breaks(
    agent: NixlHandle,
    map: NixlHandle,
    options: NixlHandle,
) -> c_int {
    if IS_BROKEN.load(Ordering::Acquire) {
        return BACKEND_FAILED;
    }
    let real = *NOTES.get().unwrap();
    // SAFETY: the caller upholds the contract of the replaced function.
    unsafe { real(agent, map, options) }
}

type GetNotifsFn = unsafe extern "C" fn(NixlHandle, NixlHandle, NixlHandle) -> c_int;
static NOTES: OnceLock<GetNotifsFn> = OnceLock::new();

// Lesson: 12.
#[tokio::test]
async fn an_agent_failure_on_an_idle_link_is_reported() {
    let name = "an_agent_failure_on_an_idle_link_is_reported";
    let Some(nixl) = in_own_process_over(name, &["tcp"]) else {
        return;
    };
    let breaking = nixl_with_functions(&nixl, |functions| {
        let _ = NOTES.set(functions.get_notifs);
        functions.get_notifs = notes_until_it_breaks;
    });
    let sender = config(1, Some(with_network_card(&nixl)));
    let (mut sender, mut receiver) = pair(sender, config(2, Some(breaking))).await;
    assert_eq!(sender.next_measured().await, Transport::Nixl);
    IS_BROKEN.store(true, Ordering::Release);
    let reason = receiver.next_lost().await;
    assert!(reason.contains("hearing of writes failed"), "{reason}");
}

/// The check accepts the metadata of a real agent.
#[tokio::test]
async fn metadata_of_a_real_agent_passes_the_check() {
    let Some(nixl) = in_own_process_over(
        "metadata_of_a_real_agent_passes_the_check",
        &["tcp", "posix"],
    ) else {
        return;
    };
    ends(&nixl).await;
}
