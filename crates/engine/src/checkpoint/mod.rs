//! Checkpoints: a Hugging Face folder.

mod map;
mod tensor;

pub use tensor::{StoredTensor, StoredType};
