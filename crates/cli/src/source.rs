//! What a fleet is made of: a model in memory, or nothing but prices.
//!
//! Owns: the choice between the two. Never: serves. Everything after it is the same for both.

use crate::args::{EngineArgs, EngineKind, MockArgs, ModelArgs};
use crate::mock::Mock;
use crate::model::{self, Loaded, apart};
use anyhow::Context;
use cleave_api::ModelFiles;
use cleave_domain::Role;
use cleave_engine::Engine;
use cleave_node::{Calibration, StepTime, calibrate};
use std::time::Duration;
use tracing::info;

/// Ready for any number of engines.
pub(crate) enum Source {
    /// Weights and their arithmetic.
    Model(Box<Loaded>),
    /// Prices.
    Mock(Box<Mock>),
}

impl Source {
    /// Opens, checks and loads what was asked for.
    ///
    /// # Errors
    /// One that names what is wrong, and where.
    pub(crate) fn open(
        (model, mock): (&ModelArgs, &MockArgs),
        engine: &EngineArgs,
    ) -> anyhow::Result<Self> {
        Ok(match mock.engine {
            EngineKind::Model => Self::Model(Box::new(model::load(model, engine)?)),
            EngineKind::Mock => Self::Mock(Box::new(Mock::open(mock, model)?)),
        })
    }

    /// The text side, as the API and routers want it.
    pub(crate) fn into_files(self) -> ModelFiles {
        match self {
            Self::Model(loaded) => loaded.files,
            Self::Mock(mock) => mock.into_files(),
        }
    }

    /// For people.
    pub(crate) fn title(&self) -> String {
        match self {
            Self::Model(loaded) => loaded.title(),
            Self::Mock(mock) => mock.title(),
        }
    }

    /// The longest sequence, prompt and output together.
    pub(crate) fn context_tokens_max(&self) -> u32 {
        match self {
            Self::Model(loaded) => loaded.context_tokens_max(),
            Self::Mock(mock) => mock.context_tokens_max(),
        }
    }

    /// Whether processes share the GPU by NVIDIA's Multi-Process Service; `None` without a GPU.
    pub(crate) fn is_mps(&self) -> Option<bool> {
        match self {
            Self::Model(loaded) => loaded.is_mps(),
            Self::Mock(_) => None,
        }
    }

    /// Engines for workers of these roles.
    ///
    /// # Errors
    /// If memory or threads cannot be had.
    pub(crate) fn engines(
        &self,
        args: &EngineArgs,
        roles: &[Role],
    ) -> anyhow::Result<Vec<Box<dyn Engine>>> {
        match self {
            Self::Model(loaded) => loaded.engines(args, roles),
            Self::Mock(mock) => roles.iter().map(|_| mock.engine(args)).collect(),
        }
    }

    /// What steps of this engine cost, measured within `budget`; nothing of one that computes
    /// nothing, or where nothing is to be measured.
    ///
    /// # Errors
    /// If the engine breaks.
    pub(crate) fn measure(
        &self,
        engine: &mut dyn Engine,
        budget: Duration,
    ) -> anyhow::Result<Option<Calibration>> {
        match self {
            Self::Model(loaded) if !budget.is_zero() => {
                let found = apart(|| calibrate(engine, &loaded.shape(), budget));
                let found =
                    found.context("the engine cannot be measured; --calibrate 0 skips it")?;
                let errors = found.learner.errors();
                let median = f64::from(errors.median_permille) / 10.0;
                info!(
                    "{} steps measured, last predicted within {median} %",
                    found.steps
                );
                Ok(Some(found))
            }
            Self::Model(_) | Self::Mock(_) => Ok(None),
        }
    }

    /// How long the steps of a worker with these legs take.
    pub(crate) fn step_time(&self, role: Role) -> StepTime {
        match self {
            Self::Model(_) => StepTime::Measured,
            Self::Mock(mock) => StepTime::Priced(mock.prices(role)),
        }
    }
}
