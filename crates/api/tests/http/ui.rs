//! The page for operators: access, limit of viewers, and the events they receive.

use crate::scripted_server::{
    HttpAnswer, TestServer, files, options, respond, send, server, server_with,
};
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use cleave_api::{AdminKey, ApiOptions, FleetSnapshot, ScalingSummary, WorkerRow, WorkerState};
use cleave_domain::Role;
use http_body_util::BodyExt;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

const FILES: [&str; 16] = [
    "/ui",
    "/ui/chat",
    "/ui/style.css",
    "/ui/chat.css",
    "/ui/page.js",
    "/ui/workers.js",
    "/ui/prompt.js",
    "/ui/chat.js",
    "/ui/turn_view.js",
    "/ui/conversation.js",
    "/ui/json.js",
    "/ui/events.js",
    "/ui/event_log.js",
    "/ui/waterfall.js",
    "/ui/theme.js",
    "/ui/words.js",
];

fn row(name: &str, running: u32) -> WorkerRow {
    WorkerRow {
        name: name.to_owned(),
        model: "m".to_owned(),
        role: Role::Decode,
        state: WorkerState::Ready,
        device: None,
        sharing: 0,
        running,
        waiting: 0,
        queue_tokens: 0,
        backlog: Duration::ZERO,
        blocks_held: 0,
        blocks_count: 8,
        last_step: None,
        since_report: None,
        tokens_per_second: None,
        placed: 0,
    }
}

fn board(workers: Vec<WorkerRow>) -> FleetSnapshot {
    FleetSnapshot {
        workers,
        ..FleetSnapshot::default()
    }
}

/// Sets the workers of the fleet.
fn set_workers(set: &TestServer, workers: Vec<WorkerRow>) {
    *set.frontend.snapshot.lock().unwrap() = Some(board(workers));
}

/// A client that reads an open stream of events.
struct UiViewer {
    body: Body,
    rest: String,
}

impl UiViewer {
    async fn open(set: &TestServer) -> Result<Self, u16> {
        let request = Request::get("/ui/events").body(Body::empty()).unwrap();
        let response = respond(set.router.clone(), request).await;
        match response.status().as_u16() {
            200 => Ok(Self {
                body: response.into_body(),
                rest: String::new(),
            }),
            status => Err(status),
        }
    }

    /// Returns the next event; `None` after the end of the stream.
    async fn next(&mut self) -> Option<(String, Value)> {
        while !self.rest.contains("\n\n") {
            let frame = self.body.frame().await?.unwrap();
            let bytes = frame.into_data().unwrap();
            self.rest += std::str::from_utf8(&bytes).unwrap();
        }
        let (event, rest) = self.rest.split_once("\n\n").unwrap();
        let (name, data) = event.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        self.rest = rest.to_owned();
        Some((name, data))
    }
}

fn names(event: &Value) -> Vec<&str> {
    let rows = event["workers"].as_array().unwrap();
    rows.iter().map(|row| row[0].as_str().unwrap()).collect()
}

fn snapshots_made(set: &TestServer) -> u32 {
    set.frontend.snapshots_made.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn viewers_get_a_snapshot_and_then_changes() {
    let set = server("llama3");
    set_workers(&set, vec![row("a", 1), row("b", 1)]);
    let mut viewer = UiViewer::open(&set).await.unwrap();
    let (name, event) = viewer.next().await.unwrap();
    assert_eq!((name.as_str(), names(&event)), ("snapshot", vec!["a", "b"]));
    assert_eq!(event["columns"][5], "running");
    set_workers(&set, vec![row("b", 2), row("c", 1)]);
    let (name, event) = viewer.next().await.unwrap();
    assert_eq!((name.as_str(), names(&event)), ("delta", vec!["b", "c"]));
    assert_eq!(event["gone"], serde_json::json!(["a"]));
    assert_eq!(event["workers"][0][5], 2);
    // A later viewer starts with the current state.
    let mut later = UiViewer::open(&set).await.unwrap();
    let (name, event) = later.next().await.unwrap();
    assert_eq!((name.as_str(), names(&event)), ("snapshot", vec!["b", "c"]));
    set_workers(&set, vec![row("b", 2), row("c", 7)]);
    for viewer in [&mut viewer, &mut later] {
        assert_eq!(names(&viewer.next().await.unwrap().1), ["c"]);
    }
    assert_eq!(event.get("scaling"), None, "nobody decides");
    let scaling = Some(ScalingSummary::default());
    set.frontend
        .snapshot
        .lock()
        .unwrap()
        .as_mut()
        .unwrap()
        .scaling = scaling;
    let (_, event) = viewer.next().await.unwrap();
    assert_eq!(event["scaling"]["advisory"], false);
    // The server stops: all viewers are disconnected.
    *set.frontend.snapshot.lock().unwrap() = None;
    later.next().await.unwrap();
    assert!(viewer.next().await.is_none() && later.next().await.is_none());
    assert_eq!(UiViewer::open(&set).await.err(), Some(503));
}

#[tokio::test(start_paused = true)]
async fn one_snapshot_a_second_serves_all_viewers() {
    let set = server("llama3");
    set_workers(&set, vec![row("a", 1)]);
    tokio::time::advance(Duration::from_secs(10)).await;
    assert_eq!(snapshots_made(&set), 0, "nobody looks");
    let mut viewers = Vec::new();
    for _ in 0..5 {
        viewers.push(UiViewer::open(&set).await.unwrap());
    }
    for second in 0..4 {
        for viewer in &mut viewers {
            viewer.next().await.unwrap();
        }
        assert_eq!(snapshots_made(&set), 1 + second, "one for all");
    }
    drop(viewers);
    let before = snapshots_made(&set);
    for _ in 0..30 {
        tokio::time::advance(Duration::from_secs(1)).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(snapshots_made(&set), before, "nobody looks any more");
    // A new viewer starts the snapshots again.
    let mut viewer = UiViewer::open(&set).await.unwrap();
    assert_eq!(viewer.next().await.unwrap().0, "snapshot");
    assert_eq!(viewer.next().await.unwrap().0, "delta");
}

#[tokio::test(start_paused = true)]
async fn viewers_that_do_not_read_are_disconnected() {
    let set = server("llama3");
    set_workers(&set, vec![row("a", 1)]);
    let mut reads = UiViewer::open(&set).await.unwrap();
    let mut sleepers = Vec::new();
    let full = loop {
        match UiViewer::open(&set).await {
            Ok(viewer) => sleepers.push(viewer),
            Err(status) => break status,
        }
        assert!(sleepers.len() < 1_000, "there is no bound");
    };
    assert_eq!((full, sleepers.len()), (503, 31));
    for _ in 0..20 {
        reads.next().await.unwrap();
    }
    // The idle viewers were disconnected, each after the few events in its queue.
    let mut sleeper = sleepers.pop().unwrap();
    let mut waited = 0;
    while sleeper.next().await.is_some() {
        waited += 1;
    }
    assert!((2..=8).contains(&waited), "{waited}");
    assert!(UiViewer::open(&set).await.is_ok());
    assert!(reads.next().await.is_some(), "who reads stays");
}

async fn get(set: &TestServer, path: &str, headers: &[(&str, &str)]) -> HttpAnswer {
    let mut request = Request::get(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(set.router.clone(), request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn the_page_is_not_framed_and_loads_nothing_external() {
    let set = server("llama3");
    for path in FILES {
        let answer = get(&set, path, &[("host", "localhost:8000")]).await;
        assert_eq!(answer.status, 200, "{path}");
        let policy = answer.header("content-security-policy");
        for rule in [
            "default-src 'none'",
            "script-src 'self'",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(rule), "{path}: {policy}");
        }
        assert!(
            !policy.contains("-inline") && !policy.contains("-eval"),
            "{policy}"
        );
        assert_eq!(answer.header("x-frame-options"), "DENY");
        assert_eq!(answer.header("x-content-type-options"), "nosniff");
        assert_eq!(answer.header("cross-origin-resource-policy"), "same-origin");
        let names_a_host = answer.body.replace("http://www.w3.org/2000/svg", "");
        let names_a_host = names_a_host.replace("'http://www.w3.org", "");
        assert!(!names_a_host.contains("http://"), "{path} names a host");
        assert!(!names_a_host.contains("https://"), "{path} names a host");
        assert!(
            !answer.body.contains(" style=\""),
            "{path} has styles in line"
        );
    }
}

#[tokio::test]
async fn without_a_key_the_ui_is_local_only() {
    let set = server("llama3");
    for path in ["/ui", "/ui/events", "/ui/page.js", "/admin/workers"] {
        for strange in [
            // DNS rebinding: a host name that resolves to this machine.
            [("host", "rebound.example:8000")].as_slice(),
            // A page of another site or port, with any kind of request.
            &[
                ("host", "localhost"),
                ("sec-fetch-site", "cross-site"),
                ("sec-fetch-mode", "no-cors"),
            ],
            &[
                ("host", "localhost"),
                ("sec-fetch-site", "same-site"),
                ("sec-fetch-mode", "cors"),
            ],
            // A request forwarded by a local proxy.
            &[("host", "localhost"), ("x-forwarded-for", "203.0.113.7")],
        ] {
            get(&set, path, strange)
                .await
                .is_error(403, "forbidden", None);
        }
        let mut request = Request::get(path).header("host", "localhost");
        let far = ConnectInfo(SocketAddr::from(([203, 0, 113, 7], 40_000)));
        request.extensions_mut().unwrap().insert(far);
        let request = request.body(Body::empty()).unwrap();
        send(set.router.clone(), request)
            .await
            .is_error(403, "forbidden", None);
    }
    // Browsers send the origin of a page's own scripts; the events are refused with any origin.
    let own = [
        ("host", "localhost:8000"),
        ("origin", "http://localhost:8000"),
    ];
    assert_eq!(get(&set, "/ui/page.js", &own).await.status, 200);
    for path in ["/ui/events", "/admin/workers"] {
        get(&set, path, &own).await.is_error(403, "forbidden", None);
    }
    // The user follows a link.
    let followed = [
        ("host", "127.0.0.1:8000"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
    ];
    assert_eq!(get(&set, "/ui", &followed).await.status, 200);
}

#[tokio::test]
async fn ui_events_need_the_admin_key() {
    let key = AdminKey::new("letmein").unwrap();
    let options = ApiOptions {
        admin_key: Some(key),
        ..options()
    };
    let set = server_with(files("llama3"), options);
    // The page that asks for the key is public, under any host name.
    for path in FILES {
        assert_eq!(
            get(&set, path, &[("host", "cleave.example")]).await.status,
            200
        );
    }
    get(&set, "/ui/events", &[])
        .await
        .is_error(401, "invalid_api_key", None);
    let wrong = [("authorization", "Bearer letmeout")];
    get(&set, "/ui/events", &wrong)
        .await
        .is_error(401, "invalid_api_key", None);
    let in_address = get(&set, "/ui/events?key=letmein", &[]).await;
    in_address.is_error(401, "invalid_api_key", None);
    // The right key is accepted; the frontend shows no snapshot.
    let right = [("authorization", "Bearer letmein")];
    get(&set, "/ui/events", &right)
        .await
        .is_error(503, "draining", None);
}
