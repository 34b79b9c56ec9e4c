//! Checkpoints: a Hugging Face folder.
//!
//! Owns: config.json's and generation_config.json's bytes, the safetensors files, the formats of
//! quantised weights, the identity of weights, LoRA adapters, and checkpoints with random weights.
//! (The tokenizer's files are the API's.)
//! Never: copies weights: tensors are views of mapped files, but for experts' whose axes or rows
//! have another order there, and matrices that are rounded. Never computes with a weight.
//! Invariant: an open [`Checkpoint`] is complete: every tensor that the model needs exists in the
//! right shape and a known format, and no other tensor exists but those that may be ignored.
//! Embedding, head, norms and biases are floats; projections may be quantised (see `quantization`
//! for the layouts).

#![warn(missing_docs)]

mod adapter;
mod checkpoint;
mod config_file;
pub mod e2m1;
pub mod e4m3;
pub mod e8m0;
mod error;
mod folder;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod generation;
mod map;
pub(crate) mod packed_numbers;
mod quantization;
mod quantized;
mod revision;
pub mod rounding;
mod scales;
mod shard;
mod stacks;
pub mod synth;
mod tensor;

pub use adapter::{ADAPTED_STACKS, Adapter, AdapterFile, AdapterPart, AdapterTarget};
pub use checkpoint::{Checkpoint, CheckpointProgress, KvScales};
pub use error::CheckpointError;
pub use quantized::{ByteCodes, QuantizedTensor, QuantizedType, StoredMatrix};
pub use revision::{CheckpointStamp, Revision};
pub use stacks::StoredBias;
pub use tensor::{StoredTensor, StoredType};
