//! Texts of clients for tests and libFuzzer.

use crate::detokenize::{TextStart, TextStream};
use crate::model_files::ModelFiles;
use crate::model_text::ModelText;
use crate::tokenizer::SpecialTokens;
use std::path::Path;
use std::sync::{Arc, LazyLock};

fn model(name: &str) -> ModelText {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata"));
    let files = ModelFiles::read(&root.join(name)).expect("a checkpoint of the tests");
    ModelText::new(files).expect("a tokenizer")
}

/// Tokenizes a text with tokenizers of three kinds.
///
/// # Panics
/// If a token does not exist, text is lost, or streamed decoding differs from decoding all tokens
/// at once.
pub fn text(bytes: &[u8]) {
    static MODELS: LazyLock<[(Arc<ModelText>, bool); 3]> = LazyLock::new(|| {
        // The flag says whether every text survives: the second model prepends a space and has no
        // token for some characters.
        [("llama3", true), ("llama2", false), ("qwen3", false)]
            .map(|(name, is_exact)| (Arc::new(model(name)), is_exact))
    });
    let text = String::from_utf8_lossy(bytes);
    for (model, is_exact) in &*MODELS {
        let tokens = model.tokenizer().encode(&text, SpecialTokens::Skipped);
        let tokens = tokens.expect("a text has tokens");
        let count = model.vocabulary_count();
        assert!(tokens.iter().all(|token| *token < count), "{tokens:?}");
        let whole = model.tokenizer().decode(&tokens, SpecialTokens::Kept);
        if *is_exact {
            assert_eq!(whole, text);
        }
        let mut stream = TextStream::new(Arc::clone(model), SpecialTokens::Kept, TextStart::Fresh);
        let mut parts: String = tokens.iter().map(|token| stream.push(*token)).collect();
        parts.push_str(&stream.finish());
        assert_eq!(parts, whole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_survives_tokenization() {
        let samples = [
            "What is a slice? It's 12,345.67 \u{a0} \t\n\n  done"
                .as_bytes()
                .to_vec(),
            "Größe, 语言模型, 🦀👩‍👩‍👧, \u{1F1E9}\u{1F1EA} é e\u{301}"
                .as_bytes()
                .to_vec(),
            "<|im_start|><s></s><0x0A>▁<|eot_id|>".as_bytes().to_vec(),
            b"\xff\xfe\x00\x01\xc3".to_vec(),
        ];
        cleave_fuzz::check_samples("text", &samples, 3_000, text);
    }
}
