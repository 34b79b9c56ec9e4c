//! Kinds and sizes of bodies, by what they cost.
//!
//! Owns: the limit of a short body, and the kinds of work. Never: reads a body or reserves memory.

/// Limit of a short body, in bytes.
pub(crate) const SHORT_BYTES: usize = 64 * 1024;

/// The kind of work that a body causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyWork {
    /// Parsing: time in proportion to the length of the body.
    ParseOnly,
    /// Rendering: time that depends on the chat template.
    RenderTemplate,
    /// Tokenization of a text or of a rendered conversation, whose tokens are the answer.
    ListTokens,
    /// Rendering of a body that becomes the body of a chat request first.
    RenderConverted,
    /// Tokenization of such a body, whose number of tokens is the answer.
    ListConverted,
    /// Turns tokens of a body back into text.
    JoinTokens,
}
