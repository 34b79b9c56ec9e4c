//! No request body costs more memory than four times its bytes, whatever is in it, and none of it stays.
//!
//! The test has a file, and so a process, of its own: what counts is that of all threads.
#![allow(clippy::unwrap_used)] // Tests, and what they share.
#![allow(unsafe_code)] // An allocator that counts.

use axum::body::{Body, Bytes};
use axum::http::{Request as HttpRequest, header};
use cleave_api::{
    ApiOptions, App, CommandError, FlightEvent, FlightStream, Frontend, ModelFiles, ModelText,
    Operator, Readiness, WorkerCommand, WorkerView,
};
use cleave_domain::{Ending, Refusal, Request, Timing, Usage};
use futures::StreamExt;
use http_body_util::BodyExt;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Runtime;
use tower::ServiceExt;

struct Counting;

/// Bytes that are taken now.
static TAKEN: AtomicUsize = AtomicUsize::new(0);
/// The most that were since the last reset.
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn took(bytes: usize) {
    let taken = TAKEN.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(taken, Ordering::Relaxed);
}

// SAFETY: the system's allocator does everything; this one counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        TAKEN.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The system moves pages of what is large instead of copying them: old and new are never there together.
        TAKEN.fetch_sub(layout.size(), Ordering::Relaxed);
        took(size);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes of memory for each byte of a body.
const BYTES_PER_BYTE: usize = 4;
/// The same where a template joins a long text piece by piece: the library copies what it joined so far twice.
const COPIED_BYTES_PER_BYTE: usize = 6;
/// The limits of a template, which may write JSON out with any number of blanks, and keep a second copy.
const TEMPLATE_BYTES: usize = 8 << 20;
const TEMPLATE_BYTES_PER_BYTE: usize = 16;
/// Memory that a request takes besides its body: the server's own, and tokens of a prompt that fits the context.
const BESIDES: usize = 256 << 10;
const BODY: usize = 512 << 10;

/// Refuses everything, once it has been read.
struct Refusing;

impl Operator for Refusing {
    fn workers(&self) -> Vec<WorkerView> {
        Vec::new()
    }

    fn command(&self, _: &str, _: WorkerCommand) -> Result<WorkerView, CommandError> {
        Err(CommandError::Unknown)
    }
}

impl Frontend for Refusing {
    fn submit(&self, _: Request) -> FlightStream {
        let ended = FlightEvent::Ended {
            ending: Ending::Refused(Refusal::NoWorker),
            usage: Usage::default(),
            timing: Timing::default(),
        };
        futures::stream::iter([ended]).boxed()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn metrics(&self) -> String {
        String::new()
    }
}

/// `before`, then `item` with its number in place of `#` again and again, then `after`.
fn repeated(before: &str, item: &str, after: &str) -> String {
    let mut text = before.to_owned();
    let mut index = 0;
    while text.len() + item.len() + 8 + after.len() < BODY {
        if index > 0 {
            text.push(',');
        }
        text += &item.replace('#', &index.to_string());
        index += 1;
    }
    text + after
}

fn filled(before: &str, piece: &str, after: &str) -> String {
    before.to_owned() + &piece.repeat((BODY - before.len() - after.len()) / piece.len()) + after
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// Route and body, by name.
fn bodies() -> Vec<(&'static str, &'static str, String)> {
    let nested = "[".repeat(120) + &"]".repeat(120);
    let hello = r#"{"messages":[{"role":"user","content":"hi"}],"#;
    let chat = |name, before: &str, item: &str, after: &str| {
        (
            name,
            CHAT,
            repeated(&(hello.to_owned() + before), item, after),
        )
    };
    vec![
        (
            "unknown arrays",
            TEXT,
            repeated(r#"{"prompt":"a","zzz":["#, &nested, "]}"),
        ),
        (
            "unknown objects",
            TEXT,
            repeated(r#"{"prompt":"a","zzz":["#, r#"{"":{}}"#, "]}"),
        ),
        (
            "unknown keys",
            TEXT,
            repeated(r#"{"prompt":"a","#, r##""k#":1"##, "}"),
        ),
        ("the same key", TEXT, repeated("{", r#""prompt":"a""#, "}")),
        (
            "numbers",
            TEXT,
            repeated(r#"{"prompt":"a","zzz":["#, "1", "]}"),
        ),
        (
            "long prompt",
            TEXT,
            filled(r#"{"prompt":""#, "ab ", r#""}"#),
        ),
        (
            "distinct words",
            TEXT,
            repeated(r#"{"prompt":""#, "w#", r#""}"#),
        ),
        (
            "escaped prompt",
            TEXT,
            filled(r#"{"prompt":""#, r"\u0041", r#""}"#),
        ),
        (
            "wide prompt",
            TEXT,
            filled(r#"{"prompt":""#, "日本", r#""}"#),
        ),
        (
            "prompts of text",
            TEXT,
            repeated(r#"{"prompt":["#, r#""a""#, "]}"),
        ),
        (
            "a prompt of ids",
            TEXT,
            repeated(r#"{"prompt":["#, "1", "]}"),
        ),
        (
            "prompts of ids",
            TEXT,
            repeated(r#"{"prompt":["#, "[1]", "]}"),
        ),
        (
            "stops",
            TEXT,
            repeated(r#"{"prompt":"a","stop":["#, r#""x""#, "]}"),
        ),
        (
            "a long stop",
            TEXT,
            filled(r#"{"prompt":"a","stop":""#, "\u{200b}", r#""}"#),
        ),
        (
            "biases",
            TEXT,
            repeated(r#"{"prompt":"a","logit_bias":{"#, r##""#":1"##, "}}"),
        ),
        (
            "a long bias",
            TEXT,
            filled(r#"{"prompt":"a","logit_bias":{""#, "\u{200b}", r#"":1}}"#),
        ),
        (
            "stop tokens",
            TEXT,
            repeated(r#"{"prompt":"a","stop_token_ids":["#, "1", "]}"),
        ),
        (
            "a long model",
            TEXT,
            filled(r#"{"prompt":"a","model":""#, "\u{200b}", r#""}"#),
        ),
        (
            "a long format",
            TEXT,
            filled(
                r#"{"prompt":"a","response_format":{"type":""#,
                r"\n",
                r#""}}"#,
            ),
        ),
        (
            "tiny messages",
            CHAT,
            repeated(r#"{"messages":["#, r#"{"role":"user","content":""}"#, "]}"),
        ),
        (
            "tiny answers",
            CHAT,
            repeated(r#"{"messages":["#, r#"{"role":"assistant"}"#, "]}"),
        ),
        (
            "a long message",
            CHAT,
            filled(
                r#"{"messages":[{"role":"user","content":""#,
                "ab ",
                r#""}]}"#,
            ),
        ),
        (
            "an escaped message",
            CHAT,
            filled(
                r#"{"messages":[{"role":"user","content":""#,
                r"\n",
                r#""}]}"#,
            ),
        ),
        (
            "some messages",
            CHAT,
            repeated(
                r#"{"messages":["#,
                &format!(
                    r#"{{"role":"user","content":"{}"}}"#,
                    "word ".repeat(20_000)
                ),
                "]}",
            ),
        ),
        (
            "parts",
            CHAT,
            repeated(
                r#"{"messages":[{"role":"user","content":["#,
                r#"{"type":"text","text":"a"}"#,
                "]}]}",
            ),
        ),
        (
            "a long role",
            CHAT,
            filled(r#"{"messages":[{"role":""#, "\u{200b}", r#""}]}"#),
        ),
        (
            "a part of a long type",
            CHAT,
            filled(
                r#"{"messages":[{"role":"user","content":[{"type":""#,
                "\u{200b}",
                r#""}]}]}"#,
            ),
        ),
        (
            "calls",
            CHAT,
            repeated(
                r#"{"messages":[{"role":"assistant","tool_calls":["#,
                r#"{"function":{"name":"f"}}"#,
                "]}]}",
            ),
        ),
        (
            "arguments",
            CHAT,
            repeated(
                r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"["#,
                "1",
                r#"]"}}]}]}"#,
            ),
        ),
        chat(
            "tools",
            r#""tools":["#,
            r#"{"function":{"name":"f"}}"#,
            "]}",
        ),
        chat(
            "a tool of numbers",
            r#""tools":[{"function":{"name":"f","parameters":["#,
            "1",
            "]}}]}",
        ),
        chat(
            "a tool of arrays",
            r#""tools":[{"function":{"name":"f","parameters":["#,
            &nested,
            "]}}]}",
        ),
        chat("documents", r#""documents":["#, "{}", "]}"),
        chat("documents of digits", r#""documents":["#, "0", "]}"),
        chat(
            "kwargs",
            r#""chat_template_kwargs":{"#,
            r##""k#":[]"##,
            "}}",
        ),
        chat("metadata", r#""metadata":{"#, r##""k#":[]"##, "}}"),
        ("deep", TEXT, filled("{\"prompt\":", "[", "")),
        (
            "broken",
            CHAT,
            repeated(r#"{"messages":["#, r#"{"role":"user","content":""}"#, ""),
        ),
        (
            "tokenize",
            "/tokenize",
            filled(r#"{"prompt":""#, "ab ", r#""}"#),
        ),
        (
            "tokenize messages",
            "/tokenize",
            repeated(r#"{"messages":["#, r#"{"role":"user","content":""}"#, "]}"),
        ),
        (
            "detokenize",
            "/detokenize",
            repeated(r#"{"tokens":["#, "1", "]}"),
        ),
    ]
}

/// Templates that would take gigabytes, and the memory that they may take.
const HOSTILE: [&str; 6] = [
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab', l=[]) %}{% for i in range(90000) %}{% set ns.l = ns.l + [ns.x * 9999] %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('', ns.x) %}{% endfor %}",
    "{% for a in range(90000) %}{% for b in range(9) %}0123456789abcdef0123456789abcdef{% endfor %}{% endfor %}",
    "{{ '%999999999d'|format(1) }}{{ messages|tojson(indent=999999999) }}",
];
const HOSTILE_BYTES: usize = 32 << 20;

fn app(model: &str) -> App {
    app_with(model, None)
}

fn app_with(model: &str, template: Option<&str>) -> App {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let options = ApiOptions {
        startup_grace: Duration::ZERO,
        ..ApiOptions::default()
    };
    let app = App::new(Arc::new(Refusing), options);
    let mut files = ModelFiles::read(&root.join(model)).unwrap();
    files.chat_template = template.map(str::to_owned).or(files.chat_template);
    app.serve_model(ModelText::new(files).unwrap());
    app
}

/// The most memory that was taken beyond what was before.
fn peak_of(runtime: &Runtime, app: &App, path: &str, body: &Bytes, announced: bool) -> usize {
    let router = app.client_router();
    let pieces: Vec<_> = (0..body.len().div_ceil(64 << 10))
        .map(|piece| {
            let start = piece * (64 << 10);
            Ok::<_, std::io::Error>(body.slice(start..body.len().min(start + (64 << 10))))
        })
        .collect();
    let before = TAKEN.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    let mut request = HttpRequest::post(path).header(header::CONTENT_TYPE, "application/json");
    if announced {
        request = request.header(header::CONTENT_LENGTH, body.len());
    }
    let request = request.body(Body::from_stream(futures::stream::iter(pieces)));
    runtime.block_on(async {
        let response = router.oneshot(request.unwrap()).await.unwrap();
        assert!(
            response.status().as_u16() < 500 || response.status() == 503,
            "{path}"
        );
        response.into_body().collect().await.unwrap();
    });
    PEAK.load(Ordering::SeqCst) - before
}

#[test]
fn a_hostile_template_takes_little_memory_and_leaves_none() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let body = Bytes::from_static(br#"{"messages":[{"role":"user","content":"hi"}]}"#);
    for template in HOSTILE {
        let app = app_with("qwen3", Some(template));
        let before = TAKEN.load(Ordering::SeqCst);
        let peak = peak_of(&runtime, &app, CHAT, &body, true);
        let left = TAKEN.load(Ordering::SeqCst).saturating_sub(before);
        println!("{peak} bytes, {left} left: {template}");
        assert!(peak < HOSTILE_BYTES && left < BESIDES, "{template}");
    }
}

/// The counters are of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_body_costs_four_times_its_bytes_at_most() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let mut dear = Vec::new();
    // Templates and ways to tokenize; bodies that say how long they are, and others.
    for (model, announced) in [("qwen3", true), ("llama3", true), ("llama2", false)] {
        let app = app(model);
        let small =
            Bytes::from_static(br#"{"messages":[{"role":"user","content":"hi"}],"prompt":"a"}"#);
        // Threads, thread-local caches and the tokenizer's own come once.
        for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
            peak_of(&runtime, &app, path, &small, true);
        }
        for (name, path, body) in bodies() {
            let body = Bytes::from(body);
            {
                let before = TAKEN.load(Ordering::SeqCst);
                let peak = peak_of(&runtime, &app, path, &body, announced);
                let left = TAKEN.load(Ordering::SeqCst).saturating_sub(before);
                println!(
                    "{model:8} {name:24} {:.2} bytes a byte, {left} left",
                    peak as f64 / body.len() as f64
                );
                // The text that a template makes of tools has a limit of its own.
                let most = match name {
                    "arguments" | "a tool of numbers" | "a tool of arrays" => {
                        2 * (TEMPLATE_BYTES + TEMPLATE_BYTES_PER_BYTE * body.len())
                    }
                    "a long message" | "calls" => COPIED_BYTES_PER_BYTE * body.len() + BESIDES,
                    _ => BYTES_PER_BYTE * body.len() + BESIDES,
                };
                if peak > most || left > BESIDES {
                    dear.push((
                        model,
                        name,
                        announced,
                        peak as f64 / body.len() as f64,
                        left,
                    ));
                }
            }
        }
    }
    assert!(dear.is_empty(), "{dear:#?}");
}
