//! Products by Hopper's wgmma instruction, if it rounds as mma does.
//!
//! Owns: the comparison. No manual specifies how tensor cores add up the sixteen products of a
//! step. If wgmma did it otherwise than mma, a row would give other bits in a prompt than in a
//! decode step. So both kernels multiply the same numbers once at the start, and the results are
//! compared. Of those with equal bits the faster ones are kept, by a product of zeros.
//! Never: decides for which rows either kernel is used.
//! Invariant: without equal bits no wgmma kernel is used.

use crate::args::{MatmulArgs, slice_ends};
use crate::driver::{CudaEvent, CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::tiled::{MatrixInstruction, TiledCode, TiledKernel};

/// The only major compute capability whose chips have wgmma.
const HOPPER: u32 = 9;
/// Launches of which the fastest counts.
const TIMED_LAUNCHES: usize = 4;
/// The most floats that a thread block leaves in the workspace.
const FLOATS_OF_BLOCK: usize = 3 * 128 * 192;

/// The sizes of a product that kernels are compared by.
struct ProbeSizes {
    columns: usize,
    width: usize,
    rows: usize,
    slice_ends: &'static [usize],
    span_width: usize,
}

/// Two tiles, which a cluster shares. The first slice ends within a step of the copies, and the
/// second waits for it.
const COMPARED: ProbeSizes = ProbeSizes {
    columns: 256,
    width: 208,
    rows: 128,
    slice_ends: &[80, 208],
    span_width: 128,
};
/// Several tiles for each multiprocessor, as a prompt has them; whole tiles of 128 and of 192 rows.
const TIMED: ProbeSizes = ProbeSizes {
    columns: 8192,
    width: 4096,
    rows: 1536,
    slice_ends: &[4096],
    span_width: 1024,
};

/// Loads the wgmma kernels for many rows whose bits equal those of `many`, the mma kernel for as
/// many rows: those in clusters or the one without, whichever is faster here; none if the device is
/// no Hopper.
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
    let is_in_clusters = |kernel: &TiledKernel| matches!(kernel.code, TiledCode::Clusters(_));
    let (in_clusters, alone): (Vec<_>, Vec<_>) = equal.into_iter().partition(is_in_clusters);
    if in_clusters.is_empty() || alone.is_empty() {
        return Ok(in_clusters.into_iter().chain(alone).collect());
    }
    let probe = WgmmaProbe::of_zeros(stream, &TIMED)?;
    let clustered = probe.least_seconds(stream, &in_clusters)?;
    let single = probe.least_seconds(stream, &alone)?;
    let is_faster = clustered < single;
    tracing::debug!(
        "a product takes {:.0} us in clusters of blocks, {:.0} us without",
        clustered * 1e6,
        single * 1e6
    );
    Ok(if is_faster { in_clusters } else { alone })
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
    let probe = WgmmaProbe::of_numbers(stream, &COMPARED)?;
    let by_mma = probe.product(stream, many)?;
    let mut found = Vec::new();
    for (name, is_cluster, tile) in kernels {
        let kernel = TiledKernel {
            code: if is_cluster {
                TiledCode::Clusters(images.kernel(name)?.in_turn())
            } else {
                TiledCode::alone(images, name)?
            },
            tile,
            rows_max: usize::MAX,
            instruction: MatrixInstruction::Wgmma,
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

/// The operands of a comparison.
struct WgmmaProbe {
    sizes: &'static ProbeSizes,
    weights: DeviceMemory,
    x: DeviceMemory,
    out: DeviceMemory,
    rows_count: DeviceMemory,
    sums: DeviceMemory,
}

impl WgmmaProbe {
    fn of_numbers(stream: &CudaStream, sizes: &'static ProbeSizes) -> Result<Self, CudaError> {
        let probe = Self::of_zeros(stream, sizes)?;
        for (seed, memory) in [(1, &probe.weights), (2, &probe.x)] {
            upload(stream, memory, &numbers(seed, memory.bytes() / 2))?;
        }
        Ok(probe)
    }

    fn of_zeros(stream: &CudaStream, sizes: &'static ProbeSizes) -> Result<Self, CudaError> {
        let zeros = |bytes: usize| -> Result<DeviceMemory, CudaError> {
            let memory = DeviceMemory::new(stream.device(), bytes, "a comparison")?;
            stream.zero(&memory, 0..bytes)?;
            Ok(memory)
        };
        // Sums wait for those of other slices.
        let waiting = match sizes.slice_ends.len() {
            1 => 1,
            _ => (sizes.columns * sizes.rows).div_ceil(128 * 128) * FLOATS_OF_BLOCK,
        };
        let probe = Self {
            sizes,
            weights: zeros(sizes.columns * sizes.width * 2)?,
            x: zeros(sizes.rows * sizes.width * 2)?,
            out: zeros(sizes.columns * sizes.rows * size_of::<f32>())?,
            rows_count: zeros(size_of::<u32>())?,
            sums: zeros(waiting * size_of::<f32>())?,
        };
        upload(
            stream,
            &probe.rows_count,
            &(sizes.rows as u32).to_ne_bytes(),
        )?;
        Ok(probe)
    }

    fn launch(&self, stream: &CudaStream, kernel: &TiledKernel) -> Result<(), CudaError> {
        let ProbeSizes {
            columns,
            width,
            rows,
            slice_ends: ends,
            span_width,
        } = *self.sizes;
        let args = MatmulArgs {
            weights: self.weights.at(0),
            column_scales: 0,
            group_scales: 0,
            x: self.x.at(0),
            bias: 0,
            out: self.out.at(0),
            rows_count: self.rows_count.at(0),
            sums: self.sums.at(0),
            columns: columns as u32,
            width: width as u32,
            span_width: span_width as u32,
            group_shift: 0,
            is_out_f32: 1,
            slices: ends.len() as u32,
            slice_ends: slice_ends(ends.iter().copied()),
        };
        let tiles = kernel.tiles(rows, columns);
        let blocks = kernel.blocks(tiles, stream.processors_count() as usize);
        // SAFETY: the sizes are those of this memory, which lives until the stream is done.
        unsafe { kernel.launch(stream, blocks, args, rows) }
    }

    /// Returns the bits of every sum.
    fn product(&self, stream: &CudaStream, kernel: &TiledKernel) -> Result<Vec<u32>, CudaError> {
        let bytes = self.out.bytes();
        stream.zero(&self.out, 0..bytes)?;
        let mut fetched = PinnedMemory::new(stream.device(), bytes)?;
        self.launch(stream, kernel)?;
        stream.copy_out((&self.out, 0), (&mut fetched, 0..bytes))?;
        stream.synchronize()?;
        let words = fetched.as_slice()[..bytes].as_chunks::<4>().0;
        Ok(words.iter().copied().map(u32::from_ne_bytes).collect())
    }

    /// Returns the time of a product by the fastest of these kernels.
    fn least_seconds(
        &self,
        stream: &CudaStream,
        kernels: &[TiledKernel],
    ) -> Result<f64, CudaError> {
        let (begin, end) = (
            CudaEvent::timed(stream.device())?,
            CudaEvent::timed(stream.device())?,
        );
        let mut least = f64::INFINITY;
        for kernel in kernels {
            // The first launch is slower than the others.
            for _ in 0..TIMED_LAUNCHES {
                begin.record(stream)?;
                self.launch(stream, kernel)?;
                end.record(stream)?;
                end.synchronize()?;
                least = least.min(begin.elapsed_until(&end)?.as_secs_f64());
            }
        }
        Ok(least)
    }
}

/// Copies bytes to memory of the device, and waits for them.
fn upload(stream: &CudaStream, memory: &DeviceMemory, bytes: &[u8]) -> Result<(), CudaError> {
    let mut staged = PinnedMemory::new(stream.device(), bytes.len())?;
    staged.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    stream.copy_in((&staged, 0..bytes.len()), (memory, 0))?;
    stream.synchronize()
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
