//! Weights in the layout that the kernels read.
//!
//! Owns: [`CpuPack`] and what it makes.
//! Never: keeps a second copy of an embedding table: its rows are read where the file is mapped.
//! Invariant: the layout does not depend on the instruction set, so engines may share weights.

use crate::kernel::product::PANEL;
use crate::memory::{Memory, Parts};
use crate::options::CpuOptions;
use cleave_engine::EngineError;
use cleave_engine::checkpoint::StoredTensor;
use cleave_engine::ops::{Pack, Precision, RotaryTable};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Packs weights, with several threads.
#[derive(Clone, Debug)]
pub struct CpuPack {
    precision: Precision,
    threads: usize,
}

/// A packed weight.
#[derive(Debug)]
pub struct CpuMatrix {
    pub(crate) precision: Precision,
    /// Columns of the result: rows of the stored tensors.
    pub(crate) columns: usize,
    /// Elements summed per result.
    pub(crate) width: usize,
    /// Steps of the inner dimension.
    pub(crate) steps: usize,
    /// `[panel][step][PANEL]`; in bf16 a word is two elements of the inner dimension.
    pub(crate) words: Memory<u32>,
    /// `(panels × PANEL)`.
    pub(crate) bias: Option<Vec<f32>>,
}

/// Embedding rows, where the file is mapped.
#[derive(Debug)]
pub struct CpuTable(pub(crate) StoredTensor);

/// A norm's weight.
#[derive(Debug)]
pub struct CpuVector(pub(crate) Vec<f32>);

/// Cosines and sines by position.
#[derive(Debug)]
pub struct CpuRotary {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) half: usize,
}

/// Words between the columns of a panel while it is put together; the extra words keep columns of a
/// power-of-two size from sharing cache sets.
const fn column_stride(steps: usize) -> usize {
    steps.next_multiple_of(16) + 16
}

impl CpuPack {
    /// Packs for `options.precision` with `options.threads`.
    pub fn new(options: &CpuOptions) -> Self {
        Self {
            precision: options.precision,
            threads: options.threads_count(),
        }
    }

    const fn steps(&self, width: usize) -> usize {
        match self.precision {
            Precision::F32 => width,
            Precision::Bf16 => width.div_ceil(2),
        }
    }
}

/// bf16 bits, halves to even; a NaN stays one.
#[inline]
fn brain(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits | 0x0040_0000) >> 16;
    }
    bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16
}

fn column_words(precision: Precision, x: &[f32], to: &mut [u32]) {
    match precision {
        Precision::F32 => {
            for (to, x) in to.iter_mut().zip(x) {
                *to = x.to_bits();
            }
        }
        Precision::Bf16 => {
            let (pairs, odd) = x.as_chunks::<2>();
            for (to, [low, high]) in to.iter_mut().zip(pairs) {
                *to = brain(*low) | brain(*high) << 16;
            }
            if let [last] = odd {
                to[pairs.len()] = brain(*last);
            }
        }
    }
}

/// Puts one panel together: `columns[i]` is where column `i` of the panel comes from.
fn pack_panel(
    precision: Precision,
    columns: &[(&StoredTensor, usize)],
    (row, words): (&mut [f32], &mut [u32]),
    panel: &mut [u32],
) {
    let steps = panel.len() / PANEL;
    let stride = column_stride(steps);
    words.fill(0);
    for (column, (tensor, index)) in columns.iter().enumerate() {
        tensor.read_row(*index, row);
        column_words(precision, row, &mut words[column * stride..][..steps]);
    }
    for (step, to) in panel.chunks_exact_mut(PANEL).enumerate() {
        for (column, to) in to.iter_mut().enumerate() {
            *to = words[column * stride + step];
        }
    }
}

impl Pack for CpuPack {
    type Matrix = CpuMatrix;
    type Table = CpuTable;
    type Vector = CpuVector;
    type Rotary = CpuRotary;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn matrix(
        &self,
        stack: &[StoredTensor],
        bias: Option<&[f32]>,
    ) -> Result<CpuMatrix, EngineError> {
        let width = stack.first().map_or(0, StoredTensor::columns);
        assert!(stack.iter().all(|tensor| tensor.columns() == width));
        let columns: usize = stack.iter().map(StoredTensor::rows).sum();
        let steps = self.steps(width);
        let panels = columns.div_ceil(PANEL);
        let mut words = Memory::zeroed(panels * steps * PANEL)?;
        let sources: Vec<(&StoredTensor, usize)> = stack
            .iter()
            .flat_map(|tensor| (0..tensor.rows()).map(move |row| (tensor, row)))
            .collect();
        let parts = Parts::new(&mut words);
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.threads.min(panels) {
                scope.spawn(|| {
                    let mut row = vec![0.0; width];
                    let mut scratch = vec![0; PANEL * column_stride(steps)];
                    loop {
                        let panel = next.fetch_add(1, Ordering::Relaxed);
                        if panel >= panels {
                            break;
                        }
                        let first = panel * PANEL;
                        let columns = &sources[first..columns.min(first + PANEL)];
                        let size = steps * PANEL;
                        // SAFETY: every panel is taken by one thread.
                        let to = unsafe { parts.part(panel * size..(panel + 1) * size) };
                        pack_panel(self.precision, columns, (&mut row, &mut scratch), to);
                    }
                });
            }
        });
        let bias = bias.map(|bias| {
            assert_eq!(bias.len(), columns, "bias of a stack of {columns} rows");
            let mut padded = bias.to_vec();
            padded.resize(panels * PANEL, 0.0);
            padded
        });
        Ok(CpuMatrix {
            precision: self.precision,
            columns,
            width,
            steps,
            words,
            bias,
        })
    }

    fn table(&self, stored: &StoredTensor) -> Result<CpuTable, EngineError> {
        Ok(CpuTable(stored.clone()))
    }

    fn vector(&self, values: &[f32]) -> Result<CpuVector, EngineError> {
        Ok(CpuVector(values.to_vec()))
    }

    fn rotary(&self, table: RotaryTable<'_>) -> Result<CpuRotary, EngineError> {
        assert_eq!(table.cos.len(), table.sin.len());
        Ok(CpuRotary {
            cos: table.cos.to_vec(),
            sin: table.sin.to_vec(),
            half: table.half,
        })
    }
}
