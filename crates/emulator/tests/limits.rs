//! Limits of memory and launches, and planned faults.

use crate::device::{
    AddArgs, EmulatedDevice, ILLEGAL_ADDRESS, INVALID_VALUE, KernelLaunch, LAUNCH_FAILED,
    LAUNCH_OUT_OF_RESOURCES, NO_BINARY_FOR_GPU, NOT_FOUND, NOT_READY, OUT_OF_MEMORY, blocks,
};
use std::ptr;

const NUMBERS: u32 = 10;

fn add(device: &EmulatedDevice) -> AddArgs {
    AddArgs {
        numbers: device.upload(&[0_u32; NUMBERS as usize]),
        count: NUMBERS,
        value: 1,
    }
}

#[test]
fn freed_memory_can_be_allocated_again() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let (free, total) = device.memory();
    assert_eq!((free, total), (2 << 30, 2 << 30));
    let most = device.alloc(total - (64 << 20)).expect("most of it");
    assert_eq!(device.alloc(65 << 20), Err(OUT_OF_MEMORY));
    let rest = device.alloc(64 << 20).expect("the rest");
    assert_eq!(device.memory().0, 0);
    device.free(most).expect("a free");
    device.free(rest).expect("a free");
    assert_eq!(device.memory().0, free);
}

#[test]
fn fresh_memory_reads_as_nan() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let at = device.alloc(1000).expect("memory");
    assert!(
        device
            .read::<f32>(at, 250)
            .expect("numbers")
            .iter()
            .all(|x| x.is_nan())
    );
    device.free(at).expect("a free");
    assert_ne!(
        device.alloc(1000).expect("memory"),
        at,
        "an address is not given out again soon"
    );
}

#[test]
fn launches_beyond_device_limits_are_refused() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let args = add(&device);
    let none = ptr::null_mut();
    assert_eq!(
        device.launch("add", blocks(0, 128), args, none),
        Err(INVALID_VALUE)
    );
    assert_eq!(
        device.launch("add", blocks(1, 160), args, none),
        Err(LAUNCH_OUT_OF_RESOURCES)
    );
    assert_eq!(
        device.launch("nothing_of_that_name", blocks(1, 32), args, none),
        Err(NOT_FOUND)
    );
    let wide = |shared_bytes| KernelLaunch {
        grid: [1, 1, 1],
        threads: 128,
        shared_bytes,
    };
    assert_eq!(
        device.launch("add", wide(64 << 10), args, none),
        Err(INVALID_VALUE),
        "not allowed yet"
    );
    let function = device.function("add").expect("a function");
    device
        .allow_shared(function, 64 << 10)
        .expect("less than a block can have");
    device.run("add", wide(64 << 10), args).expect("a launch");
    const OPTIN_MAX: i32 = 97;
    let most = device.attribute(OPTIN_MAX);
    assert_eq!(most, 227 << 10);
    device
        .allow_shared(function, most)
        .expect("what a block can have");
    assert_eq!(device.allow_shared(function, most + 1), Err(INVALID_VALUE));
}

#[test]
fn planned_faults_occur_at_their_call() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    device
        .stand_in
        .plan_faults("alloc@3,module@1,host_alloc@1,event_late@2");
    assert_eq!(device.load_module(), Err(NO_BINARY_FOR_GPU));
    device.load_module().expect("the next one is fine");
    device.alloc(4).expect("the first");
    device.alloc(4).expect("the second");
    assert_eq!(device.alloc(4), Err(OUT_OF_MEMORY));
    device.alloc(4).expect("the fourth");
    assert_eq!(device.pinned(4).map(drop), Err(OUT_OF_MEMORY));
    let (event, stream) = (device.event(), device.stream());
    device.record(event, stream).expect("a record");
    device.synchronize_event(event).expect("no error");
    assert_eq!(
        [
            device.query(event),
            device.query(event),
            device.query(event)
        ],
        [Err(NOT_READY), Err(NOT_READY), Ok(())]
    );
}

#[test]
fn a_failed_launch_fails_every_later_call() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let args = add(&device);
    device.stand_in.plan_faults("launch:follow@1,launch:add@2");
    device.run("add", blocks(1, 128), args).expect("the first");
    let (stream, after) = (device.stream(), device.event());
    device
        .launch("add", blocks(1, 128), args, stream)
        .expect("accepted");
    device.record(after, stream).expect("a record");
    assert_eq!(device.synchronize_event(after), Err(LAUNCH_FAILED));
    assert_eq!(device.alloc(4), Err(LAUNCH_FAILED));
    assert_eq!(
        device.launch("add", blocks(1, 128), args, stream),
        Err(LAUNCH_FAILED)
    );
}

#[test]
fn a_failed_copy_fails_every_later_wait() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let args = add(&device);
    device.stand_in.plan_faults("copy@2");
    assert_eq!(device.read::<u32>(args.numbers, 1).expect("the first"), [0]);
    assert_eq!(device.read::<u32>(args.numbers, 1), Err(ILLEGAL_ADDRESS));
    assert_eq!(device.synchronize(), Err(ILLEGAL_ADDRESS));
}

#[test]
#[should_panic(expected = "not a list of faults")]
fn an_unknown_fault_panics() {
    let Some(device) = EmulatedDevice::open() else {
        panic!("not a list of faults, and no emulator")
    };
    device.stand_in.plan_faults("alloc@0");
}

#[test]
fn driver_calls_are_counted() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let args = add(&device);
    let before = ["launch", "alloc", "wait"].map(|call| device.stand_in.calls_count(call));
    device.run("add", blocks(1, 128), args).expect("a launch");
    let after = ["launch", "alloc", "wait"].map(|call| device.stand_in.calls_count(call));
    assert_eq!(
        [
            after[0] - before[0],
            after[1] - before[1],
            after[2] - before[2]
        ],
        [1, 0, 1]
    );
}
