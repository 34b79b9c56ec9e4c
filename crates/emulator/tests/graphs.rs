//! Stream captures and graphs: their effects, and the calls that are forbidden during a capture.

use crate::device::{
    AddArgs, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_UNJOINED, CAPTURE_UNSUPPORTED,
    DriverHandle, EmulatedDevice, UPDATE_FAILURE, blocks,
};

const COUNT: usize = 200;

fn add(device: &EmulatedDevice, numbers: u64, value: u32, stream: DriverHandle) {
    let args = AddArgs {
        numbers,
        count: COUNT as u32,
        value,
    };
    device
        .launch("add", blocks(2, 128), args, stream)
        .expect("a launch");
}

fn first(device: &EmulatedDevice, numbers: u64) -> u32 {
    let all: Vec<u32> = device.read(numbers, COUNT).expect("numbers");
    assert!(all.iter().all(|&number| number == all[0]));
    all[0]
}

struct ForkJoinWork<'a> {
    device: &'a EmulatedDevice,
    numbers: u64,
    copied: u64,
    main: DriverHandle,
    side: DriverHandle,
}

impl ForkJoinWork<'_> {
    /// numbers = 7; on a second stream copied = numbers; then numbers += 5 and, after both, copied
    /// += 1.
    fn submit(&self) {
        let ForkJoinWork {
            device,
            numbers,
            copied,
            main,
            side,
        } = *self;
        let (forked, joined) = (device.event(), device.event());
        device.fill_async(numbers, 7, COUNT, main).expect("a fill");
        device.record(forked, main).expect("a record");
        device.wait(side, forked).expect("a wait");
        device
            .copy_async(copied, numbers, COUNT * 4, side)
            .expect("a copy");
        device.record(joined, side).expect("a record");
        device.wait(main, joined).expect("a wait");
        add(device, numbers, 5, main);
        add(device, copied, 1, main);
    }

    fn result(&self) -> (u32, u32) {
        self.device.synchronize().expect("no error");
        (
            first(self.device, self.numbers),
            first(self.device, self.copied),
        )
    }
}

#[test]
fn a_graph_repeats_its_captured_work() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let fresh = || device.upload(&[0_u32; COUNT]);
    let work = ForkJoinWork {
        device: &device,
        numbers: fresh(),
        copied: fresh(),
        main: device.stream(),
        side: device.stream(),
    };
    device.begin_capture(work.main).expect("a capture");
    work.submit();
    let graph = device.end_capture(work.main).expect("a graph");
    assert_eq!(device.nodes(graph).len(), 4);
    assert_eq!(work.result(), (0, 0), "a capture runs nothing");
    let exec = device.instantiate(graph).expect("an executable graph");
    for seed in 0..12 {
        device.stand_in.set_seed(seed);
        work.submit();
        assert_eq!(work.result(), (12, 8), "seed {seed}");
        device.launch_graph(exec, work.main).expect("a launch");
        assert_eq!(work.result(), (12, 8), "a graph, seed {seed}");
    }
}

#[test]
fn launches_of_one_graph_run_in_order() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let (main, side) = (device.stream(), device.stream());
    let numbers = device.upload(&[0_u32; COUNT]);
    device.begin_capture(main).expect("a capture");
    add(&device, numbers, 1, main);
    add(&device, numbers, 2, main);
    let graph = device.end_capture(main).expect("a graph");
    let exec = device.instantiate(graph).expect("an executable graph");
    for stream in [main, side, main] {
        device.launch_graph(exec, stream).expect("a launch");
    }
    device.synchronize().expect("no error");
    assert_eq!(first(&device, numbers), 9);
}

#[test]
fn graph_updates_apply_to_later_launches_only() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let stream = device.stream();
    let numbers = device.upload(&[0_u32; COUNT]);
    let capture = |value| {
        device.begin_capture(stream).expect("a capture");
        add(&device, numbers, value, stream);
        device.end_capture(stream).expect("a graph")
    };
    let graph = capture(1);
    let exec = device.instantiate(graph).expect("an executable graph");
    device.launch_graph(exec, stream).expect("a launch");
    let args = AddArgs {
        numbers,
        count: COUNT as u32,
        value: 10,
    };
    device
        .set_args(exec, device.nodes(graph)[0], args)
        .expect("an update");
    device.launch_graph(exec, stream).expect("a launch");
    device.update(exec, capture(100)).expect("an update");
    device.launch_graph(exec, stream).expect("a launch");
    device.synchronize().expect("no error");
    assert_eq!(first(&device, numbers), 111);
    device.begin_capture(stream).expect("a capture");
    add(&device, numbers, 1, stream);
    add(&device, numbers, 1, stream);
    let longer = device.end_capture(stream).expect("a graph");
    assert_eq!(device.update(exec, longer), Err(UPDATE_FAILURE));
}

/// The name of a forbidden call, and the call.
type ForbiddenCall<'a> = (&'a str, &'a dyn Fn() -> Result<(), i32>);

#[test]
fn synchronous_calls_invalidate_a_capture() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let (stream, other) = (device.stream(), device.stream());
    let numbers = device.upload(&[0_u32; COUNT]);
    let event = device.event();
    device.record(event, other).expect("a record");
    let forbidden: [ForbiddenCall<'_>; 7] = [
        ("synchronize its stream", &|| {
            device.synchronize_stream(stream)
        }),
        ("synchronize another", &|| device.synchronize_stream(other)),
        ("synchronize all", &|| device.synchronize()),
        ("ask an event", &|| device.query(event)),
        ("allocate", &|| device.alloc(4).map(drop)),
        ("free", &|| device.free(numbers)),
        ("copy at once", &|| device.write(numbers, &[1_u32])),
    ];
    for (call, forbidden) in forbidden {
        device.begin_capture(stream).expect("a capture");
        add(&device, numbers, 1, stream);
        assert_eq!(forbidden(), Err(CAPTURE_UNSUPPORTED), "{call}");
        assert_eq!(
            device.end_capture(stream),
            Err(CAPTURE_INVALIDATED),
            "{call}"
        );
    }
    device.begin_capture(stream).expect("a capture");
    add(&device, numbers, 1, other);
    device
        .end_capture(stream)
        .expect("what another stream does meanwhile is no matter");
    device.synchronize().expect("no error");
    assert_eq!(first(&device, numbers), 1);
}

#[test]
fn unjoined_streams_and_outside_events_fail_a_capture() {
    let Some(device) = EmulatedDevice::open() else {
        return;
    };
    let (main, side, event) = (device.stream(), device.stream(), device.event());
    let numbers = device.upload(&[0_u32; COUNT]);
    device.begin_capture(main).expect("a capture");
    add(&device, numbers, 1, main);
    device.record(event, main).expect("a record");
    device.wait(side, event).expect("a wait");
    add(&device, numbers, 1, side);
    assert_eq!(device.end_capture(main), Err(CAPTURE_UNJOINED));
    let outside = device.event();
    device.record(outside, side).expect("a record");
    device.begin_capture(main).expect("a capture");
    assert_eq!(device.wait(main, outside), Err(CAPTURE_ISOLATION));
    assert_eq!(device.end_capture(main), Err(CAPTURE_INVALIDATED));
}
