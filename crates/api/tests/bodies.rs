//! Memory of request bodies: no body costs more than four times its bytes, whatever its content,
//! and all of it is freed.
//!
//! The test is a process of its own, because the counters include all threads.
#![allow(clippy::unwrap_used)] // Tests, and what they share.
#![allow(unsafe_code)] // An allocator that counts.

#[path = "../../text/src/template/tests/hostile.rs"]
mod hostile;

use axum::body::{Body, Bytes};
use axum::http::{Request as HttpRequest, header};
use cleave_api::{
    ApiOptions, App, CommandError, FlightEvent, FlightStream, Frontend, Operator, ServingReadiness,
    WorkerCommand, WorkerView,
};
use cleave_domain::{Ending, Refusal, Request, RequestStageTimes, TokenUsage};
use cleave_text::{ModelFiles, ModelText, PIECE_BYTES_MAX};
use futures::StreamExt;
use hostile::HOSTILE;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Runtime;
use tower::ServiceExt;

struct PeakAllocator;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
/// Most bytes allocated since the last reset.
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn count_allocated(bytes: usize) {
    let allocated = ALLOCATED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(allocated, Ordering::Relaxed);
}

// SAFETY: the system's allocator does all the work; this one only counts.
unsafe impl GlobalAlloc for PeakAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocated(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The system remaps the pages of a large block instead of copying them: old and new block
        // never exist together.
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        count_allocated(size);
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: PeakAllocator = PeakAllocator;

/// Limit of memory per byte of a body.
const BYTES_PER_BYTE: usize = 4;
/// The same where a template joins a long text piece by piece, since the library copies the text so
/// far twice; and where it prints values with more separators than the body has.
const COPIED_BYTES_PER_BYTE: usize = 6;
/// The same of a body that becomes a chat request first.
const CONVERTED_BYTES_PER_BYTE: usize = COPIED_BYTES_PER_BYTE + 2;
/// Limits of a template, which may write JSON with any number of blanks and keep a second copy.
const TEMPLATE_BYTES: usize = 8 << 20;
const TEMPLATE_BYTES_PER_BYTE: usize = 16;
/// Memory of a request besides its body: the server's own, and the tokens of a prompt that fits the
/// context.
const OVERHEAD_BYTES: usize = 256 << 10;
/// Memory of a list of tokens in an answer, per byte of the body; of tokens that are decoded.
const LISTED_BYTES_PER_BYTE: usize = 28 + 4;
const JOINED_BYTES_PER_BYTE: usize = 96 / 2;
/// Memory of the longest piece in the `tokenizers` library.
const PIECE_BYTES: usize = 128 * PIECE_BYTES_MAX;
const BODY: usize = 512 << 10;

/// A frontend that refuses every request.
struct RefusingFrontend;

impl Operator for RefusingFrontend {
    fn workers(&self) -> Vec<WorkerView> {
        Vec::new()
    }

    fn command(&self, _: &str, _: WorkerCommand) -> Result<WorkerView, CommandError> {
        Err(CommandError::UnknownWorker)
    }
}

impl Frontend for RefusingFrontend {
    fn submit(&self, _: Request) -> FlightStream {
        let ended = FlightEvent::Ended {
            ending: Ending::Refused(Refusal::NoWorker),
            usage: TokenUsage::default(),
            timing: RequestStageTimes::default(),
        };
        futures::stream::iter([ended]).boxed()
    }

    fn readiness(&self, _: &str) -> ServingReadiness {
        ServingReadiness::Ready
    }

    fn metrics(&self) -> String {
        String::new()
    }
}

/// Returns `before`, then copies of `item` with the copy's number in place of `#`, then `after`.
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
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// Names, routes and bodies of the cases.
fn bodies() -> Vec<(&'static str, &'static str, String)> {
    let nested = "[".repeat(120) + &"]".repeat(120);
    let hello = r#"{"messages":[{"role":"user","content":"hi"}],"#;
    // A piece of the longest length comes before the one that is too long.
    let piece_start = r#"{"prompt":""#.to_owned() + &" ".repeat(PIECE_BYTES_MAX);
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
            "tokenize with texts",
            "/tokenize",
            filled(r#"{"return_token_strs":true,"prompt":""#, "7 ", r#""}"#),
        ),
        (
            "tokenize a long piece",
            "/tokenize",
            filled(&piece_start, "a", r#""}"#),
        ),
        ("a long piece", TEXT, filled(&piece_start, "a", r#""}"#)),
        (
            "tokenize messages",
            "/tokenize",
            repeated(r#"{"messages":["#, r#"{"role":"user","content":""}"#, "]}"),
        ),
        (
            "tiny messages of blocks",
            MESSAGES,
            repeated(
                r#"{"max_tokens":1,"messages":["#,
                r#"{"role":"user","content":[]}"#,
                "]}",
            ),
        ),
        (
            "a long message of blocks",
            MESSAGES,
            filled(
                r#"{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"text","text":""#,
                "ab ",
                r#""}]}]}"#,
            ),
        ),
        (
            "blocks",
            MESSAGES,
            repeated(
                r#"{"max_tokens":1,"messages":[{"role":"user","content":["#,
                r#"{"type":"text","text":"a"}"#,
                "]}]}",
            ),
        ),
        (
            "results of tools",
            MESSAGES,
            repeated(
                r#"{"max_tokens":1,"messages":[{"role":"user","content":["#,
                r#"{"type":"tool_result","tool_use_id":""}"#,
                "]}]}",
            ),
        ),
        (
            "tools of blocks",
            MESSAGES,
            repeated(
                r#"{"max_tokens":1,"messages":[{"role":"user","content":""}],"tools":["#,
                r#"{"name":"f"}"#,
                "]}",
            ),
        ),
        (
            "calls and their outputs",
            RESPONSES,
            repeated(
                r#"{"input":["#,
                r#"{"type":"function_call","call_id":"","name":"f","arguments":""},{"type":"function_call_output","call_id":"","output":""}"#,
                "]}",
            ),
        ),
        (
            "a long input",
            RESPONSES,
            filled(r#"{"input":""#, "ab ", r#""}"#),
        ),
        (
            "long instructions",
            RESPONSES,
            filled(r#"{"input":"a","instructions":""#, r"\n", r#""}"#),
        ),
        (
            "detokenize",
            "/detokenize",
            repeated(r#"{"tokens":["#, "1", "]}"),
        ),
    ]
}

/// Limit of a hostile template's memory, including the library's copy of the last text; the most
/// expensive template takes two thirds of it.
const HOSTILE_BYTES: usize = 2 * TEMPLATE_BYTES;

fn app(model: &str) -> App {
    app_with(model, None)
}

fn app_with(model: &str, template: Option<&str>) -> App {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let options = ApiOptions {
        startup_grace: Duration::ZERO,
        ..ApiOptions::default()
    };
    let app = App::new(Arc::new(RefusingFrontend), options);
    let mut files = ModelFiles::read(&root.join(model)).unwrap();
    files.chat_template = template.map(str::to_owned).or(files.chat_template);
    app.serve_model(ModelText::new(files).unwrap());
    app
}

fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().unwrap()
}

/// Returns the most bytes allocated above the initial amount, and those that are left.
fn peak_of(
    runtime: &Runtime,
    app: &App,
    path: &str,
    body: &Bytes,
    announced: bool,
) -> (usize, usize) {
    let start = ALLOCATED.load(Ordering::SeqCst);
    let router = app.client_router();
    let pieces: Vec<_> = (0..body.len().div_ceil(64 << 10))
        .map(|piece| {
            let start = piece * (64 << 10);
            Ok::<_, std::io::Error>(body.slice(start..body.len().min(start + (64 << 10))))
        })
        .collect();
    let before = ALLOCATED.load(Ordering::SeqCst);
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
    let left = ALLOCATED.load(Ordering::SeqCst).saturating_sub(start);
    (PEAK.load(Ordering::SeqCst) - before, left)
}

#[test]
fn hostile_templates_stay_within_the_memory_limit() {
    let _alone = ONE_AT_A_TIME.lock();
    let runtime = runtime();
    let body = Bytes::from_static(br#"{"messages":[{"role":"user","content":"hi"}]}"#);
    for (ended, template) in HOSTILE {
        let app = app_with("qwen3", Some(template));
        let (peak, left) = peak_of(&runtime, &app, CHAT, &body, true);
        println!("{peak} bytes, {left} left, {ended:?}: {template}");
        assert!(peak < HOSTILE_BYTES && left < OVERHEAD_BYTES, "{template}");
    }
}

/// A body whose documents or template variables a template prints.
struct PrintedBody {
    name: &'static str,
    template: &'static str,
    body: String,
    /// Whether the printed text has more separators than the body has bytes for them.
    grows: bool,
}

fn printed_bodies() -> Vec<PrintedBody> {
    const WHOLE: [&str; 4] = [
        "{{ documents }}",
        "{{ documents | tojson }}",
        "{{ shown }}",
        "{{ shown | tojson }}",
    ];
    const BY_PARTS: [&str; 2] = [
        "{% for document in documents %}{{ document.text }}{% endfor %}",
        "{% for name in shown %}{{ name }}{% endfor %}",
    ];
    let hello = r#"{"messages":[{"role":"user","content":"hi"}],"#;
    let documents = hello.to_owned() + r#""documents":["#;
    let shown = hello.to_owned() + r#""chat_template_kwargs":{"shown":"#;
    let (list, mapping, text) = (
        shown.clone() + "[",
        shown.clone() + "{",
        shown.clone() + "\"",
    );
    let long = format!(r#"{{"title":"t","text":"{}"}}"#, "word ".repeat(2000));
    let short = r#"{"text":"a"}"#;
    let bodies = [
        ("empty documents", repeated(&documents, "{}", "]}"), true),
        ("documents of digits", repeated(&documents, "0", "]}"), true),
        ("short documents", repeated(&documents, short, "]}"), true),
        ("long documents", repeated(&documents, &long, "]}"), false),
        ("digits", repeated(&list, "0", "]}}"), true),
        ("keys", repeated(&mapping, r##""k#":[]"##, "}}}"), true),
        ("a text", filled(&text, "ab ", r#""}}"#), false),
        ("escapes", filled(&text, r"\u0041", r#""}}"#), false),
    ];
    let mut cases = Vec::new();
    for (name, body, has_separators) in bodies {
        let variable = if body.starts_with(&documents) {
            "documents"
        } else {
            "shown"
        };
        for template in WHOLE.into_iter().chain(BY_PARTS) {
            if template.contains(variable) {
                cases.push(PrintedBody {
                    name,
                    template,
                    body: body.clone(),
                    grows: has_separators && WHOLE.contains(&template),
                });
            }
        }
    }
    cases
}

#[test]
fn printed_documents_and_variables_keep_the_limits() {
    let _alone = ONE_AT_A_TIME.lock();
    let runtime = runtime();
    let mut dear = Vec::new();
    for case in printed_bodies() {
        let PrintedBody {
            name,
            template,
            body,
            grows,
        } = case;
        let app = app_with("qwen3", Some(template));
        let small = Bytes::from_static(br#"{"messages":[{"role":"user","content":"hi"}]}"#);
        peak_of(&runtime, &app, CHAT, &small, true);
        let body = Bytes::from(body);
        let (peak, left) = peak_of(&runtime, &app, CHAT, &body, true);
        let factor = peak as f64 / body.len() as f64;
        println!("{name:24} {factor:.2} bytes a byte, {left} left: {template}");
        let factor_max = if grows {
            COPIED_BYTES_PER_BYTE
        } else {
            BYTES_PER_BYTE
        };
        if peak > factor_max * body.len() + OVERHEAD_BYTES || left > OVERHEAD_BYTES {
            dear.push((name, template, factor, left));
        }
    }
    assert!(dear.is_empty(), "{dear:#?}");
}

/// The counters include the whole process, so the tests take turns.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

// Lesson: 33.
#[test]
fn a_body_costs_at_most_four_times_its_bytes() {
    let _alone = ONE_AT_A_TIME.lock();
    let runtime = runtime();
    let mut dear = Vec::new();
    // Models with different templates and tokenizers; announced bodies and others.
    for (model, announced) in [("qwen3", true), ("llama3", true), ("llama2", false)] {
        let app = app(model);
        let small =
            Bytes::from_static(br#"{"messages":[{"role":"user","content":"hi"}],"prompt":"a"}"#);
        // Threads, thread-local caches and the tokenizer's caches are allocated once.
        for path in [CHAT, TEXT, "/tokenize", "/detokenize"] {
            peak_of(&runtime, &app, path, &small, true);
        }
        for (name, path, body) in bodies() {
            let body = Bytes::from(body);
            {
                let (peak, left) = peak_of(&runtime, &app, path, &body, announced);
                println!(
                    "{model:8} {name:24} {:.2} bytes a byte, {left} left",
                    peak as f64 / body.len() as f64
                );
                // The text that a template makes of tools has its own limit.
                let most = match name {
                    "arguments" | "a tool of numbers" | "a tool of arrays" => {
                        2 * (TEMPLATE_BYTES + TEMPLATE_BYTES_PER_BYTE * body.len())
                    }
                    _ if [MESSAGES, RESPONSES].contains(&path) => {
                        CONVERTED_BYTES_PER_BYTE * body.len() + OVERHEAD_BYTES
                    }
                    "a long message" | "calls" => {
                        COPIED_BYTES_PER_BYTE * body.len() + OVERHEAD_BYTES
                    }
                    "tokenize" | "tokenize with texts" | "tokenize messages" => {
                        (BYTES_PER_BYTE + LISTED_BYTES_PER_BYTE) * body.len() + OVERHEAD_BYTES
                    }
                    "detokenize" => {
                        (BYTES_PER_BYTE + JOINED_BYTES_PER_BYTE) * body.len() + OVERHEAD_BYTES
                    }
                    "a long piece" | "tokenize a long piece" => {
                        BYTES_PER_BYTE * body.len() + PIECE_BYTES + OVERHEAD_BYTES
                    }
                    _ => BYTES_PER_BYTE * body.len() + OVERHEAD_BYTES,
                };
                if peak > most || left > OVERHEAD_BYTES {
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
