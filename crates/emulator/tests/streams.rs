//! Order among streams: guarantees of the API hold under every seed, and missing synchronisation
//! fails under some.

use crate::device::{self, AddArgs, EmulatedDevice, INVALID_VALUE, NOT_READY, blocks};
use std::ptr;

const COUNT: usize = 300;

fn add(numbers: u64, value: u32) -> AddArgs {
    AddArgs {
        numbers,
        count: COUNT as u32,
        value,
    }
}

/// One stream writes, another copies the result, with or without an event between them.
fn copy_between_streams(device: &EmulatedDevice, seed: u64, waits: bool) -> u32 {
    device.stand_in.set_seed(seed);
    let (writer, reader, written) = (device.stream(), device.stream(), device.event());
    let from = device.upload(&[0_u32; COUNT]);
    let to = device.alloc(COUNT * 4).expect("memory");
    for value in 1..=4 {
        device
            .launch("add", blocks(3, 128), add(from, value), writer)
            .expect("a launch");
    }
    device.record(written, writer).expect("a record");
    if waits {
        device.wait(reader, written).expect("a wait");
    }
    device
        .copy_async(to, from, COUNT * 4, reader)
        .expect("a copy");
    device.synchronize().expect("no error");
    let got: Vec<u32> = device.read(to, COUNT).expect("numbers");
    for stream in [writer, reader] {
        device.destroy_stream(stream).expect("a stream");
    }
    assert!(got.iter().all(|&number| number == got[0]));
    got[0]
}

#[test]
fn a_missing_event_wait_fails_under_some_seed() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let seeds = 1..20;
    assert!(
        seeds
            .clone()
            .all(|seed| copy_between_streams(&device, seed, true) == 10)
    );
    let results: Vec<u32> = seeds
        .map(|seed| copy_between_streams(&device, seed, false))
        .collect();
    assert!(results.iter().any(|&number| number != 10), "{results:?}");
}

#[test]
fn pinned_copies_read_their_buffer_when_they_run() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let stream = device.stream();
    let staging = device.pinned(COUNT).expect("pinned memory");
    let to = device.alloc(COUNT * 4).expect("memory");
    staging.fill(1);
    device.write_async(to, staging, stream).expect("a copy");
    staging.fill(2);
    device.synchronize_stream(stream).expect("no error");
    assert_eq!(
        device.read::<u32>(to, 1).expect("numbers"),
        [2],
        "pinned memory is read when the copy runs"
    );
    let mut pageable = vec![3_u32; COUNT];
    device.write_async(to, &pageable, stream).expect("a copy");
    pageable.fill(4);
    device.synchronize_stream(stream).expect("no error");
    assert_eq!(
        device.read::<u32>(to, 1).expect("numbers"),
        [3],
        "pageable memory is read at the call"
    );
    device
        .read_async(&mut pageable, to, stream)
        .expect("a copy");
    assert_eq!(
        pageable[0], 3,
        "pageable memory is written before the call returns"
    );
}

#[test]
fn pinned_results_arrive_only_after_a_wait() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let (stream, done) = (device.stream(), device.event());
    let result = device.pinned(COUNT).expect("pinned memory");
    result.fill(0);
    let numbers = device.upload(&[5_u32; COUNT]);
    device.read_async(result, numbers, stream).expect("a copy");
    device.record(done, stream).expect("a record");
    assert_eq!(result[0], 0);
    device.synchronize_event(done).expect("no error");
    assert_eq!(result[0], 5);
}

#[test]
fn event_queries_make_progress() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let (stream, first, last) = (device.stream(), device.event(), device.event());
    let numbers = device.upload(&[0_u32; COUNT]);
    assert_eq!(device.query(first), Ok(()), "never recorded is complete");
    device.record(first, stream).expect("a record");
    for _ in 0..5 {
        device
            .launch("add", blocks(3, 128), add(numbers, 1), stream)
            .expect("a launch");
    }
    device.record(last, stream).expect("a record");
    assert_eq!(device.elapsed(first, last), Err(NOT_READY));
    let mut queries_count = 0;
    while device.query(last) == Err(NOT_READY) {
        queries_count += 1;
        assert!(queries_count < 10, "a question runs a piece of work");
    }
    assert!(queries_count > 1, "a question ran everything");
    assert!(device.elapsed(first, last).expect("both are there") >= 0.0);
    assert_eq!(device.query_stream(stream), Ok(()));
}

#[test]
fn the_legacy_stream_orders_blocking_streams() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    for seed in 0..20 {
        device.stand_in.set_seed(seed);
        let numbers = device.upload(&[0_u32; COUNT]);
        let (blocking, legacy) = (device.blocking_stream(), ptr::null_mut());
        device
            .fill_async(numbers, 3, COUNT, blocking)
            .expect("a fill");
        device
            .fill_async(numbers, 5, COUNT, legacy)
            .expect("a fill");
        device
            .launch("add", blocks(3, 128), add(numbers, 1), blocking)
            .expect("a launch");
        device.synchronize().expect("no error");
        assert_eq!(
            device.read::<u32>(numbers, 1).expect("numbers"),
            [6],
            "seed {seed}"
        );
    }
}

#[test]
fn threads_submit_to_their_own_streams() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let streams: Vec<usize> = (0..4).map(|_| device.stream() as usize).collect();
    let buffers: Vec<u64> = (0..4).map(|_| device.upload(&[0_u32; COUNT])).collect();
    let device = SyncDevice(&device);
    std::thread::scope(|scope| {
        for (&stream, &numbers) in streams.iter().zip(&buffers) {
            let device = &device;
            scope.spawn(move || {
                device.0.make_current();
                let stream = stream as device::DriverHandle;
                for _ in 0..50 {
                    device
                        .0
                        .launch("add", blocks(3, 128), add(numbers, 1), stream)
                        .expect("a launch");
                    device.0.synchronize_stream(stream).expect("no error");
                }
            });
        }
    });
    for numbers in buffers {
        assert!(
            device
                .0
                .read::<u32>(numbers, COUNT)
                .expect("numbers")
                .iter()
                .all(|&number| number == 50)
        );
    }
}

/// The driver's calls may come from any thread; it synchronises the objects behind the handles
/// itself.
struct SyncDevice<'a>(&'a EmulatedDevice);
// SAFETY: `EmulatedDevice` holds handles that the driver takes from any thread, and a lock's guard
// that is only kept.
unsafe impl Sync for SyncDevice<'_> {}

#[test]
fn a_copy_past_an_allocation_is_refused() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let numbers = device.upload(&[0_u32; COUNT]);
    assert_eq!(
        device.write(numbers, &[0_u32; COUNT + 1]),
        Err(INVALID_VALUE)
    );
    assert!(
        device
            .stand_in
            .last_message()
            .contains("not all in one allocation"),
        "{}",
        device.stand_in.last_message()
    );
    assert_eq!(device.read::<u32>(numbers + 4, COUNT), Err(INVALID_VALUE));
    let on_host = [0_u32; 4];
    assert_eq!(
        device.write(on_host.as_ptr() as u64, &on_host),
        Err(INVALID_VALUE)
    );
    device.free(numbers).expect("a free");
    assert_eq!(device.free(numbers), Err(INVALID_VALUE), "twice");
    assert_eq!(
        device.read::<u32>(numbers, 1),
        Err(INVALID_VALUE),
        "after it was freed"
    );
}
