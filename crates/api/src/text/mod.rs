//! Conversion of output tokens into text, as they arrive.
//!
//! Owns: the decision which text is final, and the search for stop strings. Never: stops a flight.
//! Invariant: the text of a stream depends on its tokens, not on how they are divided among
//! emissions; `stream` states the one exception to equality with the tokenizer's decoding.

mod stop;
mod stream;

pub(crate) use stop::StopStrings;
pub use stream::{TextStart, TextStream};
