//! The stand-in cublasLt: products compared with plain loops, refused operands, and stream order.

use crate::device::{self, DriverHandle, EmulatedDevice};
use cleave_emulator::{StandInLibrary, cublas_lt};
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ffi::{c_int, c_void};
use std::ptr;

const F32: c_int = 0;
const F16: c_int = 2;
const BF16: c_int = 14;
const E4M3: c_int = 28;
const COMPUTE_F32: c_int = 68;
const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;
const EXECUTION_FAILED: c_int = 13;

const TRANSA: c_int = 3;
const TRANSB: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS: c_int = 8;
const A_SCALE: c_int = 17;
const B_SCALE: c_int = 18;
const A_SCALE_MODE: c_int = 31;
const WORKSPACE_MAX: c_int = 1;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct HeuristicResult {
    algo: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

type CreateObjectFn = unsafe extern "C" fn(*mut DriverHandle) -> c_int;
type SetAttributeFn = unsafe extern "C" fn(DriverHandle, c_int, *const c_void, usize) -> c_int;
type CreateDescFn = unsafe extern "C" fn(*mut DriverHandle, c_int, c_int) -> c_int;
type CreateLayoutFn = unsafe extern "C" fn(*mut DriverHandle, c_int, u64, u64, i64) -> c_int;
type HeuristicFn = unsafe extern "C" fn(
    DriverHandle,
    DriverHandle,
    DriverHandle,
    DriverHandle,
    DriverHandle,
    DriverHandle,
    DriverHandle,
    c_int,
    *mut HeuristicResult,
    *mut c_int,
) -> c_int;
type MatmulFn = unsafe extern "C" fn(
    DriverHandle,
    DriverHandle,
    *const f32,
    u64,
    DriverHandle,
    u64,
    DriverHandle,
    *const f32,
    u64,
    DriverHandle,
    u64,
    DriverHandle,
    *const HeuristicResult,
    u64,
    usize,
    DriverHandle,
) -> c_int;

/// The library, for products of column-major matrices.
struct EmulatedCublasLt {
    library: StandInLibrary,
    handle: DriverHandle,
    workspace: u64,
}

/// A matrix on the device, column-major without gaps.
#[derive(Clone, Copy)]
struct DeviceMatrix {
    at: u64,
    kind: c_int,
    rows: usize,
    columns: usize,
}

struct MatmulCall {
    a: DeviceMatrix,
    b: DeviceMatrix,
    d: DeviceMatrix,
    beta: f32,
    attributes: Vec<(c_int, u64, usize)>,
    stream: DriverHandle,
}

impl EmulatedCublasLt {
    fn open(device: &EmulatedDevice) -> EmulatedCublasLt {
        let library = StandInLibrary::open(cublas_lt().expect("built with the driver"));
        let mut handle = ptr::null_mut();
        // SAFETY: the type is the function's.
        let code = unsafe {
            library
                .function::<CreateObjectFn>("cublasLtCreate")
                .expect("a function")(&raw mut handle)
        };
        assert_eq!(code, 0);
        let workspace = device.alloc(1 << 20).expect("memory");
        EmulatedCublasLt {
            library,
            handle,
            workspace,
        }
    }

    fn layout(&self, matrix: DeviceMatrix) -> DriverHandle {
        let DeviceMatrix {
            kind,
            rows,
            columns,
            ..
        } = matrix;
        let mut layout = ptr::null_mut();
        // SAFETY: the type is the function's.
        unsafe {
            let create = self
                .library
                .function::<CreateLayoutFn>("cublasLtMatrixLayoutCreate")
                .expect("a function");
            assert_eq!(
                create(
                    &raw mut layout,
                    kind,
                    rows as u64,
                    columns as u64,
                    rows as i64
                ),
                0
            );
        }
        layout
    }

    fn set(
        &self,
        function: &str,
        object: DriverHandle,
        attribute: c_int,
        value: u64,
        bytes: usize,
    ) {
        // SAFETY: the type is the function's, and the value has at least that many bytes.
        unsafe {
            let set = self
                .library
                .function::<SetAttributeFn>(function)
                .expect("a function");
            assert_eq!(set(object, attribute, (&raw const value).cast(), bytes), 0);
        }
    }

    /// Gives the status of the heuristic, or else of the product.
    fn run(&self, operation: &MatmulCall) -> c_int {
        let MatmulCall {
            a,
            b,
            d,
            beta,
            attributes,
            stream,
        } = operation;
        let (mut desc, mut preference) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the types are the functions'; all handles are alive, and never given back, as
        // tests are short.
        unsafe {
            let create = self
                .library
                .function::<CreateDescFn>("cublasLtMatmulDescCreate")
                .expect("a function");
            assert_eq!(create(&raw mut desc, COMPUTE_F32, F32), 0);
            let create = self
                .library
                .function::<CreateObjectFn>("cublasLtMatmulPreferenceCreate")
                .expect("a function");
            assert_eq!(create(&raw mut preference), 0);
        }
        for &(attribute, value, bytes) in attributes {
            self.set(
                "cublasLtMatmulDescSetAttribute",
                desc,
                attribute,
                value,
                bytes,
            );
        }
        self.set(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            WORKSPACE_MAX,
            1 << 20,
            8,
        );
        let [a_layout, b_layout, d_layout] = [*a, *b, *d].map(|matrix| self.layout(matrix));
        let (mut found, mut count) = (HeuristicResult::default(), 0);
        let alpha = 1.0;
        // SAFETY: as above; operands are device memory, which the library checks.
        unsafe {
            let heuristic = self
                .library
                .function::<HeuristicFn>("cublasLtMatmulAlgoGetHeuristic")
                .expect("a function");
            let handle = self.handle;
            let code = heuristic(
                handle,
                desc,
                a_layout,
                b_layout,
                d_layout,
                d_layout,
                preference,
                1,
                &raw mut found,
                &raw mut count,
            );
            if code != 0 {
                return code;
            }
            let matmul = self
                .library
                .function::<MatmulFn>("cublasLtMatmul")
                .expect("a function");
            matmul(
                handle,
                desc,
                &raw const alpha,
                a.at,
                a_layout,
                b.at,
                b_layout,
                beta,
                d.at,
                d_layout,
                d.at,
                d_layout,
                &raw const found,
                self.workspace,
                found.workspace_bytes,
                *stream,
            )
        }
    }

    /// Runs a product in the legacy stream.
    fn product(
        &self,
        [a, b, d]: [DeviceMatrix; 3],
        beta: f32,
        attributes: Vec<(c_int, u64, usize)>,
    ) -> c_int {
        let stream = ptr::null_mut();
        self.run(&MatmulCall {
            a,
            b,
            d,
            beta,
            attributes,
            stream,
        })
    }
}

fn numbers(random: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count)
        .map(|_| bf16::from_f32(random.random_range(-1.0..1.0)).to_f32())
        .collect()
}

fn upload(device: &EmulatedDevice, numbers: &[f32], kind: c_int) -> u64 {
    match kind {
        F32 => device.upload(numbers),
        F16 => device.upload(
            &numbers
                .iter()
                .map(|&x| f16::from_f32(x))
                .collect::<Vec<_>>(),
        ),
        _ => device.upload(
            &numbers
                .iter()
                .map(|&x| bf16::from_f32(x))
                .collect::<Vec<_>>(),
        ),
    }
}

#[test]
fn cublaslt_products_match_plain_loops() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let products = EmulatedCublasLt::open(&device);
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let (rows, columns, depth) = (37, 9, 50);
    for kind in [F32, F16, BF16] {
        for (transa, transb) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            let (a, b, bias) = (
                numbers(&mut random, rows * depth),
                numbers(&mut random, depth * columns),
                numbers(&mut random, rows),
            );
            let before = numbers(&mut random, rows * columns);
            let shape = |is_transposed: i32, rows, columns| {
                if is_transposed == 1 {
                    (columns, rows)
                } else {
                    (rows, columns)
                }
            };
            let matrix = |numbers: &[f32], kind, (rows, columns)| DeviceMatrix {
                at: upload(&device, numbers, kind),
                kind,
                rows,
                columns,
            };
            let a_matrix = matrix(&a, kind, shape(transa, rows, depth));
            let b_matrix = matrix(&b, kind, shape(transb, depth, columns));
            let d_matrix = matrix(&before, F32, (rows, columns));
            let bias_at = upload(&device, &bias, F32);
            let attributes = vec![
                (TRANSA, transa as u64, 4),
                (TRANSB, transb as u64, 4),
                (EPILOGUE, 4, 4),
                (BIAS, bias_at, 8),
            ];
            assert_eq!(
                products.product([a_matrix, b_matrix, d_matrix], 0.5, attributes),
                0
            );
            let d: Vec<f32> = device.read(d_matrix.at, rows * columns).expect("a product");
            for row in 0..rows {
                for column in 0..columns {
                    let a_at = |k: usize| {
                        if transa == 1 {
                            a[row * depth + k]
                        } else {
                            a[k * rows + row]
                        }
                    };
                    let b_at = |k: usize| {
                        if transb == 1 {
                            b[k * columns + column]
                        } else {
                            b[column * depth + k]
                        }
                    };
                    let sum: f32 = (0..depth).map(|k| a_at(k) * b_at(k)).sum();
                    let expected = sum + 0.5 * before[column * rows + row] + bias[row];
                    let got = d[column * rows + row];
                    assert!(
                        (got - expected).abs() < 2e-2,
                        "{kind} {transa} {transb} at {row}, {column}: {got} is not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn e4m3_products_apply_scales_and_need_one_layout() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let products = EmulatedCublasLt::open(&device);
    let (rows, columns, depth) = (32, 16, 48);
    // 0x38 is one and 0x40 is two in e4m3.
    let a = DeviceMatrix {
        at: device.upload(&vec![0x38_u8; rows * depth]),
        kind: E4M3,
        rows: depth,
        columns: rows,
    };
    let b = DeviceMatrix {
        at: device.upload(&vec![0x40_u8; depth * columns]),
        kind: E4M3,
        rows: depth,
        columns,
    };
    let d = DeviceMatrix {
        at: device.alloc(rows * columns * 2).expect("memory"),
        kind: BF16,
        rows,
        columns,
    };
    let by_row: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    let scales = vec![
        (A_SCALE, device.upload(&by_row), 8),
        (B_SCALE, device.upload(&[0.25_f32]), 8),
        (A_SCALE_MODE, 3, 4),
    ];
    let transposed = vec![(TRANSA, 1, 4)];
    assert_eq!(
        products.product([a, b, d], 0.0, [scales.clone(), transposed].concat()),
        0
    );
    let got: Vec<bf16> = device.read(d.at, rows * columns).expect("a product");
    assert!(
        got.iter()
            .enumerate()
            .all(|(index, x)| x.to_f32() == (index % rows) as f32 * 24.0),
        "{got:?}"
    );
    assert_eq!(
        products.product(
            [
                DeviceMatrix {
                    rows,
                    columns: depth,
                    ..a
                },
                b,
                d
            ],
            0.0,
            scales.clone()
        ),
        NOT_SUPPORTED,
        "not transposed"
    );
    let ragged = |matrix| DeviceMatrix { rows: 40, ..matrix };
    let transposed = vec![(TRANSA, 1, 4)];
    assert_eq!(
        products.product([ragged(a), ragged(b), d], 0.0, transposed.clone()),
        NOT_SUPPORTED,
        "no whole sixteens"
    );
    assert_eq!(
        products.product([a, DeviceMatrix { rows: 64, ..b }, d], 0.0, transposed),
        INVALID_VALUE,
        "they do not fit"
    );
}

#[test]
fn products_run_in_stream_order() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let products = EmulatedCublasLt::open(&device);
    let stream = device.stream();
    let matrix = |numbers: &[f32]| DeviceMatrix {
        at: device.upload(numbers),
        kind: F32,
        rows: 8,
        columns: 8,
    };
    let (a, b, d) = (matrix(&[0.0; 64]), matrix(&[1.0; 64]), matrix(&[0.0; 64]));
    let operation = MatmulCall {
        a,
        b,
        d,
        beta: 0.0,
        attributes: Vec::new(),
        stream,
    };
    let staging = device.pinned(64).expect("pinned memory");
    staging.fill(2.0_f32.to_bits());
    device.write_async(a.at, staging, stream).expect("a copy");
    assert_eq!(products.run(&operation), 0);
    assert_eq!(
        device.read::<f32>(d.at, 1).expect("numbers"),
        [0.0],
        "nobody waited"
    );
    device.synchronize_stream(stream).expect("no error");
    assert_eq!(device.read::<f32>(d.at, 1).expect("numbers"), [16.0]);
    device.begin_capture(stream).expect("a capture");
    assert_eq!(products.run(&operation), 0);
    let graph = device.end_capture(stream).expect("a graph");
    assert_eq!(device.nodes(graph).len(), 1);
    device.write(a.at, &[3.0_f32; 64]).expect("a copy");
    let exec = device.instantiate(graph).expect("an executable graph");
    device.launch_graph(exec, stream).expect("a launch");
    device.synchronize_stream(stream).expect("no error");
    assert_eq!(device.read::<f32>(d.at, 1).expect("numbers"), [24.0]);
}

#[test]
fn products_with_bad_operands_are_refused() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let products = EmulatedCublasLt::open(&device);
    let matrix = |at| DeviceMatrix {
        at,
        kind: F32,
        rows: 8,
        columns: 8,
    };
    let (there, short) = (device.upload(&[1.0_f32; 64]), device.upload(&[1.0_f32; 63]));
    let product = |a, b, d| products.product([matrix(a), matrix(b), matrix(d)], 0.0, Vec::new());
    assert_eq!(product(there, there, there), 0);
    assert_eq!(product(short, there, there), INVALID_VALUE);
    let on_host = [1.0_f32; 64];
    assert_eq!(
        product(there, on_host.as_ptr() as u64, there),
        INVALID_VALUE
    );
    device.stand_in.plan_faults("launch@1");
    device
        .run(
            "swap_halves",
            device::blocks(1, 64),
            device::MistakeArgs {
                results: there,
                numbers: there,
                choice: 1,
            },
        )
        .unwrap_err();
    assert_eq!(
        product(there, there, there),
        EXECUTION_FAILED,
        "after an error of the device"
    );
}
