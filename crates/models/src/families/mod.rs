//! Model families, one file each: config.json to a spec, and the names of the tensors.
//!
//! Owns: each family's defaults and meanings of keys. `decoder` has the parts that the families of
//! Llama's layout share.
//! Never: tests for another family's name.

pub(crate) mod decoder;
pub(crate) mod llama;
pub(crate) mod mistral;
pub(crate) mod olmo2;
pub(crate) mod qwen2;
pub(crate) mod qwen3;
