//! Weights on the device.
//!
//! Owns: one allocation for all weights, and its division into parts.
//! Never: changes a dense layout: matrices lie as checkpoints store them, `(out, in)`, row-major.
//! Quantised matrices are packed for their kernels (see `narrow`), or widened, with a warning,
//! where no kernel takes them.
//! Invariant: every part begins at a multiple of 256 bytes; a tensor with two uses (a tied head) is
//! stored once.

use crate::driver::{CudaDevice, DeviceMemory};
use crate::error::CudaError;
use crate::experts::{ExpertMatrices, supports_experts};
use crate::quantized::{QuantizedFormat, QuantizedStack, RowPacking};
use crate::upload::{UploadSource, Uploader};
use cleave_checkpoint::rounding::RoundedForm;
use cleave_checkpoint::{StoredMatrix, StoredTensor};
use cleave_engine::EngineError;
use cleave_engine::ops::{
    DenseStack, GatedMatrices, InnerSlices, LoadPlan, ModelSpec, Precision, Quantize, RotaryTable,
    Unsupported, WeightLoader, supports_decoder,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;

/// The alignment of parts in bytes, more than the kernels' widest loads and the tensor memory
/// accelerator need.
const ALIGNMENT: usize = 256;

/// A part of the weights' memory.
#[derive(Clone, Debug)]
pub(crate) struct WeightPart {
    memory: Arc<DeviceMemory>,
    offset: usize,
}

impl WeightPart {
    pub(crate) fn address(&self) -> u64 {
        self.memory.at(self.offset)
    }
}

/// A matrix of weights, `(columns, width)`, with an optional bias, `(columns)`.
#[derive(Debug)]
pub struct CudaMatrix {
    pub(crate) weight: WeightPart,
    pub(crate) bias: Option<WeightPart>,
    pub(crate) columns: usize,
    pub(crate) width: usize,
    /// Slices of the inner dimension, `width`.
    pub(crate) slices: InnerSlices,
    /// The further parts of a quantised matrix; `None` for a dense one.
    pub(crate) quantized: Option<QuantizedParts>,
}

impl CudaMatrix {
    /// Returns whether the matrix is still quantised on the device.
    pub fn is_quantized(&self) -> bool {
        self.quantized.is_some()
    }

    /// Returns whether another matrix has the same shape and format, and each of its parts lies
    /// `distance` bytes behind this one's.
    pub(crate) fn is_repeated_by(&self, other: &Self, distance: u64) -> bool {
        let Self {
            weight,
            bias,
            columns,
            width,
            slices,
            quantized,
        } = self;
        let is_behind = |first: &WeightPart, second: &WeightPart| {
            second.address() == first.address().wrapping_add(distance)
        };
        let has_bias = match (bias, &other.bias) {
            (None, None) => true,
            (Some(first), Some(second)) => is_behind(first, second),
            (Some(_), None) | (None, Some(_)) => false,
        };
        let has_format = match (quantized, &other.quantized) {
            (None, None) => true,
            (Some(first), Some(second)) => {
                (first.format, first.group) == (second.format, second.group)
                    && is_behind(&first.scales, &second.scales)
            }
            (Some(_), None) | (None, Some(_)) => false,
        };
        is_behind(weight, &other.weight)
            && (columns, width, slices) == (&other.columns, &other.width, &other.slices)
            && has_bias
            && has_format
    }
}

/// The parts of a quantised matrix besides its codes.
#[derive(Debug)]
pub(crate) struct QuantizedParts {
    pub(crate) format: QuantizedFormat,
    pub(crate) scales: WeightPart,
    /// Elements of a group, in formats with groups.
    pub(crate) group: Option<usize>,
}

/// Embedding rows `(vocab, width)`.
#[derive(Debug)]
pub struct CudaTable {
    pub(crate) rows: WeightPart,
    pub(crate) vocab: usize,
    pub(crate) width: usize,
}

/// A norm's weight `(width)`, f32.
#[derive(Debug)]
pub struct CudaVector {
    pub(crate) values: WeightPart,
    pub(crate) width: usize,
}

/// Cosines and sines `(positions, half)`, f32.
#[derive(Debug)]
pub struct CudaRotary {
    pub(crate) cos: WeightPart,
    pub(crate) sin: WeightPart,
    pub(crate) half: usize,
    pub(crate) query_factors: Option<WeightPart>,
}

/// Loads weights onto one device, once.
#[derive(Debug)]
pub struct CudaWeightLoader {
    device: Arc<CudaDevice>,
    precision: Precision,
    quantize: Option<Quantize>,
    uploader: Uploader,
    arena: Mutex<Option<WeightArena>>,
    widened: Mutex<WidenedMatrices>,
}

/// The quantised matrices that no kernel takes, for one warning.
#[derive(Debug, Default)]
struct WidenedMatrices {
    count: usize,
    /// The name of the first one, and the reason.
    first: Option<(String, String)>,
}

/// The allocation for all weights.
#[derive(Debug)]
struct WeightArena {
    memory: Arc<DeviceMemory>,
    used: usize,
    /// The tables that were loaded already, which a head may share, by the place of their bytes on
    /// the host. They are kept until the end of loading, so that no other tensor can reuse one's
    /// host memory.
    tables: BTreeMap<(usize, usize), (StoredTensor, WeightPart)>,
}

impl CudaWeightLoader {
    /// Starts the threads that load weights.
    ///
    /// # Errors
    /// If memory or threads for loading cannot be had.
    pub fn new(device: &Arc<CudaDevice>, precision: Precision) -> Result<Self, CudaError> {
        Ok(Self {
            device: Arc::clone(device),
            precision,
            quantize: None,
            uploader: Uploader::new(device)?,
            arena: Mutex::new(None),
            widened: Mutex::new(WidenedMatrices::default()),
        })
    }

    /// Returns the loader with a format to which dense projections are rounded.
    #[must_use]
    pub fn with_quantize(self, quantize: Option<Quantize>) -> Self {
        Self { quantize, ..self }
    }

    /// Returns the format to which a stack is rounded, if it is dense.
    fn rounded_form(&self, stack: &[StoredMatrix], slices: &InnerSlices) -> Option<RoundedForm> {
        let is_dense = |matrix: &StoredMatrix| matches!(matrix, StoredMatrix::Dense(_));
        let quantize = self.quantize.filter(|_| stack.iter().all(is_dense))?;
        Some(quantize.form(slices))
    }

    /// Returns the bytes of a dense stack of so many rows on the device.
    fn dense_stack_bytes(&self, rows: usize, slices: &InnerSlices) -> usize {
        let rounded = self
            .quantize
            .map(|quantize| QuantizedStack::rounded(quantize.form(slices), rows, slices));
        match rounded {
            Some(Ok(rounded)) => rounded.bytes(),
            Some(Err(_)) | None => rows * slices.elements().len() * self.precision.element_bytes(),
        }
    }

    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    /// Takes a part of `bytes` bytes from the allocation.
    fn allocate(&self, bytes: usize) -> Result<WeightPart, EngineError> {
        let mut arena = self.arena.lock();
        let arena = arena.as_mut().expect("loading begins with its plan");
        let offset = arena.used;
        let end = offset + bytes.next_multiple_of(ALIGNMENT);
        if end > arena.memory.bytes() {
            return Err(EngineError::Device(format!(
                "weights take {end} bytes, more than the {} bytes of the loading plan",
                arena.memory.bytes()
            )));
        }
        arena.used = end;
        Ok(WeightPart {
            memory: Arc::clone(&arena.memory),
            offset,
        })
    }

    fn queue_upload(
        &self,
        source: UploadSource,
        part: &WeightPart,
        offset: usize,
    ) -> Result<(), EngineError> {
        Ok(self
            .uploader
            .push(source, &part.memory, part.offset + offset)?)
    }

    fn floats(&self, values: &[f32]) -> Result<WeightPart, EngineError> {
        let part = self.allocate(size_of_val(values))?;
        let words = values.iter().map(|value| value.to_bits()).collect();
        self.queue_upload(UploadSource::Words(words), &part, 0)?;
        Ok(part)
    }

    /// Returns the layout in which kernels for quantised weights take the stack, or the reason why
    /// they do not.
    fn quantized_stack(
        &self,
        stack: &[StoredMatrix],
        slices: &InnerSlices,
    ) -> Result<QuantizedStack, String> {
        match self.precision {
            Precision::Bf16 => QuantizedStack::of(stack, slices),
            Precision::F32 => Err("an f32 engine keeps all weights in f32".to_owned()),
        }
    }

    /// Loads a quantised stack: the codes, one tensor after the other, then all scales.
    fn packed(
        &self,
        stack: &[StoredMatrix],
        quantized: QuantizedStack,
    ) -> Result<(WeightPart, QuantizedParts), EngineError> {
        let codes = self.allocate(quantized.weight_bytes())?;
        let mut offset = 0;
        for matrix in stack {
            let StoredMatrix::Quantized(tensor) = matrix else {
                continue;
            };
            let tensor = Arc::clone(tensor);
            let bytes = tensor.rows() * quantized.row_bytes();
            self.queue_upload(
                UploadSource::Packed(RowPacking {
                    tensor,
                    stack: quantized,
                }),
                &codes,
                offset,
            )?;
            offset += bytes;
        }
        let scales = self.allocate(quantized.scales_count() * size_of::<u32>())?;
        self.queue_upload(UploadSource::Words(quantized.scales(stack)), &scales, 0)?;
        let parts = QuantizedParts {
            format: quantized.format,
            scales,
            group: quantized.group,
        };
        Ok((codes, parts))
    }

    fn note_widened(&self, stack: &[StoredMatrix], reason: String) {
        let is_quantized = |matrix: &&StoredMatrix| matches!(matrix, StoredMatrix::Quantized(_));
        let Some(first) = stack.iter().find(is_quantized) else {
            return;
        };
        let mut widened = self.widened.lock();
        widened.count += 1;
        let first = (first.name().to_owned(), reason);
        widened.first.get_or_insert(first);
    }

    /// Warns once about the matrices that take more memory on the device than in the checkpoint.
    fn warn_widened(&self) {
        let mut widened = self.widened.lock();
        let WidenedMatrices { count, first } = std::mem::take(&mut *widened);
        if let Some((name, reason)) = first {
            let precision = self.precision.name();
            tracing::warn!(
                "{count} quantised matrices are widened to {precision} and take more memory; the first contains {name}: {reason}"
            );
        }
    }

    /// Returns the size of a stack in bytes if it is stored in the loader's precision.
    fn dense_bytes(&self, stack: &[StoredMatrix]) -> usize {
        let elements = stack.iter().map(|matrix| matrix.rows() * matrix.columns());
        elements.sum::<usize>() * self.precision.element_bytes()
    }

    /// Loads tensors one after the other. A single tensor that is a table already is not copied
    /// again.
    fn stacked(&self, stack: &[StoredMatrix]) -> Result<WeightPart, EngineError> {
        if let [StoredMatrix::Dense(tensor)] = stack {
            let arena = self.arena.lock();
            let there = arena
                .as_ref()
                .and_then(|arena| arena.tables.get(&source_range(tensor)));
            if let Some((_, part)) = there {
                return Ok(part.clone());
            }
        }
        let part = self.allocate(self.dense_bytes(stack))?;
        let mut offset = 0;
        for matrix in stack {
            let source = match matrix {
                StoredMatrix::Dense(tensor) => UploadSource::Tensor(tensor.clone(), self.precision),
                StoredMatrix::Quantized(tensor) => {
                    UploadSource::Widened(Arc::clone(tensor), self.precision)
                }
            };
            self.queue_upload(source, &part, offset)?;
            offset += self.dense_bytes(std::slice::from_ref(matrix));
        }
        Ok(part)
    }
}

/// The place of a tensor's bytes on the host: its address and its length.
fn source_range(tensor: &StoredTensor) -> (usize, usize) {
    let bytes = tensor.bytes();
    (bytes.as_ptr() as usize, bytes.len())
}

impl WeightLoader for CudaWeightLoader {
    type Matrix = CudaMatrix;
    type Table = CudaTable;
    type Vector = CudaVector;
    type Rotary = CudaRotary;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn reserve(&self, plan: &LoadPlan) -> Result<(), EngineError> {
        let LoadPlan {
            matrix_elements,
            dense,
            quantized,
            vector_elements,
            tensors_count,
        } = plan;
        let packed = quantized
            .iter()
            .map(|(stack, slices)| self.matrix_bytes(stack, slices) as usize);
        let dense_bytes = dense
            .iter()
            .map(|DenseStack { rows, slices }| self.dense_stack_bytes(*rows, slices));
        let bytes = *matrix_elements as usize * self.precision.element_bytes()
            + dense_bytes.sum::<usize>()
            + packed.sum::<usize>()
            + *vector_elements as usize * size_of::<f32>()
            // Codes and scales of a quantised matrix are two parts, and each part may lose bytes to
            // alignment.
            + (tensors_count + dense.len() + quantized.len()) * ALIGNMENT;
        let memory = DeviceMemory::new(&self.device, bytes, "weights")?;
        let mut arena = self.arena.lock();
        *arena = Some(WeightArena {
            memory: Arc::new(memory),
            used: 0,
            tables: BTreeMap::new(),
        });
        Ok(())
    }

    fn supports(&self, spec: &ModelSpec) -> Result<(), Unsupported> {
        supports_decoder(spec)?;
        supports_experts(spec)?;
        match (self.quantize, self.precision) {
            (Some(quantize), Precision::F32) => Err(Unsupported {
                family: spec.family,
                problem: format!(
                    "weights rounded to {} are multiplied with bf16 on a GPU; --dtype bf16 gives \
                     that",
                    quantize.name()
                ),
            }),
            _ => Ok(()),
        }
    }

    fn weight_form(&self) -> &'static str {
        self.quantize.map_or("", Quantize::name)
    }

    fn matrix_bytes(&self, stack: &[StoredMatrix], slices: &InnerSlices) -> u64 {
        let quantized = match self.rounded_form(stack, slices) {
            Some(form) => {
                let rows = stack.iter().map(StoredMatrix::rows).sum();
                QuantizedStack::rounded(form, rows, slices)
            }
            None => self.quantized_stack(stack, slices),
        };
        let bytes = match quantized {
            Ok(quantized) => quantized.bytes(),
            Err(_) => self.dense_bytes(stack),
        };
        bytes as u64
    }

    fn head_bytes(&self, head: &StoredTensor) -> u64 {
        self.dense_bytes(&[head.clone().into()]) as u64
    }

    fn head(&self, head: &StoredTensor) -> Result<CudaMatrix, EngineError> {
        Ok(CudaMatrix {
            weight: self.stacked(&[head.clone().into()])?,
            bias: None,
            columns: head.rows(),
            width: head.columns(),
            slices: InnerSlices::whole(head.columns()),
            quantized: None,
        })
    }

    fn finish(&self) -> Result<(), EngineError> {
        self.uploader.finish()?;
        self.warn_widened();
        let mut arena = self.arena.lock();
        if let Some(arena) = arena.as_mut() {
            arena.tables.clear();
        }
        Ok(())
    }

    fn sliced_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
        slices: &InnerSlices,
    ) -> Result<CudaMatrix, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        assert!(
            stack.iter().all(|tensor| tensor.columns() == width),
            "a stack of different widths"
        );
        assert_eq!(slices.elements().len(), width, "slices of a stack");
        let rounded: Vec<StoredMatrix>;
        let stack = match self.rounded_form(stack, slices) {
            Some(form) => {
                let threads = thread::available_parallelism().map_or(1, |count| count.get());
                let each = stack.iter().map(|matrix| {
                    let rounded = matrix.rounded(form, threads);
                    matrix.release();
                    rounded.into()
                });
                rounded = each.collect();
                &rounded
            }
            None => stack,
        };
        let (weight, quantized) = match self.quantized_stack(stack, slices) {
            Ok(quantized) => {
                let (codes, parts) = self.packed(stack, quantized)?;
                (codes, Some(parts))
            }
            Err(reason) => {
                self.note_widened(stack, reason);
                (self.stacked(stack)?, None)
            }
        };
        Ok(CudaMatrix {
            weight,
            bias: bias.map(|bias| self.floats(bias)).transpose()?,
            columns: stack.iter().map(StoredMatrix::rows).sum(),
            width,
            slices: slices.clone(),
            quantized,
        })
    }

    fn exact_matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<CudaMatrix, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        let values: Vec<f32> = stack.iter().flat_map(StoredMatrix::to_f32).collect();
        Ok(CudaMatrix {
            weight: self.floats(&values)?,
            bias: bias.map(|bias| self.floats(bias)).transpose()?,
            columns: stack.iter().map(StoredMatrix::rows).sum(),
            width,
            slices: InnerSlices::whole(width),
            quantized: None,
        })
    }

    fn check_experts(&self, experts: &[GatedMatrices<CudaMatrix>]) -> Result<(), EngineError> {
        let of_all =
            |matrices: Vec<&CudaMatrix>| ExpertMatrices::of(matrices.into_iter()).map(|_| ());
        of_all(experts.iter().map(|of| &of.gate_up).collect())
            .and_then(|()| of_all(experts.iter().map(|of| &of.down).collect()))
            .map_err(EngineError::Device)
    }

    fn table(&self, stored: &StoredTensor) -> Result<CudaTable, EngineError> {
        let rows = self.stacked(&[stored.clone().into()])?;
        let mut arena = self.arena.lock();
        let arena = arena.as_mut().expect("room was taken from it");
        let loaded = (stored.clone(), rows.clone());
        arena.tables.insert(source_range(stored), loaded);
        Ok(CudaTable {
            rows,
            vocab: stored.rows(),
            width: stored.columns(),
        })
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector, EngineError> {
        Ok(CudaVector {
            values: self.floats(values)?,
            width: values.len(),
        })
    }

    fn rotary(&self, table: RotaryTable<'_>) -> Result<CudaRotary, EngineError> {
        Ok(CudaRotary {
            cos: self.floats(table.cos)?,
            sin: self.floats(table.sin)?,
            half: table.half,
            query_factors: match table.query_factors {
                [] => None,
                factors => Some(self.floats(factors)?),
            },
        })
    }
}
