//! The tables of processors without an instruction set of their own here.

use super::{bytes_kernels, kernels};
use crate::isa::Isa;
use crate::kernel::{CpuKernels, IntegerKernels};

kernels!(plain, crate::simd::plain::PlainSimd);
bytes_kernels!(bytes_plain, crate::simd::plain::PlainSimd);

static PLAIN: CpuKernels = plain::KERNELS;

/// The kernels of an instruction set; `None` for those of other processors.
pub(in crate::kernel) fn table(isa: Isa) -> Option<&'static CpuKernels> {
    (isa == Isa::Plain).then_some(&PLAIN)
}

/// The products with quantised weights of an instruction set.
pub(in crate::kernel) fn bytes_table(isa: Isa) -> Option<&'static IntegerKernels> {
    (isa == Isa::Plain).then_some(&bytes_plain::KERNELS)
}
