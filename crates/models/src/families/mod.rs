//! Model families, one file each: config.json to a spec, and the names of the tensors.
//!
//! Owns: each family's defaults and meanings of keys. `decoder` and `names` have the parts that the
//! families of Llama's layout share.
//! Never: tests for another family's name.

pub(crate) mod cohere;
pub(crate) mod cohere2;
pub(crate) mod decoder;
pub(crate) mod exaone4;
pub(crate) mod expert_names;
pub(crate) mod experts;
pub(crate) mod gemma2;
pub(crate) mod gemma3;
pub(crate) mod glm4;
pub(crate) mod glm4_moe;
pub(crate) mod gpt_oss;
pub(crate) mod granite;
pub(crate) mod granitemoe;
pub(crate) mod granitemoehybrid;
pub(crate) mod granitemoeshared;
pub(crate) mod llama;
pub(crate) mod minimax_m2;
pub(crate) mod ministral3;
pub(crate) mod mistral;
pub(crate) mod mixtral;
pub(crate) mod names;
pub(crate) mod olmo2;
pub(crate) mod olmo3;
pub(crate) mod olmoe;
pub(crate) mod phi3;
pub(crate) mod qwen2;
pub(crate) mod qwen2_moe;
pub(crate) mod qwen3;
pub(crate) mod qwen3_moe;
pub(crate) mod seed_oss;
pub(crate) mod smollm3;
pub(crate) mod wrappers;

#[cfg(test)]
mod published;
