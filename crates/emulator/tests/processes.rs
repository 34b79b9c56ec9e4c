//! Memory and events that two processes share, and memory of two devices in one.

use crate::device::{AddArgs, EmulatedDevice, ILLEGAL_ADDRESS, INVALID_CONTEXT, IpcHandle, blocks};
use std::env;
use std::process::Command;

const COUNT: usize = 5000;
const HANDLES: &str = "CLEAVE_TEST_HANDLES";

fn text(handle: IpcHandle) -> String {
    handle
        .bytes
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn handle(text: &str) -> IpcHandle {
    let mut bytes = [0; 64];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).expect("two digits");
    }
    IpcHandle { bytes }
}

/// Runs in the second process: waits for the first one's work, reads the numbers, and changes them.
#[test]
fn child_process_uses_shared_memory() {
    let Ok(handles) = env::var(HANDLES) else {
        return;
    };
    let device = EmulatedDevice::open().expect("whoever started us has an emulator");
    let (memory, event) = handles.split_once(' ').expect("two handles");
    let numbers = device.open_memory(handle(memory)).expect("its memory");
    assert_eq!(
        device.open_memory(handle(memory)),
        Ok(numbers),
        "the same memory twice"
    );
    let ready = device.open_event(handle(event)).expect("its event");
    let stream = device.stream();
    let copy = device.alloc(COUNT * 4).expect("memory");
    device.wait(stream, ready).expect("a wait");
    device
        .copy_async(copy, numbers, COUNT * 4, stream)
        .expect("a copy");
    device.synchronize_stream(stream).expect("no error");
    assert!(
        device
            .read::<u32>(copy, COUNT)
            .expect("numbers")
            .iter()
            .all(|&number| number == 42)
    );
    device
        .run(
            "add",
            blocks(40, 128),
            AddArgs {
                numbers,
                count: COUNT as u32,
                value: 1000,
            },
        )
        .expect("a launch");
    device.close_memory(numbers).expect("one of two");
    device.close_memory(numbers).expect("the other");
    assert!(device.close_memory(numbers).is_err(), "there were two");
}

#[test]
fn two_processes_share_memory_and_events() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let numbers = device.upload(&[40_u32; COUNT]);
    let (stream, ready) = (device.stream(), device.shared_event());
    for _ in 0..2 {
        device
            .launch(
                "add",
                blocks(40, 128),
                AddArgs {
                    numbers,
                    count: COUNT as u32,
                    value: 1,
                },
                stream,
            )
            .expect("a launch");
    }
    device.record(ready, stream).expect("a record");
    // This process does not wait for the work: the other one does.
    let handles = format!(
        "{} {}",
        text(device.memory_handle(numbers).expect("a handle")),
        text(device.event_handle(ready).expect("a handle"))
    );
    assert_eq!(
        device.open_memory(device.memory_handle(numbers).expect("a handle")),
        Err(INVALID_CONTEXT),
        "one's own"
    );
    let mut other = Command::new(env::current_exe().expect("this program"));
    other
        .args([
            "--exact",
            "processes::child_process_uses_shared_memory",
            "--nocapture",
        ])
        .env(HANDLES, handles);
    let output = other.output().expect("it starts");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        device
            .read::<u32>(numbers, COUNT)
            .expect("numbers")
            .iter()
            .all(|&number| number == 1042)
    );
}

const DEVICES: &str = "CLEAVE_STANDIN_DEVICES";

/// Runs in a process with two devices.
#[test]
fn child_process_with_two_devices() {
    if env::var(DEVICES).is_err() {
        return;
    }
    let device = EmulatedDevice::open().expect("whoever started us has an emulator");
    assert!(device.can_access_peer(1) && !device.can_access_peer(0));
    let peer = device.make_device_current(1).expect("the other device");
    let (there, free) = (device.upload(&[7_u32; COUNT]), device.memory().0);
    device.make_current();
    assert!(device.memory().0 > free, "each has its own memory");
    let here = device.upload(&[0_u32; COUNT]);
    let stream = device.stream();
    device
        .copy_from_peer(here, there, peer, COUNT * 4, stream)
        .expect("a copy");
    device.synchronize_stream(stream).expect("no error");
    assert_eq!(device.read::<u32>(here, 1).expect("numbers"), [7]);
    let add = AddArgs {
        numbers: there,
        count: COUNT as u32,
        value: 1,
    };
    device.enable_peer(peer).expect("peers");
    device.run("add", blocks(40, 128), add).expect("a launch");
    device.make_device_current(1).expect("the other device");
    assert_eq!(device.read::<u32>(there, 1).expect("numbers"), [8]);
    assert_eq!(
        device.run(
            "add",
            blocks(40, 128),
            AddArgs {
                numbers: here,
                ..add
            }
        ),
        Err(ILLEGAL_ADDRESS)
    );
    assert!(
        device.stand_in.last_message().contains("peer access"),
        "{}",
        device.stand_in.last_message()
    );
    device.make_current();
    device.alloc(4).expect("the first device has no error");
}

#[test]
fn two_devices_have_separate_memory_and_errors() {
    if env::var(DEVICES).is_ok() || EmulatedDevice::open().is_none() {
        return;
    }
    let mut other = Command::new(env::current_exe().expect("this program"));
    other
        .args([
            "--exact",
            "processes::child_process_with_two_devices",
            "--nocapture",
        ])
        .env(DEVICES, "2");
    let output = other.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}
