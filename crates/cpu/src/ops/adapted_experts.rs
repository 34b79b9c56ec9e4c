//! Adapters of experts: the changes of the rows that use an expert, one adapter after the other.
//!
//! Owns: which places of a mixture have which change.
//! Never: does arithmetic itself, but for the last addition.
//! Invariant: a place without a change keeps the bits of a mixture without adapters, and one with a
//! change has those of its row alone.

use super::adapters::{AdapterScratch, CpuAdapter};
use super::experts::{ExpertProduct, ExpertsScratch, Mixture};
use super::{CpuOps, ensure_len};
use cleave_cpu_kernels::memory::PageMemory;
use cleave_engine::EngineError;
use cleave_engine::ops::{AdaptedExperts, Projection};

/// The adapter of a row without one.
const NO_ADAPTER: u32 = u32::MAX;

/// The changes of a mixture's products, kept for the next one.
pub(super) struct ExpertChanges {
    /// Number of each row's adapter, `(rows)`; empty in a pass without changes of experts.
    adapter_of_row: Vec<u32>,
    /// Changes of gate and up of the places of a piece, laid out as their gated products, but twice
    /// as wide.
    pub(super) addends: PageMemory<f32>,
    /// Whether a place of the piece has such a change.
    pub(super) is_adapted: Vec<bool>,
    /// Places with the adapter at hand, and the rows of its products' input.
    places: Vec<usize>,
    rows: Vec<u32>,
}

impl ExpertChanges {
    pub(super) fn new() -> Result<Self, EngineError> {
        Ok(Self {
            adapter_of_row: Vec::new(),
            addends: PageMemory::zeroed(0)?,
            is_adapted: Vec::new(),
            places: Vec::new(),
            rows: Vec::new(),
        })
    }

    /// Begins a mixture of this many rows.
    pub(super) fn begin(&mut self, rows: usize, adapted: &AdaptedExperts<'_, CpuAdapter>) {
        self.adapter_of_row.clear();
        self.adapter_of_row.resize(rows, NO_ADAPTER);
        for (number, group) in (0..).zip(adapted.groups) {
            for row in &group.rows {
                self.adapter_of_row[*row as usize] = number;
            }
        }
    }
}

impl ExpertProduct {
    fn stack(self) -> &'static [Projection] {
        match self {
            Self::GateUp => Projection::EXPERT_GATE_UP,
            Self::Down => Projection::EXPERT_DOWN,
        }
    }
}

impl CpuOps {
    /// Computes the changes of one product of each part: those of gate and up before the product,
    /// as addends of it, and those of the down projection after it, into the outputs.
    pub(super) fn change_parts(
        &mut self,
        mixture: &Mixture<'_>,
        scratch: &mut ExpertsScratch,
        which: ExpertProduct,
        first_place: usize,
    ) -> Result<(), EngineError> {
        let Some(adapted) = mixture.adapted else {
            return Ok(());
        };
        if which == ExpertProduct::GateUp {
            let last = scratch.parts.last();
            let places = last.map_or(0, |part| part.places.end - first_place);
            let changes = &mut scratch.changes;
            changes.is_adapted.clear();
            changes.is_adapted.resize(places, false);
            ensure_len(&mut changes.addends, 2 * scratch.gated_len)?;
        }
        let mut own = self.take_scratch()?;
        let done = self.change_each(mixture, adapted, scratch, which, first_place, &mut own);
        self.adapters = Some(own);
        done
    }

    fn change_each(
        &mut self,
        mixture: &Mixture<'_>,
        adapted: AdaptedExperts<'_, CpuAdapter>,
        scratch: &mut ExpertsScratch,
        which: ExpertProduct,
        first_place: usize,
        own: &mut AdapterScratch,
    ) -> Result<(), EngineError> {
        let ExpertsScratch {
            sorted,
            parts,
            gated,
            outputs,
            changes,
            ..
        } = scratch;
        for part in &*parts {
            for (number, change) in adapted.changes(part.expert, which.stack()) {
                let ExpertChanges {
                    adapter_of_row,
                    addends,
                    is_adapted,
                    places,
                    rows,
                } = &mut *changes;
                places.clear();
                rows.clear();
                let of_part = sorted.rows_at(part.places.clone());
                for (place, row) in part.places.clone().zip(of_part) {
                    if adapter_of_row[*row as usize] == number as u32 {
                        places.push(place);
                        rows.push(match which {
                            ExpertProduct::GateUp => *row,
                            ExpertProduct::Down => (place - part.places.start) as u32,
                        });
                    }
                }
                if places.is_empty() {
                    continue;
                }
                let x = match which {
                    ExpertProduct::GateUp => mixture.x,
                    ExpertProduct::Down => &gated[part.gated_at..],
                };
                self.expand_rows(change, rows, x, own)?;
                let width = change.expand.columns;
                let products = own.expanded.chunks_exact(width);
                for (place, product) in places.iter().zip(products) {
                    match which {
                        ExpertProduct::GateUp => {
                            let at = 2 * part.gated_at + (place - part.places.start) * width;
                            addends[at..at + width].copy_from_slice(product);
                            is_adapted[place - first_place] = true;
                        }
                        ExpertProduct::Down => {
                            let at = (place - first_place) * width;
                            let output = &mut outputs[at..at + width];
                            // SAFETY: `CpuKernels::of` checked the instructions.
                            unsafe { (self.kernels.add)(output, product) };
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
