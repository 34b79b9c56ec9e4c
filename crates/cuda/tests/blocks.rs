//! Tests of KV blocks that are copied beside the engine: their contents afterwards, and their order
//! after steps.

use crate::harness;
use cleave_cuda::{CudaDevice, CudaOps, CudaOptions};
use cleave_domain::{BlockIndex, KvPlane, StateCapacity};
use cleave_engine::ops::{HeadShape, KvPoolShape, KvType, Ops, Precision};
use cleave_engine::{BlockSpan, DeviceBlocks};
use std::sync::Arc;

/// Returns a shape whose blocks have `2 × layers × 2 × 16 × 8` elements of f32.
fn shape(layers_count: usize, blocks_count: usize) -> KvPoolShape {
    KvPoolShape::uniform(
        HeadShape {
            query_heads: 2,
            kv_heads: 2,
            head_dim: 8,
        },
        layers_count,
        16,
        blocks_count,
        KvType::F32,
    )
}

/// A pool with both accesses to its blocks: the engine's, and the one beside it.
struct TestPool {
    ops: CudaOps,
    pool: <CudaOps as Ops>::Pool,
    shape: KvPoolShape,
    blocks: Arc<dyn DeviceBlocks>,
}

impl TestPool {
    fn new(shape: KvPoolShape) -> Option<Self> {
        Some(Self::on(&harness::device()?, shape))
    }

    fn on(device: &Arc<CudaDevice>, shape: KvPoolShape) -> Self {
        let ops = CudaOps::new(device, &CudaOptions::new(Precision::F32)).unwrap();
        let pool = ops.pool(shape.clone()).unwrap();
        let blocks = ops.blocks(&pool).unwrap();
        Self {
            ops,
            pool,
            shape,
            blocks,
        }
    }

    fn fill(&mut self, salt: u64) -> Vec<Vec<u8>> {
        let count = self.shape.blocks_count as u32;
        let contents: Vec<Vec<u8>> = (0..count)
            .map(|block| noise(salt + u64::from(block), self.shape.block_bytes()))
            .collect();
        for (block, bytes) in contents.iter().enumerate() {
            let whole = span(block as u32, 0, bytes.len());
            self.ops.write_block(&mut self.pool, whole, bytes).unwrap();
        }
        contents
    }

    fn content(&self, block: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.shape.block_bytes()];
        self.ops
            .read_block(&self.pool, span(block, 0, bytes.len()), &mut bytes)
            .unwrap();
        bytes
    }

    fn read(&self, spans: &[BlockSpan]) -> (Vec<Vec<u8>>, Vec<u64>) {
        let mut buffers: Vec<Vec<u8>> = spans.iter().map(|span| vec![0; span.len]).collect();
        let mut parts: Vec<(BlockSpan, &mut [u8])> = spans
            .iter()
            .zip(&mut buffers)
            .map(|(span, buffer)| (*span, buffer.as_mut_slice()))
            .collect();
        let sums = self.blocks.read(&mut parts).unwrap();
        (buffers, sums)
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn span(block: u32, offset: usize, len: usize) -> BlockSpan {
    BlockSpan::of_block(BlockIndex(block), offset, len)
}

/// Returns whole blocks, pieces that kernels take, and pieces that no kernel takes.
fn spans(block_bytes: usize) -> Vec<BlockSpan> {
    let mut spans: Vec<BlockSpan> = (0..9).map(|block| span(block, 0, block_bytes)).collect();
    spans.extend([span(3, 16, 256), span(4, 48, 1024), span(5, 0, 4096 + 16)]);
    spans.extend([
        span(1, 7, 241),
        span(2, 16, 240),
        span(6, 1, 3),
        span(7, 0, 1),
    ]);
    spans
}

// Invariant: I25.
#[test]
fn reads_return_the_pools_bytes_and_checksums() {
    for layers in [3, 70] {
        let Some(mut pool) = TestPool::new(shape(layers, 9)) else {
            return;
        };
        let contents = pool.fill(layers as u64);
        let spans = spans(pool.shape.block_bytes());
        let (buffers, sums) = pool.read(&spans);
        let again = pool.blocks.checksums(&spans).unwrap();
        for (
            i,
            BlockSpan {
                block, offset, len, ..
            },
        ) in spans.iter().enumerate()
        {
            let expected = &contents[block.0 as usize][*offset..offset + len];
            assert!(buffers[i] == expected, "{:?} of {layers} layers", spans[i]);
            let sum = xxhash_rust::xxh3::xxh3_64(expected);
            assert_eq!((sums[i], again[i]), (sum, sum), "{:?}", spans[i]);
        }
    }
}

#[test]
fn writes_change_exactly_the_named_spans() {
    for layers in [1, 70] {
        let Some(mut pool) = TestPool::new(shape(layers, 12)) else {
            return;
        };
        let mut contents = pool.fill(1);
        let block_bytes = pool.shape.block_bytes();
        // No span overlaps another.
        let mut spans: Vec<BlockSpan> = (0..6).map(|block| span(block, 0, block_bytes)).collect();
        spans.extend([
            span(7, 16, 256),
            span(8, 48, 1024),
            span(9, 7, 241),
            span(10, 1, 3),
        ]);
        let bytes: Vec<Vec<u8>> = (0..)
            .zip(&spans)
            .map(|(i, s)| noise(90 + i, s.len))
            .collect();
        let parts: Vec<(BlockSpan, &[u8])> = spans
            .iter()
            .copied()
            .zip(bytes.iter().map(Vec::as_slice))
            .collect();
        pool.blocks.write(&parts).unwrap();
        for (span, bytes) in parts {
            contents[span.block.0 as usize][span.offset..span.offset + span.len]
                .copy_from_slice(bytes);
        }
        for (block, expected) in contents.iter().enumerate() {
            assert!(pool.content(block as u32) == *expected, "block {block}");
        }
    }
}

/// The blocks exceed both halves of the staging memory together, and each block exceeds one half.
#[test]
fn blocks_longer_than_staging_memory_are_copied_whole() {
    // A block has 10 MiB.
    let Some(mut pool) = TestPool::new(shape(5121, 3)) else {
        return;
    };
    assert!(pool.shape.block_bytes() > 10 << 20);
    let contents = pool.fill(5);
    let bytes = pool.shape.block_bytes();
    let (buffers, sums) = pool.read(&[span(2, 0, bytes), span(0, 0, bytes)]);
    assert!(buffers[0] == contents[2] && buffers[1] == contents[0]);
    assert_eq!(sums[0], xxhash_rust::xxh3::xxh3_64(&contents[2]));
    pool.blocks
        .write(&[(span(1, 0, bytes), &buffers[0])])
        .unwrap();
    assert!(pool.content(1) == contents[2]);
}

#[test]
fn a_span_outside_the_pool_is_refused_without_a_copy() {
    let Some(mut pool) = TestPool::new(shape(1, 2)) else {
        return;
    };
    let contents = pool.fill(3);
    let bytes = pool.shape.block_bytes();
    for outside in [span(2, 0, 1), span(0, 1, bytes), span(1, usize::MAX, 2)] {
        let inside = noise(1, bytes);
        let bad = vec![0; outside.len.min(bytes)];
        if bad.len() == outside.len {
            let parts = [(span(0, 0, bytes), &inside[..]), (outside, &bad[..])];
            assert!(pool.blocks.write(&parts).is_err(), "{outside:?}");
        }
        assert!(pool.blocks.checksums(&[outside]).is_err(), "{outside:?}");
    }
    assert!(pool.content(0) == contents[0]);
}

#[test]
fn blocks_are_copied_between_pools_of_one_process() {
    let Some(mut near) = TestPool::new(shape(2, 4)) else {
        return;
    };
    let mut far = TestPool::new(shape(2, 7)).unwrap();
    let (sent, before) = (near.fill(1), far.fill(50));
    let bytes = near.shape.block_bytes();
    let peer = near.blocks.open(&far.blocks.handle().unwrap()).unwrap();
    assert!(peer.probe().unwrap() > 0);
    let parts = [
        (span(3, 0, bytes), BlockIndex(6)),
        (span(0, 64, 512), BlockIndex(2)),
    ];
    let sums = peer.write(&parts).unwrap();
    assert_eq!(
        far.blocks
            .checksums(&[span(6, 0, bytes), span(2, 64, 512)])
            .unwrap(),
        sums
    );
    assert!(far.content(6) == sent[3]);
    let mut second = before[2].clone();
    second[64..64 + 512].copy_from_slice(&sent[0][64..64 + 512]);
    assert!(far.content(2) == second);
    for untouched in [0, 1, 3, 4, 5] {
        assert!(far.content(untouched) == before[untouched as usize]);
    }
    assert!(peer.write(&[(span(0, 0, bytes), BlockIndex(7))]).is_err());
}

/// Without direct access their copies would go through the host.
#[test]
fn peer_access_is_enabled_between_gpus_of_a_process() {
    let name = "blocks::peer_access_is_enabled_between_gpus_of_a_process";
    if !harness::has_stand_in_settings(name, &[("CLEAVE_STANDIN_DEVICES", "2")]) {
        return;
    }
    let stand_in = harness::stand_in().unwrap();
    let mut near = TestPool::new(shape(2, 4)).unwrap();
    let mut far = TestPool::on(&CudaDevice::open(1).unwrap(), shape(2, 4));
    let sent = near.fill(1);
    far.fill(50);
    let bytes = near.shape.block_bytes();
    let handle = far.blocks.handle().unwrap();
    for opened in 1..=2 {
        let peer = near.blocks.open(&handle).unwrap();
        // The second opening enables both directions again, and the driver answers that they are
        // enabled already.
        assert_eq!(stand_in.calls_count("peer"), 2 * opened);
        peer.write(&[(span(3, 0, bytes), BlockIndex(1))]).unwrap();
    }
    assert!(far.content(1) == sent[3]);
}

/// The test starts a process that copies from its own pool into this process's pool.
#[test]
fn a_child_process_writes_into_its_parents_pool() {
    const HANDLE: &str = "CLEAVE_TEST_POOL_HANDLE";
    let name = "blocks::a_child_process_writes_into_its_parents_pool";
    if let Ok(handle) = std::env::var(HANDLE) {
        let hex = |at: usize| u8::from_str_radix(&handle[at..at + 2], 16).unwrap();
        let handle: Vec<u8> = (0..handle.len()).step_by(2).map(hex).collect();
        let mut own = TestPool::new(shape(2, 4)).unwrap();
        own.fill(7);
        let peer = own.blocks.open(&handle).unwrap();
        let whole = span(3, 0, own.shape.block_bytes());
        peer.write(&[(whole, BlockIndex(1))]).unwrap();
        return;
    }
    let Some(mut pool) = TestPool::new(shape(2, 4)) else {
        return;
    };
    let before = pool.fill(50);
    let handle = pool.blocks.handle().unwrap();
    let handle: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name]).env(HANDLE, handle);
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}");
    let expected = noise(7 + 3, pool.shape.block_bytes());
    assert!(pool.content(1) == expected, "the child's block");
    assert!(pool.content(0) == before[0]);
}

#[test]
fn an_invalid_or_mismatched_pool_handle_is_refused() {
    let Some(near) = TestPool::new(shape(2, 4)) else {
        return;
    };
    let other = TestPool::new(shape(3, 4)).unwrap();
    let handle = other.blocks.handle().unwrap();
    let refused = near.blocks.open(&handle).unwrap_err().to_string();
    assert!(refused.contains("bytes"), "{refused}");
    for bad in [&[][..], &handle[1..], &[7; 500]] {
        assert!(near.blocks.open(bad).is_err());
    }
    // A dropped pool cannot be opened by its handle.
    let gone = TestPool::new(shape(2, 4)).unwrap();
    let handle = gone.blocks.handle().unwrap();
    drop(gone);
    assert!(near.blocks.open(&handle).is_err());
}

/// A shape with state slots of `bytes` bytes.
fn shape_with_states(blocks_count: usize, bytes: u32, count: u32) -> KvPoolShape {
    let mut shape = shape(2, blocks_count);
    shape.states = Some(StateCapacity { bytes, count });
    shape
}

fn state_span(slot: u32, offset: usize, len: usize) -> BlockSpan {
    BlockSpan {
        plane: KvPlane::State,
        ..span(slot, offset, len)
    }
}

#[test]
fn states_are_copied_beside_the_engine_as_blocks_are() {
    let Some(mut pool) = TestPool::new(shape_with_states(4, 5000, 3)) else {
        return;
    };
    let contents = pool.fill(1);
    let states: Vec<Vec<u8>> = (0..3).map(|slot| noise(70 + slot, 5000)).collect();
    // In pieces, as they arrive from another worker.
    let cut = 2048;
    let parts: Vec<(BlockSpan, &[u8])> = (0..)
        .zip(&states)
        .flat_map(|(slot, bytes)| {
            let (head, tail) = bytes.split_at(cut);
            let head = (state_span(slot, 0, cut), head);
            [head, (state_span(slot, cut, 5000 - cut), tail)]
        })
        .collect();
    pool.blocks.write(&parts).unwrap();
    let whole = |slot| state_span(slot, 0, 5000);
    let (read, sums) = pool.read(&[whole(0), whole(1), whole(2)]);
    for (bytes, (found, sum)) in states.iter().zip(read.iter().zip(sums)) {
        assert!(found == bytes);
        assert_eq!(sum, xxhash_rust::xxh3::xxh3_64(bytes));
    }
    pool.ops
        .copy_block(&mut pool.pool, KvPlane::State, BlockIndex(0), BlockIndex(2))
        .unwrap();
    pool.ops.clear_state(&mut pool.pool, BlockIndex(1)).unwrap();
    let mut after = vec![1; 5000];
    for (slot, expected) in [(0, &states[0]), (1, &vec![0; 5000]), (2, &states[0])] {
        pool.ops
            .read_block(&pool.pool, whole(slot), &mut after)
            .unwrap();
        assert!(after == *expected, "slot {slot}");
    }
    for (block, expected) in (0..).zip(&contents) {
        assert!(pool.content(block) == *expected, "block {block}");
    }
    for outside in [state_span(3, 0, 1), state_span(0, 1, 5000)] {
        assert!(pool.blocks.checksums(&[outside]).is_err(), "{outside:?}");
    }
}

#[test]
fn states_are_copied_between_pools_of_one_process() {
    let Some(near) = TestPool::new(shape_with_states(4, 5000, 3)) else {
        return;
    };
    // Slots begin elsewhere in a pool with other numbers of blocks and slots.
    let mut far = TestPool::new(shape_with_states(7, 5000, 2)).unwrap();
    let before = far.fill(50);
    let bytes = noise(9, 5000);
    near.blocks
        .write(&[(state_span(2, 0, 5000), &bytes)])
        .unwrap();
    let peer = near.blocks.open(&far.blocks.handle().unwrap()).unwrap();
    peer.write(&[(state_span(2, 16, 4000), BlockIndex(1))])
        .unwrap();
    assert!(peer.probe().unwrap() > 0);
    let (read, _) = far.read(&[state_span(1, 0, 5000), state_span(0, 0, 5000)]);
    assert!(read[0][16..4016] == bytes[16..4016] && read[0][..16] == [0; 16]);
    assert!(read[0][4016..] == [0; 984] && read[1] == [0; 5000]);
    for (block, expected) in (0..).zip(&before) {
        assert!(far.content(block) == *expected, "block {block}");
    }
    let outside = peer.write(&[(state_span(2, 0, 1), BlockIndex(2))]);
    assert!(outside.is_err(), "the other pool has two slots");
    let other = TestPool::new(shape_with_states(4, 4999, 3)).unwrap();
    let refused = near.blocks.open(&other.blocks.handle().unwrap());
    assert!(refused.unwrap_err().to_string().contains("state slots"));
}
