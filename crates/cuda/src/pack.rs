//! Weights on the device.
//!
//! Owns: one allocation for all of them, and who has which part.
//! Never: changes a layout: matrices lie as checkpoints store them, `(out, in)`, row-major.
//! Invariant: every part begins on 256 bytes; a tensor that serves twice (a tied head) is there once.

use crate::driver::{Device, DeviceMemory};
use crate::error::CudaError;
use crate::upload::{Source, Uploader};
use cleave_engine::EngineError;
use cleave_engine::checkpoint::StoredTensor;
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
        self.push(Source::Floats(values.to_vec()), &part, 0)?;
        Ok(part)
    }

    /// Tensors one after the other; a single one that is there already is not copied again.
    fn stacked(&self, stack: &[StoredTensor]) -> Result<Part, EngineError> {
        let place = |tensor: &StoredTensor| {
            let bytes = tensor.bytes();
            (bytes.as_ptr() as usize, bytes.len())
        };
        if let [tensor] = stack {
            let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
            let there = arena
                .as_ref()
                .and_then(|arena| arena.there.get(&place(tensor)));
            if let Some((_, part)) = there {
                return Ok(part.clone());
            }
        }
        let bytes_of = |tensor: &StoredTensor| {
            tensor.rows() * tensor.columns() * self.precision.element_bytes()
        };
        let part = self.take(stack.iter().map(bytes_of).sum())?;
        let mut offset = 0;
        for tensor in stack {
            self.push(
                Source::Tensor(tensor.clone(), self.precision),
                &part,
                offset,
            )?;
            offset += bytes_of(tensor);
        }
        if let [tensor] = stack {
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

    fn expect(&self, plan: LoadPlan) -> Result<(), EngineError> {
        let LoadPlan {
            matrix_elements,
            vector_elements,
            tensors_count,
        } = plan;
        let bytes = matrix_elements as usize * self.precision.element_bytes()
            + vector_elements as usize * size_of::<f32>()
            + tensors_count * ALIGNMENT;
        let memory = DeviceMemory::new(&self.device, bytes, "weights")?;
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        *arena = Some(Arena {
            memory: Arc::new(memory),
            used: 0,
            there: BTreeMap::new(),
        });
        Ok(())
    }

    fn finish(&self) -> Result<(), EngineError> {
        self.uploader.finish()?;
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = arena.as_mut() {
            arena.there.clear();
        }
        Ok(())
    }

    fn matrix(
        &self,
        stack: &[StoredTensor],
        bias: Option<&[f32]>,
    ) -> Result<CudaMatrix, EngineError> {
        let width = stack.first().map_or(0, StoredTensor::columns);
        assert!(
            stack.iter().all(|tensor| tensor.columns() == width),
            "a stack of different widths"
        );
        Ok(CudaMatrix {
            weight: self.stacked(stack)?,
            bias: bias.map(|bias| self.floats(bias)).transpose()?,
            columns: stack.iter().map(StoredTensor::rows).sum(),
            width,
        })
    }

    fn table(&self, stored: &StoredTensor) -> Result<CudaTable, EngineError> {
        Ok(CudaTable {
            rows: self.stacked(std::slice::from_ref(stored))?,
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
