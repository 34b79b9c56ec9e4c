//! The processor's limits: bytes read and operations done per second, measured by loops that do
//! nothing else.
//!
//! Owns: these loops, and their threads while they run.
//! Never: estimates: an instruction set without a loop has no ceiling.
//! Invariant: a rate is that of all threads together, from the first one's start to the last one's
//! end, the best of a few rounds: other load on the machine makes it smaller, never larger.

use cleave_cpu_kernels::isa::Isa;
use cleave_cpu_kernels::memory::PageMemory;
use cleave_engine::EngineError;
use std::sync::Barrier;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DotType {
    F32,
    /// Pairs of bfloat16, summed in 32-bit floats.
    Bf16,
    /// Groups of four eight-bit integers, summed in 32 bits.
    Int8,
    /// The same with four-bit integers on one side, so that sums of two products fit 16 bits.
    Int4,
}

/// Memory to read, larger than any cache.
const BYTES: usize = 512 << 20;
/// Bytes per part of the memory: small enough that all threads end together.
const PART_BYTES: usize = 1 << 20;
/// Instructions of a loop of products, about two milliseconds.
const DOTS: usize = 14_000_000;
/// Independent chains of products: more than any processor's latency times its number of units.
const CHAINS: usize = 14;
const ROUNDS: usize = 3;

/// Memory to be read, and the number of threads.
pub struct BandwidthReader {
    words: PageMemory<u32>,
    threads: usize,
}

impl BandwidthReader {
    /// # Errors
    /// `Device` if memory is short.
    pub fn new(threads: usize) -> Result<Self, EngineError> {
        let mut words = PageMemory::<u32>::zeroed(BYTES / size_of::<u32>())?;
        // Pages that were never written all map the same page of zeros.
        words.fill(1);
        Ok(Self {
            words,
            threads: threads.max(1),
        })
    }

    /// Measures bytes read per second.
    pub fn bytes_per_second(&self) -> f64 {
        let each = PART_BYTES / size_of::<u32>();
        let parts: Vec<&[u32]> = self.words.chunks(each).collect();
        let seconds = best_seconds_on_threads(self.threads, &|thread| {
            for part in parts.iter().skip(thread).step_by(self.threads) {
                std::hint::black_box(sum(part));
            }
        });
        BYTES as f64 / seconds
    }
}

/// Measures operations per second, counting a multiply-add as two; `None` if the instruction set
/// has no such product, or no loop here.
pub fn operations_per_second(isa: Isa, dot: DotType, threads: usize) -> Option<f64> {
    let threads = threads.max(1);
    let spin = DotLoop::of(isa, dot)?;
    // SAFETY: `DotLoop::of` found the instructions.
    let seconds = best_seconds_on_threads(threads, &|_| unsafe { (spin.loop_fn)(DOTS / CHAINS) });
    let count = DOTS / CHAINS * CHAINS * spin.operations * threads;
    Some(count as f64 / seconds)
}

/// Runs `body` on so many threads at once; returns the shortest of a few rounds, in seconds. Uses
/// its own threads: a waiting [`Threads`](crate::Threads) would shorten the spinning of an engine's
/// threads.
fn best_seconds_on_threads(threads: usize, body: &(dyn Fn(usize) + Sync)) -> f64 {
    let (start, end) = (Barrier::new(threads), Barrier::new(threads));
    let times = |thread: usize| {
        let mut least = f64::INFINITY;
        for _ in 0..ROUNDS {
            start.wait();
            let from = Instant::now();
            body(thread);
            end.wait();
            least = least.min(from.elapsed().as_secs_f64());
        }
        least
    };
    std::thread::scope(|scope| {
        for thread in 1..threads {
            let times = &times;
            scope.spawn(move || times(thread));
        }
        times(0)
    })
}

/// Sums words in separate lanes, which the compiler vectorises.
fn sum(words: &[u32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was just detected.
        return unsafe { sum_avx2(words) };
    }
    sum_lanes(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u32]) -> u32 {
    sum_lanes(words)
}

#[inline(always)]
fn sum_lanes(words: &[u32]) -> u32 {
    let mut lanes = [0_u32; 64];
    for chunk in words.as_chunks::<64>().0 {
        for i in 0..lanes.len() {
            lanes[i] = lanes[i].wrapping_add(chunk[i]);
        }
    }
    lanes.iter().fold(0, |sum, lane| sum.wrapping_add(*lane))
}

/// A loop of products on registers.
struct DotLoop {
    /// Runs so many rounds of [`CHAINS`] instructions.
    loop_fn: unsafe fn(usize),
    /// Operations per instruction; a multiply-add counts as two.
    operations: usize,
}

impl DotLoop {
    #[cfg(target_arch = "x86_64")]
    fn of(isa: Isa, dot: DotType) -> Option<Self> {
        if !isa.available() {
            return None;
        }
        Some(match (isa, dot) {
            (Isa::Avx512Bf16, DotType::Bf16) => Self {
                loop_fn: x86::bf16,
                operations: 64,
            },
            (Isa::Avx512Bf16 | Isa::Avx512Vnni, DotType::Int8 | DotType::Int4) => Self {
                loop_fn: x86::int8,
                operations: 128,
            },
            // Without an instruction for pairs of bf16, these are widened to f32.
            (Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512, DotType::F32)
            | (Isa::Avx512Vnni | Isa::Avx512, DotType::Bf16) => Self {
                loop_fn: x86::f32_wide,
                operations: 32,
            },
            (Isa::Avx2Vnni | Isa::Avx2, DotType::F32 | DotType::Bf16) => Self {
                loop_fn: x86::f32_narrow,
                operations: 16,
            },
            (Isa::Avx2Vnni, DotType::Int8 | DotType::Int4) => Self {
                loop_fn: x86::int8_narrow,
                operations: 64,
            },
            // Without a dot product of four bytes, bytes are widened to 16 bits, and a second
            // instruction adds.
            (Isa::Avx2, DotType::Int8) => Self {
                loop_fn: x86::pairs_narrow,
                operations: 32,
            },
            (Isa::Avx512, DotType::Int8) => Self {
                loop_fn: x86::pairs_wide,
                operations: 64,
            },
            // One instruction multiplies and adds pairs of bytes; two more add those sums.
            (Isa::Avx2, DotType::Int4) => Self {
                loop_fn: x86::codes_narrow,
                operations: 64,
            },
            (Isa::Avx512, DotType::Int4) => Self {
                loop_fn: x86::codes_wide,
                operations: 128,
            },
            _ => return None,
        })
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: Isa, _: DotType) -> Option<Self> {
        None
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Each chain depends on itself, so that the compiler cannot remove a product.

    use super::CHAINS;
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm256_add_epi32, _mm256_dpbusd_avx_epi32, _mm256_fmadd_ps,
        _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm512_add_epi32,
        _mm512_dpbf16_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_madd_epi16,
        _mm512_maddubs_epi16, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32,
        _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    };
    use std::hint::black_box;
    use std::mem::transmute;

    /// Makes a function of each row: the loop over one instruction, or over the few that stand for
    /// it. A row has the CPU features, the first value of the chains, constants, and a step.
    macro_rules! instruction_loops {
        ($($name:ident $features:literal: $zero:expr, [$($constant:ident = $value:expr),*],
            |$chain:ident| $step:expr;)*) => {$(
            #[target_feature(enable = $features)]
            pub(super) fn $name(rounds: usize) {
                $(let $constant = black_box($value);)*
                let mut chains = [$zero; CHAINS];
                for _ in 0..rounds {
                    for $chain in &mut chains {
                        *$chain = $step;
                    }
                }
                black_box(chains);
            }
        )*};
    }

    instruction_loops! {
        bf16 "avx512f,avx512bf16": _mm512_setzero_ps(),
            // SAFETY: both are 512 bits.
            [ones = unsafe { transmute::<__m512i, __m512bh>(_mm512_set1_epi32(0x3f80_3f80)) }],
            |chain| _mm512_dpbf16_ps(*chain, ones, ones);
        int8 "avx512f,avx512vnni": _mm512_setzero_si512(), [ones = _mm512_set1_epi8(1)],
            |chain| _mm512_dpbusd_epi32(*chain, ones, ones);
        f32_wide "avx512f": _mm512_setzero_ps(), [ones = _mm512_set1_ps(1.0)],
            |chain| _mm512_fmadd_ps(ones, ones, *chain);
        pairs_wide "avx512f,avx512bw": _mm512_setzero_si512(), [ones = _mm512_set1_epi16(1)],
            |chain| _mm512_add_epi32(*chain, _mm512_madd_epi16(*chain, ones));
        codes_wide "avx512f,avx512bw": _mm512_setzero_si512(),
            [bytes = _mm512_set1_epi8(1), pairs = _mm512_set1_epi16(1)],
            |chain| _mm512_add_epi32(
                *chain,
                _mm512_madd_epi16(_mm512_maddubs_epi16(*chain, bytes), pairs),
            );
        int8_narrow "avx2,avxvnni": _mm256_setzero_si256(), [ones = _mm256_set1_epi8(1)],
            |chain| _mm256_dpbusd_avx_epi32(*chain, ones, ones);
        pairs_narrow "avx2": _mm256_setzero_si256(), [ones = _mm256_set1_epi16(1)],
            |chain| _mm256_add_epi32(*chain, _mm256_madd_epi16(*chain, ones));
        codes_narrow "avx2": _mm256_setzero_si256(),
            [bytes = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1)],
            |chain| _mm256_add_epi32(
                *chain,
                _mm256_madd_epi16(_mm256_maddubs_epi16(*chain, bytes), pairs),
            );
        f32_narrow "avx2,fma": _mm256_setzero_ps(), [ones = _mm256_set1_ps(1.0)],
            |chain| _mm256_fmadd_ps(ones, ones, *chain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_rates_are_finite_and_positive() {
        let isa = Isa::detect();
        let reader = BandwidthReader::new(2).unwrap();
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        assert!(is_rate(reader.bytes_per_second()));
        for dot in [DotType::F32, DotType::Bf16, DotType::Int8, DotType::Int4] {
            match operations_per_second(isa, dot, 1) {
                // No core does ten trillion a second; a loop that was optimised away would.
                Some(rate) => assert!(is_rate(rate) && rate < 1e13, "{dot:?}: {rate}"),
                None => assert!(
                    !cfg!(target_arch = "x86_64") || isa == Isa::Plain,
                    "{dot:?}"
                ),
            }
        }
        assert_eq!(operations_per_second(Isa::Plain, DotType::F32, 1), None);
    }

    #[test]
    fn the_bandwidth_loop_reads_every_word() {
        let words: Vec<u32> = (0..256).collect();
        assert_eq!(sum(&words), 255 * 128);
    }
}
