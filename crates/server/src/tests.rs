//! Hostile and slow clients at a port, over real sockets.

mod half_close;

use super::*;
use axum::body::{Body, Bytes};
use axum::routing::get;
use cleave_telemetry::Telemetry;
use futures::stream;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;

const PATIENCE: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

fn limits() -> HttpLimits {
    HttpLimits {
        connections_max: Some(400),
        ..HttpLimits::default()
    }
}

struct PortFixture {
    server: HttpServer,
    telemetry: Telemetry,
    go: Arc<Notify>,
}

async fn port(limits: HttpLimits) -> PortFixture {
    let go = Arc::new(Notify::new());
    let wait = Arc::clone(&go);
    let endless = async || {
        let chunk = Bytes::from(vec![b'x'; 1 << 16]);
        Body::from_stream(stream::repeat_with(move || {
            Ok::<_, io::Error>(chunk.clone())
        }))
    };
    let waits = async move || {
        wait.notified().await;
        "waited"
    };
    let routes = Router::new()
        .route("/", get(async || "here"))
        .route("/wait", get(waits))
        .route("/endless", get(endless));
    let telemetry = Telemetry::default();
    let listener = bind("127.0.0.1:0").await.unwrap();
    let series = telemetry.servers.clone();
    let server = HttpServer::start(listener, PortRoutes::clear(routes), limits, series).unwrap();
    PortFixture {
        server,
        telemetry,
        go,
    }
}

impl PortFixture {
    async fn dial(&self) -> TcpStream {
        TcpStream::connect(self.server.address).await.unwrap()
    }

    fn has_closed_for(&self, reason: &str) -> bool {
        let line = format!("cleave_connections_let_go_total{{reason=\"{reason}\"}} 0");
        !self.telemetry.text().contains(&line)
    }
}

/// Sends these bytes and reads until the other end closes.
async fn exchange(stream: &mut TcpStream, bytes: &[u8]) -> String {
    // The server may have closed already, after its answer.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let read = timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    let _reset = read.expect("the server closes in time");
    String::from_utf8_lossy(&answer).into_owned()
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
const LAST: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

/// One answer on a connection that stays.
async fn ask(stream: &mut TcpStream) -> String {
    stream.write_all(GET).await.unwrap();
    let mut answer = String::new();
    while !answer.ends_with("here") {
        let mut some = [0; 512];
        let count = timeout(PATIENCE, stream.read(&mut some)).await.unwrap();
        let count = count.unwrap();
        assert!(count > 0, "closed after {answer:?}");
        answer += std::str::from_utf8(&some[..count]).unwrap();
    }
    answer
}

#[tokio::test]
async fn endless_headers_close_the_connection() {
    let limits = HttpLimits {
        headers_wait_max: SHORT,
        ..limits()
    };
    let port = port(limits).await;
    let mut slow = port.dial().await;
    // A first request is answered; the headers of the second one never end.
    ask(&mut slow).await;
    let (mut reads, mut writes) = slow.into_split();
    let trickle = async {
        let mut sent = writes.write_all(b"GET / HTTP/1.1\r\n").await;
        while sent.is_ok() {
            tokio::time::sleep(SHORT / 20).await;
            sent = writes.write_all(b"x: y\r\n").await;
        }
    };
    let closed = async {
        let mut rest = Vec::new();
        reads.read_to_end(&mut rest).await
    };
    let ended = timeout(PATIENCE, async {
        tokio::select! {
            () = trickle => {}
            _ = closed => {}
        }
    });
    ended.await.expect("it is closed in time");
    assert!(port.has_closed_for("slow_headers"));
    assert!(
        exchange(&mut port.dial().await, LAST)
            .await
            .contains("here")
    );
}

#[tokio::test]
async fn oversized_headers_are_refused() {
    let port = port(limits()).await;
    let request = |headers: &str| format!("GET / HTTP/1.1\r\nconnection: close\r\n{headers}\r\n");
    let long = |bytes: usize| request(&format!("x: {}\r\n", "y".repeat(bytes)));
    let many = |count: usize| request(&"x: y\r\n".repeat(count));
    let (bytes, count) = (
        limits::HEADERS_BYTES_MAX as usize,
        limits::HEADERS_COUNT_MAX,
    );
    // A request within the limits is served, and one a little beyond them is not.
    for text in [long(bytes / 2), many(count - 1)] {
        let answer = exchange(&mut port.dial().await, text.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    for text in [long(2 * bytes), many(count), long(1 << 20), many(1000)] {
        let answer = exchange(&mut port.dial().await, text.as_bytes()).await;
        // A client that is still writing may get a reset before the answer.
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
            "{answer}"
        );
    }
    assert!(
        exchange(&mut port.dial().await, LAST)
            .await
            .contains("here")
    );
}

// Invariant: I45.
#[tokio::test]
async fn connections_beyond_the_limit_are_closed_at_once() {
    let port = port(limits()).await;
    let mut first = port.dial().await;
    ask(&mut first).await;
    let mut more = Vec::new();
    for _ in 0..1000 {
        more.push(port.dial().await);
    }
    // Connections beyond the limit are closed, and 399 of these stay.
    let mut closed = 0;
    for stream in &mut more {
        let answer = async {
            let mut byte = [0; 1];
            stream.write_all(GET).await?;
            stream.read(&mut byte).await
        };
        let answered = timeout(PATIENCE, answer).await.unwrap();
        closed += usize::from(!matches!(answered, Ok(1)));
    }
    assert_eq!(closed, 1000 - 399);
    assert!(port.has_closed_for("full"));
    ask(&mut first).await;
    drop(more);
    // Places are free again.
    let served = async {
        while !exchange(&mut port.dial().await, LAST)
            .await
            .contains("here")
        {}
    };
    timeout(PATIENCE, served).await.expect("a place in time");
}

#[tokio::test]
async fn idle_connections_are_closed_and_busy_ones_are_not() {
    let limits = HttpLimits {
        idle_max: SHORT,
        ..limits()
    };
    let port = port(limits).await;
    let mut busy = port.dial().await;
    let wait = b"GET /wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    busy.write_all(wait).await.unwrap();
    let mut used = port.dial().await;
    ask(&mut used).await;
    let mut silent = port.dial().await;
    for idle in [&mut used, &mut silent] {
        assert_eq!(exchange(idle, b"").await, "", "closed without a word");
    }
    assert!(port.has_closed_for("idle"));
    port.go.notify_one();
    assert!(exchange(&mut busy, b"").await.contains("waited"));
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_closed() {
    let limits = HttpLimits {
        stall_max: SHORT,
        ..limits()
    };
    let port = port(limits).await;
    let mut stream = port.dial().await;
    let endless = b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n";
    stream.write_all(endless).await.unwrap();
    let gone = async {
        while !port.has_closed_for("stalled") {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, gone).await.expect("it is let go in time");
}

#[tokio::test]
async fn an_http2_client_that_gives_no_window_is_closed() {
    let limits = HttpLimits {
        stall_max: SHORT,
        ..limits()
    };
    let port = port(limits).await;
    let io = TokioIo::new(port.dial().await);
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(1 << 16)
        .handshake(io)
        .await
        .unwrap();
    tokio::spawn(connection);
    let get = |path: &str| {
        let uri = format!("http://x{path}");
        hyper::Request::get(uri)
            .body(Empty::<Bytes>::new())
            .unwrap()
    };
    let unread = sender.send_request(get("/endless")).await.unwrap();
    // The connection itself makes progress, while one answer on it is not read.
    let gone = async {
        while !port.has_closed_for("stalled") {
            if let Ok(answer) = sender.send_request(get("/")).await {
                // It may be cut off in the middle.
                let _ = answer.into_body().collect().await;
            }
        }
    };
    timeout(PATIENCE, gone).await.expect("it is let go in time");
    drop(unread);
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

#[tokio::test]
async fn http2_has_the_same_limits() {
    let limits = HttpLimits {
        streams_max: 2,
        ..limits()
    };
    let port = port(limits).await;
    let io = TokioIo::new(port.dial().await);
    let (mut sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .max_header_list_size(1 << 20)
        .handshake(io)
        .await
        .unwrap();
    tokio::spawn(connection);
    let bytes = limits::HEADERS_BYTES_MAX as usize;
    for (length, fits) in [(bytes / 2, true), (2 * bytes, false)] {
        let request = hyper::Request::get("http://x/").header("x", "y".repeat(length));
        let request = request.body(Empty::<Bytes>::new()).unwrap();
        let answer = timeout(PATIENCE, sender.send_request(request))
            .await
            .unwrap();
        // Refused by an answer, or cut off.
        let served = answer.is_ok_and(|answer| answer.status() == 200);
        assert_eq!(served, fits, "{length}");
    }
    // Three requests that wait, of two that may be there: the third is refused as one to be tried
    // again.
    let mut stream = port.dial().await;
    let mut words = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    words.extend(frame(4, 0, 0, &[]));
    for number in [1, 3, 5] {
        // GET http /wait, by the static table but for the path.
        let headers = [&[0x82, 0x86, 0x44, 5], &b"/wait"[..]].concat();
        words.extend(frame(1, 0x5, number, &headers));
    }
    stream.write_all(&words).await.unwrap();
    let refused = async {
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).await.unwrap();
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            let mut payload = vec![0; length];
            stream.read_exact(&mut payload).await.unwrap();
            if head[3] == 3 {
                return (head[8], payload);
            }
        }
    };
    let refused = timeout(PATIENCE, refused).await.expect("one is refused");
    assert_eq!(refused, (5, vec![0, 0, 0, 7]));
}

/// Java's client asks for an upgrade with its first request. RFC 9110, section 7.8, lets a server
/// answer in HTTP/1.1.
#[tokio::test]
async fn a_request_to_upgrade_to_http2_is_answered_in_http_1_1() {
    let port = port(limits()).await;
    let mut stream = port.dial().await;
    let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings, close\r\n\
        upgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n\r\n";
    let answer = exchange(&mut stream, request).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(answer.ends_with("here"), "{answer}");
}

#[tokio::test]
async fn a_flood_of_stream_resets_closes_the_connection() {
    let port = port(limits()).await;
    let (mut reads, mut writes) = port.dial().await.into_split();
    let flood = async {
        writes
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await?;
        writes.write_all(&frame(4, 0, 0, &[])).await?;
        // GET http / by the static table, its end, and CANCEL.
        for stream in (1..).step_by(2) {
            let mut pair = frame(1, 0x5, stream, &[0x82, 0x86, 0x84]);
            pair.extend(frame(3, 0, stream, &8_u32.to_be_bytes()));
            writes.write_all(&pair).await?;
        }
        Ok::<_, io::Error>(())
    };
    let mut received = Vec::new();
    let ended = timeout(PATIENCE, async {
        tokio::join!(flood, reads.read_to_end(&mut received))
    });
    let (flooded, _) = ended.await.expect("it is cut off in time");
    assert!(flooded.is_err());
    assert!(
        exchange(&mut port.dial().await, LAST)
            .await
            .contains("here")
    );
}
