//! An adapter as matrices of a device that multiplies each group of rows by itself.
//!
//! Owns: these matrices, by stack. Never: reads a file by itself.

use super::changes::{StoredChanges, StoredLowRank};
use crate::EngineError;
use cleave_models::Projection;
use std::collections::BTreeMap;

/// A change of a product's output, `expand · (shrink · x)`, in f32.
#[derive(Debug)]
pub struct LowRank<M> {
    /// First matrix, `(ranks, in)`.
    pub shrink: M,
    /// Second matrix, `(out, ranks)`; the adapter's scale is in it.
    pub expand: M,
}

/// The changes of one layer, by the stack whose product they are added to.
type LayerChanges<M> = BTreeMap<&'static [Projection], LowRank<M>>;

/// A loaded adapter, as pairs of matrices by layer and stack.
#[derive(Debug)]
pub struct AdapterMatrices<M> {
    layers: Vec<LayerChanges<M>>,
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
        let layers = (0..changes.layers_count()).map(|layer| {
            let stored = changes.stacks(layer).filter_map(|stack| {
                let stored = changes.of(layer, stack)?;
                Some((stack, stored))
            });
            stored
                .map(|(stack, stored)| Ok((stack, load(stored)?)))
                .collect()
        });
        Ok(Self {
            layers: layers.collect::<Result<_, EngineError>>()?,
        })
    }

    /// The change of a stack's product; `None` if the adapter leaves it as it is.
    pub fn change(&self, layer: usize, stack: &'static [Projection]) -> Option<&LowRank<M>> {
        self.layers[layer].get(stack)
    }
}
