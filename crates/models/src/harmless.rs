//! Keys of config.json that change no answer, and the refusal of all others that no reader used.
//!
//! Owns: these lists. Never: reads a value for a spec.
//! Invariant: a key that no reader used, that is on no list and that is not null refuses the model:
//! a key that a newer writer added may change what the weights compute, and the answers would be
//! wrong without an error.

use crate::error::ConfigError;
use crate::fields::{ConfigFields, shown};
use crate::registry::Family;
use crate::wrapper::TEXT_CONFIG;
use serde_json::Value;

/// Keys without effect here: training, bookkeeping of writers, and transformers' older generation
/// defaults, which are taken from generation_config.json alone. Every key that begins with an
/// underscore is one too.
const HARMLESS: [&str; 70] = [
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "length_penalty",
    "max_length",
    "max_sequence_length",
    "max_shard_size",
    "min_length",
    "mlp_dropout",
    "model_max_length",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "use_bfloat16",
    "use_cache",
    "use_flash_attn",
];

/// Beginnings of keys that trainers add.
const HARMLESS_BEGINNINGS: [&str; 2] = ["_", "unsloth_"];

/// Keys that name a change of the model: harmless only if they turn it off.
const HARMLESS_WHEN_OFF: [&str; 16] = [
    "add_cross_attention",
    "attention_bias",
    "cross_attention_hidden_size",
    "is_encoder_decoder",
    "lm_head_bias",
    "mlp_bias",
    "pruned_heads",
    "qkv_bias",
    "quantization",
    "quantization_config.dynamic",
    "rope_interleaved",
    "tie_encoder_decoder",
    "use_mrope",
    "use_qk_norm",
    "use_bidirectional_attention",
    "use_sliding_window",
];

/// Keys of switches that change nothing only while they are on: attention that looks ahead has
/// another answer.
const HARMLESS_WHEN_ON: [&str; 1] = ["is_causal"];

impl Family {
    /// Refuses config.json if it has a key that no reader used, and that may change the answers.
    ///
    /// # Errors
    /// The first such key, with what to do about it.
    pub(crate) fn refuse_unread(&self, fields: &ConfigFields) -> Result<(), ConfigError> {
        let unread = fields.unread();
        let unknown = unread
            .iter()
            .find(|(path, value)| !self.is_harmless(path, value));
        match unknown {
            None => Ok(()),
            Some((path, value)) => {
                let problem = format!(
                    "{} is not known for a {} model; it may change what the weights compute. \
                     Remove it from the file if it does not",
                    shown(value),
                    self.name
                );
                Err(fields.unsupported(path, problem))
            }
        }
    }

    fn is_harmless(&self, path: &str, value: &Value) -> bool {
        let text = path.strip_prefix(TEXT_CONFIG);
        let path = text.and_then(|path| path.strip_prefix('.')).unwrap_or(path);
        HARMLESS.contains(&path)
            || self.unused_keys.contains(&path)
            || HARMLESS_BEGINNINGS
                .iter()
                .any(|beginning| path.starts_with(beginning))
            || (HARMLESS_WHEN_OFF.contains(&path) && is_off(value))
            || (HARMLESS_WHEN_ON.contains(&path) && *value == Value::Bool(true))
    }
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) => false,
    }
}
