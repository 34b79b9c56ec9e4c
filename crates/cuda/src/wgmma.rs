//! Products by Hopper's wgmma instruction, if it rounds as mma does.
//!
//! Owns: the comparison. No manual specifies how tensor cores add up the sixteen products of a
//! step. If wgmma did it otherwise than mma, a row would give other bits in a prompt than in a
//! decode step. So both kernels multiply the same numbers once at the start, and the results are
//! compared.
//! Never: decides for which rows either kernel is used.
//! Invariant: without equal bits no wgmma kernel is used.

use crate::args::{MatmulArgs, slice_ends};
use crate::driver::{CudaKernel, CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::images::KernelImages;

/// The only major compute capability whose chips have wgmma.
const HOPPER: u32 = 9;
/// The columns, rows and width of the comparison: one tile of two spans, the second of which is
/// shorter.
const COLUMNS: usize = 128;
const ROWS: usize = 128;
const WIDTH: usize = 320;
const SPAN_WIDTH: usize = 256;

/// Loads the wgmma kernel for many rows if the device is a Hopper and the kernel's bits equal those
/// of `many`, the mma kernel for the same tile.
///
/// # Errors
/// If the device fails.
pub(crate) fn load_wgmma_kernel(
    images: &KernelImages,
    stream: &CudaStream,
    many: &CudaKernel<MatmulArgs>,
) -> Result<Option<CudaKernel<MatmulArgs>>, CudaError> {
    let Some(found) = compare_with_mma(images, stream, many)? else {
        return Ok(None);
    };
    if found.sums_differing > 0 {
        tracing::info!(
            "{}: wgmma rounds differently from mma ({} of {} sums differ), so products are left to mma; \
             --gpu-matmul fast is faster for long prompts",
            stream.device().facts().name,
            found.sums_differing,
            found.sums
        );
        return Ok(None);
    }
    Ok(Some(found.wide))
}

/// The result of the comparison.
pub(crate) struct WgmmaComparison {
    wide: CudaKernel<MatmulArgs>,
    /// The number of sums whose bits differ, out of `sums`.
    pub(crate) sums_differing: usize,
    pub(crate) sums: usize,
}

/// Multiplies the same numbers with both kernels; `None` on a chip without wgmma.
///
/// # Errors
/// If the device fails.
pub(crate) fn compare_with_mma(
    images: &KernelImages,
    stream: &CudaStream,
    many: &CudaKernel<MatmulArgs>,
) -> Result<Option<WgmmaComparison>, CudaError> {
    if stream.device().facts().capability.0 != HOPPER {
        return Ok(None);
    }
    let wide = images.kernel("matmul_wide128_bf16")?;
    let probe = WgmmaProbe::new(stream)?;
    let (by_mma, by_wgmma) = (probe.product(stream, many)?, probe.product(stream, &wide)?);
    let different = by_mma.iter().zip(&by_wgmma).filter(|(a, b)| a != b);
    Ok(Some(WgmmaComparison {
        wide,
        sums_differing: different.count(),
        sums: by_mma.len(),
    }))
}

/// The operands of the comparison.
struct WgmmaProbe {
    weights: DeviceMemory,
    x: DeviceMemory,
    out: DeviceMemory,
    rows_count: DeviceMemory,
}

impl WgmmaProbe {
    fn new(stream: &CudaStream) -> Result<Self, CudaError> {
        let upload = |bytes: &[u8]| -> Result<DeviceMemory, CudaError> {
            let mut staged = PinnedMemory::new(stream.device(), bytes.len())?;
            staged.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
            let memory = DeviceMemory::new(stream.device(), bytes.len(), "a comparison")?;
            stream.copy_in((&staged, 0..bytes.len()), (&memory, 0))?;
            stream.synchronize()?;
            Ok(memory)
        };
        Ok(Self {
            weights: upload(&numbers(1, COLUMNS * WIDTH))?,
            x: upload(&numbers(2, ROWS * WIDTH))?,
            out: DeviceMemory::new(stream.device(), COLUMNS * ROWS * 4, "a comparison")?,
            rows_count: upload(&(ROWS as u32).to_ne_bytes())?,
        })
    }

    /// Returns the bits of every sum.
    fn product(
        &self,
        stream: &CudaStream,
        kernel: &CudaKernel<MatmulArgs>,
    ) -> Result<Vec<u32>, CudaError> {
        let bytes = self.out.bytes();
        stream.zero(&self.out, 0..bytes)?;
        let args = MatmulArgs {
            weights: self.weights.at(0),
            column_scales: 0,
            group_scales: 0,
            x: self.x.at(0),
            bias: 0,
            out: self.out.at(0),
            rows_count: self.rows_count.at(0),
            sums: 0,
            arrivals: 0,
            columns: COLUMNS as u32,
            width: WIDTH as u32,
            span_width: SPAN_WIDTH as u32,
            spans: WIDTH.div_ceil(SPAN_WIDTH) as u32,
            group_shift: 0,
            is_out_f32: 1,
            slices: 1,
            slice_ends: slice_ends(std::iter::once(WIDTH)),
            padding: 0,
        };
        let mut fetched = PinnedMemory::new(stream.device(), bytes)?;
        // SAFETY: the sizes are those of the memory allocated above, which lives until the stream
        // is done.
        unsafe { kernel.launch(stream, [1, 1, 1], args) }?;
        stream.copy_out((&self.out, 0), (&mut fetched, 0..bytes))?;
        stream.synchronize()?;
        let words = fetched.as_slice()[..bytes].chunks_exact(4);
        Ok(words
            .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
            .collect())
    }
}

/// Returns random bf16 numbers of both signs between 2^-8 and 2^8. Nearly every bit of their sums
/// depends on the order and on the rounding of intermediate results.
fn numbers(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed;
    let mut draw = || {
        // SplitMix64 (Steele, Lea and Flood, 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let number = |bits: u64| {
        let (sign, exponent, fraction) = (bits & 1, 127 - 8 + (bits >> 1 & 15), bits >> 5 & 127);
        (sign << 15 | exponent << 7 | fraction) as u16
    };
    let all = (0..count).map(|_| number(draw()));
    all.flat_map(u16::to_ne_bytes).collect()
}
