//! Products by Hopper's wgmma instruction, if it rounds as mma does.
//!
//! Owns: the comparison. No manual specifies how tensor cores add up the sixteen products of a
//! step. If wgmma did it otherwise than mma, a row would give other bits in a prompt than in a
//! decode step. So both kernels multiply the same numbers once at the start, and the results are
//! compared.
//! Never: decides for which rows either kernel is used.
//! Invariant: without equal bits no wgmma kernel is used.

use crate::args::{MatmulArgs, slice_ends};
use crate::driver::{CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::tiled::{TiledCode, TiledKernel};

/// The only major compute capability whose chips have wgmma.
const HOPPER: u32 = 9;
/// The columns, rows and width of the comparison: two tiles, which a cluster shares.
const COLUMNS: usize = 256;
const ROWS: usize = 128;
const WIDTH: usize = 208;
/// The first slice ends within a step of the copies, and the second waits for it.
const SLICE_ENDS: [usize; 2] = [80, WIDTH];
const SPAN_WIDTH: usize = 128;
/// Thread blocks of the comparison, and the most floats that each leaves in the workspace.
const BLOCKS: usize = 2;
const FLOATS_OF_BLOCK: usize = 3 * 128 * 192;

/// Loads the wgmma kernels for many rows whose bits equal those of `many`, the mma kernel for as
/// many rows: those in clusters, else the one without; none if the device is no Hopper.
///
/// # Errors
/// If the device fails.
pub(crate) fn load_wgmma_kernels(
    images: &KernelImages,
    stream: &CudaStream,
    many: &TiledKernel,
) -> Result<Vec<TiledKernel>, CudaError> {
    let mut equal = Vec::new();
    for found in compare_with_mma(images, stream, many)? {
        if found.sums_differing == 0 {
            equal.push(found.kernel);
            continue;
        }
        tracing::info!(
            "{}: {} rounds differently from mma ({} of {} sums differ) and is not used; \
             --gpu-matmul fast is faster for long prompts",
            stream.device().facts().name,
            found.name,
            found.sums_differing,
            found.sums
        );
    }
    let in_clusters = |kernel: &TiledKernel| matches!(kernel.code, TiledCode::Clusters(_));
    if equal.iter().any(in_clusters) {
        equal.retain(in_clusters);
    }
    Ok(equal)
}

/// The result of the comparison of one kernel.
pub(crate) struct WgmmaComparison {
    pub(crate) name: &'static str,
    kernel: TiledKernel,
    /// The number of sums whose bits differ, out of `sums`.
    pub(crate) sums_differing: usize,
    pub(crate) sums: usize,
}

/// Multiplies the same numbers with `many` and with each wgmma kernel; returns nothing on a chip
/// without wgmma.
///
/// # Errors
/// If the device fails.
pub(crate) fn compare_with_mma(
    images: &KernelImages,
    stream: &CudaStream,
    many: &TiledKernel,
) -> Result<Vec<WgmmaComparison>, CudaError> {
    if stream.device().facts().capability.0 != HOPPER {
        return Ok(Vec::new());
    }
    let kernels = [
        ("matmul_cluster192_bf16", true, (128, 192)),
        ("matmul_cluster128_bf16", true, (128, 128)),
        ("matmul_wide128_bf16", false, (128, 128)),
    ];
    let probe = WgmmaProbe::new(stream)?;
    let by_mma = probe.product(stream, many)?;
    let mut found = Vec::new();
    for (name, is_cluster, tile) in kernels {
        let kernel = TiledKernel {
            code: if is_cluster {
                TiledCode::Clusters(images.kernel(name)?)
            } else {
                TiledCode::Alone(images.kernel(name)?)
            },
            tile,
            rows_max: usize::MAX,
            merges_spans: false,
        };
        let by_wgmma = match probe.product(stream, &kernel) {
            // A driver without tensor maps cannot launch clusters that copy by them.
            Err(CudaError::Call { ref name, .. }) if name == "CUDA_ERROR_NOT_SUPPORTED" => continue,
            product => product?,
        };
        let different = by_mma.iter().zip(&by_wgmma).filter(|(a, b)| a != b);
        found.push(WgmmaComparison {
            name,
            kernel,
            sums_differing: different.count(),
            sums: by_mma.len(),
        });
    }
    Ok(found)
}

/// The operands of the comparison.
struct WgmmaProbe {
    weights: DeviceMemory,
    x: DeviceMemory,
    out: DeviceMemory,
    rows_count: DeviceMemory,
    sums: DeviceMemory,
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
            sums: DeviceMemory::new(
                stream.device(),
                BLOCKS * FLOATS_OF_BLOCK * 4,
                "a comparison",
            )?,
        })
    }

    /// Returns the bits of every sum.
    fn product(&self, stream: &CudaStream, kernel: &TiledKernel) -> Result<Vec<u32>, CudaError> {
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
            sums: self.sums.at(0),
            arrivals: 0,
            columns: COLUMNS as u32,
            width: WIDTH as u32,
            span_width: SPAN_WIDTH as u32,
            // One of each slice.
            spans: SLICE_ENDS.len() as u32,
            group_shift: 0,
            is_out_f32: 1,
            slices: SLICE_ENDS.len() as u32,
            slice_ends: slice_ends(SLICE_ENDS.into_iter()),
            padding: 0,
        };
        let mut fetched = PinnedMemory::new(stream.device(), bytes)?;
        // SAFETY: the sizes are those of the memory allocated above, which lives until the stream
        // is done.
        unsafe { kernel.launch(stream, BLOCKS, args, ROWS) }?;
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
