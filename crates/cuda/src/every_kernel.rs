//! Runs every kernel of the table once, on small sizes that are no multiples of a tile, in buffers
//! that end with the kernel's last number; sanitizers watch the same run.
//!
//! Owns: a recipe for each kernel. Never: checks results, as the tests of operations do.
//! Invariant: a kernel without a recipe fails the test, so that none is left out.
#![allow(clippy::unwrap_used)] // Tests.

mod adapters;
mod experts;
mod norms;
mod sample;

use crate::args::{
    AttendArgs, AttendPlainArgs, DeviceAddress, EmbedArgs, GateArgs, GatherArgs, MatmulArgs,
    MatmulClusterArgs, MatmulPlainArgs, RotateArgs, slice_ends,
};
use crate::driver::{CudaDevice, CudaStream, DeviceMemory, KernelArgs, PinnedMemory, TensorMap};
use crate::images::{KernelImages, TABLE};
use crate::plan::{AttentionPlanShape, CudaAttentionPlan, STATE_HEADER, segments};
use cleave_emulator::{SANITIZER_EXIT, SanitizerVariant, StandInLibrary};
use cleave_engine::ops::{Batch, BatchSegment};
use std::cell::RefCell;
use std::sync::Arc;

/// The slot of a row that stores nothing, and the value for no window: all ones.
const NONE: u32 = u32::MAX;
/// Marks a token that the device drew.
const FED: u32 = 1 << 31;

/// Arguments of the kernels in `kernels/blocks`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RecipeBlocksArgs {
    pool: DeviceAddress,
    staging: DeviceAddress,
    pieces: DeviceAddress,
    checksums: DeviceAddress,
    secret: DeviceAddress,
}

// SAFETY: the struct holds addresses and mirrors the kernels' struct.
unsafe impl KernelArgs for RecipeBlocksArgs {}

/// The device, and the memory that kernels read and write until the test ends.
pub(crate) struct KernelBench {
    pub(crate) stream: CudaStream,
    pub(crate) images: KernelImages,
    memory: RefCell<Vec<DeviceMemory>>,
    seed: RefCell<u64>,
}

impl KernelBench {
    pub(crate) fn new(stream: CudaStream) -> Self {
        Self {
            images: KernelImages::load(stream.device()).unwrap(),
            stream,
            memory: RefCell::default(),
            seed: RefCell::new(1),
        }
    }

    /// Returns all bytes of the memory that begins at this address.
    pub(crate) fn read(&self, address: DeviceAddress) -> Vec<u8> {
        let memory = self.memory.borrow();
        let memory = memory.iter().find(|memory| memory.at(0) == address);
        let memory = memory.expect("memory of this bench");
        let mut pinned = PinnedMemory::new(self.stream.device(), memory.bytes()).unwrap();
        self.stream
            .copy_out((memory, 0), (&mut pinned, 0..memory.bytes()))
            .unwrap();
        self.stream.synchronize().unwrap();
        pinned.as_slice()[..memory.bytes()].to_vec()
    }

    /// Allocates exactly `bytes` zeros.
    pub(crate) fn zeros(&self, bytes: usize) -> DeviceAddress {
        let memory = DeviceMemory::new(self.stream.device(), bytes, "a test").unwrap();
        self.stream.zero(&memory, 0..bytes).unwrap();
        let address = memory.at(0);
        self.memory.borrow_mut().push(memory);
        address
    }

    /// Allocates memory for exactly these values.
    pub(crate) fn of<T: Copy>(&self, values: &[T]) -> DeviceAddress {
        let bytes = size_of_val(values);
        let memory = DeviceMemory::new(self.stream.device(), bytes, "a test").unwrap();
        let mut pinned = PinnedMemory::new(self.stream.device(), bytes).unwrap();
        // SAFETY: the values are numbers, or structs of numbers without padding.
        let source = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        pinned.as_mut_slice().copy_from_slice(source);
        self.stream
            .copy_in((&pinned, 0..bytes), (&memory, 0))
            .unwrap();
        self.stream.synchronize().unwrap();
        let address = memory.at(0);
        self.memory.borrow_mut().push(memory);
        address
    }

    /// Returns numbers between −1 and 1 whose upper halves are the same numbers in bf16.
    pub(crate) fn numbers(&self, count: usize) -> Vec<f32> {
        let mut seed = self.seed.borrow_mut();
        let mut next = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((*seed >> 40) as f32 / (1 << 23) as f32) - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    /// Allocates numbers in the format that the kernel's name contains.
    pub(crate) fn stored(&self, name: &str, count: usize) -> DeviceAddress {
        let numbers = self.numbers(count);
        if name.contains("_f32") {
            self.of(&numbers)
        } else {
            self.of(&half_floats(&numbers))
        }
    }

    pub(crate) fn floats(&self, count: usize) -> DeviceAddress {
        self.of(&self.numbers(count))
    }

    pub(crate) fn bytes(&self, count: usize) -> DeviceAddress {
        // No byte stands for a NaN in a one-byte format.
        let bytes: Vec<u8> = self
            .numbers(count)
            .iter()
            .map(|x| (x * 60.0) as i8 as u8)
            .collect();
        self.of(&bytes)
    }

    pub(crate) fn launch<A: KernelArgs>(&self, name: &str, grid: [u32; 3], args: A) {
        let kernel = self.images.kernel::<A>(name).unwrap();
        // SAFETY: every address is of memory that lives as long as the bench; the stand-in checks
        // the accesses.
        unsafe { kernel.launch(&self.stream, grid, args) }.unwrap();
        self.stream
            .synchronize()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

pub(crate) fn half_floats(numbers: &[f32]) -> Vec<u16> {
    let bits = numbers.iter().map(|x| half::bf16::from_f32(*x).to_bits());
    bits.collect()
}

/// Returns the size of an element by the kernel's name.
pub(crate) fn element_bytes(name: &str) -> usize {
    if name.contains("_f32") { 4 } else { 2 }
}

fn run_recipe(bench: &KernelBench, name: &str) {
    match name {
        _ if name.starts_with("embed_") => embed(bench, name),
        _ if name.starts_with("add_rows_") => norms::add_rows(bench, name),
        _ if name.starts_with("norm_add_") => norms::norm_add(bench, name),
        _ if name.starts_with("round_rows_") => norms::round_rows(bench, name),
        _ if name.starts_with("projection_norm_") => norms::projection_norm(bench, name),
        _ if name.starts_with("norm_") => norms::norm(bench, name),
        _ if name.starts_with("head_norm_") => norms::head_norm(bench, name),
        _ if name.starts_with("rotate_") => rotate(bench, name),
        _ if name.starts_with("silu_gate_") => gate(bench, name),
        "gather_rows" => gather(bench),
        "cap_logits" => sample::cap(bench, name),
        "sample_prepare" | "sample_weigh" | "sample_draw" => sample::sample(bench, name),
        _ if name.starts_with("blocks_") => blocks(bench, name),
        _ if name.starts_with("attend_plain_") => attend_plain(bench, name),
        _ if name.starts_with("attend_") => attend(bench, name),
        _ if name.starts_with("adapt_") => adapters::run(bench, name),
        _ if name.starts_with("experts_") => experts::run(bench, name),
        _ if name.starts_with("matmul_plain_") => matmul_plain(bench, name),
        _ if name.starts_with("matmul_") => matmul(bench, name),
        _ => panic!("{name} has no recipe here: write one"),
    }
}

fn embed(bench: &KernelBench, name: &str) {
    let (vocab, width) = (5, 130);
    let args = EmbedArgs {
        table: bench.stored(name, vocab * width),
        tokens: bench.of(&[4, FED, FED | 1, 0]),
        // The second draw gave no token.
        drawn: bench.of(&[3, NONE]),
        out: bench.zeros(4 * width * 4),
        width: width as u32,
        vocab: vocab as u32,
        factor: 1.5,
        padding: 0,
    };
    bench.launch(name, [4, 1, 1], args);
}

fn rotate(bench: &KernelBench, name: &str) {
    let (rows, dim, block_tokens, blocks) = (3, 24, 8, 2);
    let head = block_tokens * dim;
    let args = RotateArgs {
        qkv: bench.stored(name, rows * (3 + 2) * dim),
        cos: bench.floats(6 * dim / 2),
        sin: bench.floats(6 * dim / 2),
        query_factors: bench.floats(6),
        positions: bench.of(&[5, 0, 0]),
        row_slots: bench.of(&[15, 0, NONE]),
        pool: bench.zeros(blocks * 2 * head * element_bytes(name)),
        block_elements: 2 * head as u64,
        key_offset: 0,
        value_offset: head as u64,
        query_heads: 3,
        kv_heads: 1,
        head_dim: dim as u32,
        half: dim as u32 / 2 - 1,
        block_tokens: block_tokens as u32,
        padding: 0,
    };
    bench.launch(name, [rows as u32, 2, 1], args);
}

fn gate(bench: &KernelBench, name: &str) {
    for (width, activation) in [(130, 0), (264, 1), (264, 2)] {
        let args = GateArgs {
            gate_up: bench.stored(name, 2 * 2 * width),
            out: bench.zeros(2 * width * element_bytes(name)),
            width: width as u32,
            activation,
            limit: 0.5,
            padding: 0,
        };
        bench.launch(name, [2, 2, 1], args);
    }
}

fn gather(bench: &KernelBench) {
    let args = GatherArgs {
        from: bench.zeros(3 * 131 * 2),
        to: bench.zeros(2 * 131 * 2),
        indices: bench.of(&[2, 0]),
        units: 131,
        padding: 0,
    };
    bench.launch("gather_rows", [2, 1, 1], args);
}

fn blocks(bench: &KernelBench, name: &str) {
    // The fields of `Piece`: offset in the pool, offset in the staging memory, bytes.
    let pieces: [[u64; 3]; 2] = [[16, 0, 5024], [6144, 5024, 272]];
    let args = RecipeBlocksArgs {
        pool: bench.bytes(6144 + 272),
        staging: bench.bytes(5024 + 272),
        pieces: bench.of(&pieces),
        checksums: bench.zeros(2 * 8),
        secret: bench.bytes(192),
    };
    let grid = match name {
        "blocks_checksum" => [2, 1, 1],
        _ => [2, 2, 1],
    };
    bench.launch(name, grid, args);
}

const BLOCK_TOKENS: usize = 16;

/// Returns a batch of segments `(position, rows)`, each with a block table of its own.
fn batch(parts: &[(usize, usize)]) -> (Batch, Vec<u32>) {
    let mut batch = Batch::default();
    let (mut row, mut tables) = (0, Vec::new());
    for (position, rows) in parts {
        let first = tables.len();
        tables.extend((0..(position + rows).div_ceil(BLOCK_TOKENS)).map(|at| (first + at) as u32));
        batch.segments.push(BatchSegment {
            rows: row..row + rows,
            position: *position,
            blocks: first..tables.len(),
            state: None,
        });
        row += rows;
    }
    tables.reverse();
    (batch, tables)
}

fn attend_plain(bench: &KernelBench, name: &str) {
    let dim = 24;
    let (batch, tables) = batch(&[(70, 1), (0, 3)]);
    let head = BLOCK_TOKENS * dim;
    let args = AttendPlainArgs {
        qkv: bench.stored(name, 4 * (4 + 2 * 2) * dim),
        out: bench.zeros(4 * 4 * dim * element_bytes(name)),
        pool: bench.stored(name, tables.len() * 2 * 2 * head),
        tables: bench.of(&tables),
        segments: bench.of(&segments(&batch)),
        segments_count: bench.of(&[batch.segments.len() as u32]),
        sinks: bench.floats(4),
        block_elements: 2 * 2 * head as u64,
        key_elements: 0,
        value_elements: 2 * head as u64,
        query_heads: 4,
        kv_heads: 2,
        head_dim: dim as u32,
        block_tokens: BLOCK_TOKENS as u32,
        window: 50,
        scale: 0.3,
        cap: 2.0,
        cap_exponent: 1.4,
    };
    // The launch has one row more than the batch: padding.
    bench.launch(name, [5, 1, 1], args);
}

/// One segment has two spans of keys, split over items that share a tile; the other has one span
/// and one item.
fn attend(bench: &KernelBench, name: &str) {
    let dim: usize = name.rsplit('_').next().unwrap().parse().unwrap();
    let is_decode = name.contains("decode");
    let parts: &[(usize, usize)] = if is_decode {
        &[(520, 1), (37, 2)]
    } else {
        &[(500, 14), (3, 21)]
    };
    let (batch, tables) = batch(parts);
    let shape = AttentionPlanShape {
        group: 4,
        kv_heads: 1,
        window: None,
        // So many that an item has one span.
        blocks_count: 64,
        has_prefill: true,
    };
    let plan = CudaAttentionPlan::new(&batch, &shape);
    let items = if is_decode { plan.decode } else { plan.prefill };
    assert!(items.iter().any(|item| item.parts > 1), "items that merge");
    let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
    let element = 2 - usize::from(name.contains("fp8"));
    let head = BLOCK_TOKENS * dim * element;
    let args = AttendArgs {
        qkv: bench.stored(name, rows * (4 + 2) * dim),
        out: bench.zeros(rows * 4 * dim * 2),
        pool: match element {
            1 => bench.bytes(tables.len() * 2 * head),
            _ => bench.stored(name, tables.len() * 2 * BLOCK_TOKENS * dim),
        },
        tables: bench.of(&tables),
        segments: bench.of(&segments(&batch)),
        items: bench.of(&items),
        items_count: bench.of(&[items.len() as u32]),
        states: bench.zeros(plan.states_count * (dim + STATE_HEADER) * 4),
        arrivals: bench.zeros(plan.arrivals_count * 4),
        sinks: bench.floats(4),
        block_bytes: 2 * head as u64,
        key_bytes: 0,
        value_bytes: head as u64,
        query_heads: 4,
        kv_heads: 1,
        block_shift: BLOCK_TOKENS.trailing_zeros(),
        window: NONE,
        scale: 0.1,
        value_scale: 1.0,
        cap: 2.0,
        cap_exponent: 1.4,
    };
    bench.launch(name, [3, 1, 1], args);
}

fn matmul_plain(bench: &KernelBench, name: &str) {
    let (rows, columns) = (3, 70);
    for ends in [vec![45], vec![16, 48, 64, 80]] {
        let width = ends[ends.len() - 1];
        let args = MatmulPlainArgs {
            weights: bench.stored(name, columns * width),
            x: bench.stored(name, rows * width),
            bias: bench.floats(columns),
            out: bench.zeros(rows * columns * 4),
            rows_count: bench.of(&[rows as u32]),
            columns: columns as u32,
            width: width as u32,
            is_out_f32: 1,
            slices: ends.len() as u32,
            slice_ends: slice_ends(ends.iter().copied()),
        };
        bench.launch(name, [2, 1, 1], args);
    }
}

/// The matrix has two tiles of columns and, in kernels for few rows, two spans that are merged.
fn matmul(bench: &KernelBench, name: &str) {
    // The last span is shorter, by a length that the narrowest groups and chunks still divide.
    matmul_slices(bench, name, &[if name.contains("few") { 192 } else { 64 }]);
    // A slice of two spans, and shorter ones.
    matmul_slices(bench, name, &[32, 224, 256, 288]);
}

fn matmul_slices(bench: &KernelBench, name: &str, ends: &[usize]) {
    const SPAN_WIDTH: usize = 128;
    // Sums of slices that wait at once.
    const WAITING: usize = 3;
    const BLOCKS: u32 = 3;
    let (tile_rows, format) = name
        .trim_start_matches("matmul_")
        .trim_start_matches("few")
        .trim_start_matches("many")
        .trim_start_matches("wide")
        .trim_start_matches("cluster")
        .split_once('_')
        .unwrap();
    let tile_rows: usize = tile_rows.parse().unwrap();
    let is_few = name.contains("few");
    let columns: usize = 131;
    let width = ends[ends.len() - 1];
    // The tile is not full.
    let rows = tile_rows - 3;
    let tile_columns = match (is_few, format) {
        (true, "bf16") => 64,
        _ => 128,
    };
    let group_shift = if format == "nvfp4" { 4 } else { 5 };
    let (groups, padded) = (width >> group_shift, columns.next_multiple_of(4));
    let sums_count = match ends.len() {
        1 => 0,
        _ => BLOCKS as usize * WAITING,
    };
    let args = MatmulArgs {
        weights: match format {
            "bf16" => bench.stored(name, columns * width),
            "int4" | "fp4" | "nvfp4" => bench.bytes(columns * width / 2),
            _ => bench.bytes(columns * width),
        },
        column_scales: match format {
            "fp8" | "int8" => bench.floats(columns),
            _ => 0,
        },
        group_scales: match format {
            "bf16" | "fp8" | "int8" => 0,
            _ => bench.floats(groups * padded),
        },
        x: bench.of(&half_floats(&bench.numbers(rows * width))),
        bias: bench.floats(columns),
        out: bench.zeros(rows * columns * 2),
        rows_count: bench.of(&[rows as u32]),
        sums: match sums_count {
            0 => 0,
            _ => bench.zeros(sums_count * tile_columns * tile_rows * 4),
        },
        columns: columns as u32,
        width: width as u32,
        span_width: SPAN_WIDTH as u32,
        group_shift,
        is_out_f32: 0,
        slices: ends.len() as u32,
        slice_ends: slice_ends(ends.iter().copied()),
    };
    if name.contains("cluster") {
        // A cluster is two blocks, each of which copies all of its columns and half of the rows.
        let map = |address, count, box_rows: usize| {
            let device = bench.stream.device();
            TensorMap::new(device, address, count, width, box_rows as u32).unwrap()
        };
        let args = MatmulClusterArgs {
            weights: map(args.weights, columns, tile_columns),
            x: map(args.x, rows, tile_rows / 2),
            product: args,
            padding: [0; 34],
        };
        bench.launch(name, [2, 1, 1], args);
    } else {
        bench.launch(name, [BLOCKS, 1, 1], args);
    }
}

/// Returns whether tests run on a real GPU.
fn is_real() -> bool {
    std::env::var("CLEAVE_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Returns the real GPU if `CLEAVE_TEST_DEVICE=cuda` asks for it, else the stand-in's.
pub(crate) fn device() -> Option<Arc<CudaDevice>> {
    if !is_real() && !cleave_emulator::preload(SanitizerVariant::from_environment()) {
        eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
        return None;
    }
    Some(CudaDevice::open(0).expect("a GPU, or the stand-in's"))
}

/// Returns the stand-in's device for a test of what the stand-in alone counts, or `None` with a
/// message.
pub(crate) fn stand_in_device() -> Option<Arc<CudaDevice>> {
    if is_real() {
        eprintln!("skipped: needs the stand-in driver");
        return None;
    }
    device()
}

/// Returns whether the device can run the kernel: wgmma needs Hopper, and large tiles need much
/// shared memory.
fn runs_on(device: &CudaDevice, name: &str) -> bool {
    let facts = device.facts();
    let listed = TABLE.iter().find(|listed| listed.name == name).unwrap();
    let has_wgmma = !is_real() || facts.capability.0 == 9;
    // Clusters are not emulated.
    let is_wgmma = name.contains("wide") || name.contains("cluster");
    (has_wgmma || !is_wgmma)
        && (is_real() || !name.contains("cluster"))
        && listed.shared_bytes <= facts.shared_bytes_max
}

/// The run uses the variant that this process was started for: the plain one, unless a sanitizer's
/// test started it.
#[test]
fn every_kernel_runs_on_small_sizes() {
    let Some(device) = device() else {
        return;
    };
    let stand_in = if is_real() {
        None
    } else {
        StandInLibrary::load(SanitizerVariant::from_environment())
    };
    let launches = || stand_in.map_or(0, |stand_in| stand_in.calls_count("launch"));
    let bench = KernelBench::new(CudaStream::new(&device).unwrap());
    for listed in TABLE {
        let (before, began) = (launches(), std::time::Instant::now());
        if !runs_on(&device, listed.name) {
            println!("{}: not for this GPU", listed.name);
            continue;
        }
        run_recipe(&bench, listed.name);
        assert!(is_real() || launches() > before, "{} ran", listed.name);
        bench.memory.borrow_mut().clear();
        println!("{}: {:.1} s", listed.name, began.elapsed().as_secs_f32());
    }
    println!("{} kernels ran", TABLE.len());
}

/// Starts this test program again with a sanitizer's runtime and kernels.
fn run_under_sanitizer(variant: SanitizerVariant) {
    if is_real() || cleave_emulator::driver_library(variant).is_none() {
        return eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
    }
    let program = std::env::current_exe().unwrap();
    let Some(mut command) = cleave_emulator::sanitized_command(variant, program.as_os_str()) else {
        return eprintln!("skipped: g++ has not the runtime of the {variant:?} sanitizer");
    };
    let name = "every_kernel::every_kernel_runs_on_small_sizes";
    let output = command.args(["--exact", name, "--nocapture"]).output();
    let output = output.unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let found = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code();
    assert_ne!(code, Some(SANITIZER_EXIT), "{stdout}\n{found}");
    assert_eq!(code, Some(0), "{stdout}\n{found}");
    let all = format!("{} kernels ran", TABLE.len());
    assert!(stdout.contains(&all), "{stdout}\n{found}");
}

#[test]
fn kernels_stay_within_memory_under_the_address_sanitizer() {
    run_under_sanitizer(SanitizerVariant::Address);
}

#[test]
fn kernels_have_no_data_race_under_the_thread_sanitizer() {
    run_under_sanitizer(SanitizerVariant::Thread);
}
