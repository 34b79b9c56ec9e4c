//! Threads: work whose length a template decides never holds up other requests.

use crate::scripted_server::server;
use futures::poll;
use serde_json::json;
use std::sync::mpsc;

/// Polls of a request before it counts as waiting.
const POLLS: usize = 100;

/// The only blocking thread is busy, so a request that renders must wait for it, and no other does.
#[test]
fn chat_templates_render_on_blocking_threads() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(1)
        .build()
        .unwrap();
    runtime.block_on(async {
        let set = server("qwen3");
        let (release, released) = mpsc::channel();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        set.script_default();
        let plain = set.post("/v1/completions", json!({"prompt": "a"})).await;
        assert_eq!(plain.status, 200, "it has no template");
        let messages = json!([{"role": "user", "content": "hi"}]);
        let mut rendered = Vec::new();
        for (path, stream) in [
            ("/v1/chat/completions", false),
            ("/v1/chat/completions", true),
            ("/tokenize", false),
        ] {
            if path != "/tokenize" {
                set.script_default();
            }
            let body = json!({"messages": messages, "stream": stream});
            let mut answer = Box::pin(set.post(path, body));
            for _ in 0..POLLS {
                assert!(poll!(&mut answer).is_pending(), "{path} rendered here");
                tokio::task::yield_now().await;
            }
            rendered.push(answer);
        }
        release.send(()).unwrap();
        busy.await.unwrap().unwrap();
        for answer in rendered {
            assert_eq!(answer.await.status, 200);
        }
    });
}
