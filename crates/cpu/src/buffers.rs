//! Activations and the KV pool, in host memory.
//!
//! Invariant: a pool's bytes are its elements in the machine's byte order, which is little-endian
//! on every supported machine.

use cleave_cpu_kernels::memory::{PageMemory, PlainData};
use cleave_domain::KvPlane;
use cleave_engine::ops::KvPoolShape;
use cleave_engine::{BlockSpan, EngineError};
use std::ops::Range;

/// An activation buffer `(rows_max, width)`.
#[derive(Debug)]
pub struct CpuRows {
    pub(crate) values: PageMemory<f32>,
    pub(crate) width: usize,
}

/// A KV pool: the blocks, then the state slots.
#[derive(Debug)]
pub struct CpuPool {
    bytes: PageMemory<u8>,
    pub(crate) shape: KvPoolShape,
    /// First byte of the window plane.
    windows_start: usize,
    /// First byte of the state slots.
    states_start: usize,
}

/// Alignment of a plane's first byte: a cache line.
const PLANE_ALIGNMENT: usize = 64;

impl CpuRows {
    /// Shape: `(rows_max, width)`, row by row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Shape: `(rows_max, width)`, row by row.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Number of elements in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn head(&self, rows: usize) -> &[f32] {
        &self.values[..rows * self.width]
    }

    pub(crate) fn head_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.values[..rows * self.width]
    }
}

impl CpuPool {
    /// Allocates a pool, zeroed.
    pub(crate) fn new(shape: KvPoolShape) -> Result<Self, EngineError> {
        let [blocks, windows, states] = [KvPlane::Blocks, KvPlane::Window, KvPlane::State]
            .map(|plane| shape.plane(plane).bytes_total().unwrap_or(usize::MAX / 8));
        let windows_start = blocks.next_multiple_of(PLANE_ALIGNMENT);
        let states_start = (windows_start + windows).next_multiple_of(PLANE_ALIGNMENT);
        Ok(Self {
            bytes: PageMemory::zeroed(states_start + states)?,
            shape,
            windows_start,
            states_start,
        })
    }

    /// The elements of a plane with keys and values.
    pub(crate) fn elements<T: PlainData>(&self, plane: KvPlane) -> &[T] {
        let (start, len) = self.plane_elements::<T>(plane);
        // SAFETY: memory is page-aligned, the plane begins at a cache line and is as long, and
        // every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().add(start).cast(), len) }
    }

    pub(crate) fn elements_mut<T: PlainData>(&mut self, plane: KvPlane) -> &mut [T] {
        let (start, len) = self.plane_elements::<T>(plane);
        // SAFETY: as in `elements`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().add(start).cast(), len) }
    }

    /// The first byte of a plane in memory, and its elements.
    fn plane_elements<T: PlainData>(&self, plane: KvPlane) -> (usize, usize) {
        assert_eq!(size_of::<T>(), self.shape.kv.element_bytes());
        let bytes = self.shape.plane(plane).bytes_total();
        let bytes = bytes.expect("the pool was allocated");
        let start = self.plane_start(plane);
        assert!(start + bytes <= self.bytes.len());
        (start, bytes / size_of::<T>())
    }

    fn plane_start(&self, plane: KvPlane) -> usize {
        match plane {
            KvPlane::Blocks => 0,
            KvPlane::Window => self.windows_start,
            KvPlane::State => self.states_start,
        }
    }

    /// The bytes of a span.
    pub(crate) fn span(&self, span: &BlockSpan) -> &[u8] {
        &self.bytes[self.range(span)]
    }

    /// The bytes of a span.
    pub(crate) fn span_mut(&mut self, span: &BlockSpan) -> &mut [u8] {
        let range = self.range(span);
        &mut self.bytes[range]
    }

    /// Copies a span of the pool to another one of the same length.
    pub(crate) fn copy(&mut self, from: &BlockSpan, to: &BlockSpan) {
        let (from, to) = (self.range(from), self.range(to));
        self.bytes.copy_within(from, to.start);
    }

    /// Where a span lies in the pool's memory.
    fn range(&self, span: &BlockSpan) -> Range<usize> {
        let range = self.shape.plane(span.plane).range(span);
        let range = range.expect("the engine names spans of the pool");
        let start = self.plane_start(span.plane);
        start + range.start..start + range.end
    }
}
