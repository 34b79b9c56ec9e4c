//! The tables of 64-bit x86.

use super::{bytes_kernels, format_kernels, kernels};
use crate::isa::Isa;
use crate::kernel::{CpuKernels, IntegerKernels};

kernels!(
    avx512,
    crate::simd::avx512::Avx512<false>,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
format_kernels!(
    avx512_bf16,
    crate::simd::avx512::Avx512Bf16,
    Bf16Format,
    u16,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"
);
kernels!(avx2, crate::simd::avx2::Avx2<false>, "avx2,fma,f16c");
kernels!(plain, crate::simd::plain::PlainSimd);

bytes_kernels!(
    bytes_avx512_vnni,
    crate::simd::avx512::Avx512<true>,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
);
bytes_kernels!(
    bytes_avx512,
    crate::simd::avx512::Avx512<false>,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
);
bytes_kernels!(
    bytes_avx2_vnni,
    crate::simd::avx2::Avx2<true>,
    "avx2,fma,f16c,avxvnni"
);
bytes_kernels!(bytes_avx2, crate::simd::avx2::Avx2<false>, "avx2,fma,f16c");
bytes_kernels!(bytes_plain, crate::simd::plain::PlainSimd);

static AVX512: CpuKernels = avx512::KERNELS;
static AVX512_BF16: CpuKernels = CpuKernels {
    of_bf16: avx512_bf16::KERNELS,
    ..avx512::KERNELS
};
static AVX2: CpuKernels = avx2::KERNELS;
static PLAIN: CpuKernels = plain::KERNELS;

/// The kernels of an instruction set; `None` for those of other processors.
pub(in crate::kernel) fn table(isa: Isa) -> Option<&'static CpuKernels> {
    Some(match isa {
        Isa::Avx512Bf16 => &AVX512_BF16,
        Isa::Avx512Vnni | Isa::Avx512 => &AVX512,
        Isa::Avx2Vnni | Isa::Avx2 => &AVX2,
        Isa::NeonI8mm | Isa::NeonBf16 | Isa::NeonDot | Isa::Neon => return None,
        Isa::Plain => &PLAIN,
    })
}

/// The products with quantised weights of an instruction set.
pub(in crate::kernel) fn bytes_table(isa: Isa) -> Option<&'static IntegerKernels> {
    Some(match isa {
        Isa::Avx512Bf16 | Isa::Avx512Vnni => &bytes_avx512_vnni::KERNELS,
        Isa::Avx512 => &bytes_avx512::KERNELS,
        Isa::Avx2Vnni => &bytes_avx2_vnni::KERNELS,
        Isa::Avx2 => &bytes_avx2::KERNELS,
        Isa::NeonI8mm | Isa::NeonBf16 | Isa::NeonDot | Isa::Neon => return None,
        Isa::Plain => &bytes_plain::KERNELS,
    })
}
