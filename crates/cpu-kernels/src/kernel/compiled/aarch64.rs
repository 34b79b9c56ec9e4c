//! The tables of 64-bit Arm.

use super::{bytes_kernels, format_kernels, kernels};
use crate::isa::Isa;
use crate::kernel::{CpuKernels, IntegerKernels};

kernels!(neon, crate::simd::neon::Neon<false, false, false>, "neon");
format_kernels!(
    neon_bf16,
    crate::simd::neon::Neon<false, false, true>,
    Bf16Format,
    u16,
    "neon,bf16"
);
kernels!(plain, crate::simd::plain::PlainSimd);

bytes_kernels!(
    bytes_neon_i8mm,
    crate::simd::neon::Neon<true, true, false>,
    "neon,dotprod,i8mm"
);
bytes_kernels!(
    bytes_neon_dot,
    crate::simd::neon::Neon<true, false, false>,
    "neon,dotprod"
);
bytes_kernels!(
    bytes_neon,
    crate::simd::neon::Neon<false, false, false>,
    "neon"
);
bytes_kernels!(bytes_plain, crate::simd::plain::PlainSimd);

static NEON: CpuKernels = neon::KERNELS;
static NEON_BF16: CpuKernels = CpuKernels {
    of_bf16: neon_bf16::KERNELS,
    ..neon::KERNELS
};
static PLAIN: CpuKernels = plain::KERNELS;

/// The kernels of an instruction set; `None` for those of other processors.
pub(in crate::kernel) fn table(isa: Isa) -> Option<&'static CpuKernels> {
    Some(match isa {
        Isa::NeonI8mm | Isa::NeonBf16 => &NEON_BF16,
        Isa::NeonDot | Isa::Neon => &NEON,
        Isa::Plain => &PLAIN,
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2Vnni | Isa::Avx2 => return None,
    })
}

/// The products with quantised weights of an instruction set.
pub(in crate::kernel) fn bytes_table(isa: Isa) -> Option<&'static IntegerKernels> {
    Some(match isa {
        Isa::NeonI8mm => &bytes_neon_i8mm::KERNELS,
        Isa::NeonBf16 | Isa::NeonDot => &bytes_neon_dot::KERNELS,
        Isa::Neon => &bytes_neon::KERNELS,
        Isa::Plain => &bytes_plain::KERNELS,
        Isa::Avx512Bf16 | Isa::Avx512Vnni | Isa::Avx512 | Isa::Avx2Vnni | Isa::Avx2 => return None,
    })
}
