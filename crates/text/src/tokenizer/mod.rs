//! Conversion of text into tokens.
//!
//! Owns: the spelling of tokens, and a shorter way to the tokens of common tokenizers. Never: reads
//! a file, or joins tokens that arrive one by one (see `detokenize`). Invariant: the tokens are
//! those of the `tokenizers` library.

mod byte_level;
mod piece;

pub(crate) use byte_level::ByteLevelEncoder;
pub use byte_level::EncodedText;
pub(crate) use piece::{PieceEncoding, fallback_byte};

/// The treatment of special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Special tokens are added to tokens, or shown in text.
    Kept,
    /// Special tokens are left out.
    Skipped,
}
