//! Streams, events and graphs: the order in which a device works.
//!
//! Owns: what is queued. Never: waits unless the name says so.
//! Invariant: work of one stream runs in the order it was queued; between streams only events order it.

use super::{
    Device, DeviceMemory, ImportedMemory, Partition, PinnedMemory, STREAM_NON_BLOCKING, call, check,
};
use crate::error::CudaError;
use crate::options::{Priority, Share};
use cudarc::driver::sys;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A queue of work for the device.
#[derive(Debug)]
pub(crate) struct Stream {
    device: Arc<Device>,
    handle: sys::CUstream,
    /// Where its work runs, if not everywhere.
    partition: Option<Partition>,
}

// SAFETY: the driver locks for itself; order between threads is the callers' affair.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a stream that waits for no other.
    ///
    /// # Errors
    /// If the driver makes none.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::placed(device, (Priority::Normal, None))
    }

    /// The same, for work that goes before other work or keeps to some multiprocessors.
    ///
    /// # Errors
    /// As [`Stream::new`]; or if the device cannot be divided so.
    pub(crate) fn placed(
        device: &Arc<Device>,
        (priority, share): (Priority, Option<Share>),
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let (mut least, mut greatest) = (0, 0);
        call!(cuCtxGetStreamPriorityRange(
            &raw mut least,
            &raw mut greatest
        ))?;
        let priority = match priority {
            Priority::Normal => least,
            Priority::High => greatest,
        };
        let partition = share.map(|share| Partition::new(device, share));
        let partition = partition.transpose()?;
        let mut handle = std::ptr::null_mut();
        match &partition {
            Some(partition) => call!(cuGreenCtxStreamCreate(
                &raw mut handle,
                partition.handle(),
                STREAM_NON_BLOCKING,
                priority
            )),
            None => call!(cuStreamCreateWithPriority(
                &raw mut handle,
                STREAM_NON_BLOCKING,
                priority
            )),
        }?;
        Ok(Self {
            device: Arc::clone(device),
            handle,
            partition,
        })
    }

    /// Multiprocessors that its work runs on.
    pub(crate) fn processors_count(&self) -> u32 {
        let own = self.partition.as_ref().map(Partition::processors_count);
        own.unwrap_or(self.device.facts().processors_count)
    }

    /// The device it is on.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Makes the calling thread one that may queue here.
    ///
    /// # Errors
    /// If the context has failed.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.device.bind()
    }

    /// Queues a copy of `from` to the device. `from` must keep its bytes until the copy is done.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If a range is outside its memory.
    pub(crate) fn copy_in(
        &self,
        from: (&PinnedMemory, Range<usize>),
        to: (&DeviceMemory, usize),
    ) -> Result<(), CudaError> {
        let (source, range) = from;
        let bytes = &source.as_slice()[range];
        let target = span(to, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        call!(cuMemcpyHtoDAsync_v2(
            target,
            bytes.as_ptr().cast(),
            bytes.len(),
            self.handle
        ))
    }

    /// Queues a copy to the host. Nobody may look at `to` until the copy is done.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If a range is outside its memory.
    pub(crate) fn copy_out(
        &self,
        from: (&DeviceMemory, usize),
        to: (&mut PinnedMemory, Range<usize>),
    ) -> Result<(), CudaError> {
        let (target, range) = to;
        let bytes = &mut target.as_mut_slice()[range];
        let source = span(from, bytes.len());
        if bytes.is_empty() {
            return Ok(());
        }
        call!(cuMemcpyDtoHAsync_v2(
            bytes.as_mut_ptr().cast(),
            source,
            bytes.len(),
            self.handle
        ))
    }

    /// Queues a copy from memory of a device to memory of the same or another one.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If a range is outside its memory.
    pub(crate) fn copy_within(
        &self,
        from: (&DeviceMemory, usize),
        to: (&DeviceMemory, usize),
        bytes: usize,
    ) -> Result<(), CudaError> {
        let (source, target) = (span(from, bytes), span(to, bytes));
        let (near, far) = (&from.0.device, &to.0.device);
        if near.handle == far.handle {
            return call!(cuMemcpyDtoDAsync_v2(target, source, bytes, self.handle));
        }
        // By way of the host where the two cannot reach each other.
        call!(cuMemcpyPeerAsync(
            target,
            far.context,
            source,
            near.context,
            bytes,
            self.handle
        ))
    }

    /// Queues a copy to memory of another process.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If a range is outside its memory.
    pub(crate) fn copy_abroad(
        &self,
        from: (&DeviceMemory, usize),
        to: (&ImportedMemory, usize),
        bytes: usize,
    ) -> Result<(), CudaError> {
        let (source, target) = (span(from, bytes), to.0.span(to.1, bytes));
        call!(cuMemcpyDtoDAsync_v2(target, source, bytes, self.handle))
    }

    /// Queues zeros.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the range is outside the memory.
    pub(crate) fn zero(&self, memory: &DeviceMemory, range: Range<usize>) -> Result<(), CudaError> {
        if range.is_empty() {
            return Ok(());
        }
        let at = span((memory, range.start), range.len());
        call!(cuMemsetD8Async(at, 0, range.len(), self.handle))
    }

    /// Waits until everything queued is done.
    ///
    /// # Errors
    /// What failed on the way.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        call!(cuStreamSynchronize(self.handle))
    }

    /// From now on what is queued here is recorded instead of run, until [`Stream::end_recording`].
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn begin_recording(&self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        call!(cuStreamBeginCapture_v2(self.handle, mode))
    }

    /// What was queued since [`Stream::begin_recording`].
    ///
    /// # Errors
    /// If something that cannot be recorded was among it; nothing is recorded then.
    pub(crate) fn end_recording(&self) -> Result<Graph, CudaError> {
        let mut graph = std::ptr::null_mut();
        let ended = call!(cuStreamEndCapture(self.handle, &raw mut graph));
        let mut executable = std::ptr::null_mut();
        let made =
            ended.and_then(|()| call!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)));
        if !graph.is_null() {
            let _ = call!(cuGraphDestroy(graph));
        }
        made.map(|()| Graph {
            device: Arc::clone(&self.device),
            handle: executable,
        })
    }

    /// Queues everything that a graph recorded.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        call!(cuGraphLaunch(graph.handle, self.handle))
    }
}

/// Address of `bytes` bytes from an offset on.
fn span((memory, offset): (&DeviceMemory, usize), bytes: usize) -> u64 {
    let end = offset.checked_add(bytes).expect("a range on the device");
    assert!(
        end <= memory.bytes(),
        "bytes {offset}..{end} of {} on the device",
        memory.bytes()
    );
    memory.at(offset)
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // What was queued may still touch memory that is freed next.
        let _ = call!(cuStreamSynchronize(self.handle));
        let _ = call!(cuStreamDestroy_v2(self.handle));
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub(crate) struct Event {
    device: Arc<Device>,
    handle: sys::CUevent,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Event {}
// SAFETY: as for `Stream`.
unsafe impl Sync for Event {}

impl Event {
    /// An event that counts as reached until it is recorded.
    ///
    /// # Errors
    /// If the driver makes none.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        // Only order: without a time an event is cheaper.
        Self::with(
            device,
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32,
        )
    }

    /// As [`Event::new`], and it knows when it was reached.
    ///
    /// # Errors
    /// If the driver makes none.
    pub(crate) fn timed(device: &Arc<Device>) -> Result<Self, CudaError> {
        Self::with(device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32)
    }

    /// As [`Event::new`], and whoever waits for it leaves the processor to others.
    ///
    /// # Errors
    /// If the driver makes none.
    pub(crate) fn idle(device: &Arc<Device>) -> Result<Self, CudaError> {
        use sys::CUevent_flags_enum::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
        Self::with(
            device,
            CU_EVENT_DISABLE_TIMING as u32 | CU_EVENT_BLOCKING_SYNC as u32,
        )
    }

    fn with(device: &Arc<Device>, flags: u32) -> Result<Self, CudaError> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        call!(cuEventCreate(&raw mut handle, flags))?;
        Ok(Self {
            device: Arc::clone(device),
            handle,
        })
    }

    /// Stands for everything that was queued in the stream so far.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        call!(cuEventRecord(self.handle, stream.handle))
    }

    /// From this one to a later one; both know their times and were reached.
    ///
    /// # Errors
    /// If one was not, or what failed on the way.
    pub(crate) fn until(&self, later: &Self) -> Result<Duration, CudaError> {
        let mut milliseconds: f32 = 0.0;
        call!(cuEventElapsedTime_v2(
            &raw mut milliseconds,
            self.handle,
            later.handle
        ))?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) * 1e-3))
    }

    /// Waits until it is reached.
    ///
    /// # Errors
    /// What failed on the way.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        call!(cuEventSynchronize(self.handle))
    }

    /// Whether it is reached.
    ///
    /// # Errors
    /// What failed on the way.
    pub(crate) fn is_reached(&self) -> Result<bool, CudaError> {
        const NOT_READY: i32 = sys::CUresult::CUDA_ERROR_NOT_READY as i32;
        match crate::dynamic::call_raw!(sys::culib, sys::cuEventQuery(self.handle)) {
            Some(NOT_READY) => Ok(false),
            result => check(result, "cuEventQuery").map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuEventDestroy_v2(self.handle));
    }
}

/// Recorded work that is queued at once.
#[derive(Debug)]
pub(crate) struct Graph {
    device: Arc<Device>,
    handle: sys::CUgraphExec,
}

// SAFETY: as for `Stream`.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuGraphExecDestroy(self.handle));
    }
}
