//! Spelling of bytes in a vocabulary.
//!
//! Owns: the conversion of a token's spelling into its bytes. Never: joins tokens (see
//! `detokenize`).
//! Invariant: the result agrees with the tokenizer's own decoder.

use tokenizers::{DecoderWrapper, Tokenizer};

/// Families of tokenizers, by their decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceEncoding {
    /// Each byte is a printable character (GPT-2, Llama 3, Qwen); a token may be a part of a
    /// character.
    ByteLevel,
    /// Words with `▁` for the space, and `<0xE4>` for bytes of characters that the vocabulary lacks
    /// (Llama 2, Mistral, Gemma).
    ByteFallback,
    /// Any other kind; tokens are whole characters.
    Words,
}

impl PieceEncoding {
    /// Determines the family by the tokenizer's decoder.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        match tokenizer.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => Self::ByteLevel,
            Some(DecoderWrapper::ByteFallback(_)) => Self::ByteFallback,
            Some(DecoderWrapper::Sequence(sequence)) => {
                let decoders = sequence.get_decoders();
                if let [DecoderWrapper::ByteLevel(_)] = decoders {
                    Self::ByteLevel
                } else if decoders
                    .iter()
                    .any(|d| matches!(d, DecoderWrapper::ByteFallback(_)))
                {
                    Self::ByteFallback
                } else {
                    Self::Words
                }
            }
            _ => Self::Words,
        }
    }

    /// Returns the bytes that a spelling stands for.
    pub(crate) fn bytes(self, piece: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => {
                let bytes: Option<Vec<u8>> = piece.chars().map(byte_of_level_letter).collect();
                bytes.unwrap_or_else(|| piece.as_bytes().to_vec())
            }
            Self::ByteFallback => match fallback_byte(piece) {
                Some(byte) => vec![byte],
                None => piece.replace('▁', " ").into_bytes(),
            },
            Self::Words => piece.replace('▁', " ").into_bytes(),
        }
    }
}

/// Parses a byte token: `<0xE4>` is 0xE4.
pub(crate) fn fallback_byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

/// Decodes GPT-2's alphabet: printable Latin-1 characters are themselves; the other 68 bytes, in
/// order, are the characters from U+0100 on.
pub(super) fn byte_of_level_letter(character: char) -> Option<u8> {
    match character as u32 {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}
