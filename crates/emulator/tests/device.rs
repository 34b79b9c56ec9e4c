//! The driver's calls for tests: results as `Result`, handles as numbers, one test at a time.
//!
//! Owns: the types of the functions, and the lock that separates the tests of one process, since
//! seed and faults are global to the process.
#![allow(unsafe_code, non_snake_case)]

use cleave_emulator::{SanitizerVariant, StandInLibrary, driver_library_of};
use parking_lot::{Mutex, MutexGuard};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const INVALID_CONTEXT: i32 = 201;
pub(crate) const NO_BINARY_FOR_GPU: i32 = 209;
/// The first bytes of machine code, which is all that this driver looks at.
const IMAGE: u64 = 0x464c_457f;
pub(crate) const NOT_FOUND: i32 = 500;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
pub(crate) const LAUNCH_OUT_OF_RESOURCES: i32 = 701;
pub(crate) const MISALIGNED_ADDRESS: i32 = 716;
pub(crate) const LAUNCH_FAILED: i32 = 719;
pub(crate) const CAPTURE_UNSUPPORTED: i32 = 900;
pub(crate) const CAPTURE_INVALIDATED: i32 = 901;
pub(crate) const CAPTURE_UNJOINED: i32 = 904;
pub(crate) const CAPTURE_ISOLATION: i32 = 905;
pub(crate) const UPDATE_FAILURE: i32 = 910;

pub(crate) type DriverHandle = *mut c_void;
pub(crate) type DriverResult<T> = Result<T, i32>;

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        struct DriverFunctions { $($name: unsafe extern "C" fn($($argument),*) -> c_int,)* }
        impl DriverFunctions {
            fn of(library: StandInLibrary) -> DriverFunctions {
                // SAFETY: the types are those of the driver's interface.
                unsafe { DriverFunctions { $($name: *library.function(stringify!($name)).expect(stringify!($name)),)* } }
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuDevicePrimaryCtxRetain(*mut DriverHandle, c_int);
    cuDevicePrimaryCtxReset_v2(c_int);
    cuCtxSetCurrent(DriverHandle);
    cuCtxSynchronize();
    cuCtxEnablePeerAccess(DriverHandle, c_uint);
    cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
    cuMemcpyPeerAsync(u64, DriverHandle, u64, DriverHandle, usize, DriverHandle);
    cuDeviceGetAttribute(*mut c_int, c_int, c_int);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemFree_v2(u64);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemcpyHtoD_v2(u64, *const c_void, usize);
    cuMemcpyDtoH_v2(*mut c_void, u64, usize);
    cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, DriverHandle);
    cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, DriverHandle);
    cuMemcpyDtoDAsync_v2(u64, u64, usize, DriverHandle);
    cuMemsetD32Async(u64, c_uint, usize, DriverHandle);
    cuModuleLoadData(*mut DriverHandle, *const c_void);
    cuModuleGetFunction(*mut DriverHandle, DriverHandle, *const c_char);
    cuFuncGetParamInfo(DriverHandle, usize, *mut usize, *mut usize);
    cuFuncSetAttribute(DriverHandle, c_int, c_int);
    cuLaunchKernel(DriverHandle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, DriverHandle, *mut *mut c_void, *mut *mut c_void);
    cuStreamCreateWithPriority(*mut DriverHandle, c_uint, c_int);
    cuStreamDestroy_v2(DriverHandle);
    cuStreamSynchronize(DriverHandle);
    cuStreamQuery(DriverHandle);
    cuStreamWaitEvent(DriverHandle, DriverHandle, c_uint);
    cuEventCreate(*mut DriverHandle, c_uint);
    cuEventRecord(DriverHandle, DriverHandle);
    cuEventQuery(DriverHandle);
    cuEventSynchronize(DriverHandle);
    cuEventElapsedTime_v2(*mut f32, DriverHandle, DriverHandle);
    cuStreamBeginCapture_v2(DriverHandle, c_int);
    cuStreamEndCapture(DriverHandle, *mut DriverHandle);
    cuGraphInstantiateWithFlags(*mut DriverHandle, DriverHandle, u64);
    cuGraphLaunch(DriverHandle, DriverHandle);
    cuGraphGetNodes(DriverHandle, *mut DriverHandle, *mut usize);
    cuGraphExecKernelNodeSetParams_v2(DriverHandle, DriverHandle, *const KernelNodeParams);
    cuGraphKernelNodeGetParams_v2(DriverHandle, *mut KernelNodeParams);
    cuGraphExecUpdate_v2(DriverHandle, DriverHandle, *mut GraphUpdateInfo);
    cuIpcGetMemHandle(*mut IpcHandle, u64);
    cuIpcOpenMemHandle_v2(*mut u64, IpcHandle, c_uint);
    cuIpcCloseMemHandle(u64);
    cuIpcGetEventHandle(*mut IpcHandle, DriverHandle);
    cuIpcOpenEventHandle(*mut DriverHandle, IpcHandle);
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle {
    pub(crate) bytes: [u8; 64],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelNodeParams {
    pub(crate) function: DriverHandle,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) params: *mut *mut c_void,
    pub(crate) extra: *mut *mut c_void,
    pub(crate) kernel: DriverHandle,
    pub(crate) context: DriverHandle,
}

#[repr(C)]
pub(crate) struct GraphUpdateInfo {
    pub(crate) result: c_int,
    pub(crate) nodes: [DriverHandle; 2],
}

/// Grid, threads and shared memory of a launch.
#[derive(Clone, Copy)]
pub(crate) struct KernelLaunch {
    pub(crate) grid: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

pub(crate) fn blocks(count: u32, threads: u32) -> KernelLaunch {
    KernelLaunch {
        grid: [count, 1, 1],
        threads,
        shared_bytes: 0,
    }
}

/// The folder of the tests' own kernels.
pub(crate) fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels")
}

pub(crate) struct EmulatedDevice {
    functions: DriverFunctions,
    pub(crate) stand_in: StandInLibrary,
    module: DriverHandle,
    context: DriverHandle,
    _alone: MutexGuard<'static, ()>,
}

/// Kernel arguments that are plain words.
pub(crate) trait KernelArguments: Copy {}

macro_rules! call {
    ($device:expr, $name:ident($($argument:expr),*)) => {{
        // SAFETY: pointers are to locals, buffers that the caller keeps, or device memory, which
        // the driver checks.
        let code = unsafe { ($device.functions.$name)($($argument),*) };
        if code == 0 { Ok(()) } else { Err(code) }
    }};
}

impl EmulatedDevice {
    /// Opens the device; none where the emulator cannot be built.
    pub(crate) fn open() -> Option<EmulatedDevice> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock();
        let Some(path) = driver_library_of(&kernels(), SanitizerVariant::from_environment()) else {
            eprintln!("left out: no emulator on this machine");
            return None;
        };
        let stand_in = StandInLibrary::open(path);
        let mut device = EmulatedDevice {
            functions: DriverFunctions::of(stand_in),
            stand_in,
            module: ptr::null_mut(),
            context: ptr::null_mut(),
            _alone: alone,
        };
        device.reset().expect("a fresh context");
        Some(device)
    }

    fn reset(&mut self) -> DriverResult<()> {
        self.stand_in.plan_faults("");
        self.stand_in.set_seed(1);
        call!(self, cuInit(0))?;
        call!(self, cuDevicePrimaryCtxRetain(&raw mut self.context, 0))?;
        call!(self, cuDevicePrimaryCtxReset_v2(0))?;
        self.make_current();
        let image = [IMAGE];
        call!(
            self,
            cuModuleLoadData(&raw mut self.module, image.as_ptr().cast())
        )
    }

    /// Makes the context current in a thread that did not open the device.
    pub(crate) fn make_current(&self) {
        call!(self, cuCtxSetCurrent(self.context)).expect("a context");
    }

    /// Makes another device's context current, and gives it.
    pub(crate) fn make_device_current(&self, ordinal: i32) -> DriverResult<DriverHandle> {
        let mut context = ptr::null_mut();
        call!(self, cuDevicePrimaryCtxRetain(&raw mut context, ordinal))?;
        call!(self, cuCtxSetCurrent(context)).map(|()| context)
    }

    pub(crate) fn can_access_peer(&self, peer: i32) -> bool {
        let mut can = 0;
        call!(self, cuDeviceCanAccessPeer(&raw mut can, 0, peer)).expect("two devices");
        can != 0
    }

    pub(crate) fn enable_peer(&self, peer: DriverHandle) -> DriverResult<()> {
        call!(self, cuCtxEnablePeerAccess(peer, 0))
    }

    pub(crate) fn copy_from_peer(
        &self,
        to: u64,
        from: u64,
        peer: DriverHandle,
        bytes: usize,
        stream: DriverHandle,
    ) -> DriverResult<()> {
        call!(
            self,
            cuMemcpyPeerAsync(to, self.context, from, peer, bytes, stream)
        )
    }

    pub(crate) fn load_module(&self) -> DriverResult<()> {
        let (image, mut module) = ([IMAGE], ptr::null_mut());
        call!(
            self,
            cuModuleLoadData(&raw mut module, image.as_ptr().cast())
        )
    }

    pub(crate) fn attribute(&self, attribute: i32) -> i32 {
        let mut value = 0;
        call!(self, cuDeviceGetAttribute(&raw mut value, attribute, 0)).expect("an attribute");
        value
    }

    pub(crate) fn synchronize(&self) -> DriverResult<()> {
        call!(self, cuCtxSynchronize())
    }

    // === memory ===

    pub(crate) fn alloc(&self, bytes: usize) -> DriverResult<u64> {
        let mut at = 0;
        call!(self, cuMemAlloc_v2(&raw mut at, bytes)).map(|()| at)
    }

    pub(crate) fn free(&self, at: u64) -> DriverResult<()> {
        call!(self, cuMemFree_v2(at))
    }

    pub(crate) fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        call!(self, cuMemGetInfo_v2(&raw mut free, &raw mut total)).expect("memory's size");
        (free, total)
    }

    pub(crate) fn upload<T: Copy>(&self, data: &[T]) -> u64 {
        let at = self.alloc(size_of_val(data)).expect("memory");
        self.write(at, data).expect("a copy");
        at
    }

    pub(crate) fn write<T: Copy>(&self, at: u64, data: &[T]) -> DriverResult<()> {
        call!(
            self,
            cuMemcpyHtoD_v2(at, data.as_ptr().cast(), size_of_val(data))
        )
    }

    pub(crate) fn read<T: Copy + Default>(&self, at: u64, count: usize) -> DriverResult<Vec<T>> {
        let mut data = vec![T::default(); count];
        call!(
            self,
            cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), at, count * size_of::<T>())
        )?;
        Ok(data)
    }

    /// Allocates pinned memory for this many words.
    pub(crate) fn pinned(&self, count: usize) -> DriverResult<&'static mut [u32]> {
        let mut at = ptr::null_mut();
        call!(self, cuMemHostAlloc(&raw mut at, count * 4, 0))?;
        // SAFETY: the driver gave that many bytes, and they are not freed before the process ends.
        Ok(unsafe { std::slice::from_raw_parts_mut(at.cast(), count) })
    }

    /// Copies from memory that must not change until the stream has run the copy.
    pub(crate) fn write_async(
        &self,
        at: u64,
        data: &[u32],
        stream: DriverHandle,
    ) -> DriverResult<()> {
        call!(
            self,
            cuMemcpyHtoDAsync_v2(at, data.as_ptr().cast(), size_of_val(data), stream)
        )
    }

    pub(crate) fn read_async(
        &self,
        data: &mut [u32],
        at: u64,
        stream: DriverHandle,
    ) -> DriverResult<()> {
        call!(
            self,
            cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), at, size_of_val(data), stream)
        )
    }

    pub(crate) fn copy_async(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: DriverHandle,
    ) -> DriverResult<()> {
        call!(self, cuMemcpyDtoDAsync_v2(to, from, bytes, stream))
    }

    pub(crate) fn fill_async(
        &self,
        at: u64,
        value: u32,
        count: usize,
        stream: DriverHandle,
    ) -> DriverResult<()> {
        call!(self, cuMemsetD32Async(at, value, count, stream))
    }

    // === kernels ===

    pub(crate) fn function(&self, name: &str) -> DriverResult<DriverHandle> {
        let (mut function, name) = (ptr::null_mut(), CString::new(name).expect("a name"));
        call!(
            self,
            cuModuleGetFunction(&raw mut function, self.module, name.as_ptr())
        )
        .map(|()| function)
    }

    pub(crate) fn args_bytes(&self, function: DriverHandle) -> usize {
        let (mut offset, mut bytes) = (0, 0);
        call!(
            self,
            cuFuncGetParamInfo(function, 0, &raw mut offset, &raw mut bytes)
        )
        .expect("one parameter");
        bytes
    }

    pub(crate) fn allow_shared(&self, function: DriverHandle, bytes: i32) -> DriverResult<()> {
        const DYNAMIC_SHARED_MAX: i32 = 8;
        call!(
            self,
            cuFuncSetAttribute(function, DYNAMIC_SHARED_MAX, bytes)
        )
    }

    pub(crate) fn launch<A: KernelArguments>(
        &self,
        name: &str,
        shape: KernelLaunch,
        args: A,
        stream: DriverHandle,
    ) -> DriverResult<()> {
        let function = self.function(name)?;
        assert_eq!(
            self.args_bytes(function),
            size_of::<A>(),
            "the arguments of {name}"
        );
        let mut args = args;
        let mut params = [(&raw mut args).cast::<c_void>()];
        let KernelLaunch {
            grid: [x, y, z],
            threads,
            shared_bytes,
        } = shape;
        call!(
            self,
            cuLaunchKernel(
                function,
                x,
                y,
                z,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                params.as_mut_ptr(),
                ptr::null_mut()
            )
        )
    }

    /// Launches in the legacy stream, and waits.
    pub(crate) fn run<A: KernelArguments>(
        &self,
        name: &str,
        shape: KernelLaunch,
        args: A,
    ) -> DriverResult<()> {
        self.launch(name, shape, args, ptr::null_mut())?;
        self.synchronize()
    }

    // === streams and events ===

    pub(crate) fn stream(&self) -> DriverHandle {
        const NON_BLOCKING: u32 = 1;
        self.stream_of(NON_BLOCKING)
    }

    pub(crate) fn blocking_stream(&self) -> DriverHandle {
        self.stream_of(0)
    }

    fn stream_of(&self, flags: u32) -> DriverHandle {
        let mut stream = ptr::null_mut();
        call!(self, cuStreamCreateWithPriority(&raw mut stream, flags, 0)).expect("a stream");
        stream
    }

    pub(crate) fn destroy_stream(&self, stream: DriverHandle) -> DriverResult<()> {
        call!(self, cuStreamDestroy_v2(stream))
    }

    pub(crate) fn synchronize_stream(&self, stream: DriverHandle) -> DriverResult<()> {
        call!(self, cuStreamSynchronize(stream))
    }

    pub(crate) fn query_stream(&self, stream: DriverHandle) -> DriverResult<()> {
        call!(self, cuStreamQuery(stream))
    }

    pub(crate) fn event(&self) -> DriverHandle {
        self.event_of(0)
    }

    /// An event that other processes can open.
    pub(crate) fn shared_event(&self) -> DriverHandle {
        const INTERPROCESS_WITHOUT_TIMES: u32 = 6;
        self.event_of(INTERPROCESS_WITHOUT_TIMES)
    }

    fn event_of(&self, flags: u32) -> DriverHandle {
        let mut event = ptr::null_mut();
        call!(self, cuEventCreate(&raw mut event, flags)).expect("an event");
        event
    }

    pub(crate) fn record(&self, event: DriverHandle, stream: DriverHandle) -> DriverResult<()> {
        call!(self, cuEventRecord(event, stream))
    }

    pub(crate) fn wait(&self, stream: DriverHandle, event: DriverHandle) -> DriverResult<()> {
        call!(self, cuStreamWaitEvent(stream, event, 0))
    }

    pub(crate) fn query(&self, event: DriverHandle) -> DriverResult<()> {
        call!(self, cuEventQuery(event))
    }

    pub(crate) fn synchronize_event(&self, event: DriverHandle) -> DriverResult<()> {
        call!(self, cuEventSynchronize(event))
    }

    pub(crate) fn elapsed(&self, from: DriverHandle, to: DriverHandle) -> DriverResult<f32> {
        let mut milliseconds = 0.0;
        call!(self, cuEventElapsedTime_v2(&raw mut milliseconds, from, to)).map(|()| milliseconds)
    }

    // === graphs ===

    pub(crate) fn begin_capture(&self, stream: DriverHandle) -> DriverResult<()> {
        const GLOBAL: i32 = 0;
        call!(self, cuStreamBeginCapture_v2(stream, GLOBAL))
    }

    pub(crate) fn end_capture(&self, stream: DriverHandle) -> DriverResult<DriverHandle> {
        let mut graph = ptr::null_mut();
        call!(self, cuStreamEndCapture(stream, &raw mut graph)).map(|()| graph)
    }

    pub(crate) fn instantiate(&self, graph: DriverHandle) -> DriverResult<DriverHandle> {
        let mut exec = ptr::null_mut();
        call!(self, cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)).map(|()| exec)
    }

    pub(crate) fn launch_graph(
        &self,
        exec: DriverHandle,
        stream: DriverHandle,
    ) -> DriverResult<()> {
        call!(self, cuGraphLaunch(exec, stream))
    }

    pub(crate) fn nodes(&self, graph: DriverHandle) -> Vec<DriverHandle> {
        let mut count = 0;
        call!(
            self,
            cuGraphGetNodes(graph, ptr::null_mut(), &raw mut count)
        )
        .expect("a count");
        let mut nodes = vec![ptr::null_mut(); count];
        call!(
            self,
            cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count)
        )
        .expect("nodes");
        nodes
    }

    /// Replaces a kernel node's arguments for later launches.
    pub(crate) fn set_args<A: KernelArguments>(
        &self,
        exec: DriverHandle,
        node: DriverHandle,
        args: A,
    ) -> DriverResult<()> {
        let mut params = KernelNodeParams {
            function: ptr::null_mut(),
            grid: [0; 3],
            block: [0; 3],
            shared_bytes: 0,
            params: ptr::null_mut(),
            extra: ptr::null_mut(),
            kernel: ptr::null_mut(),
            context: ptr::null_mut(),
        };
        call!(self, cuGraphKernelNodeGetParams_v2(node, &raw mut params))?;
        let mut args = args;
        let mut pointers = [(&raw mut args).cast::<c_void>()];
        params.params = pointers.as_mut_ptr();
        call!(
            self,
            cuGraphExecKernelNodeSetParams_v2(exec, node, &raw const params)
        )
    }

    pub(crate) fn update(&self, exec: DriverHandle, graph: DriverHandle) -> DriverResult<()> {
        let mut info = GraphUpdateInfo {
            result: 0,
            nodes: [ptr::null_mut(); 2],
        };
        call!(self, cuGraphExecUpdate_v2(exec, graph, &raw mut info))
    }

    // === between processes ===

    pub(crate) fn memory_handle(&self, at: u64) -> DriverResult<IpcHandle> {
        let mut handle = IpcHandle { bytes: [0; 64] };
        call!(self, cuIpcGetMemHandle(&raw mut handle, at)).map(|()| handle)
    }

    pub(crate) fn open_memory(&self, handle: IpcHandle) -> DriverResult<u64> {
        let mut at = 0;
        call!(self, cuIpcOpenMemHandle_v2(&raw mut at, handle, 1)).map(|()| at)
    }

    pub(crate) fn close_memory(&self, at: u64) -> DriverResult<()> {
        call!(self, cuIpcCloseMemHandle(at))
    }

    pub(crate) fn event_handle(&self, event: DriverHandle) -> DriverResult<IpcHandle> {
        let mut handle = IpcHandle { bytes: [0; 64] };
        call!(self, cuIpcGetEventHandle(&raw mut handle, event)).map(|()| handle)
    }

    pub(crate) fn open_event(&self, handle: IpcHandle) -> DriverResult<DriverHandle> {
        let mut event = ptr::null_mut();
        call!(self, cuIpcOpenEventHandle(&raw mut event, handle)).map(|()| event)
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AddArgs {
    pub(crate) numbers: u64,
    pub(crate) count: u32,
    pub(crate) value: u32,
}
impl KernelArguments for AddArgs {}

/// Arguments of each kernel in mistakes.cu.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MistakeArgs {
    pub(crate) results: u64,
    pub(crate) numbers: u64,
    pub(crate) choice: u64,
}
impl KernelArguments for MistakeArgs {}
