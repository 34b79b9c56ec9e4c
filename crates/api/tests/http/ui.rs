//! The page for operators: who may see it, how many at once, and what they are sent.

use crate::stage::{Answer, Set, files, options, send, set, set_with};
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use cleave_api::{AdminKey, ApiOptions, Board, Scaling, WorkerRow, WorkerState};
use cleave_domain::Role;
use http_body_util::BodyExt;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tower::ServiceExt;

const FILES: [&str; 6] = [
    "/ui",
    "/ui/style.css",
    "/ui/page.js",
    "/ui/workers.js",
    "/ui/prompt.js",
    "/ui/words.js",
];

fn row(name: &str, running: u32) -> WorkerRow {
    WorkerRow {
        name: name.to_owned(),
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
        step: None,
        heard: None,
        tokens_per_second: None,
        placed: 0,
    }
}

fn board(workers: Vec<WorkerRow>) -> Board {
    Board {
        workers,
        ..Board::default()
    }
}

/// A fleet is shown, of these workers.
fn shows(set: &Set, workers: Vec<WorkerRow>) {
    *set.stage.board.lock().unwrap() = Some(board(workers));
}

/// What an open stream says.
struct Viewer {
    body: Body,
    rest: String,
}

impl Viewer {
    async fn open(set: &Set) -> Result<Self, u16> {
        let mut request = Request::get("/ui/events").body(Body::empty()).unwrap();
        let here = ConnectInfo(SocketAddr::from(([127, 0, 0, 1], 40_000)));
        request.extensions_mut().insert(here);
        let response = set.router.clone().oneshot(request).await.unwrap();
        match response.status().as_u16() {
            200 => Ok(Self {
                body: response.into_body(),
                rest: String::new(),
            }),
            status => Err(status),
        }
    }

    /// The next event; none once the stream has ended.
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

fn made(set: &Set) -> u32 {
    set.stage.boards_made.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn a_viewer_is_sent_a_snapshot_and_then_what_changed() {
    let set = set("llama3");
    shows(&set, vec![row("a", 1), row("b", 1)]);
    let mut viewer = Viewer::open(&set).await.unwrap();
    let (name, event) = viewer.next().await.unwrap();
    assert_eq!((name.as_str(), names(&event)), ("snapshot", vec!["a", "b"]));
    assert_eq!(event["columns"][5], "running");
    shows(&set, vec![row("b", 2), row("c", 1)]);
    let (name, event) = viewer.next().await.unwrap();
    assert_eq!((name.as_str(), names(&event)), ("delta", vec!["b", "c"]));
    assert_eq!(event["gone"], serde_json::json!(["a"]));
    assert_eq!(event["workers"][0][5], 2);
    // Who comes later begins where the others are.
    let mut later = Viewer::open(&set).await.unwrap();
    let (name, event) = later.next().await.unwrap();
    assert_eq!((name.as_str(), names(&event)), ("snapshot", vec!["b", "c"]));
    shows(&set, vec![row("b", 2), row("c", 7)]);
    for viewer in [&mut viewer, &mut later] {
        assert_eq!(names(&viewer.next().await.unwrap().1), ["c"]);
    }
    assert_eq!(event.get("scaling"), None, "nobody decides");
    let scaling = Some(Scaling::default());
    set.stage.board.lock().unwrap().as_mut().unwrap().scaling = scaling;
    let (_, event) = viewer.next().await.unwrap();
    assert_eq!(event["scaling"]["advisory"], false);
    // The server stops: everybody is let go.
    *set.stage.board.lock().unwrap() = None;
    later.next().await.unwrap();
    assert!(viewer.next().await.is_none() && later.next().await.is_none());
    assert_eq!(Viewer::open(&set).await.err(), Some(503));
}

#[tokio::test(start_paused = true)]
async fn a_board_was_made_for_each_viewer_and_for_none() {
    let set = set("llama3");
    shows(&set, vec![row("a", 1)]);
    tokio::time::advance(Duration::from_secs(10)).await;
    assert_eq!(made(&set), 0, "nobody looks");
    let mut viewers = Vec::new();
    for _ in 0..5 {
        viewers.push(Viewer::open(&set).await.unwrap());
    }
    for second in 0..4 {
        for viewer in &mut viewers {
            viewer.next().await.unwrap();
        }
        assert_eq!(made(&set), 1 + second, "one for all");
    }
    drop(viewers);
    let before = made(&set);
    for _ in 0..30 {
        tokio::time::advance(Duration::from_secs(1)).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(made(&set), before, "nobody looks any more");
    // And it begins again.
    let mut viewer = Viewer::open(&set).await.unwrap();
    assert_eq!(viewer.next().await.unwrap().0, "snapshot");
    assert_eq!(viewer.next().await.unwrap().0, "delta");
}

#[tokio::test(start_paused = true)]
async fn viewers_that_do_not_read_kept_others_out() {
    let set = set("llama3");
    shows(&set, vec![row("a", 1)]);
    let mut reads = Viewer::open(&set).await.unwrap();
    let mut sleepers = Vec::new();
    let full = loop {
        match Viewer::open(&set).await {
            Ok(viewer) => sleepers.push(viewer),
            Err(status) => break status,
        }
        assert!(sleepers.len() < 1_000, "there is no bound");
    };
    assert_eq!((full, sleepers.len()), (503, 31));
    for _ in 0..20 {
        reads.next().await.unwrap();
    }
    // They were let go, each with the few events that waited for it.
    let mut sleeper = sleepers.pop().unwrap();
    let mut waited = 0;
    while sleeper.next().await.is_some() {
        waited += 1;
    }
    assert!((2..=8).contains(&waited), "{waited}");
    assert!(Viewer::open(&set).await.is_ok());
    assert!(reads.next().await.is_some(), "who reads stays");
}

async fn get(set: &Set, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::get(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    send(set.router.clone(), request.body(Body::empty()).unwrap()).await
}

#[tokio::test]
async fn the_page_could_be_framed_or_brought_things_from_elsewhere() {
    let set = set("llama3");
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
async fn strangers_saw_the_fleet_where_no_key_was_set() {
    let set = set("llama3");
    for path in ["/ui", "/ui/events", "/ui/page.js", "/admin/workers"] {
        for strange in [
            // A page whose name was made to mean this machine.
            [("host", "rebound.example:8000")].as_slice(),
            // A page of another site or port, by whatever tag.
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
            // Handed on by a proxy here.
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
    // Browsers say where a page's own scripts are asked for; of its facts nobody may.
    let own = [
        ("host", "localhost:8000"),
        ("origin", "http://localhost:8000"),
    ];
    assert_eq!(get(&set, "/ui/page.js", &own).await.status, 200);
    for path in ["/ui/events", "/admin/workers"] {
        get(&set, path, &own).await.is_error(403, "forbidden", None);
    }
    // Its user follows a link.
    let followed = [
        ("host", "127.0.0.1:8000"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
    ];
    assert_eq!(get(&set, "/ui", &followed).await.status, 200);
}

#[tokio::test]
async fn the_key_was_not_asked_for() {
    let key = AdminKey::new("letmein").unwrap();
    let options = ApiOptions {
        admin_key: Some(key),
        ..options()
    };
    let set = set_with(files("llama3"), options);
    // What asks for the key is for everybody, by whatever name.
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
    // The right one is let in, and finds that nothing is shown.
    let right = [("authorization", "Bearer letmein")];
    get(&set, "/ui/events", &right)
        .await
        .is_error(503, "draining", None);
}
