//! Products of adapters: rows of one adapter are gathered, multiplied twice, and put back.
//!
//! Owns: the buffers between these steps.
//! Never: does arithmetic itself, but for the last addition.
//! Invariant: a row's result is that of the row alone, since both products are.

use super::product::{ProductGate, RowsSource};
use super::{CpuOps, ensure_len};
use crate::buffers::CpuRows;
use crate::pack::{CpuMatrix, CpuWeightLoader};
use cleave_cpu_kernels::kernel::product::RowAddends;
use cleave_cpu_kernels::memory::{PageMemory, SliceParts};
use cleave_engine::ops::{AdaptedStack, AdapterLoader, GatedIo, WeightLoader};
use cleave_engine::{AdapterMatrices, EngineError, LowRank, StoredChanges};

/// An adapter in memory.
pub(super) type CpuAdapter = AdapterMatrices<CpuMatrix>;

impl AdapterLoader for CpuWeightLoader {
    type Adapter = CpuAdapter;

    fn load(&self, changes: &StoredChanges<'_>) -> Result<CpuAdapter, EngineError> {
        AdapterMatrices::load(changes, |stored| {
            Ok(LowRank {
                shrink: self.exact_matrix(&stored.shrink, None)?,
                expand: self.exact_matrix(&[stored.expand.into()], None)?,
            })
        })
    }
}

/// Use of an adapter's product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdapterSum {
    /// It is added to the rows.
    Added,
    /// It replaces what the rows hold.
    Written,
}

/// Rows between an adapter's steps. They grow to the largest step and stay.
pub(super) struct AdapterScratch {
    /// Inputs of the adapter's rows, `(rows, in)`.
    gathered: PageMemory<f32>,
    /// Products with the first matrix, `(rows, ranks)`.
    shrunk: PageMemory<f32>,
    /// Products with the second one, `(rows, out)`.
    pub(super) expanded: PageMemory<f32>,
    /// Rows whose gate has an addend in the present layer, `(rows)`.
    is_adapted: Vec<bool>,
}

impl AdapterScratch {
    fn new() -> Result<Self, EngineError> {
        Ok(Self {
            gathered: PageMemory::zeroed(0)?,
            shrunk: PageMemory::zeroed(0)?,
            expanded: PageMemory::zeroed(0)?,
            is_adapted: Vec::new(),
        })
    }
}

impl CpuOps {
    /// Computes the products of a stack's adapters with their rows of `x`, into the same rows of
    /// `out`.
    pub(super) fn adapt_rows(
        &mut self,
        stack: &AdaptedStack<'_, CpuAdapter>,
        x: &CpuRows,
        out: &mut CpuRows,
        sum: AdapterSum,
    ) -> Result<(), EngineError> {
        let mut scratch = self.take_scratch()?;
        let done = stack.changes().try_for_each(|(change, rows)| {
            assert_eq!(x.width, change.shrink.width, "width of an adapter's input");
            let columns = change.expand.columns;
            assert_eq!(out.width, columns, "width of an adapter's output");
            self.expand_rows(change, rows, &x.values, &mut scratch)?;
            self.put_rows(rows, &scratch.expanded, out, sum);
            Ok(())
        });
        self.adapters = Some(scratch);
        done
    }

    /// Computes gated products, with the products of a stack's adapters as addends of their rows.
    pub(super) fn gated_with_adapters(
        &mut self,
        matrix: &CpuMatrix,
        rows: usize,
        x: &CpuRows,
        to: GatedIo<'_, CpuRows>,
        stack: &AdaptedStack<'_, CpuAdapter>,
    ) -> Result<(), EngineError> {
        assert_eq!(x.width, matrix.width, "width of a product's left side");
        let GatedIo {
            activation,
            gate_up,
            out,
        } = to;
        assert_eq!(gate_up.width, 2 * matrix.columns, "width of gate and up");
        self.adapt_rows(stack, x, gate_up, AdapterSum::Written)?;
        let mut scratch = self.take_scratch()?;
        scratch.is_adapted.clear();
        scratch.is_adapted.resize(rows, false);
        for row in stack.changes().flat_map(|(_, rows)| rows) {
            scratch.is_adapted[*row as usize] = true;
        }
        let addends = RowAddends {
            values: gate_up.head(rows),
            is_adapted: &scratch.is_adapted,
        };
        let gate = ProductGate {
            addends: Some(addends),
            ..ProductGate::of(activation)
        };
        let from = RowsSource::Rows(x.head(rows));
        let done = self.product(matrix, Some(gate), rows, from, out.head_mut(rows));
        self.adapters = Some(scratch);
        done
    }

    pub(super) fn take_scratch(&mut self) -> Result<Box<AdapterScratch>, EngineError> {
        match self.adapters.take() {
            Some(scratch) => Ok(scratch),
            None => Ok(Box::new(AdapterScratch::new()?)),
        }
    }

    /// Multiplies these rows of `x` `(rows, in)` with both matrices, into `scratch.expanded`.
    pub(super) fn expand_rows(
        &mut self,
        adapter: &LowRank<CpuMatrix>,
        rows: &[u32],
        x: &[f32],
        scratch: &mut AdapterScratch,
    ) -> Result<(), EngineError> {
        let LowRank { shrink, expand } = adapter;
        let (count, width) = (rows.len(), shrink.width);
        let AdapterScratch {
            gathered,
            shrunk,
            expanded,
            is_adapted: _,
        } = scratch;
        ensure_len(gathered, count * width)?;
        ensure_len(shrunk, count * shrink.columns)?;
        ensure_len(expanded, count * expand.columns)?;
        let gathered = &mut gathered[..count * width];
        let parts = SliceParts::new(gathered);
        self.each_row(count, width, &|at| {
            let from = rows[at] as usize * width;
            // SAFETY: each row is written by one task.
            let to = unsafe { parts.part(at * width..(at + 1) * width) };
            to.copy_from_slice(&x[from..from + width]);
        });
        let shrunk = &mut shrunk[..count * shrink.columns];
        self.product(shrink, None, count, RowsSource::Rows(gathered), shrunk)?;
        let expanded = &mut expanded[..count * expand.columns];
        self.product(expand, None, count, RowsSource::Rows(shrunk), expanded)
    }

    /// Adds or writes `(rows, out)` to these rows of a buffer.
    fn put_rows(&mut self, rows: &[u32], from: &[f32], out: &mut CpuRows, sum: AdapterSum) {
        let (width, add) = (out.width, self.kernels.add);
        assert!(rows.is_sorted_by(|one, next| one < next), "rows ascend");
        let to = SliceParts::new(&mut out.values);
        self.each_row(rows.len(), width, &|at| {
            let first = rows[at] as usize * width;
            let from = &from[at * width..(at + 1) * width];
            // SAFETY: rows differ, so that each is written by one task; `CpuKernels::of` checked
            // the instructions.
            unsafe {
                let to = to.part(first..first + width);
                match sum {
                    AdapterSum::Added => add(to, from),
                    AdapterSum::Written => to.copy_from_slice(from),
                }
            }
        });
    }
}
