//! Results of kernels on the emulator, compared with the expected ones.

use cleave_emulator::{SanitizerVariant, driver_library_of, sanitized_command};

use crate::device::{self, EmulatedDevice, KernelArguments, KernelLaunch, blocks};
use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

#[repr(C)]
#[derive(Clone, Copy)]
struct ExchangeArgs {
    results: u64,
    counters: u64,
}
impl KernelArguments for ExchangeArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct ConvertArgs {
    numbers: u64,
    results: u64,
    count: u64,
}
impl KernelArguments for ConvertArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct TileProductArgs {
    a: u64,
    b: u64,
    c: u64,
    rows: u32,
    columns: u32,
    depth: u32,
    b_is_transposed: u32,
}
impl KernelArguments for TileProductArgs {}

#[test]
fn warp_primitives_exchange_the_right_values() {
    const BLOCKS: u32 = 3;
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let threads = BLOCKS as usize * 64;
    let results = device.alloc(threads * 8 * 4).expect("memory");
    let counters = device.upload(&[0_u32; 3]);
    device
        .run(
            "exchange",
            blocks(BLOCKS, 64),
            ExchangeArgs { results, counters },
        )
        .expect("a launch");
    let exchanged: Vec<u32> = device.read(results, threads * 8).expect("results");
    let mut tickets = Vec::new();
    for index in 0..threads {
        let thread = (index % 64) as u32;
        let (warp, lane) = (thread / 32 * 32, thread % 32);
        let got = &exchanged[index * 8..index * 8 + 8];
        assert_eq!(got[0], thread ^ 5);
        assert_eq!(got[1], (warp + 7) * 3);
        assert_eq!(got[2], if lane < 2 { thread } else { thread - 2 });
        assert_eq!(
            got[3],
            (0..32)
                .filter(|lane| lane % 6 == 3)
                .map(|lane| 1 << lane)
                .sum::<u32>()
        );
        assert_eq!(got[4], thread ^ 1);
        assert_eq!(got[5], (0..64).sum::<u32>());
        assert_eq!(got[7], thread.leading_zeros() | thread.count_ones() << 8);
        tickets.push(got[6]);
    }
    tickets.sort_unstable();
    assert!(
        tickets.iter().copied().eq(0..threads as u32),
        "each thread's addition counts once"
    );
    let counted: Vec<u32> = device.read(counters, 3).expect("counters");
    assert_eq!(counted, [threads as u32, 63 + BLOCKS - 1, BLOCKS]);
}

#[test]
fn bf16_and_e4m3_round_as_on_the_device() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut numbers: Vec<f32> = (0..4000).map(|_| f32::from_bits(random.random())).collect();
    numbers.extend([
        0.0,
        -0.0,
        1.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE / 2.0,
        -126.5,
        -150.0,
        127.0,
        128.0,
    ]);
    numbers.extend((0..256).map(|byte| f32::from_bits(0x3f80_0000 | byte)));
    // Every e4m3 number, and the values between it and the next.
    for byte in (0..=255u8).filter(|byte| byte & 0x7f < 0x7e) {
        let (x, next) = (e4m3(byte), e4m3(byte + 1));
        let middle = f32::midpoint(x, next);
        numbers.extend([x, middle, middle.next_up(), middle.next_down()]);
    }
    let (from, to) = (
        device.upload(&numbers),
        device.alloc(numbers.len() * 20).expect("memory"),
    );
    let args = ConvertArgs {
        numbers: from,
        results: to,
        count: numbers.len() as u64,
    };
    device
        .run(
            "convert",
            blocks(numbers.len().div_ceil(64) as u32, 64),
            args,
        )
        .expect("a launch");
    let results: Vec<f32> = device.read(to, numbers.len() * 5).expect("results");
    for (index, &x) in numbers.iter().enumerate() {
        let got = &results[index * 5..index * 5 + 5];
        let rounded = bf16::from_f32(x).to_f32();
        assert!(
            rounded.is_nan() && got[0].is_nan() || rounded.to_bits() == got[0].to_bits(),
            "{x}: {} is not {rounded}",
            got[0]
        );
        let power = f64::from(x).exp2() as f32;
        let power = if power < f32::MIN_POSITIVE {
            0.0
        } else {
            power
        };
        assert!(
            power.is_nan() && got[1].is_nan()
                || power == got[1]
                || (power - got[1]).abs() <= power * 3e-7,
            "2^{x}: {} is not {power}",
            got[1]
        );
        let small = e4m3(x.to_bits() as u8);
        assert!(
            small.is_nan() && got[2].is_nan() || small.to_bits() == got[2].to_bits(),
            "e4m3 {:#x}: {} is not {small}",
            x.to_bits() as u8,
            got[2]
        );
        assert!(
            got[3] == 0.0 || rounded.is_nan() || rounded.is_infinite(),
            "a number and its opposite: {}",
            got[3]
        );
        let narrow = nearest_e4m3(x);
        assert!(
            narrow.is_nan() && got[4].is_nan() || narrow.to_bits() == got[4].to_bits(),
            "{x} as e4m3: {} is not {narrow}",
            got[4]
        );
    }
}

/// By the format's definition: sign, four bits of exponent, three of fraction.
fn e4m3(byte: u8) -> f32 {
    let (sign, exponent, fraction) = (
        if byte & 0x80 == 0 { 1.0 } else { -1.0 },
        i32::from(byte >> 3 & 15),
        f32::from(byte & 7),
    );
    match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * fraction / 512.0,
        _ => sign * (1.0 + fraction / 8.0) * 2.0_f32.powi(exponent - 7),
    }
}

/// The nearest e4m3 number; ties go to the even one, and numbers beyond the largest become the
/// largest.
fn nearest_e4m3(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let size = x.abs().min(448.0);
    let apart = |byte: &u8| (f64::from(e4m3(*byte)) - f64::from(size)).abs();
    let nearest = (0..0x7f).min_by(|a, b| {
        let order = apart(a).total_cmp(&apart(b));
        order.then((a & 1).cmp(&(b & 1)))
    });
    e4m3(nearest.expect("there are numbers")).copysign(x)
}

#[test]
fn tile_products_match_plain_loops() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let mut random = ChaCha8Rng::seed_from_u64(11);
    for (rows, columns, depth) in [
        (32, 32, 32),
        (1, 8, 8),
        (70, 40, 200),
        (33, 96, 64),
        (128, 64, 256),
    ] {
        for b_is_transposed in [0, 1] {
            let mut matrix = |count: usize| -> Vec<bf16> {
                (0..count)
                    .map(|_| bf16::from_f32(random.random_range(-1.0..1.0)))
                    .collect()
            };
            let (a, b) = (matrix(rows * depth), matrix(columns * depth));
            let args = TileProductArgs {
                a: device.upload(&a),
                b: device.upload(&b),
                c: device.alloc(rows * columns * 4).expect("memory"),
                rows: rows as u32,
                columns: columns as u32,
                depth: depth as u32,
                b_is_transposed,
            };
            let grid = [columns.div_ceil(32) as u32, rows.div_ceil(32) as u32, 1];
            device
                .run(
                    "tile_product",
                    KernelLaunch {
                        grid,
                        threads: 128,
                        shared_bytes: 8192,
                    },
                    args,
                )
                .expect("a launch");
            let c: Vec<f32> = device.read(args.c, rows * columns).expect("results");
            for row in 0..rows {
                for column in 0..columns {
                    let b_at = |k: usize| {
                        if b_is_transposed == 1 {
                            b[k * columns + column]
                        } else {
                            b[column * depth + k]
                        }
                    };
                    let sum: f64 = (0..depth)
                        .map(|k| a[row * depth + k].to_f64() * b_at(k).to_f64())
                        .sum();
                    let got = f64::from(c[row * columns + column]);
                    assert!(
                        (got - sum).abs() < 1e-4,
                        "{rows}x{columns}x{depth} at {row}, {column}: {got} is not {sum}"
                    );
                }
            }
        }
    }
}

#[test]
fn unwritten_shared_memory_reads_as_nan() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let results = device.alloc(4 * 64 * 4).expect("memory");
    let shape = KernelLaunch {
        grid: [4, 1, 1],
        threads: 64,
        shared_bytes: 128,
    };
    device
        .run("read_unwritten", shape, ResultsArgs { results })
        .expect("a launch");
    let got: Vec<f32> = device.read(results, 4 * 64).expect("results");
    assert!(got.iter().all(|x| x.is_nan()), "{got:?}");
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ResultsArgs {
    results: u64,
}
impl KernelArguments for ResultsArgs {}

#[test]
fn seeds_change_the_order_of_blocks() {
    const BLOCKS: u32 = 50;
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let follow = |seed| -> Vec<u32> {
        device.stand_in.set_seed(seed);
        let numbers = device.upload(&[0_u32; BLOCKS as usize + 1]);
        device
            .run(
                "follow",
                blocks(BLOCKS, 32),
                ResultsArgs { results: numbers },
            )
            .expect("a launch");
        device.read(numbers, BLOCKS as usize + 1).expect("numbers")
    };
    let in_order: Vec<u32> = (0..=BLOCKS).collect();
    assert_eq!(follow(0), in_order);
    assert!(
        (1..4).any(|seed| follow(seed) != in_order),
        "no seed runs blocks in another order"
    );
}

#[test]
fn sanitizers_report_nothing_in_correct_kernels() {
    // The sanitized child runs this test too; only the plain parent starts children.
    if SanitizerVariant::from_environment() != SanitizerVariant::Plain
        || EmulatedDevice::open().is_none()
    {
        return;
    }
    for variant in [SanitizerVariant::Address, SanitizerVariant::Thread] {
        driver_library_of(&device::kernels(), variant).expect("there is a plain one");
        let program = std::env::current_exe().expect("this program");
        let mut command = sanitized_command(variant, program.as_os_str()).expect("a compiler");
        command.args([
            "--exact",
            "kernels::tile_products_match_plain_loops",
            "kernels::warp_primitives_exchange_the_right_values",
        ]);
        let output = command.output().expect("it starts");
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && text.contains("2 passed") && !text.contains("Sanitizer"),
            "{text}"
        );
    }
}
