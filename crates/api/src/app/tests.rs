//! Parsing of bodies within the shared memory limits.

use super::*;
use crate::fuzzing::EchoFrontend;
use cleave_text::ModelFiles;
use std::path::Path;

fn model(name: &str) -> Arc<ModelText> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    Arc::new(ModelText::new(ModelFiles::read(&root.join(name)).unwrap()).unwrap())
}

#[tokio::test(start_paused = true)]
async fn renderings_without_memory_wait_and_are_then_refused() {
    let options = ApiOptions {
        template_memory_bytes: 1,
        ..ApiOptions::default()
    };
    let app = App::new(Arc::new(EchoFrontend), options);
    let bytewise = model("qwen3");
    assert!(bytewise.tokenizer().is_byte_level());
    let body = || Body::from(r#"{"messages":[{"role":"user","content":"hi"}]}"#);
    let parse = async |work| {
        let held = app.read_body(&HeaderMap::new(), body()).await.unwrap();
        let read = |_: &Document, _: &ModelText| Ok(());
        app.parse(held, bytewise.clone(), work, read).await
    };
    assert!(parse(BodyWork::RenderTemplate).await.is_ok());
    // The smallest possible memory limit is that of one rendering.
    let other = app
        .shared
        .templates
        .reserve(40, BodyWork::RenderTemplate, &bytewise)
        .await;
    let error = parse(BodyWork::RenderTemplate).await.unwrap_err();
    let refusal = (error.status().as_u16(), error.code());
    assert_eq!(refusal, (429, Some("bodies_full")));
    assert!(parse(BodyWork::ParseOnly).await.is_ok());
    drop(other);
    assert!(parse(BodyWork::RenderTemplate).await.is_ok());
}
