//! Checks of constraints, before any work for their requests.
//!
//! Owns: who may compile a grammar now, and which recent ones were accepted. Never: keeps a
//! grammar, or compiles one on a thread that serves requests.
//! Invariant: a tenant has one check under way, so that its grammars delay its own requests alone.

use crate::error::ApiError;
use crate::request::constraint::FieldConstraint;
use cleave_domain::Grammar;
use cleave_grammar::GrammarError;
use cleave_text::ModelText;
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// Limit of accepted constraints that are known, by their digests.
const ACCEPTED_MAX: usize = 256;

/// The checks of one server.
pub(crate) struct ConstraintChecks {
    /// Checks under way, over all tenants.
    turns: Arc<Semaphore>,
    /// The turn of each tenant. Tenants are those of the policy, so there are few.
    tenants: Mutex<HashMap<String, Arc<Semaphore>>>,
    accepted: Mutex<AcceptedConstraints>,
}

/// Constraints that a model's grammars accepted, so that a schema which comes with every request is
/// compiled once.
#[derive(Default)]
struct AcceptedConstraints {
    model: Weak<ModelText>,
    /// The most recent one is the last.
    digests: VecDeque<blake3::Hash>,
}

impl AcceptedConstraints {
    fn has(&self, model: &Arc<ModelText>, digest: &blake3::Hash) -> bool {
        Weak::ptr_eq(&self.model, &Arc::downgrade(model)) && self.digests.contains(digest)
    }

    fn add(&mut self, model: &Arc<ModelText>, digest: blake3::Hash) {
        if !Weak::ptr_eq(&self.model, &Arc::downgrade(model)) {
            self.model = Arc::downgrade(model);
            self.digests.clear();
        }
        if self.digests.len() == ACCEPTED_MAX {
            self.digests.pop_front();
        }
        self.digests.push_back(digest);
    }
}

/// Digest of the grammar: its kind, and each text with its length.
fn digest(grammar: &Grammar) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(grammar.kind().as_bytes());
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    match grammar {
        Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => add(text),
        Grammar::Choice(texts) => texts.iter().for_each(|text| add(text)),
    }
    hasher.finalize()
}

impl ConstraintChecks {
    /// Checks for a server with so many cores.
    pub(crate) fn new(cores: usize) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(cores.div_ceil(2))),
            tenants: Mutex::default(),
            accepted: Mutex::default(),
        }
    }

    /// Compiles a constraint, so that a client hears at once if it cannot be enforced. The first
    /// check for a model prepares its vocabulary.
    ///
    /// # Errors
    /// An error of the field, which names the part that cannot be enforced.
    pub(crate) async fn check(
        &self,
        tenant: &str,
        asked: &FieldConstraint,
        model: &Arc<ModelText>,
    ) -> Result<(), ApiError> {
        let digest = digest(&asked.constraint.grammar);
        if self.accepted.lock().has(model, &digest) {
            return Ok(());
        }
        let own_turn = Arc::clone(
            self.tenants
                .lock()
                .entry(tenant.to_owned())
                .or_insert_with(|| Arc::new(Semaphore::new(1))),
        );
        let own_turn = own_turn.acquire_owned().await;
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let (used, all) = (Arc::clone(model), asked.clone());
        let check = move || {
            // The thread owns the turns, because it runs on after the client has disconnected.
            let _held = (own_turn, turn);
            // The content's error is the clearer one.
            let mut parts = all.content.as_deref().into_iter().chain([&all]);
            parts.try_for_each(|part| {
                let grammars = used.grammars();
                let compiled = grammars.and_then(|grammars| grammars.compile(&part.constraint));
                compiled
                    .map(drop)
                    .map_err(|error| refused(&all.path, &error))
            })
        };
        let checked = spawn_blocking(check).await;
        checked.unwrap_or_else(|_| Err(refused(&asked.path, &GrammarError::Failed)))?;
        self.accepted.lock().add(model, digest);
        Ok(())
    }
}

/// The error of a field whose constraint cannot be enforced.
pub(crate) fn refused(path: &str, error: &GrammarError) -> ApiError {
    let message = format!("`{path}` cannot be enforced: {error}.");
    match error {
        GrammarError::NoEndToken => ApiError::unsupported(path, message),
        GrammarError::Unavailable => ApiError::unavailable("grammar_unavailable", message),
        GrammarError::Refused(_)
        | GrammarError::TooComplex
        | GrammarError::Mismatch
        | GrammarError::Failed => ApiError::invalid(path, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{Constraint, ConstraintEnd};
    use cleave_text::ModelFiles;
    use std::path::Path;

    fn model() -> Arc<ModelText> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama3");
        Arc::new(ModelText::new(ModelFiles::read(&folder).unwrap()).unwrap())
    }

    fn asked(grammar: Grammar) -> FieldConstraint {
        FieldConstraint {
            path: "regex".to_owned(),
            constraint: Arc::new(Constraint {
                grammar,
                end: ConstraintEnd::Allowed,
            }),
            content: None,
        }
    }

    #[tokio::test]
    async fn an_accepted_constraint_is_compiled_once_for_a_model() {
        let (checks, first) = (ConstraintChecks::new(2), model());
        let (good, bad) = (Grammar::Regex("a+".into()), Grammar::Regex("(".into()));
        let is_known =
            |grammar: &Grammar, model| checks.accepted.lock().has(model, &digest(grammar));
        assert!(checks.check("", &asked(good.clone()), &first).await.is_ok());
        assert!(checks.check("", &asked(bad.clone()), &first).await.is_err());
        assert!(is_known(&good, &first) && !is_known(&bad, &first));
        assert!(
            !is_known(&Grammar::Lark("a+".into()), &first),
            "another kind"
        );
        let second = model();
        assert!(!is_known(&good, &second));
        checks
            .check("", &asked(good.clone()), &second)
            .await
            .unwrap();
        assert!(is_known(&good, &second) && !is_known(&good, &first));
    }

    #[test]
    fn choices_with_equal_bytes_have_other_digests() {
        let choice = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            digest(&Grammar::Choice(texts.into()))
        };
        assert_ne!(choice(&["ab", "c"]), choice(&["a", "bc"]));
        assert_eq!(choice(&["ab", "c"]), choice(&["ab", "c"]));
    }
}
