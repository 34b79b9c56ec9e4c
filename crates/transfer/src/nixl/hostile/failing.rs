//! What fails, hangs or asks for too much while a link over NIXL is made: the library with functions that a device in
//! trouble would make of them.
//!
//! Owns: those functions, and what both ends must do about each. Never: changes the library for other tests: each that
//! does runs in a process of its own. Invariant: whatever the library does, a link is made another way or its end is told,
//! and nobody waits for ever.

use super::*;

/// As the tests beside, which have another module's name.
fn alone_over(name: &str, ways: &[&str]) -> Option<Arc<Nixl>> {
    super::alone_over(&format!("failing::{name}"), ways)
}

/// What the library says when a device fails.
const BACKEND_FAILED: c_int = -2;

extern "C" fn write_that_fails(_: Handle, _: Handle, _: Handle) -> c_int {
    BACKEND_FAILED
}

extern "C" fn write_that_goes_on(_: Handle, _: Handle, _: Handle) -> c_int {
    IN_PROGRESS
}

extern "C" fn status_of_one_that_goes_on(_: Handle, _: Handle) -> c_int {
    IN_PROGRESS
}

/// Two workers, the second of which can be dialled by the first over NIXL and over TCP.
async fn pair(sender: LinksConfig, receiver: LinksConfig) -> (Victim, Victim) {
    let sender = Victim::start(sender).await;
    let mut receiver = Victim::start(receiver).await;
    receiver.hears_of(1).await;
    sender.links.know(worker(2), receiver.route());
    (sender, receiver)
}

#[tokio::test]
async fn lesson_18_a_link_whose_first_writes_failed_was_lost_again_and_again() {
    let name = "lesson_18_a_link_whose_first_writes_failed_was_lost_again_and_again";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    let at_once: fn(&mut Functions) = |functions| functions.post_xfer_req = write_that_fails;
    let never: fn(&mut Functions) = |functions| {
        functions.post_xfer_req = write_that_goes_on;
        functions.get_xfer_status = status_of_one_that_goes_on;
    };
    for (fails, says) in [(at_once, "beginning a write"), (never, "did not come")] {
        let sender = LinksConfig {
            connect_timeout: Duration::from_secs(3),
            ..config(1, Some(with(&nixl, fails)))
        };
        let (mut sender, mut receiver) = pair(sender, config(2, Some(by_card(&nixl)))).await;
        let reason = sender.fell_back().await;
        assert!(reason.contains(says), "{reason}");
        assert_eq!(sender.measured().await, Transport::Tcp);
        receiver.lost().await;
        // A newer link takes the place of the one that stands; no time goes on trying the card again.
        let _replacing = receiver.knock(Message::Hello(hello(1))).await;
        sender.lost().await;
        sender.links.link(worker(2)).unwrap();
        let reason = sender.fell_back().await;
        assert!(reason.contains("not tried again for"), "{reason}");
        assert!(reason.contains(says), "{reason}");
        assert_eq!(sender.measured().await, Transport::Tcp);
    }
}

#[tokio::test]
async fn lesson_18_a_peer_without_the_library_is_told_of_where_a_card_could_write() {
    let name = "lesson_18_a_peer_without_the_library_is_told_of_where_a_card_could_write";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    let mut sender = Victim::start(config(1, Some(by_card(&nixl)))).await;
    let receiver = Victim::start(config(2, None)).await;
    sender.links.know(worker(2), Route::tcp(&receiver.address));
    let reason = sender.fell_back().await;
    assert!(reason.contains("the peer has no NIXL library"), "{reason}");
    assert_eq!(sender.measured().await, Transport::Tcp);
}

static MAKING: (Mutex<bool>, Condvar) = (Mutex::new(true), Condvar::new());

/// As a device that does not answer; it does once this is no more.
extern "C" fn agent_that_hangs(_: *const c_char, _: *const AgentConfig, _: *mut Handle) -> c_int {
    let (is_hanging, answered) = &MAKING;
    let mut is_hanging = is_hanging.lock().unwrap();
    while *is_hanging {
        is_hanging = answered.wait(is_hanging).unwrap();
    }
    BACKEND_FAILED
}

fn hanging(nixl: &Nixl) -> Arc<Nixl> {
    with(nixl, |functions| {
        functions.create_configured_agent = agent_that_hangs;
    })
}

#[tokio::test]
async fn lesson_08_an_agent_that_hung_kept_tcp_from_being_tried() {
    let name = "lesson_08_an_agent_that_hung_kept_tcp_from_being_tried";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    // Less than an agent may take.
    let silence_max = Duration::from_secs(1);
    let receiver = LinksConfig {
        connect_timeout: Duration::from_secs(2),
        silence_max,
        ..config(2, Some(hanging(&nixl)))
    };
    let dialler = |number| LinksConfig {
        silence_max,
        ..config(number, Some(by_card(&nixl)))
    };
    let (mut first, mut receiver) = pair(dialler(1), receiver).await;
    let reason = first.fell_back().await;
    assert!(reason.contains("no agent within 4s"), "{reason}");
    assert_eq!(first.measured().await, Transport::Tcp);
    receiver.lost().await;
    // The next one is not kept waiting for what cannot be.
    receiver.hears_of(3).await;
    let mut second = Victim::start(dialler(3)).await;
    second.links.know(worker(2), receiver.route());
    let reason = second.fell_back().await;
    assert!(
        reason.contains("has not finished with an agent"),
        "{reason}"
    );
    assert_eq!(second.measured().await, Transport::Tcp);
    receiver.lost().await;
    // When the device answers at last the worker is as it was.
    *MAKING.0.lock().unwrap() = false;
    MAKING.1.notify_all();
    let mut asking = receiver.approach(4).await;
    receiver.hears_of(4).await;
    loop {
        match answer(&mut asking).await {
            Message::NoLanding(reason) if reason.contains("not finished") => {
                receiver.lost().await;
                asking = receiver.approach(4).await;
            }
            Message::NoLanding(reason) => break assert!(reason.contains("making an agent")),
            other => panic!("{other:?}"),
        }
    }
}

/// Whoever made the first wish may have given it up, and whoever makes the second is not to wait for it.
#[tokio::test]
async fn lesson_15_a_ring_that_was_being_made_kept_the_peers_next_link_waiting() {
    let name = "lesson_15_a_ring_that_was_being_made_kept_the_peers_next_link_waiting";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    let config = LinksConfig {
        connect_timeout: Duration::from_secs(600),
        ..config(2, Some(hanging(&nixl)))
    };
    let mut victim = Victim::start(config).await;
    victim.hears_of(1).await;
    for is_closed in [false, true] {
        let mut first = victim.approach(1).await;
        let welcome = first.reader.message().await.unwrap();
        assert!(matches!(welcome, Message::Welcome { .. }), "{welcome:?}");
        let sign = first.reader.message().await.unwrap();
        assert_eq!(sign, Message::Wait);
        if is_closed {
            drop(first);
            assert!(victim.lost().await.contains("closed"));
        }
        let mut second = victim.knock(Message::Hello(hello(1))).await;
        let welcome = second.reader.message().await.unwrap();
        assert!(matches!(welcome, Message::Welcome { .. }), "{welcome:?}");
        if !is_closed {
            assert!(victim.lost().await.contains("replaced"));
        }
        drop(second);
        victim.lost().await;
    }
}

#[tokio::test]
async fn lesson_10_whoever_asked_got_a_ring_until_memory_was_gone() {
    let name = "lesson_10_whoever_asked_got_a_ring_until_memory_was_gone";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    let config = LinksConfig {
        rings_max: 1,
        connect_timeout: Duration::from_secs(2),
        ..config(2, Some(nixl))
    };
    let mut victim = Victim::start(config).await;
    let is_refused = |answer: &Message, why| matches!(answer, Message::NoLanding(reason) if reason.contains(why));
    let answered = answer(&mut victim.approach(9).await).await;
    assert!(is_refused(&answered, "no router has named"), "{answered:?}");
    for number in [1, 3] {
        victim.hears_of(number).await;
    }
    let mut first = victim.approach(1).await;
    let answered = answer(&mut first).await;
    assert!(matches!(answered, Message::Landing { .. }), "{answered:?}");
    let answered = answer(&mut victim.approach(3).await).await;
    assert!(is_refused(&answered, "1 rings"), "{answered:?}");
    victim.lost().await;
    drop(first);
    victim.lost().await;
    // The ring goes when its agent has ended.
    loop {
        match answer(&mut victim.approach(3).await).await {
            Message::Landing { .. } => break,
            Message::NoLanding(_) => drop(victim.lost().await),
            other => panic!("{other:?}"),
        }
    }
}

/// A peer that is quicker than the routers' word of it.
#[tokio::test]
async fn a_peer_that_asks_before_it_was_named_is_waited_for() {
    let Some(nixl) = alone_over(
        "a_peer_that_asks_before_it_was_named_is_waited_for",
        &["tcp"],
    ) else {
        return;
    };
    let config = LinksConfig {
        connect_timeout: Duration::from_secs(60),
        ..config(2, Some(nixl))
    };
    let mut victim = Victim::start(config).await;
    let mut early = victim.approach(1).await;
    victim.hears_of(1).await;
    let answer = answer(&mut early).await;
    assert!(matches!(answer, Message::Landing { .. }), "{answer:?}");
}

/// The two ends of one link, without it.
async fn ends(nixl: &Arc<Nixl>) -> (Landing, Mirror, Writer) {
    let shape = Shape {
        slot_bytes: BLOCK,
        slots_count: 2,
    };
    let (names, beat) = (
        Names::of((worker(1), worker(2)), 7),
        Duration::from_millis(20),
    );
    let within = Duration::from_secs(20);
    let rings = Arc::new(Semaphore::new(1));
    let parts = LandingParts {
        name: names.receiver.clone(),
        shape,
        beat,
        permit: rings.try_acquire_owned().unwrap(),
    };
    let (landing, mirror, offer) = Landing::open(nixl, parts, within).await.unwrap();
    let parts = WriterParts {
        names,
        shape,
        beat,
        offer,
    };
    let writer = Writer::open(nixl, parts, within).await.unwrap();
    (landing, mirror, writer)
}

#[tokio::test]
async fn lesson_05_a_panic_of_the_thread_that_writes_hung_its_link() {
    let name = "lesson_05_a_panic_of_the_thread_that_writes_hung_its_link";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    let (_landing, _mirror, writer) = ends(&nixl).await;
    // More than there is: the agent panics.
    writer.write(0, usize::MAX / 2);
    let failed = timeout(Duration::from_secs(20), writer.failed()).await;
    assert!(failed.unwrap().contains("panicked"));
}

static IS_BROKEN: AtomicBool = AtomicBool::new(false);

#[allow(unsafe_code)]
extern "C" fn notes_until_it_breaks(agent: Handle, map: Handle, options: Handle) -> c_int {
    if IS_BROKEN.load(Ordering::Acquire) {
        return BACKEND_FAILED;
    }
    let real = *NOTES.get().unwrap();
    // SAFETY: what the caller says to the function that this stands in for.
    unsafe { real(agent, map, options) }
}

type GetNotes = unsafe extern "C" fn(Handle, Handle, Handle) -> c_int;
static NOTES: OnceLock<GetNotes> = OnceLock::new();

#[tokio::test]
async fn lesson_12_an_agent_that_failed_while_nothing_came_was_never_told_of() {
    let name = "lesson_12_an_agent_that_failed_while_nothing_came_was_never_told_of";
    let Some(nixl) = alone_over(name, &["tcp"]) else {
        return;
    };
    let breaking = with(&nixl, |functions| {
        let _ = NOTES.set(functions.get_notifs);
        functions.get_notifs = notes_until_it_breaks;
    });
    let sender = config(1, Some(by_card(&nixl)));
    let (mut sender, mut receiver) = pair(sender, config(2, Some(breaking))).await;
    assert_eq!(sender.measured().await, Transport::Nixl);
    IS_BROKEN.store(true, Ordering::Release);
    let reason = receiver.lost().await;
    assert!(reason.contains("hearing of writes failed"), "{reason}");
}

/// The words of a real agent are those that are checked for.
#[tokio::test]
async fn metadata_of_a_real_agent_is_known_by_its_form() {
    let Some(nixl) = alone_over(
        "metadata_of_a_real_agent_is_known_by_its_form",
        &["tcp", "posix"],
    ) else {
        return;
    };
    ends(&nixl).await;
}
