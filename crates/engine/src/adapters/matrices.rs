//! An adapter as matrices of a device that multiplies each group of rows by itself.
//!
//! Owns: these matrices, by stack. Never: reads a file by itself.

use super::changes::{StoredChanges, StoredLowRank};
use crate::EngineError;
use cleave_models::{Projection, TensorPlace};
use std::collections::BTreeMap;

/// A change of a product's output, `expand · (shrink · x)`, in f32.
#[derive(Debug)]
pub struct LowRank<M> {
    /// First matrix, `(ranks, in)`.
    pub shrink: M,
    /// Second matrix, `(out, ranks)`; the adapter's scale is in it.
    pub expand: M,
}

/// A loaded adapter, as pairs of matrices by the stack whose product they are added to.
#[derive(Debug)]
pub struct AdapterMatrices<M> {
    changes: BTreeMap<(TensorPlace, &'static [Projection]), LowRank<M>>,
    /// Whether it changes experts, by layer.
    changes_experts: Vec<bool>,
}

impl<M> AdapterMatrices<M> {
    /// Loads every change by `load`.
    ///
    /// # Errors
    /// The first of `load`.
    pub fn load(
        changes: &StoredChanges<'_>,
        load: impl Fn(StoredLowRank) -> Result<LowRank<M>, EngineError>,
    ) -> Result<Self, EngineError> {
        let mut loaded = BTreeMap::new();
        let mut changes_experts = vec![false; changes.layers_count()];
        for (layer, has_experts) in changes_experts.iter_mut().enumerate() {
            for (place, stack) in changes.places(layer) {
                if let Some(stored) = changes.of(place, stack) {
                    *has_experts |= matches!(place, TensorPlace::Expert { .. });
                    loaded.insert((place, stack), load(stored)?);
                }
            }
        }
        Ok(Self {
            changes: loaded,
            changes_experts,
        })
    }

    /// The change of a stack's product, of a layer or of one of its experts; `None` if the adapter
    /// leaves it as it is.
    pub fn change(&self, place: TensorPlace, stack: &'static [Projection]) -> Option<&LowRank<M>> {
        self.changes.get(&(place, stack))
    }

    /// Whether it changes an expert of a layer.
    pub fn changes_experts(&self, layer: usize) -> bool {
        self.changes_experts[layer]
    }
}
