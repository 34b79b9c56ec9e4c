//! The pieces of an answer, as they come out of the model's text.
//!
//! Owns: the kinds of pieces, and their order within one choice. Never: formats JSON; each surface
//! has its own shape for them. Invariant: nothing follows [`OutputPiece::End`], and pieces of one
//! kind that no other kind divides are one piece, so an answer in one part costs no more than its
//! text.

use crate::request::CallReason;
use cleave_domain::{FinishReason, TokenId};
use std::sync::Arc;

/// A piece of a choice. A new kind of content is a variant here, for which the compiler then names
/// each surface.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum OutputPiece {
    /// Text of the answer.
    Text(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// A call of a tool, or a part of one.
    ToolCall(ToolCallPiece),
    /// Scores of tokens, those of an echoed prompt first.
    Scores(Vec<TokenScore>),
    /// Scores of the prompt's tokens, apart from those of the output; before any other piece.
    PromptScores(Vec<TokenScore>),
    /// The vector of a request that asks for one; nothing but the end follows.
    Vector(Arc<[f32]>),
    /// The end of the choice.
    End(ChoiceEnd),
}

/// A call of a tool. The first piece of a call has its head; others go on with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCallPiece {
    /// Index of the call in its choice.
    pub(crate) index: usize,
    pub(crate) kind: ToolKind,
    pub(crate) head: Option<ToolCallHead>,
    /// The next characters of the arguments: the text of a JSON object, or the input of a custom
    /// tool.
    pub(crate) arguments: String,
}

/// The kind of a tool, by what it is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolKind {
    /// With arguments, a JSON object.
    Function,
    /// Its input is a text of any kind.
    Custom,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ToolCallHead {
    pub(crate) id: String,
    pub(crate) name: String,
}

/// Pieces of one choice, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OutputPieces(Vec<OutputPiece>);

/// The log-probability of a token, and those of the likeliest ones in its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenScore {
    pub(crate) token: TokenId,
    /// `None` for a prompt's first token.
    pub(crate) logprob: Option<f32>,
    /// The most likely tokens, descending.
    pub(crate) top: Vec<(TokenId, f32)>,
    /// Characters of the answer before this token.
    pub(crate) offset: usize,
}

/// The end of a sequence as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChoiceEnd {
    pub(crate) reason: FinishReason,
    pub(crate) cause: StopCause,
    /// Reason that OpenAI's APIs give for calls, if the answer has any; `None` also if a stop
    /// condition of the client cut the last.
    pub(crate) whole_calls: Option<CallReason>,
}

/// The cause of the end among the client's own stop conditions; `stop_reason` in vLLM's answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StopCause {
    /// The model's end token or the length limit.
    EosOrLength,
    Text(String),
    Token(TokenId),
}

impl ChoiceEnd {
    /// The reason in the words of OpenAI's API, of metrics and of spans.
    pub(crate) fn reason_word(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop if self.whole_calls == Some(CallReason::Calls) => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

impl OutputPieces {
    /// Adds a piece. Empty texts and lists are no pieces.
    pub(crate) fn push(&mut self, piece: OutputPiece) {
        // Scores accompany content and divide none.
        let mut content = self.0.iter_mut().rev();
        let last = content.find(|piece| !matches!(piece, OutputPiece::Scores(_)));
        match piece {
            OutputPiece::Text(text) | OutputPiece::Reasoning(text) if text.is_empty() => {}
            OutputPiece::Scores(scores) if scores.is_empty() => {}
            OutputPiece::Text(text) => match last {
                Some(OutputPiece::Text(last)) => last.push_str(&text),
                _ => self.0.push(OutputPiece::Text(text)),
            },
            OutputPiece::Reasoning(text) => match last {
                Some(OutputPiece::Reasoning(last)) => last.push_str(&text),
                _ => self.0.push(OutputPiece::Reasoning(text)),
            },
            OutputPiece::ToolCall(call) => match last {
                Some(OutputPiece::ToolCall(last))
                    if call.head.is_none() && last.index == call.index =>
                {
                    last.arguments.push_str(&call.arguments);
                }
                _ => self.0.push(OutputPiece::ToolCall(call)),
            },
            OutputPiece::Scores(scores) => {
                let earlier = self.0.iter_mut().find_map(|piece| match piece {
                    OutputPiece::Scores(earlier) => Some(earlier),
                    OutputPiece::Text(_)
                    | OutputPiece::Reasoning(_)
                    | OutputPiece::ToolCall(_)
                    | OutputPiece::PromptScores(_)
                    | OutputPiece::Vector(_)
                    | OutputPiece::End(_) => None,
                });
                match earlier {
                    Some(earlier) => earlier.extend(scores),
                    None => self.0.push(OutputPiece::Scores(scores)),
                }
            }
            OutputPiece::PromptScores(_) | OutputPiece::Vector(_) | OutputPiece::End(_) => {
                self.0.push(piece);
            }
        }
    }

    pub(crate) fn append(&mut self, later: Self) {
        if self.0.is_empty() {
            *self = later;
        } else {
            later.0.into_iter().for_each(|piece| self.push(piece));
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &OutputPiece> {
        self.0.iter()
    }

    /// Returns the scores of all tokens.
    pub(crate) fn scores(&self) -> &[TokenScore] {
        let mut scores = self.0.iter().filter_map(|piece| match piece {
            OutputPiece::Scores(scores) => Some(scores.as_slice()),
            _ => None,
        });
        scores.next().unwrap_or_default()
    }

    /// Returns the vector, if there is one.
    pub(crate) fn vector(&self) -> Option<Arc<[f32]>> {
        self.0.iter().find_map(|piece| match piece {
            OutputPiece::Vector(vector) => Some(Arc::clone(vector)),
            _ => None,
        })
    }

    /// Returns the end of the choice, if it is among the pieces.
    pub(crate) fn end(&self) -> Option<&ChoiceEnd> {
        match self.0.last() {
            Some(OutputPiece::End(end)) => Some(end),
            _ => None,
        }
    }

    /// Whether a client would notice them: scores alone wait for the text that is held back.
    pub(crate) fn are_noticeable(&self) -> bool {
        let mut pieces = self.0.iter();
        let is_score = |piece: &OutputPiece| {
            matches!(piece, OutputPiece::Scores(_) | OutputPiece::PromptScores(_))
        };
        pieces.any(|piece| !is_score(piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(token: TokenId) -> TokenScore {
        TokenScore {
            token,
            logprob: None,
            top: Vec::new(),
            offset: 0,
        }
    }

    #[test]
    fn pieces_of_one_kind_are_joined() {
        let mut pieces = OutputPieces::default();
        pieces.push(OutputPiece::Text(String::new()));
        pieces.push(OutputPiece::Scores(Vec::new()));
        assert_eq!(pieces, OutputPieces::default());
        pieces.push(OutputPiece::Scores(vec![score(1)]));
        assert!(!pieces.are_noticeable());
        for token in 2..5 {
            let mut later = OutputPieces::default();
            later.push(OutputPiece::Scores(vec![score(token)]));
            later.push(OutputPiece::Text(token.to_string()));
            pieces.append(later);
        }
        assert!(pieces.are_noticeable());
        let end = ChoiceEnd {
            reason: FinishReason::Stop,
            cause: StopCause::EosOrLength,
            whole_calls: None,
        };
        pieces.push(OutputPiece::End(end.clone()));
        assert_eq!(pieces.end(), Some(&end));
        let expected = [
            OutputPiece::Scores((1..5).map(score).collect()),
            OutputPiece::Text("234".to_owned()),
            OutputPiece::End(end),
        ];
        assert_eq!(pieces.0, expected);
    }
}
