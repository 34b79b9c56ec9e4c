//! Totals of tokens that a router's clients were given, by class and model.
//!
//! Never: counts a token twice, whatever attempt drew it. Invariant: cached tokens are a part of
//! the prompt tokens.

use super::{SloClassLabels, SloSeries};
use crate::series_table::begin;
use cleave_domain::TokenUsage;
use prometheus_client::metrics::counter::Counter;

/// The counters of one sequence's class and model.
#[derive(Clone, Debug, Default)]
pub struct TokenCounters {
    prompt: Counter,
    cached: Counter,
    output: Counter,
}

impl TokenCounters {
    /// A sequence has its first token, or its vector: its prompt has run.
    pub fn prompt_done(&self, usage: TokenUsage) {
        self.prompt.inc_by(u64::from(usage.prompt_tokens));
        self.cached.inc_by(u64::from(usage.cached_tokens));
    }

    pub fn token_sent(&self) {
        self.output.inc();
    }
}

impl SloSeries {
    /// The counters of a class of a model; all unknown classes share theirs.
    pub fn token_counters(&self, class: &str, model: &str) -> TokenCounters {
        let labels = self.key(class, model).labels();
        TokenCounters {
            prompt: self.prompt_tokens.get_or_create(&labels).clone(),
            cached: self.cached_tokens.get_or_create(&labels).clone(),
            output: self.output_tokens.get_or_create(&labels).clone(),
        }
    }

    /// Creates the counters of a class of a model, at zero.
    pub(super) fn begin_tokens(&self, labels: &SloClassLabels) {
        begin(&self.prompt_tokens, [labels.clone()]);
        begin(&self.cached_tokens, [labels.clone()]);
        begin(&self.output_tokens, [labels.clone()]);
    }

    /// Removes the counters of a class of a model.
    pub(super) fn end_tokens(&self, labels: &SloClassLabels) {
        self.prompt_tokens.remove(labels);
        self.cached_tokens.remove(labels);
        self.output_tokens.remove(labels);
    }
}
