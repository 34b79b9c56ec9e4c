//! What the processor could do: bytes read and operations done per second, measured by loops that do nothing else.
//!
//! Owns: these loops, and the threads that they take for as long as they run.
//! Never: guesses: where a loop for an instruction set is not written there is no ceiling.
//! Invariant: a rate is of all threads together, from the first one's start to the last one's end, best of a few rounds: what
//! others take of the machine makes it smaller, never larger.

use crate::isa::Isa;
use crate::memory::Memory;
use cleave_engine::EngineError;
use std::sync::Barrier;
use std::time::Instant;

/// What is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dot {
    /// 32-bit floats.
    F32,
    /// Pairs of bfloat16, added up in 32-bit floats.
    Bf16,
    /// Fours of eight-bit integers, added up in 32 bits.
    Int8,
    /// The same where one of each two has four bits, so that pairs of products fit 16.
    Int4,
}

/// More than any cache holds.
const BYTES: usize = 512 << 20;
/// Bytes that a thread reads before it looks for more: small enough that all end together.
const PART_BYTES: usize = 1 << 20;
/// Instructions of a loop of products; some two milliseconds.
const DOTS: usize = 14_000_000;
/// Chains of products that do not wait for each other: more than any processor's latency times its units.
const CHAINS: usize = 14;
const ROUNDS: usize = 3;

/// Memory to be read, and how many threads read it.
pub struct Reader {
    words: Memory<u32>,
    threads: usize,
}

impl Reader {
    /// # Errors
    /// `Device` if memory is short.
    pub fn new(threads: usize) -> Result<Self, EngineError> {
        let mut words = Memory::<u32>::zeroed(BYTES / size_of::<u32>())?;
        // A page that was never written is the same page of zeros everywhere.
        words.fill(1);
        Ok(Self {
            words,
            threads: threads.max(1),
        })
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        let each = PART_BYTES / size_of::<u32>();
        let parts: Vec<&[u32]> = self.words.chunks(each).collect();
        let seconds = shared(self.threads, &|thread| {
            for part in parts.iter().skip(thread).step_by(self.threads) {
                std::hint::black_box(sum(part));
            }
        });
        BYTES as f64 / seconds
    }
}

/// Operations per second, a multiplication and its addition being two; `None` where the instruction set has no such product,
/// or no loop here.
pub fn operations_per_second(isa: Isa, dot: Dot, threads: usize) -> Option<f64> {
    let threads = threads.max(1);
    let spin = Spin::of(isa, dot)?;
    // SAFETY: `Spin::of` found the instructions.
    let seconds = shared(threads, &|_| unsafe { (spin.run)(DOTS / CHAINS) });
    let count = DOTS / CHAINS * CHAINS * spin.operations * threads;
    Some(count as f64 / seconds)
}

/// Runs the same on so many threads at once: the shortest of a few rounds, in seconds. Threads of its own, since others that only wait
/// would make an engine's threads wait with less patience.
fn shared(threads: usize, body: &(dyn Fn(usize) + Sync)) -> f64 {
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

/// In lanes of their own, which the compiler makes vectors of.
fn sum(words: &[u32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: found just now.
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
struct Spin {
    /// So many times [`CHAINS`] instructions.
    run: unsafe fn(usize),
    /// Operations of one instruction.
    operations: usize,
}

impl Spin {
    #[cfg(target_arch = "x86_64")]
    fn of(isa: Isa, dot: Dot) -> Option<Self> {
        if !isa.available() {
            return None;
        }
        Some(match (isa, dot) {
            (Isa::Avx512Bf16, Dot::Bf16) => Self {
                run: x86::bf16,
                operations: 64,
            },
            (Isa::Avx512Bf16 | Isa::Avx512Vnni, Dot::Int8 | Dot::Int4) => Self {
                run: x86::int8,
                operations: 128,
            },
            // Without an instruction for pairs of bf16 they are widened.
            (Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512, Dot::F32)
            | (Isa::Avx512Vnni | Isa::Avx512, Dot::Bf16) => Self {
                run: x86::f32_wide,
                operations: 32,
            },
            (Isa::Avx2Vnni | Isa::Avx2, Dot::F32 | Dot::Bf16) => Self {
                run: x86::f32_narrow,
                operations: 16,
            },
            (Isa::Avx2Vnni, Dot::Int8 | Dot::Int4) => Self {
                run: x86::int8_narrow,
                operations: 64,
            },
            // Without one for fours of bytes they are widened to pairs, and added up in a second instruction.
            (Isa::Avx2, Dot::Int8) => Self {
                run: x86::pairs_narrow,
                operations: 32,
            },
            (Isa::Avx512, Dot::Int8) => Self {
                run: x86::pairs_wide,
                operations: 64,
            },
            // Pairs of bytes are multiplied and added up in one, and those pairs in two more.
            (Isa::Avx2, Dot::Int4) => Self {
                run: x86::codes_narrow,
                operations: 64,
            },
            (Isa::Avx512, Dot::Int4) => Self {
                run: x86::codes_wide,
                operations: 128,
            },
            _ => return None,
        })
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn of(_: Isa, _: Dot) -> Option<Self> {
        None
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Each chain adds to itself, so that nothing can be left out.

    use super::CHAINS;
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm256_add_epi32, _mm256_dpbusd_avx_epi32, _mm256_fmadd_ps,
        _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16,
        _mm256_set1_ps, _mm256_setzero_si256, _mm512_add_epi32, _mm512_dpbf16_ps,
        _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_madd_epi16, _mm512_maddubs_epi16,
        _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
        _mm512_setzero_si512,
    };
    use std::hint::black_box;

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn bf16(rounds: usize) {
        let ones = black_box(_mm512_set1_epi32(0x3f80_3f80));
        // SAFETY: both are 512 bits.
        let ones = unsafe { std::mem::transmute::<__m512i, __m512bh>(ones) };
        let mut chains = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm512_dpbf16_ps(*chain, ones, ones);
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn int8(rounds: usize) {
        let ones = black_box(_mm512_set1_epi8(1));
        let mut chains = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm512_dpbusd_epi32(*chain, ones, ones);
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn f32_wide(rounds: usize) {
        let ones = black_box(_mm512_set1_ps(1.0));
        let mut chains = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm512_fmadd_ps(ones, ones, *chain);
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn pairs_wide(rounds: usize) {
        let ones = black_box(_mm512_set1_epi16(1));
        let mut chains = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm512_add_epi32(*chain, _mm512_madd_epi16(*chain, ones));
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn codes_wide(rounds: usize) {
        let (bytes, pairs) = (
            black_box(_mm512_set1_epi8(1)),
            black_box(_mm512_set1_epi16(1)),
        );
        let mut chains = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                let sums = _mm512_maddubs_epi16(*chain, bytes);
                *chain = _mm512_add_epi32(*chain, _mm512_madd_epi16(sums, pairs));
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn int8_narrow(rounds: usize) {
        let ones = black_box(_mm256_set1_epi8(1));
        let mut chains = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm256_dpbusd_avx_epi32(*chain, ones, ones);
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn pairs_narrow(rounds: usize) {
        let ones = black_box(_mm256_set1_epi16(1));
        let mut chains = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm256_add_epi32(*chain, _mm256_madd_epi16(*chain, ones));
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn codes_narrow(rounds: usize) {
        let (bytes, pairs) = (
            black_box(_mm256_set1_epi8(1)),
            black_box(_mm256_set1_epi16(1)),
        );
        let mut chains = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                let sums = _mm256_maddubs_epi16(*chain, bytes);
                *chain = _mm256_add_epi32(*chain, _mm256_madd_epi16(sums, pairs));
            }
        }
        black_box(chains);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn f32_narrow(rounds: usize) {
        let ones = black_box(_mm256_set1_ps(1.0));
        let mut chains = [_mm256_set1_ps(0.0); CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm256_fmadd_ps(ones, ones, *chain);
            }
        }
        black_box(chains);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_this_processor() {
        let isa = Isa::detect();
        let reader = Reader::new(2).unwrap();
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        assert!(is_rate(reader.bytes_per_second()));
        for dot in [Dot::F32, Dot::Bf16, Dot::Int8, Dot::Int4] {
            match operations_per_second(isa, dot, 1) {
                Some(rate) => assert!(is_rate(rate), "{dot:?}: {rate}"),
                None => assert!(
                    !cfg!(target_arch = "x86_64") || isa == Isa::Plain,
                    "{dot:?}"
                ),
            }
        }
        assert_eq!(operations_per_second(Isa::Plain, Dot::F32, 1), None);
    }

    #[test]
    fn every_word_is_read() {
        let words: Vec<u32> = (0..256).collect();
        assert_eq!(sum(&words), 255 * 128);
    }
}
