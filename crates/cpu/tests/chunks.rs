//! Slices of chunks of memory: here, since the kernels' own tests count this process's pages.

use cleave_cpu_kernels::memory::{PageChunks, PageMemory};

/// Alignment that memory has on every system.
const PAGE_BYTES: usize = 4096;

#[test]
fn slices_of_a_chunk_lie_together_and_do_not_overlap() {
    let mut chunks = PageChunks::default();
    let mut slices: Vec<PageMemory<u32>> = [5000, 1, 70_000]
        .map(|len| chunks.zeroed(len).unwrap())
        .into();
    for (slice, value) in slices.iter_mut().zip(1..) {
        assert!(slice.iter().all(|word| *word == 0), "slice {value}");
        slice.fill(value);
    }
    for (slice, value) in slices.iter().zip(1..) {
        assert!(slice.iter().all(|word| *word == value), "slice {value}");
        assert!(slice.as_ptr().addr().is_multiple_of(PAGE_BYTES));
    }
    let first = slices[0].as_ptr().addr();
    let last = slices[2].as_ptr().addr();
    assert!(last > first && last - first < 1 << 20, "{first} {last}");
}

#[test]
fn a_full_chunk_is_followed_by_another() {
    const LEN: usize = 2 << 20;
    let mut chunks = PageChunks::default();
    let mut slices: Vec<PageMemory<u32>> = (0..9).map(|_| chunks.zeroed(LEN).unwrap()).collect();
    for (slice, value) in slices.iter_mut().zip(1..) {
        (slice[0], slice[LEN - 1]) = (value, value);
    }
    // Slices keep their chunk.
    drop(chunks);
    for (slice, value) in slices.iter().zip(1..) {
        assert_eq!((slice[0], slice[LEN - 1]), (value, value));
    }
}

#[test]
fn slices_larger_than_a_chunk_are_allocated() {
    let mut chunks = PageChunks::default();
    for len in [0, 1, 100 << 20] {
        let mut slice: PageMemory<u8> = chunks.zeroed(len).unwrap();
        assert_eq!(slice.len(), len);
        slice.iter_mut().step_by(1 << 20).for_each(|byte| *byte = 1);
    }
}
