//! The arithmetic, written once over [`Simd`](crate::simd::Simd) and compiled for each instruction
//! set.
//!
//! Owns: [`Kernels`], the table through which everything else calls it.
//! Never: knows threads or buffers.
//! Invariant: a table for an instruction set is handed out only where the processor has it.

pub(crate) mod attention;
mod codes;
mod keys;
pub(crate) mod product;
pub(crate) mod rounding;
mod rows;
pub(crate) mod tile;

use crate::isa::Isa;
use crate::memory::Plain;
use crate::simd::{Simd, Turned};
use attention::{Attend, Queries, Scratch, Share};
use cleave_engine::e4m3;
use product::bytes::Byte;
use product::groups::Octet;
use product::halves::Half;
use product::left::Left;
use product::nibbles::{Nibble, Spread};
use product::{Form, Piece, Product};
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
    /// See [`rows::expect`].
    pub expect: unsafe fn(&[u8]),
    /// See [`Simd::turn`].
    pub turn: unsafe fn(&[u32], [usize; 3], Turned<'_>),
    /// See [`rows::rotate`].
    pub rotate: unsafe fn(&mut [f32], &[f32], &[f32]),
    /// Products with weights of f16.
    pub half: ProductKernels,
    /// In 32-bit floats.
    pub single: FormatKernels<f32>,
    /// In bfloat16.
    pub brain: FormatKernels<u16>,
}

/// Products with weights of one form.
#[derive(Clone, Copy)]
pub(crate) struct ProductKernels {
    /// Words of the left side per step and row.
    pub phases: usize,
    /// See [`product::left`].
    pub pack: unsafe fn(&Left<'_>, Range<usize>),
    /// See [`product::multiply`].
    pub multiply: unsafe fn(&Product<'_>, &Piece, &mut [f32]),
}

/// Products with quantised weights. These sets are more than those of [`Kernels`].
pub(crate) struct BytesKernels {
    /// Eight bits, a scale for each column.
    pub int8: ProductKernels,
    /// Eight bits in groups.
    pub int8_groups: ProductKernels,
    /// Four bits in groups.
    pub int4: ProductKernels,
    /// See [`rounding::round_bytes`].
    pub round_int8: unsafe fn(&[f32], &mut [u8]) -> f32,
    /// See [`rounding::round_nibbles`].
    pub round_int4: unsafe fn(&[f32], &mut [u8]) -> f32,
}

/// What depends on the number format. `T` is how the pool stores an element.
pub(crate) struct FormatKernels<T> {
    /// See there.
    pub product: ProductKernels,
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
            product::left::pack::<$simd, $format>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply(product: &Product<'_>, piece: &Piece, scratch: &mut [f32]) {
            // SAFETY: as in `pack`.
            product::multiply::<$simd, $format>(unsafe { $token }, product, piece, scratch);
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
            product: ProductKernels {
                phases: <$format as tile::Format<$simd>>::PHASES,
                pack,
                multiply,
            },
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
        unsafe fn expect(bytes: &[u8]) {
            // SAFETY: as in `norm`.
            rows::expect(unsafe { $token }, bytes);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn turn(from: &[u32], rows: [usize; 3], to: Turned<'_>) {
            // SAFETY: as in `norm`.
            Simd::turn(unsafe { $token }, from, rows, to);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
            // SAFETY: as in `norm`.
            rows::rotate(unsafe { $token }, head, cos, sin);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_half(left: &Left<'_>, tiles: Range<usize>) {
            // SAFETY: as in `norm`.
            product::halves::pack::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_half(product: &Product<'_>, piece: &Piece, scratch: &mut [f32]) {
            // SAFETY: as in `norm`.
            product::multiply::<$simd, Half>(unsafe { $token }, product, piece, scratch);
        }
        static KERNELS: Kernels = Kernels {
            rows_max: <$simd as Simd>::ROWS,
            interleave,
            norm,
            add,
            expect,
            turn,
            rotate,
            half: ProductKernels {
                phases: <Half as Form<$simd>>::PHASES,
                pack: pack_half,
                multiply: multiply_half,
            },
            single: format_kernels!($token, $simd, Single, f32 $(, $features)?),
            brain: format_kernels!($token, $simd, Brain, u16 $(, $features)?),
        };
        &KERNELS
    }};
}

/// Products with quantised weights, compiled for one instruction set.
macro_rules! bytes_kernels {
    ($token:expr, $simd:ty $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_int8(left: &Left<'_>, tiles: Range<usize>) {
            // SAFETY: this function is called only where the processor has its instructions.
            product::left::pack_bytes::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_int8(product: &Product<'_>, piece: &Piece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            product::multiply::<$simd, Byte>(unsafe { $token }, product, piece, scratch);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_int8_groups(left: &Left<'_>, tiles: Range<usize>) {
            // SAFETY: as in `pack_int8`.
            product::left::pack_octets::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_int8_groups(product: &Product<'_>, piece: &Piece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            product::multiply::<$simd, Octet>(unsafe { $token }, product, piece, scratch);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn pack_int4(left: &Left<'_>, tiles: Range<usize>) {
            // SAFETY: as in `pack_int8`.
            product::left::pack_codes::<$simd>(unsafe { $token }, left, tiles);
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_int4(product: &Product<'_>, piece: &Piece, scratch: &mut [f32]) {
            // SAFETY: as in `pack_int8`.
            let token = unsafe { $token };
            match piece.tiles.len() {
                0 | 1 => product::multiply::<$simd, Nibble>(token, product, piece, scratch),
                _ => product::multiply::<$simd, Spread>(token, product, piece, scratch),
            }
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn round_int8(x: &[f32], codes: &mut [u8]) -> f32 {
            rounding::round_bytes(x, codes)
        }
        $(#[target_feature(enable = $features)])?
        unsafe fn round_int4(x: &[f32], codes: &mut [u8]) -> f32 {
            rounding::round_nibbles(x, codes)
        }
        static KERNELS: BytesKernels = BytesKernels {
            int8: ProductKernels {
                phases: <Byte as Form<$simd>>::PHASES,
                pack: pack_int8,
                multiply: multiply_int8,
            },
            int8_groups: ProductKernels {
                phases: <Octet as Form<$simd>>::PHASES,
                pack: pack_int8_groups,
                multiply: multiply_int8_groups,
            },
            int4: ProductKernels {
                phases: <Nibble as Form<$simd>>::PHASES,
                pack: pack_int4,
                multiply: multiply_int4,
            },
            round_int8,
            round_int4,
        };
        &KERNELS
    }};
}

impl BytesKernels {
    /// The kernels of an instruction set; `None` if this processor does not have it.
    pub(crate) fn of(isa: Isa) -> Option<&'static Self> {
        isa.available().then(|| bytes_table(isa))?
    }

    /// The kernels of the best instruction set there is.
    pub(crate) fn best() -> &'static Self {
        Self::of(Isa::detect()).expect("what is detected is available")
    }
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
            "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
        ),
        Isa::Avx512Vnni | Isa::Avx512 => kernels!(
            Avx512::<false>::new(),
            Avx512<false>,
            "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
        ),
        Isa::Avx2Vnni | Isa::Avx2 => kernels!(Avx2::<false>::new(), Avx2<false>, "avx2,fma,f16c"),
        Isa::NeonBf16 | Isa::NeonDot | Isa::Neon => return None,
        Isa::Plain => kernels!(Plain::new(), Plain),
    })
}

#[cfg(target_arch = "x86_64")]
fn bytes_table(isa: Isa) -> Option<&'static BytesKernels> {
    use crate::simd::{avx2::Avx2, avx512::Avx512, plain::Plain};
    Some(match isa {
        Isa::Avx512Bf16 | Isa::Avx512Vnni => bytes_kernels!(
            Avx512::<true>::new(),
            Avx512<true>,
            "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
        ),
        Isa::Avx512 => bytes_kernels!(
            Avx512::<false>::new(),
            Avx512<false>,
            "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
        ),
        Isa::Avx2Vnni => bytes_kernels!(Avx2::<true>::new(), Avx2<true>, "avx2,fma,f16c,avxvnni"),
        Isa::Avx2 => bytes_kernels!(Avx2::<false>::new(), Avx2<false>, "avx2,fma,f16c"),
        Isa::NeonBf16 | Isa::NeonDot | Isa::Neon => return None,
        Isa::Plain => bytes_kernels!(Plain::new(), Plain),
    })
}

#[cfg(target_arch = "aarch64")]
fn bytes_table(isa: Isa) -> Option<&'static BytesKernels> {
    use crate::simd::{neon::Neon, plain::Plain};
    Some(match isa {
        Isa::NeonBf16 | Isa::NeonDot => bytes_kernels!(
            Neon::<true, false>::new(),
            Neon<true, false>,
            "neon,dotprod"
        ),
        Isa::Neon => bytes_kernels!(Neon::<false, false>::new(), Neon<false, false>, "neon"),
        Isa::Plain => bytes_kernels!(Plain::new(), Plain),
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2Vnni | Isa::Avx2 => return None,
    })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn bytes_table(isa: Isa) -> Option<&'static BytesKernels> {
    use crate::simd::plain::Plain;
    (isa == Isa::Plain).then(|| -> &'static BytesKernels { bytes_kernels!(Plain::new(), Plain) })
}

#[cfg(target_arch = "aarch64")]
fn table(isa: Isa) -> Option<&'static Kernels> {
    use crate::simd::{neon::Neon, plain::Plain};
    Some(match isa {
        Isa::NeonBf16 => {
            kernels!(Neon::<false, true>::new(), Neon<false, true>, "neon,bf16")
        }
        Isa::NeonDot | Isa::Neon => {
            kernels!(Neon::<false, false>::new(), Neon<false, false>, "neon")
        }
        Isa::Plain => kernels!(Plain::new(), Plain),
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2Vnni | Isa::Avx2 => return None,
    })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn table(isa: Isa) -> Option<&'static Kernels> {
    use crate::simd::plain::Plain;
    (isa == Isa::Plain).then(|| -> &'static Kernels { kernels!(Plain::new(), Plain) })
}
