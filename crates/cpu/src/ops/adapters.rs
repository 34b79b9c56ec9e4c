//! Products of adapters: rows of one adapter are gathered, multiplied twice, and put back.
//!
//! Owns: the buffers between these steps.
//! Never: does arithmetic itself, but for the last addition.
//! Invariant: a row's result is that of the row alone, since both products are.

use super::product::RowsSource;
use super::{CpuOps, ensure_len};
use crate::buffers::CpuRows;
use crate::pack::CpuMatrix;
use cleave_cpu_kernels::memory::{PageMemory, SliceParts};
use cleave_engine::ops::AdapterSum;
use cleave_engine::{EngineError, LowRank};

/// Rows between an adapter's steps. They grow to the largest step and stay.
pub(super) struct AdapterScratch {
    /// Inputs of the adapter's rows, `(rows, in)`.
    gathered: PageMemory<f32>,
    /// Products with the first matrix, `(rows, ranks)`.
    shrunk: PageMemory<f32>,
    /// Products with the second one, `(rows, out)`.
    expanded: PageMemory<f32>,
}

impl AdapterScratch {
    fn new() -> Result<Self, EngineError> {
        Ok(Self {
            gathered: PageMemory::zeroed(0)?,
            shrunk: PageMemory::zeroed(0)?,
            expanded: PageMemory::zeroed(0)?,
        })
    }
}

impl CpuOps {
    /// Computes an adapter's product with some rows of `x`, into the same rows of `out`.
    pub(super) fn adapt_rows(
        &mut self,
        adapter: &LowRank<CpuMatrix>,
        rows: &[u32],
        x: &CpuRows,
        out: &mut CpuRows,
        sum: AdapterSum,
    ) -> Result<(), EngineError> {
        let LowRank { shrink, expand } = adapter;
        assert_eq!(x.width, shrink.width, "width of an adapter's input");
        assert_eq!(out.width, expand.columns, "width of an adapter's output");
        let mut scratch = match self.adapters.take() {
            Some(scratch) => scratch,
            None => Box::new(AdapterScratch::new()?),
        };
        let done = self.expand_rows(adapter, rows, x, &mut scratch);
        if done.is_ok() {
            self.put_rows(rows, &scratch.expanded, out, sum);
        }
        self.adapters = Some(scratch);
        done
    }

    /// Multiplies the rows with both matrices, into `scratch.expanded`.
    fn expand_rows(
        &mut self,
        adapter: &LowRank<CpuMatrix>,
        rows: &[u32],
        x: &CpuRows,
        scratch: &mut AdapterScratch,
    ) -> Result<(), EngineError> {
        let LowRank { shrink, expand } = adapter;
        let (count, width) = (rows.len(), x.width);
        let AdapterScratch {
            gathered,
            shrunk,
            expanded,
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
            to.copy_from_slice(&x.values[from..from + width]);
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
