//! Checks of constraints, before any work for their requests.
//!
//! Owns: who may compile a grammar now. Never: keeps one, or compiles on a thread that serves
//! requests.
//! Invariant: a tenant has one check under way, so that its grammars delay its own requests alone.

use crate::error::ApiError;
use crate::request::constraint::FieldConstraint;
use cleave_grammar::GrammarError;
use cleave_text::ModelText;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

/// The checks of one server.
pub(crate) struct ConstraintChecks {
    /// Checks under way, over all tenants.
    turns: Arc<Semaphore>,
    /// The turn of each tenant. Tenants are those of the policy, so there are few.
    tenants: Mutex<HashMap<String, Arc<Semaphore>>>,
}

impl ConstraintChecks {
    /// Checks for a server with so many cores.
    pub(crate) fn new(cores: usize) -> Self {
        Self {
            turns: Arc::new(Semaphore::new(cores.div_ceil(2))),
            tenants: Mutex::default(),
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
        let own_turn = Arc::clone(
            self.tenants
                .lock()
                .entry(tenant.to_owned())
                .or_insert_with(|| Arc::new(Semaphore::new(1))),
        );
        let own_turn = own_turn.acquire_owned().await;
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        let (model, constraint) = (Arc::clone(model), Arc::clone(&asked.constraint));
        let check = move || {
            // The thread owns the turns, because it runs on after the client has disconnected.
            let _held = (own_turn, turn);
            model.grammars()?.compile(&constraint).map(drop)
        };
        let checked = spawn_blocking(check).await;
        let checked = checked.unwrap_or(Err(GrammarError::Failed));
        checked.map_err(|error| refused(&asked.path, &error))
    }
}

fn refused(path: &str, error: &GrammarError) -> ApiError {
    let message = format!("`{path}` cannot be enforced: {error}.");
    match error {
        GrammarError::NoEndToken => ApiError::unsupported(path, message),
        GrammarError::Refused(_)
        | GrammarError::TooComplex
        | GrammarError::Mismatch
        | GrammarError::Failed => ApiError::invalid(path, message),
    }
}
