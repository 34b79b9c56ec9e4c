//! The parts of the kernels that need no model: numbers of f16, the names of instruction sets, and
//! the blocks of slices.
//! Products and attention are tested through `Ops`, in `cleave-cpu`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use cleave_cpu_kernels::isa::Isa;
use cleave_cpu_kernels::kernel::product::slices::{SliceBlock, SliceBlocks};
use cleave_cpu_kernels::simd::plain::f16;
use half::f16 as Expected;
use std::ops::Range;

#[test]
fn every_f16_widens_as_in_the_half_crate() {
    for bits in 0..=u16::MAX {
        let (found, expected) = (f16(bits), Expected::from_bits(bits).to_f32());
        assert!(
            found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
            "{bits:#x}: {found} is not {expected}"
        );
    }
}

#[test]
fn isa_names_parse_back_and_unknown_ones_are_refused() {
    for isa in Isa::ALL {
        assert_eq!(isa.name().parse(), Ok(isa));
    }
    assert!("sse9".parse::<Isa>().unwrap_err().contains("avx2"));
}

#[test]
fn the_detected_isa_is_available() {
    assert!(Isa::detect().available());
    assert!(Isa::Plain.available());
}

/// Resident bytes of this process.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let resident = pages.split(' ').nth(1).unwrap();
    resident.parse::<usize>().unwrap() * 4096
}

/// Threads other than the first one allocate from arenas of their own, of which glibc returns the
/// first use, but not the second.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn memory_that_other_threads_freed_is_returned() {
    use cleave_cpu_kernels::memory::{limit_allocator_slack, trim_allocator};
    use std::hint::black_box;
    use std::sync::mpsc::channel;
    const BLOCK_BYTES: usize = 4_000;
    const BLOCKS_COUNT: usize = 12_000;
    limit_allocator_slack();
    let before = resident_bytes();
    for _ in 0..3 {
        let (freed_sender, freed) = channel();
        let (end, ended) = channel::<()>();
        let other = std::thread::spawn(move || {
            // A large block that is freed raises the allocator's own limits.
            drop(black_box(vec![1u8; 30 << 20]));
            let blocks = (0..BLOCKS_COUNT).map(|_| black_box(vec![1u8; BLOCK_BYTES]));
            let blocks: Vec<_> = blocks.collect();
            assert!(resident_bytes() > before + BLOCKS_COUNT * BLOCK_BYTES / 2);
            drop(black_box(blocks));
            freed_sender.send(()).unwrap();
            let _ = ended.recv();
        });
        freed.recv().unwrap();
        trim_allocator();
        let left = resident_bytes().saturating_sub(before);
        drop(end);
        other.join().unwrap();
        assert!(left < 8 << 20, "{left} bytes are left");
    }
}

#[test]
fn blocks_begin_anew_at_every_slice() {
    let blocks: Vec<SliceBlock> = SliceBlocks::new(&[100, 400, 528]).collect();
    let steps: Vec<(usize, Range<usize>)> = blocks
        .iter()
        .map(|block| (block.slice, block.steps.clone()))
        .collect();
    let expected = [
        (0, 0..100),
        (1, 100..228),
        (1, 228..356),
        (1, 356..400),
        (2, 400..528),
    ];
    assert_eq!(steps, expected);
    for block in &blocks {
        let SliceBlock {
            steps, slice_steps, ..
        } = block;
        assert_eq!(block.begins_slice, steps.start == slice_steps.start);
        assert_eq!(block.ends_slice, steps.end == slice_steps.end);
    }
}
