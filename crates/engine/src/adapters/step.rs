//! The adapters of a step, with the rows that each changes.
//!
//! Owns: these lists. Never: allocates once they are as long as a step needs.
//! Invariant: a row belongs to one adapter at most.

use crate::ops::{AdaptedExperts, AdaptedStack, AdapterGroup};
use cleave_domain::AdapterId;
use cleave_models::Projection;
use std::ops::Range;
use std::sync::Arc;

/// The group of a row without an adapter.
const NO_GROUP: u32 = u32::MAX;

/// Rows of a step by their adapters.
pub(crate) struct StepAdapters<A> {
    groups: Vec<AdapterGroup<A>>,
    /// Group of each row, `(rows)`; empty in a step without adapters.
    group_of_row: Vec<u32>,
    /// Lists of earlier steps, and of groups of rows, reused.
    spare_rows: Vec<Vec<u32>>,
    spare_groups: Vec<u32>,
}

impl<A> Default for StepAdapters<A> {
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            group_of_row: Vec::new(),
            spare_rows: Vec::new(),
            spare_groups: Vec::new(),
        }
    }
}

impl<A> StepAdapters<A> {
    /// Lets go of all adapters.
    pub(crate) fn clear(&mut self) {
        self.group_of_row.clear();
        for mut group in self.groups.drain(..) {
            group.rows.clear();
            self.spare_rows.push(group.rows);
        }
    }

    /// Adds an adapter of the step; its rows follow.
    pub(crate) fn hold(&mut self, adapter: AdapterId, weights: Arc<A>) {
        if self.holds(adapter) {
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
    ///
    /// [`Ops::gather`]: crate::ops::Ops::gather
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

    /// The adapters, each with its rows.
    pub(crate) fn groups(&self) -> &[AdapterGroup<A>] {
        &self.groups
    }

    /// The product of a stack; `None` in a step without adapters.
    pub(crate) fn of(
        &self,
        layer: usize,
        stack: &'static [Projection],
    ) -> Option<AdaptedStack<'_, A>> {
        let groups = &self.groups[..];
        (!groups.is_empty()).then_some(AdaptedStack {
            layer,
            stack,
            groups,
        })
    }

    /// The experts of a layer; `None` in a step without adapters.
    pub(crate) fn of_experts(&self, layer: usize) -> Option<AdaptedExperts<'_, A>> {
        let groups = &self.groups[..];
        (!groups.is_empty()).then_some(AdaptedExperts { layer, groups })
    }
}
