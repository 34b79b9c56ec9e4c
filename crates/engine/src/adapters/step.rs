//! The adapters of a step, with the rows that each changes.
//!
//! Owns: these lists. Never: allocates once they are as long as a step needs.
//! Invariant: a row belongs to one adapter at most.

use super::{AdapterWeights, LowRank};
use crate::EngineError;
use crate::ops::{AdapterSum, Ops, WeightLoader};
use cleave_domain::AdapterId;
use cleave_models::Projection;
use std::ops::Range;
use std::sync::Arc;

/// The group of a row without an adapter.
const NO_GROUP: u32 = u32::MAX;

/// Rows of a step by their adapters.
pub(crate) struct StepAdapters<P: WeightLoader> {
    groups: Vec<AdapterGroup<P>>,
    /// Group of each row, `(rows)`; empty in a step without adapters.
    group_of_row: Vec<u32>,
    /// Rows whose gate has an addend in the present layer, `(rows)`.
    is_adapted: Vec<bool>,
    /// Lists of earlier steps, and of groups of rows, reused.
    spare_rows: Vec<Vec<u32>>,
    spare_groups: Vec<u32>,
}

/// One adapter of a step.
struct AdapterGroup<P: WeightLoader> {
    adapter: AdapterId,
    weights: Arc<AdapterWeights<P>>,
    /// Rows of the batch, ascending.
    rows: Vec<u32>,
}

/// A layer's stack in a step with adapters.
pub(crate) struct AdaptedLayer<'a, P: WeightLoader> {
    adapters: &'a mut StepAdapters<P>,
    layer: usize,
    stack: &'static [Projection],
}

impl<P: WeightLoader> Default for StepAdapters<P> {
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            group_of_row: Vec::new(),
            is_adapted: Vec::new(),
            spare_rows: Vec::new(),
            spare_groups: Vec::new(),
        }
    }
}

impl<P: WeightLoader> StepAdapters<P> {
    /// Begins a step without adapters.
    pub(crate) fn clear(&mut self) {
        self.group_of_row.clear();
        for mut group in self.groups.drain(..) {
            group.rows.clear();
            self.spare_rows.push(group.rows);
        }
    }

    /// Adds an adapter of the step; its rows follow.
    pub(crate) fn hold(&mut self, adapter: AdapterId, weights: Arc<AdapterWeights<P>>) {
        if self.groups.iter().any(|group| group.adapter == adapter) {
            return;
        }
        self.groups.push(AdapterGroup {
            adapter,
            weights,
            rows: self.spare_rows.pop().unwrap_or_default(),
        });
    }

    /// Whether an adapter is one of the step's.
    pub(crate) fn holds(&self, adapter: AdapterId) -> bool {
        self.groups.iter().any(|group| group.adapter == adapter)
    }

    /// Adds the next rows of the batch.
    pub(crate) fn push_rows(&mut self, adapter: Option<AdapterId>, rows: Range<usize>) {
        if self.groups.is_empty() {
            return;
        }
        let of = |adapter| {
            self.groups
                .iter()
                .position(|group| group.adapter == adapter)
        };
        let index = adapter.map(|adapter| of(adapter).expect("the step holds its adapters"));
        let group = index.map_or(NO_GROUP, |index| index as u32);
        self.group_of_row.resize(rows.end, group);
        if let Some(index) = index {
            let rows = rows.map(|row| row as u32);
            self.groups[index].rows.extend(rows);
        }
    }

    /// Keeps the rows of these numbers, in this order, which [`Ops::gather`] moved to the front.
    pub(crate) fn select(&mut self, rows: &[u32]) {
        if self.groups.is_empty() {
            return;
        }
        let mut selected = std::mem::take(&mut self.spare_groups);
        selected.clear();
        selected.extend(rows.iter().map(|row| self.group_of_row[*row as usize]));
        self.spare_groups = std::mem::replace(&mut self.group_of_row, selected);
        self.groups.iter_mut().for_each(|group| group.rows.clear());
        for (row, group) in (0..).zip(&self.group_of_row) {
            if let Some(group) = self.groups.get_mut(*group as usize) {
                group.rows.push(row);
            }
        }
    }

    /// The changes of a stack's product; `None` if no row of the step has any.
    pub(crate) fn of(
        &mut self,
        layer: usize,
        stack: &'static [Projection],
    ) -> Option<AdaptedLayer<'_, P>> {
        let changes = |group: &AdapterGroup<P>| {
            !group.rows.is_empty() && group.weights.change(layer, stack).is_some()
        };
        self.groups.iter().any(changes).then_some(AdaptedLayer {
            adapters: self,
            layer,
            stack,
        })
    }
}

impl<P: WeightLoader> AdaptedLayer<'_, P> {
    /// The changes, each with its rows.
    fn changes(&self) -> impl Iterator<Item = (&LowRank<P::Matrix>, &[u32])> {
        let groups = self.adapters.groups.iter();
        groups.filter_map(|group| {
            let change = group.weights.change(self.layer, self.stack)?;
            (!group.rows.is_empty()).then_some((change, &group.rows[..]))
        })
    }

    /// Adds the changes to the product's output.
    pub(crate) fn add<O: Ops<Pack = P>>(
        &self,
        ops: &mut O,
        x: &O::Rows,
        out: &mut O::Rows,
    ) -> Result<(), EngineError> {
        let mut changes = self.changes();
        changes.try_for_each(|(change, rows)| ops.adapt(change, rows, x, out, AdapterSum::Added))
    }

    /// Writes the changes over `out`, and returns which of its rows have one, `(rows)`.
    pub(crate) fn write<O: Ops<Pack = P>>(
        &mut self,
        ops: &mut O,
        x: &O::Rows,
        out: &mut O::Rows,
    ) -> Result<&[bool], EngineError> {
        for (change, rows) in self.changes() {
            ops.adapt(change, rows, x, out, AdapterSum::Written)?;
        }
        let mut is_adapted = std::mem::take(&mut self.adapters.is_adapted);
        is_adapted.clear();
        is_adapted.resize(self.adapters.group_of_row.len(), false);
        for (_, rows) in self.changes() {
            rows.iter().for_each(|row| is_adapted[*row as usize] = true);
        }
        self.adapters.is_adapted = is_adapted;
        Ok(&self.adapters.is_adapted)
    }
}
