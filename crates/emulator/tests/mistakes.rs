//! Planted mistakes are found: as a failed launch with a line that says why, as NaNs, or by a sanitizer.
#![allow(unsafe_code)]

mod device;

use cleave_emulator::{FOUND_EXIT, Variant, command, library_of};
use device::{Device, ILLEGAL_ADDRESS, LAUNCH_FAILED, MISALIGNED_ADDRESS, Mistake, Shape};
use std::env;

fn shape(threads: u32, shared_bytes: u32) -> Shape {
    Shape {
        grid: [1, 1, 1],
        threads,
        shared_bytes,
    }
}

fn args(device: &Device, choice: u64) -> Mistake {
    let numbers: Vec<f32> = (0..128).map(|index| index as f32).collect();
    Mistake {
        results: device.alloc(64 * 4).expect("memory"),
        numbers: device.upload(&numbers),
        choice,
    }
}

/// The launch fails in that way, the line says so, the context says so from then on, and a new one works.
fn expect_failure(kernel: &str, shape: Shape, choice: u64, code: i32, words: &[&str]) {
    let Some(device) = Device::open() else { return };
    let args = args(&device, choice);
    assert_eq!(device.run(kernel, shape, args), Err(code), "{kernel}");
    let message = device.stand_in.message();
    for word in words {
        assert!(
            message.contains(word),
            "{kernel}: `{message}` does not say `{word}`"
        );
    }
    assert_eq!(device.alloc(4), Err(code), "an error of the device stays");
    drop(device);
    let device = Device::open().expect("it was there before");
    let args = self::args(&device, 1);
    device
        .run("swap_halves", self::shape(64, 256), args)
        .expect("a new context works");
    let swapped: Vec<f32> = device.read(args.results, 64).expect("results");
    assert_eq!(swapped[3], 35.0);
}

#[test]
fn a_barrier_in_two_branches() {
    let words = [
        "divergent_barrier",
        "sync_block at mistakes.cu:",
        "meets sync_block",
    ];
    expect_failure("divergent_barrier", shape(64, 0), 0, LAUNCH_FAILED, &words);
}

#[test]
fn a_barrier_that_some_never_reach() {
    let words = [
        "deadlock",
        "40 of 64 threads wait in sync_block at mistakes.cu:",
        "24 have returned",
    ];
    expect_failure("unreached_barrier", shape(64, 0), 0, LAUNCH_FAILED, &words);
}

#[test]
fn a_shuffle_of_half_a_warp() {
    let words = [
        "deadlock",
        "lanes 0000ffff wait in a shuffle at mistakes.cu:",
    ];
    expect_failure("half_a_shuffle", shape(32, 0), 0, LAUNCH_FAILED, &words);
}

#[test]
fn two_shuffles_of_one_warp_at_once() {
    expect_failure(
        "two_shuffles",
        shape(32, 0),
        0,
        LAUNCH_FAILED,
        &["a shuffle at mistakes.cu:", "meets a shuffle"],
    );
}

#[test]
fn a_copy_that_nobody_waited_for_at_the_end() {
    expect_failure(
        "copy_left_behind",
        shape(32, 512),
        0,
        LAUNCH_FAILED,
        &["asynchronous copies that nobody waited for"],
    );
}

#[test]
fn one_float_past_dynamic_shared_memory() {
    expect_failure(
        "write_shared",
        shape(32, 256),
        64,
        ILLEGAL_ADDRESS,
        &["write_shared", "past the end of its 256 bytes"],
    );
}

#[test]
fn a_page_past_dynamic_shared_memory() {
    expect_failure(
        "write_shared",
        shape(32, 256),
        300,
        ILLEGAL_ADDRESS,
        &["write_shared", "where there is no memory"],
    );
}

#[test]
fn one_float_past_an_allocation() {
    expect_failure(
        "write_global",
        shape(32, 0),
        1 << 20,
        ILLEGAL_ADDRESS,
        &["write_global", "where there is no memory"],
    );
}

#[test]
fn an_address_that_is_not_a_multiple_of_sixteen() {
    expect_failure(
        "misaligned",
        shape(32, 0),
        0,
        MISALIGNED_ADDRESS,
        &["misaligned", "no multiple of 16 at mistakes.cu:"],
    );
}

#[test]
fn a_stack_that_overflows() {
    expect_failure(
        "overflow_stack",
        shape(32, 0),
        1 << 20,
        ILLEGAL_ADDRESS,
        &["its stack overflowed"],
    );
}

#[test]
fn a_tail_of_an_allocation_that_was_written_to() {
    let Some(device) = Device::open() else { return };
    // 40 bytes: the float after them lies in what is left of the 256.
    let results = device.alloc(40).expect("memory");
    let args = Mistake {
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
            .message()
            .contains("past the end of an allocation of 40 bytes"),
        "{}",
        device.stand_in.message()
    );
}

#[test]
fn a_warpgroup_multiplied_what_it_must_not() {
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
    let Some(device) = Device::open() else { return };
    for (choice, is_early) in [(1, false), (3, true)] {
        let args = args(&device, choice);
        device.run("warpgroup", shape, args).expect("a launch");
        let sums: Vec<f32> = device.read(args.results, 64).expect("results");
        assert!(sums.iter().all(|sum| sum.is_nan() == is_early), "{sums:?}");
    }
}

#[test]
fn a_copy_was_read_before_it_was_waited_for() {
    let Some(device) = Device::open() else { return };
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
fn host_memory_was_given_to_a_kernel() {
    let Some(device) = Device::open() else { return };
    let on_host = [0.0_f32; 64];
    let mut args = args(&device, 0);
    args.numbers = on_host.as_ptr() as u64;
    assert_eq!(
        device.run("half_a_shuffle", shape(32, 0), args),
        Err(ILLEGAL_ADDRESS)
    );
    assert!(
        device.stand_in.message().contains("byte 8")
            && device.stand_in.message().contains("host memory"),
        "{}",
        device.stand_in.message()
    );
}

#[test]
fn freed_memory_was_given_to_a_kernel() {
    let Some(device) = Device::open() else { return };
    let args = args(&device, 0);
    device.free(args.numbers).expect("a free");
    assert_eq!(
        device.run("write_global", shape(32, 0), args),
        Err(ILLEGAL_ADDRESS)
    );
    assert!(
        device.stand_in.message().contains("was freed"),
        "{}",
        device.stand_in.message()
    );
}

// === with sanitizers: this program starts itself again ===

const KERNEL: &str = "CLEAVE_TEST_MISTAKE";

/// What runs in the process with the sanitizer: `kernel choice`.
#[test]
fn in_a_process_of_its_own() {
    let Ok(what) = env::var(KERNEL) else { return };
    let (kernel, choice) = what.split_once(' ').expect("two words");
    let device = Device::open().expect("whoever started us has an emulator");
    let args = args(&device, choice.parse().expect("a number"));
    let shape = match kernel {
        "swap_halves" => self::shape(64, 256),
        "write_shared" => self::shape(32, 256),
        _ => self::shape(32, 0),
    };
    device.run(kernel, shape, args).expect("a launch");
    println!("it ran");
}

fn sanitized(variant: Variant, kernel: &str, choice: u64) -> Option<(i32, String)> {
    // Compiled here: a child finds it there.
    library_of(&device::kernels(), variant)?;
    let program = env::current_exe().expect("this program");
    let mut command = command(variant, program.as_os_str())?;
    command.args(["--exact", "in_a_process_of_its_own", "--nocapture"]);
    command.env(KERNEL, format!("{kernel} {choice}"));
    let said = command.output().expect("it starts");
    let text =
        String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr);
    Some((said.status.code().unwrap_or(-1), text))
}

#[test]
fn the_address_sanitizer_names_the_line() {
    for (kernel, choice) in [
        ("write_shared", 64),
        ("write_static_shared", 1),
        ("write_global", 64),
    ] {
        let Some((code, said)) = sanitized(Variant::Address, kernel, choice) else {
            return;
        };
        assert_eq!(code, FOUND_EXIT, "{said}");
        assert!(
            said.contains("AddressSanitizer") && said.contains("mistakes.cu"),
            "{said}"
        );
    }
}

#[test]
fn the_address_sanitizer_is_silent_about_right_kernels() {
    for (kernel, choice) in [
        ("write_shared", 63),
        ("write_static_shared", 0),
        ("write_global", 63),
        ("swap_halves", 1),
    ] {
        let Some((code, said)) = sanitized(Variant::Address, kernel, choice) else {
            return;
        };
        assert!(code == 0 && said.contains("it ran"), "{said}");
    }
}

#[test]
fn the_thread_sanitizer_sees_a_missing_barrier() {
    let Some((code, said)) = sanitized(Variant::Thread, "swap_halves", 0) else {
        return;
    };
    assert_eq!(code, FOUND_EXIT, "{said}");
    assert!(
        said.contains("data race") && said.contains("mistakes.cu"),
        "{said}"
    );
    let (code, said) = sanitized(Variant::Thread, "swap_halves", 1).expect("as before");
    assert!(
        code == 0 && said.contains("it ran") && !said.contains("data race"),
        "{said}"
    );
}
