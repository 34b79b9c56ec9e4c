//! Text and tokens of a model.
//!
//! Owns: everything between text and token ids: the tokenizer, chat templates, the detokenizer,
//! stop strings, grammars, the parts of an output, the defaults of sampling, and the JSON that
//! templates and requests read in place, and the task that a model is served for.
//! Never: generates, or knows a server: a worker uses it as the HTTP side does. No file is opened
//! but in `model_files` and `model_task`.
//! Invariant: a [`ModelText`] does not change after construction, so threads share it without a
//! lock, and its tokens and texts are those of the reference implementation.

mod detokenize;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod grammar;
pub mod json;
mod model_files;
mod model_task;
mod model_text;
mod output;
#[cfg(test)]
mod reference;
mod stop;
mod template;
mod tokenizer;

pub use detokenize::{TextStart, TextStream};
pub use model_files::{ModelError, ModelFiles};
pub use model_task::{
    EmbedTask, ModelTask, RERANK_INSTRUCTION, RerankTask, RerankTokens, rerank_prompt,
};
pub use model_text::{ModelText, NumberBounds, SamplingDefaults, bounds_from_to};
pub use output::{
    AnswerPart, CallRules, CallableTool, OutputFormats, OutputParser, OutputPlace, OutputReading,
    OutputRules, ReasoningField, ReasoningParser, ToolCallParser, ToolSpec, UnknownParser,
};
pub use stop::{StopMatch, StopStrings};
pub use template::{RenderEnd, RenderError, TemplateInput, TemplateValue, rendering_bytes_max};
pub use tokenizer::{EncodeError, EncodedText, ModelTokenizer, PIECE_BYTES_MAX, SpecialTokens};
