//! Adapters of a pass: their form on a device, and the rows that each changes.
//!
//! Owns: the trait [`AdapterLoader`], and the plain data of the operations on adapters.
//! Never: decides which rows have an adapter.
//! Invariant: a row belongs to one group at most, and a group's rows ascend.

use crate::EngineError;
use crate::adapters::{AdapterMatrices, LowRank, StoredChanges};
use cleave_domain::AdapterId;
use cleave_models::{Projection, TensorPlace};
use std::convert::Infallible;
use std::sync::Arc;

/// Loads adapters onto a device while engines run steps there. Called from any thread.
pub trait AdapterLoader: Send + Sync {
    /// A loaded adapter. Its memory is free again once the last reference is dropped.
    type Adapter: Send + Sync;

    /// Whether the device computes all these changes.
    ///
    /// # Errors
    /// The part that it does not compute.
    fn supports(&self, changes: &StoredChanges<'_>) -> Result<(), &'static str> {
        let _ = changes;
        Ok(())
    }

    /// Loads an adapter, and returns when passes may use it.
    ///
    /// # Errors
    /// `Device` if memory is short, or a copy failed.
    fn load(&self, changes: &StoredChanges<'_>) -> Result<Self::Adapter, EngineError>;
}

/// The loader of a device that applies no adapters: none can be made.
#[derive(Debug)]
pub enum NoAdapters {}

impl AdapterLoader for NoAdapters {
    type Adapter = Infallible;

    fn load(&self, _: &StoredChanges<'_>) -> Result<Infallible, EngineError> {
        match *self {}
    }
}

/// One adapter of a pass with the rows that it changes.
#[derive(Debug)]
pub struct AdapterGroup<A> {
    /// Identity of the adapter.
    pub adapter: AdapterId,
    /// The adapter on the device.
    pub weights: Arc<A>,
    /// Rows of the batch, ascending; after [`regroup`](super::Ops::regroup) of the wanted rows.
    pub rows: Vec<u32>,
}

/// The experts of a layer in a pass with adapters.
#[derive(Debug)]
pub struct AdaptedExperts<'a, A> {
    /// Number of the layer.
    pub layer: usize,
    /// The adapters of the pass.
    pub groups: &'a [AdapterGroup<A>],
}

impl<A> Clone for AdaptedExperts<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for AdaptedExperts<'_, A> {}

impl<'a, M> AdaptedExperts<'a, AdapterMatrices<M>> {
    /// Whether a row of the pass has an adapter that changes an expert of the layer.
    pub fn has_changes(&self) -> bool {
        let mut with_rows = self.groups.iter().filter(|group| !group.rows.is_empty());
        with_rows.any(|group| group.weights.changes_experts(self.layer))
    }

    /// The changes of an expert's stack, each with the number of its adapter in `groups`.
    pub fn changes(
        &self,
        expert: usize,
        stack: &'static [Projection],
    ) -> impl Iterator<Item = (usize, &'a LowRank<M>)> + use<'a, M> {
        let Self { layer, groups } = *self;
        let place = TensorPlace::Expert { layer, expert };
        let numbered = groups.iter().enumerate();
        numbered
            .filter_map(move |(index, group)| Some((index, group.weights.change(place, stack)?)))
    }
}

/// The product of a stack in a pass with adapters.
#[derive(Debug)]
pub struct AdaptedStack<'a, A> {
    /// Number of the layer.
    pub layer: usize,
    /// Projections that are multiplied together.
    pub stack: &'static [Projection],
    /// The adapters of the pass.
    pub groups: &'a [AdapterGroup<A>],
}

impl<M> AdaptedStack<'_, AdapterMatrices<M>> {
    /// The changes of this stack, each with its rows.
    pub fn changes(&self) -> impl Iterator<Item = (&LowRank<M>, &[u32])> {
        let with_rows = self.groups.iter().filter(|group| !group.rows.is_empty());
        with_rows.filter_map(|group| {
            let place = TensorPlace::Layer(self.layer);
            let change = group.weights.change(place, self.stack)?;
            Some((change, &group.rows[..]))
        })
    }
}
