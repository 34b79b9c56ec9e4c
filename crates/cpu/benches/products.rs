//! Speed of matrix products as a fraction of the processor's limits, which are measured beside each
//! sample: bytes read per second for few rows, dot products per second for many.
//!
//! `cargo bench -p cleave-cpu --bench products [-- ROUNDS [THREADS [COLUMNS]] [FORM] [slices]]`,
//! where FORM is f16, int8 or int4. With `slices`, each product takes turns with the same one in
//! eight slices of the inner dimension.
//!
//! Every round takes one short sample of each limit and of each shape, and the best of all rounds
//! counts: other load on the machine only makes samples worse. With one thread its CPU time is
//! measured, so that other processes on its core do not count.
#![allow(clippy::print_stdout)] // what it is for
#![allow(unsafe_code)] // instructions and a clock, for the ceilings

fn main() {
    #[cfg(target_arch = "x86_64")]
    products::run();
    #[cfg(not(target_arch = "x86_64"))]
    println!("the ceilings are those of x86-64");
}

#[cfg(target_arch = "x86_64")]
mod products {
    use cleave_checkpoint::StoredTensor;
    use cleave_cpu::{
        CpuMatrix, CpuOps, CpuOptions, CpuRows, CpuWeightLoader, Isa, Quantize, Threads,
    };
    use cleave_engine::ops::{BufferRole, InnerSlices, Ops, Precision, WeightLoader};
    use std::hint::black_box;

    const WIDTH: usize = 2048;
    const COLUMNS: usize = 16384;
    /// Copies of the weights, which together exceed any cache.
    const COPIES: usize = 3;
    const ROWS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 512];

    /// A measured shape, with its buffers.
    struct ShapeSample {
        rows: usize,
        /// Number of slices of the inner dimension.
        slices: usize,
        x: CpuRows,
        out: CpuRows,
        best: f64,
    }

    pub(crate) fn run() {
        if !Isa::Avx512Bf16.available() {
            println!("this processor has not the instructions whose ceilings are measured");
            return;
        }
        let numbers: Vec<usize> = std::env::args()
            .filter_map(|arg| arg.parse().ok())
            .collect();
        let number = |index: usize, default: usize| numbers.get(index).copied().unwrap_or(default);
        let rounds = number(0, 15);
        let threads = number(1, cleave_cpu::cores_count());
        let columns = number(2, COLUMNS);
        let quantize = std::env::args().find_map(|arg| {
            let forms = [Quantize::Int8, Quantize::Int4];
            forms.into_iter().find(|form| form.name() == arg)
        });
        let keeps_f16 = std::env::args().any(|arg| arg == "f16");
        let name = match quantize {
            Some(quantize) => quantize.name(),
            None if keeps_f16 => "f16",
            None => "bf16",
        };
        let options = CpuOptions {
            threads,
            quantize,
            keeps_f16,
            ..CpuOptions::new(Precision::Bf16)
        };
        let mut ops = CpuOps::new(&options).expect("the best instruction set");
        let weights = (0..WIDTH * columns).map(|i| (i * 7919 % 1021) as f32 / 1021.0 - 0.5);
        let stored = if keeps_f16 {
            let weights: Vec<half::f16> = weights.map(half::f16::from_f32).collect();
            StoredTensor::from_f16("weights", columns, WIDTH, &weights).into()
        } else {
            let weights: Vec<half::bf16> = weights.map(half::bf16::from_f32).collect();
            StoredTensor::from_bf16("weights", columns, WIDTH, &weights).into()
        };
        let counts: &[usize] = if std::env::args().any(|arg| arg == "slices") {
            &[1, 8]
        } else {
            &[1]
        };
        let load = |slices: usize| -> Vec<CpuMatrix> {
            let slices = InnerSlices::halved(WIDTH, WIDTH / slices, slices);
            let pack = CpuWeightLoader::new(&options);
            let copies = (0..COPIES)
                .map(|_| pack.sliced_matrix(std::slice::from_ref(&stored), None, &slices));
            copies.collect::<Result<_, _>>().expect("memory")
        };
        let matrices: Vec<Vec<CpuMatrix>> = counts.iter().map(|count| load(*count)).collect();
        let bytes = CpuWeightLoader::new(&options)
            .matrix_bytes(std::slice::from_ref(&stored), &InnerSlices::whole(WIDTH))
            as f64;
        let shapes = ROWS
            .iter()
            .flat_map(|rows| counts.iter().map(move |slices| (*rows, *slices)));
        let mut samples: Vec<ShapeSample> = shapes
            .map(|(rows, slices)| {
                let mut x = ops
                    .rows(rows, WIDTH, BufferRole::Activations)
                    .expect("memory");
                for (i, x) in x.values_mut().iter_mut().enumerate() {
                    *x = (i * 31 % 257) as f32 / 257.0 - 0.5;
                }
                let out = ops
                    .rows(rows, columns, BufferRole::Activations)
                    .expect("memory");
                ShapeSample {
                    rows,
                    slices,
                    x,
                    out,
                    best: f64::INFINITY,
                }
            })
            .collect();
        let read_from = ops
            .rows(1, 24 << 20, BufferRole::Activations)
            .expect("memory");
        let mut ceilings = MeasuredCeilings::new(threads, read_from);
        let mut turn = 0;
        for _ in 0..rounds {
            for sample in &mut samples {
                ceilings.sample();
                for _ in 0..(if sample.rows >= 64 { 1 } else { 4 }) {
                    turn += 1;
                    let from = now(threads);
                    let done = ops.matmul(
                        &matrices[usize::from(sample.slices > 1)][turn % COPIES],
                        sample.rows,
                        &sample.x,
                        &mut sample.out,
                    );
                    sample.best = sample.best.min(now(threads) - from);
                    done.expect("a product");
                }
            }
        }
        let MeasuredCeilings {
            read, bf16, int8, ..
        } = ceilings;
        println!(
            "{WIDTH} × {columns}, {threads} threads; read {:.1} GB/s, bf16 {:.0} GFLOP/s, int8 {:.0} GOP/s",
            read / 1e9,
            bf16 / 1e9,
            int8 / 1e9
        );
        for ShapeSample {
            rows, slices, best, ..
        } in samples
        {
            let operations = (2 * rows * WIDTH * columns) as f64;
            let dot = match quantize {
                None => operations / bf16 / best,
                Some(_) => operations / int8 / best,
            };
            let read = bytes / read / best;
            println!(
                "{name} {rows:4} rows, {slices} slices: {:8.3} ms, {:6.1} GB/s, {:7.1} G/s, {dot:.3} of dot, {read:.3} of read",
                best * 1e3,
                bytes / best / 1e9,
                operations / best / 1e9,
            );
        }
    }

    /// Time in seconds; CPU time of this thread if it is the only one.
    fn now(threads: usize) -> f64 {
        let clock = match threads {
            1 => libc::CLOCK_THREAD_CPUTIME_ID,
            _ => libc::CLOCK_MONOTONIC,
        };
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the clock exists, and the time is written before it is read.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    }

    /// The processor's limits, the best of all samples so far.
    struct MeasuredCeilings {
        threads: Threads,
        memory: CpuRows,
        /// Bytes read from memory per second.
        read: f64,
        /// Multiplications and additions per second.
        bf16: f64,
        int8: f64,
    }

    impl MeasuredCeilings {
        fn new(threads: usize, mut memory: CpuRows) -> Self {
            memory.values_mut().fill(1.0);
            Self {
                threads: Threads::new(threads, &[]).expect("threads"),
                memory,
                read: 0.0,
                bf16: 0.0,
                int8: 0.0,
            }
        }

        fn sample(&mut self) {
            let memory = self.memory.values();
            let each = memory.len() / 32;
            let tasks = self.threads.count();
            let from = now(tasks);
            self.threads.run(32, &|turn| {
                black_box(dot::sum(&memory[turn.task * each..(turn.task + 1) * each]));
            });
            let bytes = size_of_val(memory) as f64;
            self.read = self.read.max(bytes / (now(tasks) - from));
            for (best, body, operations) in [
                (
                    &mut self.bf16,
                    dot::bf16 as fn() -> i32,
                    dot::BF16_OPERATIONS,
                ),
                (&mut self.int8, dot::int8, dot::INT8_OPERATIONS),
            ] {
                let from = now(tasks);
                self.threads.run(tasks, &|_| {
                    black_box(body());
                });
                let all = (operations * tasks) as f64;
                *best = best.max(all / (now(tasks) - from));
            }
        }
    }

    /// Loops of dot product instructions on registers, and of reads.
    mod dot {
        use std::arch::x86_64::{
            __m512bh, __m512i, _mm512_add_epi32, _mm512_castps_si512, _mm512_dpbf16_ps,
            _mm512_dpbusd_epi32, _mm512_loadu_si512, _mm512_reduce_add_epi32, _mm512_set1_epi32,
            _mm512_setzero_ps, _mm512_setzero_si512,
        };

        const ROUNDS: usize = 20_000;
        const CHAINS: usize = 14;
        pub(super) const BF16_OPERATIONS: usize = ROUNDS * CHAINS * 64;
        pub(super) const INT8_OPERATIONS: usize = ROUNDS * CHAINS * 128;

        pub(super) fn bf16() -> i32 {
            // SAFETY: the bench is for processors with these.
            unsafe { spin_bf16() }
        }

        pub(super) fn int8() -> i32 {
            // SAFETY: as above.
            unsafe { spin_int8() }
        }

        pub(super) fn sum(words: &[f32]) -> i32 {
            // SAFETY: as above.
            unsafe { spin_sum(words) }
        }

        #[target_feature(enable = "avx512f,avx512bf16")]
        unsafe fn spin_bf16() -> i32 {
            let ones = _mm512_set1_epi32(0x3f80_3f80);
            // SAFETY: both are 512 bits.
            let ones = unsafe { std::mem::transmute::<__m512i, __m512bh>(ones) };
            let mut chains = [_mm512_setzero_ps(); CHAINS];
            for _ in 0..ROUNDS {
                for chain in &mut chains {
                    *chain = _mm512_dpbf16_ps(*chain, ones, ones);
                }
            }
            let mut sum = _mm512_setzero_si512();
            for chain in chains {
                sum = _mm512_add_epi32(sum, _mm512_castps_si512(chain));
            }
            _mm512_reduce_add_epi32(sum)
        }

        #[target_feature(enable = "avx512f,avx512vnni")]
        unsafe fn spin_int8() -> i32 {
            let ones = _mm512_set1_epi32(0x0101_0101);
            let mut chains = [_mm512_setzero_si512(); CHAINS];
            for _ in 0..ROUNDS {
                for chain in &mut chains {
                    *chain = _mm512_dpbusd_epi32(*chain, ones, ones);
                }
            }
            let mut sum = _mm512_setzero_si512();
            for chain in chains {
                sum = _mm512_add_epi32(sum, chain);
            }
            _mm512_reduce_add_epi32(sum)
        }

        #[target_feature(enable = "avx512f")]
        unsafe fn spin_sum(words: &[f32]) -> i32 {
            let mut sums = [_mm512_setzero_si512(); 4];
            for line in words.chunks_exact(64) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: sixteen words are there.
                    let words = unsafe { _mm512_loadu_si512(line[16 * i..].as_ptr().cast()) };
                    *sum = _mm512_add_epi32(*sum, words);
                }
            }
            let mut all = _mm512_setzero_si512();
            for sum in sums {
                all = _mm512_add_epi32(all, sum);
            }
            _mm512_reduce_add_epi32(all)
        }
    }
}
