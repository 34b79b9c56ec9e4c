//! Weights on the device.
//!
//! Owns: one allocation for all of them, and who has which part.
//! Never: changes a dense layout: matrices lie as checkpoints store them, `(out, in)`, row-major. Quantised ones are
//! packed as their kernels want them (see `narrow`), or widened where no kernel takes them, and then that is said.
//! Invariant: every part begins on 256 bytes; a tensor that serves twice (a tied head) is there once.

use crate::driver::{Device, DeviceMemory};
use crate::error::CudaError;
use crate::narrow::{Format, Narrow, Packing};
use crate::upload::{Source, Uploader};
use cleave_engine::EngineError;
use cleave_engine::checkpoint::{StoredMatrix, StoredTensor};
use cleave_engine::ops::{LoadPlan, Pack, Precision, RotaryTable};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What kernels' widest loads and the tensor memory accelerator ask for, and more.
const ALIGNMENT: usize = 256;

/// A part of the weights' memory.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    memory: Arc<DeviceMemory>,
    offset: usize,
}

impl Part {
    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.memory.at(self.offset)
    }
}

/// A weight `(columns, width)` with an optional bias `(columns)`.
#[derive(Debug)]
pub struct CudaMatrix {
    pub(crate) weight: Part,
    pub(crate) bias: Option<Part>,
    pub(crate) columns: usize,
    pub(crate) width: usize,
    /// How it is stored if it is not dense.
    pub(crate) narrow: Option<NarrowParts>,
}

impl CudaMatrix {
    /// Whether it is kept as quantised as it came.
    pub fn is_narrow(&self) -> bool {
        self.narrow.is_some()
    }
}

/// What a quantised weight has besides codes.
#[derive(Debug)]
pub(crate) struct NarrowParts {
    pub(crate) format: Format,
    pub(crate) scales: Part,
    /// Elements of a group, where groups have scales.
    pub(crate) group: Option<usize>,
}

/// Embedding rows `(vocab, width)`.
#[derive(Debug)]
pub struct CudaTable {
    pub(crate) rows: Part,
    pub(crate) vocab: usize,
    pub(crate) width: usize,
}

/// A norm's weight `(width)`, f32.
#[derive(Debug)]
pub struct CudaVector {
    pub(crate) values: Part,
    pub(crate) width: usize,
}

/// Cosines and sines `(positions, half)`, f32.
#[derive(Debug)]
pub struct CudaRotary {
    pub(crate) cos: Part,
    pub(crate) sin: Part,
    pub(crate) half: usize,
}

/// Loads weights onto one device, once.
#[derive(Debug)]
pub struct CudaPack {
    device: Arc<Device>,
    precision: Precision,
    uploader: Uploader,
    arena: Mutex<Option<Arena>>,
    widened: Mutex<Widened>,
}

/// Quantised matrices that no kernel takes.
#[derive(Debug, Default)]
struct Widened {
    count: usize,
    /// The first one's name, and why.
    first: Option<(String, String)>,
}

/// The one allocation.
#[derive(Debug)]
struct Arena {
    memory: Arc<DeviceMemory>,
    used: usize,
    /// Tensors that are there, by where their bytes lie on the host; until the end of loading, so that no
    /// other tensor comes to lie where one of them was.
    there: BTreeMap<(usize, usize), (StoredTensor, Part)>,
}

impl CudaPack {
    /// Prepares to load.
    ///
    /// # Errors
    /// If memory or threads for loading cannot be had.
    pub fn new(device: &Arc<Device>, precision: Precision) -> Result<Self, CudaError> {
        Ok(Self {
            device: Arc::clone(device),
            precision,
            uploader: Uploader::new(device)?,
            arena: Mutex::new(None),
            widened: Mutex::new(Widened::default()),
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Room for so many bytes.
    fn take(&self, bytes: usize) -> Result<Part, EngineError> {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = arena.as_mut().expect("loading begins with its plan");
        let offset = arena.used;
        let end = offset + bytes.next_multiple_of(ALIGNMENT);
        if end > arena.memory.bytes() {
            return Err(EngineError::Device(format!(
                "weights are larger than was told before loading: {end} bytes of {}",
                arena.memory.bytes()
            )));
        }
        arena.used = end;
        Ok(Part {
            memory: Arc::clone(&arena.memory),
            offset,
        })
    }

    fn push(&self, source: Source, part: &Part, offset: usize) -> Result<(), EngineError> {
        Ok(self
            .uploader
            .push(source, &part.memory, part.offset + offset)?)
    }

    fn floats(&self, values: &[f32]) -> Result<Part, EngineError> {
        let part = self.take(size_of_val(values))?;
        let words = values.iter().map(|value| value.to_bits()).collect();
        self.push(Source::Words(words), &part, 0)?;
        Ok(part)
    }

    /// The stack as kernels for quantised weights take it, if they do.
    fn narrow(&self, stack: &[StoredMatrix]) -> Result<Narrow, String> {
        match self.precision {
            Precision::Bf16 => Narrow::of(stack),
            Precision::F32 => Err("everything is f32".to_owned()),
        }
    }

    /// Codes one tensor after the other, and the scales of all.
    fn packed(
        &self,
        stack: &[StoredMatrix],
        narrow: Narrow,
    ) -> Result<(Part, NarrowParts), EngineError> {
        let codes = self.take(narrow.weight_bytes())?;
        let mut offset = 0;
        for matrix in stack {
            let StoredMatrix::Narrow(tensor) = matrix else {
                continue;
            };
            let tensor = Arc::clone(tensor);
            let bytes = tensor.rows() * narrow.row_bytes();
            self.push(Source::Packed(Packing { tensor, narrow }), &codes, offset)?;
            offset += bytes;
        }
        let scales = self.take(narrow.scales_count() * size_of::<u32>())?;
        self.push(Source::Words(narrow.scales(stack)), &scales, 0)?;
        let parts = NarrowParts {
            format: narrow.format,
            scales,
            group: narrow.group,
        };
        Ok((codes, parts))
    }

    fn note_widened(&self, stack: &[StoredMatrix], reason: String) {
        let narrow = |matrix: &&StoredMatrix| matches!(matrix, StoredMatrix::Narrow(_));
        let Some(first) = stack.iter().find(narrow) else {
            return;
        };
        let mut widened = self.widened.lock().unwrap_or_else(PoisonError::into_inner);
        widened.count += 1;
        let first = (first.name().to_owned(), reason);
        widened.first.get_or_insert(first);
    }

    /// Says once what takes more memory than its checkpoint would have it.
    fn tell_widened(&self) {
        let mut widened = self.widened.lock().unwrap_or_else(PoisonError::into_inner);
        let Widened { count, first } = std::mem::take(&mut *widened);
        if let Some((name, reason)) = first {
            let precision = self.precision.name();
            tracing::warn!(
                "{count} quantised matrices are kept in {precision}; the first has {name}: {reason}"
            );
        }
    }

    /// What a stack takes in elements of the pack's precision.
    fn dense_bytes(&self, stack: &[StoredMatrix]) -> usize {
        let elements = stack.iter().map(|matrix| matrix.rows() * matrix.columns());
        elements.sum::<usize>() * self.precision.element_bytes()
    }

    /// Tensors one after the other; a single one that is there already is not copied again.
    fn stacked(&self, stack: &[StoredMatrix]) -> Result<Part, EngineError> {
        let place = |tensor: &StoredTensor| {
            let bytes = tensor.bytes();
            (bytes.as_ptr() as usize, bytes.len())
        };
        if let [StoredMatrix::Dense(tensor)] = stack {
            let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
            let there = arena
                .as_ref()
                .and_then(|arena| arena.there.get(&place(tensor)));
            if let Some((_, part)) = there {
                return Ok(part.clone());
            }
        }
        let part = self.take(self.dense_bytes(stack))?;
        let mut offset = 0;
        for matrix in stack {
            let source = match matrix {
                StoredMatrix::Dense(tensor) => Source::Tensor(tensor.clone(), self.precision),
                StoredMatrix::Narrow(tensor) => Source::Widened(Arc::clone(tensor), self.precision),
            };
            self.push(source, &part, offset)?;
            offset += self.dense_bytes(std::slice::from_ref(matrix));
        }
        if let [StoredMatrix::Dense(tensor)] = stack {
            let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
            let arena = arena.as_mut().expect("room was taken from it");
            let kept = (tensor.clone(), part.clone());
            arena.there.insert(place(tensor), kept);
        }
        Ok(part)
    }
}

impl Pack for CudaPack {
    type Matrix = CudaMatrix;
    type Table = CudaTable;
    type Vector = CudaVector;
    type Rotary = CudaRotary;

    fn precision(&self) -> Precision {
        self.precision
    }

    fn expect(&self, plan: &LoadPlan) -> Result<(), EngineError> {
        let LoadPlan {
            matrix_elements,
            narrow,
            vector_elements,
            tensors_count,
        } = plan;
        let bytes = *matrix_elements as usize * self.precision.element_bytes()
            + narrow.iter().map(|stack| self.matrix_bytes(stack) as usize).sum::<usize>()
            + *vector_elements as usize * size_of::<f32>()
            // Codes and scales of a quantised matrix are two.
            + (tensors_count + narrow.len()) * ALIGNMENT;
        let memory = DeviceMemory::new(&self.device, bytes, "weights")?;
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        *arena = Some(Arena {
            memory: Arc::new(memory),
            used: 0,
            there: BTreeMap::new(),
        });
        Ok(())
    }

    fn matrix_bytes(&self, stack: &[StoredMatrix]) -> u64 {
        let bytes = match self.narrow(stack) {
            Ok(narrow) => narrow.weight_bytes() + narrow.scales_count() * size_of::<u32>(),
            Err(_) => self.dense_bytes(stack),
        };
        bytes as u64
    }

    fn finish(&self) -> Result<(), EngineError> {
        self.uploader.finish()?;
        self.tell_widened();
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = arena.as_mut() {
            arena.there.clear();
        }
        Ok(())
    }

    fn matrix(
        &self,
        stack: &[StoredMatrix],
        bias: Option<&[f32]>,
    ) -> Result<CudaMatrix, EngineError> {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        assert!(
            stack.iter().all(|tensor| tensor.columns() == width),
            "a stack of different widths"
        );
        let (weight, narrow) = match self.narrow(stack) {
            Ok(narrow) => {
                let (codes, parts) = self.packed(stack, narrow)?;
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
            narrow,
        })
    }

    fn table(&self, stored: &StoredTensor) -> Result<CudaTable, EngineError> {
        Ok(CudaTable {
            rows: self.stacked(&[stored.clone().into()])?,
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
        })
    }
}
