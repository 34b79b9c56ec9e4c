//! Compiled constraints of a worker's requests.
//!
//! Owns: the compiled grammars, by content, and the matchers that the engine gets of them. Never:
//! logs a grammar, or an error that has its text.
//! Invariant: a grammar that a hand-off has pinned stays compiled, so that the engine's thread
//! finds it ready.

use cleave_domain::{Constraint, TokenId};
use cleave_engine::{ConstraintError, ConstraintSource, TokenMask, TokenMatcher};
use cleave_grammar::{CompiledGrammar, GrammarError, GrammarMatcher};
use cleave_text::{ModelFiles, ModelText};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use tracing::{error, warn};

/// Compiled grammars that are kept without a hand-off that has them.
const UNPINNED_MAX: usize = 64;
/// Limit of the memory that they take together, in bytes: that of the largest few.
const UNPINNED_BYTES_MAX: usize = 256 << 20;

/// The constraints of one worker. Threads share it.
pub(crate) struct WorkerConstraints {
    files: Arc<ModelFiles>,
    /// Made for the first constraint.
    model: OnceLock<Option<Arc<ModelText>>>,
    forced: ForcedTokens,
    compiled: Mutex<CompiledTable>,
}

/// Whether matchers look for forced tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForcedTokens {
    /// The worker verifies drafts.
    Proposed,
    Left,
}

#[derive(Default)]
struct CompiledTable {
    entries: HashMap<Arc<Constraint>, CompiledEntry>,
    /// Grows with each use.
    uses_count: u64,
}

impl CompiledTable {
    /// Drops the least recently used entries without pins that are beyond the limits, `bytes_max`
    /// and [`UNPINNED_MAX`].
    fn drop_oldest(&mut self, bytes_max: usize) {
        let entries = self.entries.iter();
        let mut unpinned: Vec<(u64, usize, Arc<Constraint>)> = entries
            .filter(|(_, entry)| entry.pins_count == 0)
            .map(|(constraint, entry)| (entry.last_use, entry.bytes(), Arc::clone(constraint)))
            .collect();
        unpinned.sort_unstable_by_key(|(last_use, ..)| *last_use);
        let mut bytes_kept = 0_usize;
        for (at, (_, bytes, constraint)) in unpinned.iter().rev().enumerate() {
            bytes_kept = bytes_kept.saturating_add(*bytes);
            if at >= UNPINNED_MAX || bytes_kept > bytes_max {
                self.entries.remove(constraint);
            }
        }
    }
}

struct CompiledEntry {
    /// `None` while it is being compiled.
    outcome: Option<Result<Arc<CompiledGrammar>, GrammarError>>,
    /// Hand-offs that have it.
    pins_count: u32,
    last_use: u64,
}

impl CompiledEntry {
    fn bytes(&self) -> usize {
        match &self.outcome {
            Some(Ok(compiled)) => compiled.bytes(),
            Some(Err(_)) | None => 0,
        }
    }
}

/// The state of a constraint that a hand-off pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompileState {
    /// It is compiled, or known to be unusable.
    Known,
    /// Another hand-off's order has begun to compile it.
    UnderWay,
    /// The caller is to compile it.
    New,
}

impl WorkerConstraints {
    pub(crate) fn new(files: Arc<ModelFiles>, forced: ForcedTokens) -> Self {
        Self {
            files,
            model: OnceLock::new(),
            forced,
            compiled: Mutex::default(),
        }
    }

    /// Keeps a constraint for a hand-off until [`WorkerConstraints::unpin`].
    pub(crate) fn pin(&self, constraint: &Arc<Constraint>) -> CompileState {
        let mut table = self.compiled.lock();
        table.uses_count += 1;
        let last_use = table.uses_count;
        let mut state = CompileState::New;
        let entry = table.entries.entry(Arc::clone(constraint));
        let entry = entry.and_modify(|entry| {
            state = match entry.outcome {
                Some(_) => CompileState::Known,
                None => CompileState::UnderWay,
            };
        });
        let entry = entry.or_insert(CompiledEntry {
            outcome: None,
            pins_count: 0,
            last_use,
        });
        entry.pins_count += 1;
        entry.last_use = last_use;
        state
    }

    /// Ends a hand-off's hold. The grammar stays while it is among the last used.
    pub(crate) fn unpin(&self, constraint: &Arc<Constraint>) {
        let mut table = self.compiled.lock();
        if let Some(entry) = table.entries.get_mut(constraint) {
            entry.pins_count = entry.pins_count.saturating_sub(1);
        }
        table.drop_oldest(UNPINNED_BYTES_MAX);
    }

    /// Compiles a constraint, which may take a part of a second; the first one a second, for the
    /// vocabulary.
    pub(crate) fn compile(&self, constraint: &Arc<Constraint>) {
        // Orders wait for an outcome, whatever it is.
        let compiled = catch_unwind(AssertUnwindSafe(|| self.compiled_now(constraint)));
        let outcome = compiled.unwrap_or(Err(GrammarError::Failed));
        if let Err(error) = &outcome {
            let kind = constraint.grammar.kind();
            let bytes = constraint.grammar.bytes();
            warn!(
                kind,
                bytes,
                error = unquoted(error),
                "a constraint cannot be enforced"
            );
        }
        let mut table = self.compiled.lock();
        if let Some(entry) = table.entries.get_mut(constraint) {
            entry.outcome = Some(outcome);
        }
    }

    fn compiled_now(&self, constraint: &Constraint) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let model = self.model().ok_or(GrammarError::Unavailable)?;
        model.grammars()?.compile(constraint).map(Arc::new)
    }

    fn model(&self) -> Option<&Arc<ModelText>> {
        let model = self.model.get_or_init(|| {
            let model = ModelText::new((*self.files).clone());
            let model = model.inspect_err(
                |error| error!(%error, "no constraint can be enforced: the tokenizer cannot be read"),
            );
            model.ok().map(Arc::new)
        });
        model.as_ref()
    }

    fn find(&self, constraint: &Constraint) -> Option<Result<Arc<CompiledGrammar>, GrammarError>> {
        self.compiled
            .lock()
            .entries
            .get(constraint)?
            .outcome
            .clone()
    }
}

impl ConstraintSource for WorkerConstraints {
    fn open(
        &self,
        constraint: &Constraint,
        output: &[TokenId],
    ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
        // Pinned ones are found; whatever comes in another way is compiled here.
        let compiled = self
            .find(constraint)
            .unwrap_or_else(|| self.compiled_now(constraint));
        let failed = |error| constraint_error(&error);
        let mut matcher = compiled.map_err(failed)?.start();
        for token in output {
            matcher.consume(*token).map_err(failed)?;
        }
        let model = self.model().ok_or_else(no_vocabulary)?;
        Ok(Box::new(SequenceMatcher {
            matcher,
            model: Arc::clone(model),
            forced: self.forced,
            failure: None,
        }))
    }
}

fn no_vocabulary() -> ConstraintError {
    ConstraintError::Broken("the tokenizer cannot be read".to_owned())
}

/// The error for the engine: limits are counts, and every worker has the same ones.
fn constraint_error(error: &GrammarError) -> ConstraintError {
    let reason = unquoted(error).to_owned();
    match error {
        GrammarError::Refused(_)
        | GrammarError::TooComplex
        | GrammarError::NoEndToken
        | GrammarError::Failed => ConstraintError::Unenforceable(reason),
        GrammarError::Mismatch | GrammarError::Unavailable => ConstraintError::Broken(reason),
    }
}

/// An error without text of the grammar.
fn unquoted(error: &GrammarError) -> &'static str {
    match error {
        GrammarError::Refused(_) => "it is not supported",
        GrammarError::TooComplex => {
            "it became too complex; simplify it (fewer alternatives or optional parts)"
        }
        GrammarError::Mismatch => "the output does not match it",
        GrammarError::NoEndToken => "the model has no end token",
        GrammarError::Failed => "it cannot be evaluated",
        GrammarError::Unavailable => "it cannot be compiled here now",
    }
}

/// The matcher of one sequence.
struct SequenceMatcher {
    matcher: GrammarMatcher,
    model: Arc<ModelText>,
    forced: ForcedTokens,
    /// Why the last token could not be appended.
    failure: Option<ConstraintError>,
}

impl TokenMatcher for SequenceMatcher {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let allowed = self.matcher.allow(mask.words_mut());
        allowed.map_err(|error| constraint_error(&error))
    }

    fn push(&mut self, token: TokenId) {
        if let Err(error) = self.matcher.consume(token) {
            self.failure.get_or_insert(constraint_error(&error));
        }
    }

    fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        self.matcher.valid_prefix(tokens)
    }

    fn forced(&mut self) -> Vec<TokenId> {
        match self.forced {
            ForcedTokens::Proposed => self.model.forced_tokens(&mut self.matcher),
            ForcedTokens::Left => Vec::new(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
