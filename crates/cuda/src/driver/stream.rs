//! Streams, events and graphs, which order the device's work.
//!
//! Owns: the queues of work. Never: waits, except in functions that are named for it.
//! Invariant: work of one stream runs in the order of its queue; between streams only events order
//! it.

use super::{
    CudaDevice, DeviceMemory, GreenPartition, ImportedMemory, PinnedMemory, STREAM_NON_BLOCKING,
    call, check,
};
use crate::error::CudaError;
use crate::options::{MultiprocessorShare, StreamPriority};
use cudarc::driver::sys;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// A queue of work for the device.
#[derive(Debug)]
pub(crate) struct CudaStream {
    device: Arc<CudaDevice>,
    handle: sys::CUstream,
    /// The multiprocessors that the stream is limited to; `None` for all.
    partition: Option<GreenPartition>,
}

// SAFETY: the driver synchronises its own calls; callers order their threads' work.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Makes a stream that does not wait for any other.
    ///
    /// # Errors
    /// If the driver fails.
    pub(crate) fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        Self::with_priority_and_share(device, StreamPriority::Normal, None)
    }

    /// Makes a stream with a priority, limited to some of the multiprocessors.
    ///
    /// # Errors
    /// As [`CudaStream::new`]; or if the device cannot be divided by that share.
    pub(crate) fn with_priority_and_share(
        device: &Arc<CudaDevice>,
        priority: StreamPriority,
        share: Option<MultiprocessorShare>,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let (mut least, mut greatest) = (0, 0);
        call!(cuCtxGetStreamPriorityRange(
            &raw mut least,
            &raw mut greatest
        ))?;
        let priority = match priority {
            StreamPriority::Normal => least,
            StreamPriority::High => greatest,
        };
        let partition = share.map(|share| GreenPartition::new(device, share));
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

    /// Returns the number of multiprocessors that the stream's work runs on.
    pub(crate) fn processors_count(&self) -> u32 {
        let own = self
            .partition
            .as_ref()
            .map(GreenPartition::processors_count);
        own.unwrap_or(self.device.facts().processors_count)
    }

    /// Returns the stream's device.
    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Makes the stream's context current on the calling thread, which may then queue work here.
    ///
    /// # Errors
    /// If the context has failed.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.device.bind()
    }

    /// Queues a copy of `from` to the device. Callers leave `from` unchanged until the copy has
    /// ended.
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
        let target = span(to.0, to.1, bytes.len());
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

    /// Queues a copy to the host. Callers do not read `to` until the copy has ended.
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
        let source = span(from.0, from.1, bytes.len());
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

    /// Queues a copy from a device's memory to memory of the same or another device.
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
        let (source, target) = (span(from.0, from.1, bytes), span(to.0, to.1, bytes));
        let (near, far) = (&from.0.device, &to.0.device);
        if near.handle == far.handle {
            return call!(cuMemcpyDtoDAsync_v2(target, source, bytes, self.handle));
        }
        // The driver copies through the host where the two devices cannot reach each other.
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
    pub(crate) fn copy_to_process(
        &self,
        from: (&DeviceMemory, usize),
        to: (&ImportedMemory, usize),
        bytes: usize,
    ) -> Result<(), CudaError> {
        let (source, target) = (span(from.0, from.1, bytes), to.0.span(to.1, bytes));
        call!(cuMemcpyDtoDAsync_v2(target, source, bytes, self.handle))
    }

    /// Queues the writing of zeros to a range of memory.
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
        let at = span(memory, range.start, range.len());
        call!(cuMemsetD8Async(at, 0, range.len(), self.handle))
    }

    /// Waits until all queued work has ended.
    ///
    /// # Errors
    /// If any of that work failed.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        call!(cuStreamSynchronize(self.handle))
    }

    /// Begins a recording: until [`CudaStream::end_recording`] the stream records queued work
    /// instead of running it.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn begin_recording(&self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        call!(cuStreamBeginCapture_v2(self.handle, mode))
    }

    /// Ends the recording, and returns the work that was queued since
    /// [`CudaStream::begin_recording`].
    ///
    /// # Errors
    /// If the work contained something that cannot be recorded; the recording is lost then.
    pub(crate) fn end_recording(&self) -> Result<CudaGraph, CudaError> {
        let mut graph = std::ptr::null_mut();
        let ended = call!(cuStreamEndCapture(self.handle, &raw mut graph));
        let mut executable = std::ptr::null_mut();
        let made =
            ended.and_then(|()| call!(cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)));
        if !graph.is_null() {
            let _ = call!(cuGraphDestroy(graph));
        }
        made.map(|()| CudaGraph {
            device: Arc::clone(&self.device),
            handle: executable,
        })
    }

    /// Queues all work of a recorded graph.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn replay(&self, graph: &CudaGraph) -> Result<(), CudaError> {
        call!(cuGraphLaunch(graph.handle, self.handle))
    }
}

/// Returns the address of `bytes` bytes from an offset on.
fn span(memory: &DeviceMemory, offset: usize, bytes: usize) -> u64 {
    let end = offset.checked_add(bytes).expect("a range on the device");
    assert!(
        end <= memory.bytes(),
        "bytes {offset}..{end} of {} on the device",
        memory.bytes()
    );
    memory.at(offset)
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // Queued work may still use memory that its owner frees after the stream.
        let _ = call!(cuStreamSynchronize(self.handle));
        let _ = call!(cuStreamDestroy_v2(self.handle));
    }
}

/// A point in a stream's work.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    device: Arc<CudaDevice>,
    handle: sys::CUevent,
}

// SAFETY: as for `CudaStream`.
unsafe impl Send for CudaEvent {}
// SAFETY: as for `CudaStream`.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event that counts as reached until it is recorded.
    ///
    /// # Errors
    /// If the driver fails.
    pub(crate) fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        // An event without a time is cheaper, and most events only order work.
        Self::with(
            device,
            sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32,
        )
    }

    /// As [`CudaEvent::new`]; the event also records the time when it is reached.
    ///
    /// # Errors
    /// If the driver fails.
    pub(crate) fn timed(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        Self::with(device, sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32)
    }

    /// As [`CudaEvent::new`]; a thread that waits for the event sleeps instead of polling.
    ///
    /// # Errors
    /// If the driver fails.
    pub(crate) fn blocking(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        use sys::CUevent_flags_enum::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
        Self::with(
            device,
            CU_EVENT_DISABLE_TIMING as u32 | CU_EVENT_BLOCKING_SYNC as u32,
        )
    }

    fn with(device: &Arc<CudaDevice>, flags: u32) -> Result<Self, CudaError> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        call!(cuEventCreate(&raw mut handle, flags))?;
        Ok(Self {
            device: Arc::clone(device),
            handle,
        })
    }

    /// Records the event behind all work that was queued in the stream so far.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) fn record(&self, stream: &CudaStream) -> Result<(), CudaError> {
        call!(cuEventRecord(self.handle, stream.handle))
    }

    /// Returns the time from this event to a later one; both must be timed and reached.
    ///
    /// # Errors
    /// If one of them was not reached, or if earlier work failed.
    pub(crate) fn elapsed_until(&self, later: &Self) -> Result<Duration, CudaError> {
        let mut milliseconds: f32 = 0.0;
        call!(cuEventElapsedTime_v2(
            &raw mut milliseconds,
            self.handle,
            later.handle
        ))?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) * 1e-3))
    }

    /// Waits until the event is reached.
    ///
    /// # Errors
    /// If any of that work failed.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        call!(cuEventSynchronize(self.handle))
    }

    /// Returns whether the event is reached.
    ///
    /// # Errors
    /// If any of that work failed.
    pub(crate) fn is_reached(&self) -> Result<bool, CudaError> {
        const NOT_READY: i32 = sys::CUresult::CUDA_ERROR_NOT_READY as i32;
        match crate::dynamic::call_raw!(sys::culib, sys::cuEventQuery(self.handle)) {
            Some(NOT_READY) => Ok(false),
            result => check(result, "cuEventQuery").map(|()| true),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuEventDestroy_v2(self.handle));
    }
}

/// Recorded work that is queued as a whole.
#[derive(Debug)]
pub(crate) struct CudaGraph {
    device: Arc<CudaDevice>,
    handle: sys::CUgraphExec,
}

// SAFETY: as for `CudaStream`.
unsafe impl Send for CudaGraph {}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuGraphExecDestroy(self.handle));
    }
}
