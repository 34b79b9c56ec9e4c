//! The arithmetic, written once over [`Simd`](crate::simd::Simd) and compiled for each instruction
//! set.
//!
//! Owns: [`Kernels`], the table through which everything else calls it.
//! Never: knows threads or buffers.
//! Invariant: a table for an instruction set is handed out only where the processor has it.

pub(crate) mod attention;
mod keys;
pub(crate) mod product;
mod rows;
pub(crate) mod tile;

use crate::isa::Isa;
use crate::memory::Plain;
use crate::simd::Simd;
use attention::{Attend, Queries, Scratch, Share};
use cleave_engine::e4m3;
use product::{Left, Piece, Product};
use std::ops::Range;
use tile::{Brain, Single};

/// What an instruction set offers. The functions are `unsafe` only because the processor must have
/// the instructions, which [`Kernels::of`] checked.
pub(crate) struct Kernels {
    /// Register tiles are at most this high.
    pub rows_max: usize,
    /// See [`product::interleave`].
    pub interleave: unsafe fn(&[u32], usize, &mut [u32]),
    /// See [`rows::norm`].
    pub norm: unsafe fn(&mut [f32], &[f32], f32),
    /// See [`rows::add`].
    pub add: unsafe fn(&mut [f32], &[f32]),
    /// See [`rows::rotate`].
    pub rotate: unsafe fn(&mut [f32], &[f32], &[f32]),
    /// See [`rows::silu_gate`].
    pub silu_gate: unsafe fn(&[f32], &[f32], &mut [f32]),
    /// In 32-bit floats.
    pub single: FormatKernels<f32>,
    /// In bfloat16.
    pub brain: FormatKernels<u16>,
}

/// What depends on the number format. `T` is how the pool stores an element.
pub(crate) struct FormatKernels<T> {
    /// Words of the left side per step and row.
    pub phases: usize,
    /// See [`product::pack`].
    pub pack: unsafe fn(&Left<'_>, Range<usize>),
    /// See [`product::multiply`].
    pub multiply: unsafe fn(&Product<'_>, &Piece),
    /// See [`rows::store`].
    pub store: unsafe fn(&[f32], &mut [T]),
    /// See [`attention::attend`].
    pub attend: unsafe fn(&Attend<'_, T>, (Queries<'_>, &Share), &mut Scratch),
    /// See [`attention::combine`].
    pub combine: unsafe fn(&Attend<'_, T>, (Queries<'_>, usize), &mut Scratch),
}

/// What attention reads of a pool, and the kernels that go with it.
pub(crate) trait Stored: Plain {
    /// The kernels of this format.
    fn of(kernels: &Kernels) -> &FormatKernels<Self>;
    /// An e4m3, exactly.
    fn of_e4m3(bits: u8) -> Self;
}

/// An element of a pool, whatever attends over it.
pub(crate) trait Kept: Plain {
    /// What rounds a head and stores it.
    fn store(kernels: &Kernels) -> unsafe fn(&[f32], &mut [Self]);
}

impl<T: Stored> Kept for T {
    fn store(kernels: &Kernels) -> unsafe fn(&[f32], &mut [T]) {
        T::of(kernels).store
    }
}

/// e4m3.
impl Kept for u8 {
    fn store(_: &Kernels) -> unsafe fn(&[f32], &mut [u8]) {
        |x, to| {
            for (to, x) in to.iter_mut().zip(x) {
                *to = e4m3::from_f32(*x);
            }
        }
    }
}

impl Stored for f32 {
    fn of_e4m3(bits: u8) -> Self {
        e4m3::to_f32(bits)
    }

    fn of(kernels: &Kernels) -> &FormatKernels<f32> {
        &kernels.single
    }
}

impl Stored for u16 {
    fn of_e4m3(bits: u8) -> Self {
        // bf16 has every bit of it.
        (e4m3::to_f32(bits).to_bits() >> 16) as u16
    }

    fn of(kernels: &Kernels) -> &FormatKernels<u16> {
        &kernels.brain
    }
}

/// The kernels of one format, compiled for one instruction set.
macro_rules! format_kernels {
    ($token:expr, $simd:ty, $format:ty, $stored:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn pack(left: &Left<'_>, tiles: Range<usize>) {
            // SAFETY: this function is called only where the processor has its instructions.
            product::pack::<$simd, $format>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply(product: &Product<'_>, piece: &Piece) {
            // SAFETY: as in `pack`.
            product::multiply::<$simd, $format>(unsafe { $token }, product, piece);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn store(x: &[f32], to: &mut [$stored]) {
            // SAFETY: as in `pack`.
            rows::store::<$simd, $format>(unsafe { $token }, x, to);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn attend(
            attend: &Attend<'_, $stored>,
            work: (Queries<'_>, &Share),
            scratch: &mut Scratch,
        ) {
            // SAFETY: as in `pack`.
            attention::attend::<$simd, $format>(unsafe { $token }, attend, work, scratch);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn combine(
            attend: &Attend<'_, $stored>,
            work: (Queries<'_>, usize),
            scratch: &mut Scratch,
        ) {
            // SAFETY: as in `pack`.
            attention::combine::<$simd, $stored>(unsafe { $token }, attend, work, scratch);
        }
        FormatKernels {
            phases: <$format as tile::Format<$simd>>::PHASES,
            pack,
            multiply,
            store,
            attend,
            combine,
        }
    }};
}

/// All kernels, compiled for one instruction set.
macro_rules! kernels {
    ($token:expr, $simd:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn interleave(columns: &[u32], stride: usize, panel: &mut [u32]) {
            // SAFETY: as in `norm`.
            product::interleave(unsafe { $token }, columns, stride, panel);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn norm(x: &mut [f32], weight: &[f32], epsilon: f32) {
            // SAFETY: this function is called only where the processor has its instructions.
            rows::norm(unsafe { $token }, x, weight, epsilon);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn add(x: &mut [f32], delta: &[f32]) {
            // SAFETY: as in `norm`.
            rows::add(unsafe { $token }, x, delta);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
            // SAFETY: as in `norm`.
            rows::rotate(unsafe { $token }, head, cos, sin);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn silu_gate(gate: &[f32], up: &[f32], out: &mut [f32]) {
            // SAFETY: as in `norm`.
            rows::silu_gate(unsafe { $token }, gate, up, out);
        }
        static KERNELS: Kernels = Kernels {
            rows_max: <$simd as Simd>::ROWS,
            interleave,
            norm,
            add,
            rotate,
            silu_gate,
            single: format_kernels!($token, $simd, Single, f32 $(, $features)?),
            brain: format_kernels!($token, $simd, Brain, u16 $(, $features)?),
        };
        &KERNELS
    }};
}

impl Kernels {
    /// The kernels of an instruction set; `None` if this processor does not have it.
    pub(crate) fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| table(isa))?
    }

    /// The kernels of the best instruction set there is.
    pub(crate) fn best() -> &'static Self {
        Self::of(Isa::detect()).expect("what is detected is available")
    }
}

#[cfg(target_arch = "x86_64")]
fn table(isa: Isa) -> Option<&'static Kernels> {
    use crate::simd::{avx2::Avx2, avx512::Avx512, avx512::Avx512Bf16, plain::Plain};
    Some(match isa {
        Isa::Avx512Bf16 => kernels!(
            Avx512Bf16::new(),
            Avx512Bf16,
            "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"
        ),
        Isa::Avx512 => kernels!(
            Avx512::new(),
            Avx512,
            "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
        ),
        Isa::Avx2 => kernels!(Avx2::new(), Avx2, "avx2,fma"),
        Isa::Neon => return None,
        Isa::Plain => kernels!(Plain::new(), Plain),
    })
}

#[cfg(target_arch = "aarch64")]
fn table(isa: Isa) -> Option<&'static Kernels> {
    use crate::simd::{neon::Neon, plain::Plain};
    Some(match isa {
        Isa::Neon => kernels!(Neon::new(), Neon, "neon"),
        Isa::Plain => kernels!(Plain::new(), Plain),
        Isa::Avx512Bf16 | Isa::Avx512 | Isa::Avx2 => return None,
    })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn table(isa: Isa) -> Option<&'static Kernels> {
    use crate::simd::plain::Plain;
    (isa == Isa::Plain).then(|| -> &'static Kernels { kernels!(Plain::new(), Plain) })
}
