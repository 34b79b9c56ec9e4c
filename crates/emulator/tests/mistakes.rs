//! Planted mistakes are found: as a failed launch with a message that names the cause, as NaNs, or
//! by a sanitizer.

use crate::device::{
    self, EmulatedDevice, ILLEGAL_ADDRESS, KernelLaunch, LAUNCH_FAILED, MISALIGNED_ADDRESS,
    MistakeArgs,
};
use cleave_emulator::{SANITIZER_EXIT, SanitizerVariant, driver_library_of, sanitized_command};
use std::env;

fn shape(threads: u32, shared_bytes: u32) -> KernelLaunch {
    KernelLaunch {
        grid: [1, 1, 1],
        threads,
        shared_bytes,
    }
}

fn args(device: &EmulatedDevice, choice: u64) -> MistakeArgs {
    let numbers: Vec<f32> = (0..128).map(|index| index as f32).collect();
    MistakeArgs {
        results: device.alloc(64 * 4).expect("memory"),
        numbers: device.upload(&numbers),
        choice,
    }
}

/// Checks that the launch fails with this code and message, that the context keeps the error, and
/// that a new context works.
fn expect_failure(kernel: &str, shape: KernelLaunch, choice: u64, code: i32, words: &[&str]) {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let args = args(&device, choice);
    assert_eq!(device.run(kernel, shape, args), Err(code), "{kernel}");
    let message = device.stand_in.last_message();
    for word in words {
        assert!(
            message.contains(word),
            "{kernel}: `{message}` does not say `{word}`"
        );
    }
    assert_eq!(device.alloc(4), Err(code), "an error of the device stays");
    drop(device);
    let device = EmulatedDevice::open().expect("it was there before");
    let args = self::args(&device, 1);
    device
        .run("swap_halves", self::shape(64, 256), args)
        .expect("a new context works");
    let swapped: Vec<f32> = device.read(args.results, 64).expect("results");
    assert_eq!(swapped[3], 35.0);
}

#[test]
fn a_divergent_barrier_is_reported() {
    let words = [
        "divergent_barrier",
        "sync_block at mistakes.cu:",
        "meets sync_block",
    ];
    expect_failure("divergent_barrier", shape(64, 0), 0, LAUNCH_FAILED, &words);
}

#[test]
fn a_barrier_not_reached_by_all_is_reported() {
    let words = [
        "deadlock",
        "40 of 64 threads wait in sync_block at mistakes.cu:",
        "24 have returned",
    ];
    expect_failure("unreached_barrier", shape(64, 0), 0, LAUNCH_FAILED, &words);
}

#[test]
fn a_shuffle_of_half_a_warp_is_reported() {
    let words = [
        "deadlock",
        "lanes 0000ffff wait in a shuffle at mistakes.cu:",
    ];
    expect_failure("half_a_shuffle", shape(32, 0), 0, LAUNCH_FAILED, &words);
}

#[test]
fn two_shuffles_of_one_warp_at_once_are_reported() {
    expect_failure(
        "two_shuffles",
        shape(32, 0),
        0,
        LAUNCH_FAILED,
        &["a shuffle at mistakes.cu:", "meets a shuffle"],
    );
}

#[test]
fn an_unawaited_copy_at_the_end_is_reported() {
    expect_failure(
        "copy_left_behind",
        shape(32, 512),
        0,
        LAUNCH_FAILED,
        &["asynchronous copies that nobody waited for"],
    );
}

#[test]
fn a_write_past_dynamic_shared_memory_is_reported() {
    expect_failure(
        "write_shared",
        shape(32, 256),
        64,
        ILLEGAL_ADDRESS,
        &["write_shared", "past the end of its 256 bytes"],
    );
}

#[test]
fn a_write_a_page_past_shared_memory_is_reported() {
    expect_failure(
        "write_shared",
        shape(32, 256),
        300,
        ILLEGAL_ADDRESS,
        &["write_shared", "where there is no memory"],
    );
}

#[test]
fn a_write_past_an_allocation_is_reported() {
    expect_failure(
        "write_global",
        shape(32, 0),
        1 << 20,
        ILLEGAL_ADDRESS,
        &["write_global", "where there is no memory"],
    );
}

#[test]
fn a_misaligned_address_is_reported() {
    expect_failure(
        "misaligned",
        shape(32, 0),
        0,
        MISALIGNED_ADDRESS,
        &["misaligned", "no multiple of 16 at mistakes.cu:"],
    );
}

#[test]
fn a_stack_overflow_is_reported() {
    expect_failure(
        "overflow_stack",
        shape(32, 0),
        1 << 20,
        ILLEGAL_ADDRESS,
        &["its stack overflowed"],
    );
}

#[test]
fn a_write_to_an_allocations_padding_is_reported() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    // 40 bytes: the next float lies in the padding up to 256.
    let results = device.alloc(40).expect("memory");
    let args = MistakeArgs {
        results,
        numbers: results,
        choice: 10,
    };
    assert_eq!(
        device.run("write_global", shape(32, 0), args),
        Err(ILLEGAL_ADDRESS)
    );
    assert!(
        device
            .stand_in
            .last_message()
            .contains("past the end of an allocation of 40 bytes"),
        "{}",
        device.stand_in.last_message()
    );
}

#[test]
fn misuses_of_wgmma_are_reported() {
    let shape = shape(128, 24576);
    let wrongs = [
        (0, LAUNCH_FAILED, "not fenced"),
        (2, LAUNCH_FAILED, "changed under a wgmma"),
        (4, MISALIGNED_ADDRESS, "does not begin with its pattern"),
    ];
    for (choice, code, word) in wrongs {
        let words = ["kernel warpgroup", word, "mistakes.cu:"];
        expect_failure("warpgroup", shape, choice, code, &words);
    }
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    for (choice, is_early) in [(1, false), (3, true)] {
        let args = args(&device, choice);
        device.run("warpgroup", shape, args).expect("a launch");
        let sums: Vec<f32> = device.read(args.results, 64).expect("results");
        assert!(sums.iter().all(|sum| sum.is_nan() == is_early), "{sums:?}");
    }
}

#[test]
fn a_copy_read_before_its_wait_gives_nan() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    for (choice, is_right) in [(0, false), (1, true)] {
        let args = args(&device, choice);
        device
            .run("without_wait", shape(32, 512), args)
            .expect("a launch");
        let read: Vec<f32> = device.read(args.results, 32).expect("results");
        assert_eq!(read.iter().any(|x| x.is_nan()), !is_right, "{read:?}");
        assert!(!is_right || read[6] == 28.0, "{read:?}");
    }
}

#[test]
fn host_memory_in_kernel_arguments_is_reported() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let on_host = [0.0_f32; 64];
    let mut args = args(&device, 0);
    args.numbers = on_host.as_ptr() as u64;
    assert_eq!(
        device.run("half_a_shuffle", shape(32, 0), args),
        Err(ILLEGAL_ADDRESS)
    );
    assert!(
        device.stand_in.last_message().contains("byte 8")
            && device.stand_in.last_message().contains("host memory"),
        "{}",
        device.stand_in.last_message()
    );
}

#[test]
fn freed_memory_in_kernel_arguments_is_reported() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let args = args(&device, 0);
    device.free(args.numbers).expect("a free");
    assert_eq!(
        device.run("write_global", shape(32, 0), args),
        Err(ILLEGAL_ADDRESS)
    );
    assert!(
        device.stand_in.last_message().contains("was freed"),
        "{}",
        device.stand_in.last_message()
    );
}

// === with sanitizers: this program starts itself again ===

const KERNEL: &str = "CLEAVE_TEST_MISTAKE";

/// Runs in the child process with the sanitizer: `kernel choice`.
#[test]
fn child_process_runs_one_kernel() {
    let Ok(kernel_and_choice) = env::var(KERNEL) else {
        return;
    };
    let (kernel, choice) = kernel_and_choice.split_once(' ').expect("two words");
    let device = EmulatedDevice::open().expect("whoever started us has an emulator");
    let args = args(&device, choice.parse().expect("a number"));
    let shape = match kernel {
        "swap_halves" => self::shape(64, 256),
        "write_shared" => self::shape(32, 256),
        _ => self::shape(32, 0),
    };
    device.run(kernel, shape, args).expect("a launch");
    println!("it ran");
}

fn run_sanitized(variant: SanitizerVariant, kernel: &str, choice: u64) -> Option<(i32, String)> {
    // Compiled here, so that the child need not wait.
    driver_library_of(&device::kernels(), variant)?;
    let program = env::current_exe().expect("this program");
    let mut command = sanitized_command(variant, program.as_os_str())?;
    command.args([
        "--exact",
        "mistakes::child_process_runs_one_kernel",
        "--nocapture",
    ]);
    command.env(KERNEL, format!("{kernel} {choice}"));
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    Some((output.status.code().unwrap_or(-1), text))
}

#[test]
fn the_address_sanitizer_names_the_line() {
    for (kernel, choice) in [
        ("write_shared", 64),
        ("write_static_shared", 1),
        ("write_global", 64),
    ] {
        let Some((code, output)) = run_sanitized(SanitizerVariant::Address, kernel, choice) else {
            return;
        };
        assert_eq!(code, SANITIZER_EXIT, "{output}");
        assert!(
            output.contains("AddressSanitizer") && output.contains("mistakes.cu"),
            "{output}"
        );
    }
}

#[test]
fn the_address_sanitizer_accepts_correct_kernels() {
    for (kernel, choice) in [
        ("write_shared", 63),
        ("write_static_shared", 0),
        ("write_global", 63),
        ("swap_halves", 1),
    ] {
        let Some((code, output)) = run_sanitized(SanitizerVariant::Address, kernel, choice) else {
            return;
        };
        assert!(code == 0 && output.contains("it ran"), "{output}");
    }
}

#[test]
fn the_thread_sanitizer_finds_a_missing_barrier() {
    let Some((code, output)) = run_sanitized(SanitizerVariant::Thread, "swap_halves", 0) else {
        return;
    };
    assert_eq!(code, SANITIZER_EXIT, "{output}");
    assert!(
        output.contains("data race") && output.contains("mistakes.cu"),
        "{output}"
    );
    let (code, output) =
        run_sanitized(SanitizerVariant::Thread, "swap_halves", 1).expect("as before");
    assert!(
        code == 0 && output.contains("it ran") && !output.contains("data race"),
        "{output}"
    );
}
