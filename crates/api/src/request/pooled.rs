//! Requests for vectors instead of tokens, and the values of their answers.
//!
//! Owns: how texts become prompts of one vector each, and what is computed of the vectors. Never:
//! formats JSON. Invariant: an answer has a value for each of its inputs, in their order.

use super::{
    AnswerFacts, CallReason, GenerateRequest, OutputFormat, OutputLimit, OutputWanted,
    ReasoningShown, ResponseMode, ScoredTokens, StopText, TokenizedPrompt, cache_salt, priority,
};
use crate::error::ApiError;
use crate::field::JsonFields;
use cleave_domain::{Pooling, SamplingParams, StopRules, TokenId};
use cleave_text::{ModelText, SpecialTokens, TextStart};
use std::sync::Arc;

/// The part of an answer that follows from its request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PooledAnswer {
    Embeddings(EmbeddingForm),
    Scores(PairScores),
    Ranking(DocumentRanking),
}

/// The form of embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EmbeddingForm {
    pub(crate) encoding: EmbeddingEncoding,
    /// Elements that are kept, the first ones; `None` keeps all.
    pub(crate) dimensions: Option<usize>,
    /// Whether what is kept is divided by its length.
    pub(crate) normalize: bool,
}

/// The form of numbers in an answer, by `encoding_format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmbeddingEncoding {
    Float,
    /// Little-endian 32-bit floats, as OpenAI's Python client asks for.
    Base64,
}

/// How the vectors of a request become scores of pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PairScores {
    /// Each vector has the logits of "no" and "yes" for a pair.
    Classified,
    /// The cosine of two vectors, by their numbers.
    Cosine(Vec<(usize, usize)>),
}

/// Documents by their scores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DocumentRanking {
    /// A score for each document, in their order.
    pub(crate) scores: PairScores,
    /// Limit of results; `None` for all.
    pub(crate) top_n: Option<usize>,
    /// The documents' texts, if the answer repeats them.
    pub(crate) documents: Option<Vec<String>>,
}

impl PooledAnswer {
    /// The text of a document, if the answer repeats it.
    pub(crate) fn document(&self, index: usize) -> Option<&str> {
        match self {
            Self::Ranking(ranking) => Some(ranking.documents.as_ref()?.get(index)?),
            Self::Embeddings(_) | Self::Scores(_) => None,
        }
    }
}

impl EmbeddingForm {
    /// The embedding of a vector.
    pub(crate) fn embedding(&self, vector: &[f32]) -> Vec<f32> {
        let kept = self.dimensions.unwrap_or(vector.len()).min(vector.len());
        let mut embedding = vector[..kept].to_vec();
        if self.normalize {
            let length = length(&embedding);
            let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
            for value in &mut embedding {
                *value = (f64::from(*value) * scale) as f32;
            }
        }
        embedding
    }
}

impl PairScores {
    /// A score for each pair.
    pub(crate) fn of(&self, vectors: &[Arc<[f32]>]) -> Vec<f64> {
        match self {
            Self::Classified => vectors
                .iter()
                .map(|logits| positive_share(logits))
                .collect(),
            Self::Cosine(pairs) => {
                let cosine = |(a, b): &(usize, usize)| cosine(&vectors[*a], &vectors[*b]);
                pairs.iter().map(cosine).collect()
            }
        }
    }
}

impl DocumentRanking {
    /// Numbers of documents with their scores, the best first; equal ones in their order.
    pub(crate) fn results(&self, vectors: &[Arc<[f32]>]) -> Vec<(usize, f64)> {
        let scores = self.scores.of(vectors);
        let mut ranked: Vec<(usize, f64)> = scores.into_iter().enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked.truncate(self.top_n.unwrap_or(usize::MAX));
        ranked
    }
}

/// The softmax of the second of two logits.
fn positive_share(logits: &[f32]) -> f64 {
    match *logits {
        [negative, positive] => 1.0 / (1.0 + (f64::from(negative) - f64::from(positive)).exp()),
        _ => 0.0,
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    let lengths = length(a) * length(b);
    if lengths > 0.0 {
        // Rounding may lead a little beyond what a cosine can be.
        (products.sum::<f64>() / lengths).clamp(-1.0, 1.0)
    } else {
        0.0
    }
}

fn length(vector: &[f32]) -> f64 {
    let squares = vector.iter().map(|value| f64::from(*value).powi(2));
    squares.sum::<f64>().sqrt()
}

/// A request for one vector of each prompt.
pub(crate) fn pooled_request(
    fields: &JsonFields,
    prompts: Vec<Vec<TokenId>>,
    pooling: Pooling,
    answer: PooledAnswer,
) -> Result<GenerateRequest, ApiError> {
    let prompt = |tokens: Vec<TokenId>| TokenizedPrompt {
        tokens: tokens.into(),
        stop: StopRules {
            max_tokens: 1,
            min_tokens: 0,
            stop_tokens: Arc::from([]),
        },
        start: TextStart::Fresh,
        echo: None,
        output_wanted: OutputWanted::Vector,
    };
    Ok(GenerateRequest {
        prompts: prompts.into_iter().map(prompt).collect(),
        choices: 1,
        sampling: SamplingParams::greedy(),
        constraint: None,
        output: OutputFormat {
            stops: Arc::from([]),
            stop_text: StopText::Cut,
            special: SpecialTokens::Kept,
            logprobs: None,
            prompt_logprobs: None,
            scored: ScoredTokens::All,
            reasoning: ReasoningShown::Shown,
            call_reason: CallReason::Stop,
            custom_tools: Arc::from([]),
        },
        reading: None,
        delivery: ResponseMode::Whole,
        facts: AnswerFacts {
            pooled: Some(Arc::new(answer)),
            ..AnswerFacts::default()
        },
        priority: priority(fields)?,
        cache_salt: cache_salt(fields)?,
        warnings: Vec::new(),
        output_limit: OutputLimit::Requested,
        pooling: Some(pooling),
    })
}

/// Refuses a prompt that no worker takes: it must have a token, and be shorter than the context.
pub(crate) fn check_prompt(
    tokens: &[TokenId],
    model: &ModelText,
    path: &str,
) -> Result<(), ApiError> {
    let context = model.context_tokens_max();
    if tokens.is_empty() {
        let message = format!("`{path}` has no token; a vector is made of at least one.");
        Err(ApiError::invalid(path, message))
    } else if tokens.len() >= context as usize {
        let message = format!(
            "This model's maximum context length is {context} tokens, and a vector is made of at most {}, one less; \
             `{path}` has {} tokens. Shorten it.",
            context.saturating_sub(1),
            tokens.len()
        );
        Err(ApiError::context_exceeded(path, message))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(dimensions: Option<usize>, normalize: bool) -> EmbeddingForm {
        EmbeddingForm {
            encoding: EmbeddingEncoding::Float,
            dimensions,
            normalize,
        }
    }

    #[test]
    fn an_embedding_is_cut_before_it_is_normalised() {
        let vector = [3.0, 4.0, 12.0];
        assert_eq!(form(Some(2), true).embedding(&vector), [0.6, 0.8]);
        assert_eq!(form(Some(2), false).embedding(&vector), [3.0, 4.0]);
        assert_eq!(form(None, false).embedding(&vector), vector);
        assert_eq!(form(None, true).embedding(&[0.0, 0.0]), [0.0, 0.0]);
    }

    #[test]
    fn a_ranking_has_the_best_documents_first() {
        let logits = |yes: f32| Arc::from([0.0, yes]);
        let ranking = DocumentRanking {
            scores: PairScores::Classified,
            top_n: Some(3),
            documents: None,
        };
        let results = ranking.results(&[logits(1.0), logits(-1.0), logits(2.0), logits(1.0)]);
        let order: Vec<usize> = results.iter().map(|(index, _)| *index).collect();
        assert_eq!(
            order,
            [2, 0, 3],
            "equal scores keep the order of the documents"
        );
        let expected = 1.0 / (1.0 + (-2.0f64).exp());
        assert!((results[0].1 - expected).abs() < 1e-12);
    }

    #[test]
    fn cosines_do_not_depend_on_lengths() {
        let vectors: Vec<Arc<[f32]>> = vec![
            Arc::from([1.0, 0.0]),
            Arc::from([5.0, 0.0]),
            Arc::from([0.0, 2.0]),
            Arc::from([0.0, 0.0]),
        ];
        let pairs = PairScores::Cosine(vec![(0, 1), (0, 2), (1, 3)]);
        assert_eq!(pairs.of(&vectors), [1.0, 0.0, 0.0]);
    }

    #[test]
    fn a_cosine_is_at_most_one() {
        for count in 1..200 {
            let vector: Vec<f32> = (1..=count).map(|i| 1.0 / i as f32).collect();
            let other: Vec<f32> = vector.iter().map(|value| -value).collect();
            assert!(cosine(&vector, &vector) <= 1.0, "{count}");
            assert!(cosine(&vector, &other) >= -1.0, "{count}");
        }
    }
}
