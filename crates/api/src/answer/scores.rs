//! Log-probabilities in OpenAI's two shapes.

use crate::choice::TokenScore;
use cleave_domain::TokenId;
use cleave_text::ModelText;
use serde_json::{Map, Value, json};

/// Text of a token as a client sees it: its own bytes, with replacements for invalid UTF-8.
fn text(token: TokenId, model: &ModelText) -> String {
    String::from_utf8_lossy(&model.tokenizer().bytes(token)).into_owned()
}

/// Builds `choices[].logprobs` of chat completions.
pub(super) fn chat(scores: &[TokenScore], model: &ModelText) -> Value {
    let one = |token: TokenId, logprob: Option<f32>| json!({"token": text(token, model), "logprob": logprob, "bytes": model.tokenizer().bytes(token)});
    let content = scores.iter().map(|score| {
        let mut entry = one(score.token, score.logprob);
        let top = score
            .top
            .iter()
            .map(|&(token, logprob)| one(token, Some(logprob)));
        entry["top_logprobs"] = top.collect();
        entry
    });
    json!({"content": content.collect::<Value>(), "refusal": null})
}

/// Builds `choices[].logprobs` of completions: parallel lists. The chosen token is among the top
/// ones even if it is less likely.
pub(super) fn completion(scores: &[TokenScore], model: &ModelText) -> Value {
    let top = |score: &TokenScore| {
        let Some(chosen) = score.logprob else {
            return Value::Null;
        };
        let mut map = Map::new();
        for &(token, logprob) in score.top.iter().chain([&(score.token, chosen)]) {
            // Tokens that are parts of characters share a text; the likeliest one is kept.
            map.entry(text(token, model))
                .or_insert_with(|| logprob.into());
        }
        Value::Object(map)
    };
    json!({
        "tokens": scores.iter().map(|score| text(score.token, model)).collect::<Value>(),
        "token_logprobs": scores.iter().map(|score| score.logprob).collect::<Vec<_>>(),
        "top_logprobs": scores.iter().map(top).collect::<Value>(),
        "text_offset": scores.iter().map(|score| score.offset).collect::<Value>(),
    })
}
