//! Tensor maps: matrices in the form in which the copies of Hopper's clusters take them.
//!
//! Owns: the layout of boxes, which is that of wgmma's operands. Never: copies.

use super::{CudaDevice, call};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::sync::Arc;

/// Columns of a box: 128 bytes of bf16, which one pattern of the swizzle takes.
const BOX_COLUMNS: u32 = 64;

/// A bf16 matrix on the device, of which kernels copy boxes to shared memory. Its bytes are the
/// driver's secret.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(128))]
pub(crate) struct TensorMap([u64; 16]);

impl TensorMap {
    /// Describes a `(rows, width)` matrix at `address`, in boxes of `box_rows` rows. The address is
    /// a multiple of 16, the width of 8.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn new(
        device: &Arc<CudaDevice>,
        address: u64,
        rows: usize,
        width: usize,
        box_rows: u32,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        const { assert!(size_of::<Self>() == size_of::<sys::CUtensorMap>()) };
        let mut map = Self([0; 16]);
        // The inner dimension comes first; it has no stride of its own.
        let (sizes, strides) = ([width as u64, rows as u64], [width as u64 * 2]);
        let (box_sizes, steps) = ([BOX_COLUMNS, box_rows], [1u32; 2]);
        call!(cuTensorMapEncodeTiled(
            (&raw mut map).cast(),
            sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            box_sizes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ))?;
        Ok(map)
    }
}
