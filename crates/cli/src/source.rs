//! The source of a fleet's engines: a model in memory, or prices only.
//!
//! Owns: the choice between the two. Never: serves. All later code is the same for both.

use crate::args::{EngineArgs, EngineKind, HostArgs, ModelArgs};
use crate::mock::MockModel;
use crate::model::{self, EngineShare, LoadedModel, OpenedModel, ProcessWorkers, on_own_thread};
use anyhow::{Context, bail};
use cleave_domain::Role;
use cleave_engine::Engine;
use cleave_text::ModelFiles;
use cleave_worker::{Calibration, StepTime, calibrate};
use std::time::Duration;
use tracing::info;

/// A source from which any number of engines can be made.
pub(crate) enum EngineSource {
    Model(Box<LoadedModel>),
    /// Prices of a mock engine.
    Mock(Box<MockModel>),
}

/// A source whose files were checked, and whose weights are not loaded.
pub(crate) enum OpenedSource {
    Model(Box<OpenedModel>),
    Mock(Box<MockModel>),
}

impl OpenedSource {
    /// Opens and checks the source.
    ///
    /// # Errors
    /// One that names the file and its defect, or a flag of the other source.
    pub(crate) fn open(model: &ModelArgs, host: &HostArgs) -> anyhow::Result<Self> {
        let HostArgs { engine, mock, .. } = host;
        if mock.mock_script.is_some() && mock.engine == EngineKind::Model {
            bail!("--mock-script: a model gives its own answers; add --engine mock");
        }
        Ok(match mock.engine {
            EngineKind::Model => Self::Model(Box::new(model::open(model, engine)?)),
            EngineKind::Mock => Self::Mock(Box::new(MockModel::open(mock, model)?)),
        })
    }

    /// Returns the name under which the model is served.
    pub(crate) fn served_name(&self) -> &str {
        match self {
            Self::Model(opened) => &opened.files.name,
            Self::Mock(mock) => mock.served_name(),
        }
    }

    /// Loads the weights, with room for adapters as the flags say.
    ///
    /// # Errors
    /// One that names the tensor, or the memory that is missing.
    pub(crate) fn load(self, host: &HostArgs) -> anyhow::Result<EngineSource> {
        Ok(match self {
            Self::Model(opened) => {
                let loaded = opened.load()?.with_loras_max(host.adapters.loras_max());
                EngineSource::Model(Box::new(loaded))
            }
            Self::Mock(mock) => EngineSource::Mock(mock),
        })
    }
}

impl EngineSource {
    /// Returns the text side, for the API and the routers.
    pub(crate) fn into_files(self) -> ModelFiles {
        match self {
            Self::Model(loaded) => loaded.files,
            Self::Mock(mock) => mock.into_files(),
        }
    }

    /// Returns the name under which the model is served.
    pub(crate) fn served_name(&self) -> &str {
        match self {
            Self::Model(loaded) => &loaded.files.name,
            Self::Mock(mock) => mock.served_name(),
        }
    }

    /// Returns a title for people.
    pub(crate) fn title(&self) -> String {
        match self {
            Self::Model(loaded) => loaded.title(),
            Self::Mock(mock) => mock.title(),
        }
    }

    /// Returns the longest sequence, prompt and output together.
    pub(crate) fn context_tokens_max(&self) -> u32 {
        match self {
            Self::Model(loaded) => loaded.context_tokens_max(),
            Self::Mock(mock) => mock.context_tokens_max(),
        }
    }

    /// Whether processes share the GPU through NVIDIA's Multi-Process Service; `None` without a
    /// GPU.
    pub(crate) fn is_mps(&self) -> Option<bool> {
        match self {
            Self::Model(loaded) => loaded.is_mps(),
            Self::Mock(_) => None,
        }
    }

    /// Returns the bytes of the KV cache of each worker of this model, beside all `workers` of the
    /// process; a mock engine's are its profile's.
    ///
    /// # Errors
    /// If no memory is left, or it cannot be read.
    pub(crate) fn kv_bytes(
        &self,
        args: &EngineArgs,
        workers: ProcessWorkers,
    ) -> anyhow::Result<u64> {
        match self {
            Self::Model(loaded) => loaded.kv_bytes(args, workers),
            Self::Mock(_) => Ok(0),
        }
    }

    /// Creates engines for workers of these roles.
    ///
    /// # Errors
    /// If memory or threads are not available.
    pub(crate) fn engines(
        &self,
        args: &EngineArgs,
        roles: &[Role],
        share: EngineShare,
    ) -> anyhow::Result<Vec<Box<dyn Engine>>> {
        match self {
            Self::Model(loaded) => loaded.engines(args, roles, share),
            Self::Mock(mock) => roles.iter().map(|_| mock.engine(args)).collect(),
        }
    }

    /// Measures the step times of this engine within `budget`; `None` for a mock engine or a budget
    /// of zero.
    ///
    /// # Errors
    /// If the engine fails.
    pub(crate) fn measure(
        &self,
        engine: &mut dyn Engine,
        budget: Duration,
    ) -> anyhow::Result<Option<Calibration>> {
        match self {
            Self::Model(loaded) if !budget.is_zero() => {
                let found = on_own_thread(|| calibrate(engine, &loaded.cost(), budget));
                let found =
                    found.context("the engine cannot be measured; --calibrate 0 skips it")?;
                let errors = found.learner.errors();
                let median = f64::from(errors.median_permille) / 10.0;
                info!(
                    steps = found.steps,
                    error_percent = median,
                    "step times measured"
                );
                Ok(Some(found))
            }
            Self::Model(_) | Self::Mock(_) => Ok(None),
        }
    }

    /// Returns the source of a worker's step times.
    pub(crate) fn step_time(&self, role: Role) -> StepTime {
        match self {
            Self::Model(_) => StepTime::Measured,
            Self::Mock(mock) => StepTime::Priced(mock.prices(role)),
        }
    }
}
