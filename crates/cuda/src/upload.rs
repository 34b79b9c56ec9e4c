//! The upload of a mapped checkpoint to the device, at the speed of the link.
//!
//! Owns: threads that read tensors and copy them, each through two pieces of pinned memory: while
//! the device copies one piece, the thread reads the next, and converts it if the file has another
//! format.
//! Never: keeps more than its pieces and a short queue in memory.
//! Invariant: when [`Uploader::finish`] returns, either every queued byte is on the device, or it
//! returns the first error.

use crate::driver::{CudaDevice, CudaEvent, CudaStream, DeviceMemory, PinnedMemory};
use crate::error::CudaError;
use crate::quantized::RowPacking;
use cleave_checkpoint::{QuantizedTensor, StoredTensor, StoredType};
use cleave_engine::ops::Precision;
use half::bf16;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// The number of reading threads: one thread cannot read a file as fast as the link transfers it.
const READERS: usize = 4;
/// The size of one piece in bytes, so large that the start of a copy costs nothing in comparison.
const PIECE_BYTES: usize = 8 << 20;
/// The number of jobs that may wait for a reader.
const QUEUED: usize = 2 * READERS;

/// A copy to make: its source and its destination.
struct UploadJob {
    source: UploadSource,
    target: Arc<DeviceMemory>,
    offset: usize,
}

/// The source of a copy.
pub(crate) enum UploadSource {
    /// A tensor, converted to elements of this precision.
    Tensor(StoredTensor, Precision),
    /// A quantised tensor's codes, in the kernels' order.
    Packed(RowPacking),
    /// A quantised tensor, widened to elements of this precision.
    Widened(Arc<QuantizedTensor>, Precision),
    /// Words that are copied unchanged.
    Words(Vec<u32>),
}

/// Copies in the background.
#[derive(Debug)]
pub(crate) struct Uploader {
    device: Arc<CudaDevice>,
    /// `None` once dropped, which ends the readers.
    queue: Option<SyncSender<UploadJob>>,
    readers: Vec<JoinHandle<()>>,
    state: Arc<UploadState>,
}

/// The progress of the upload.
#[derive(Debug, Default)]
struct UploadState {
    progress: Mutex<UploadProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct UploadProgress {
    /// Jobs whose bytes are not yet on the device.
    pending: usize,
    failure: Option<CudaError>,
}

impl Uploader {
    /// Starts the readers.
    ///
    /// # Errors
    /// If pinned memory or threads cannot be had.
    pub(crate) fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let (queue, jobs) = sync_channel(QUEUED);
        let jobs = Arc::new(Mutex::new(jobs));
        // The uploader exists before its readers, so that dropping it ends the started ones if
        // another cannot be started.
        let mut uploader = Self {
            device: Arc::clone(device),
            queue: Some(queue),
            readers: Vec::new(),
            state: Arc::new(UploadState::default()),
        };
        for number in 0..READERS {
            let mut reader = UploadReader::new(device)?;
            let (jobs, state) = (Arc::clone(&jobs), Arc::clone(&uploader.state));
            let work = move || reader.run(&jobs, &state);
            let thread = std::thread::Builder::new().name(format!("upload-{number}"));
            let started = thread.spawn(work).map_err(|error| CudaError::Call {
                call: "starting a thread",
                name: "upload".to_owned(),
                text: error.to_string(),
                is_device_lost: false,
            });
            uploader.readers.push(started?);
        }
        Ok(uploader)
    }

    /// Queues a copy, and waits while the queue is full.
    ///
    /// # Errors
    /// If an earlier copy failed.
    pub(crate) fn push(
        &self,
        source: UploadSource,
        target: &Arc<DeviceMemory>,
        offset: usize,
    ) -> Result<(), CudaError> {
        let mut progress = lock(&self.state.progress);
        if let Some(failure) = &progress.failure {
            return Err(failure.clone());
        }
        progress.pending += 1;
        drop(progress);
        let job = UploadJob {
            source,
            target: Arc::clone(target),
            offset,
        };
        let queue = self.queue.as_ref().expect("alive until dropped");
        queue
            .send(job)
            .expect("readers take jobs until the queue is dropped");
        Ok(())
    }

    /// Waits until everything that was queued so far is on the device.
    ///
    /// # Errors
    /// The first error of a copy.
    pub(crate) fn finish(&self) -> Result<(), CudaError> {
        let mut progress = lock(&self.state.progress);
        let done = |progress: &mut UploadProgress| progress.pending > 0;
        self.state.changed.wait_while(&mut progress, done);
        match &progress.failure {
            Some(failure) => Err(failure.clone()),
            None => self.device.synchronize(),
        }
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        self.queue = None;
        for reader in self.readers.drain(..) {
            // The panic of a reader was already printed, and a drop cannot return it.
            let _ = reader.join();
        }
    }
}

/// One thread's stream and memory.
struct UploadReader {
    stream: CudaStream,
    pieces: [(PinnedMemory, CudaEvent); 2],
    next: usize,
}

impl UploadReader {
    fn new(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let piece = || -> Result<_, CudaError> {
            let memory = PinnedMemory::new(device, PIECE_BYTES)?;
            Ok((memory, CudaEvent::new(device)?))
        };
        Ok(Self {
            stream: CudaStream::new(device)?,
            pieces: [piece()?, piece()?],
            next: 0,
        })
    }

    /// Takes jobs until the queue is closed. After a failure it only counts them as done, so that
    /// `finish` does not wait for ever.
    fn run(&mut self, jobs: &Mutex<Receiver<UploadJob>>, state: &UploadState) {
        let mut bound = self.stream.bind();
        loop {
            let job = lock(jobs).recv();
            let Ok(job) = job else {
                return;
            };
            let done = bound.clone().and_then(|()| self.copy(&job));
            let mut progress = lock(&state.progress);
            if let Err(failure) = done {
                bound = Err(failure.clone());
                progress.failure.get_or_insert(failure);
            }
            progress.pending -= 1;
            state.changed.notify_all();
        }
    }

    fn copy(&mut self, job: &UploadJob) -> Result<(), CudaError> {
        let (units, unit_bytes) = job.source.units();
        let units_each = (PIECE_BYTES / unit_bytes.max(1)).max(1);
        let mut first = 0;
        while first < units {
            let count = units_each.min(units - first);
            let (piece, fetched) = &mut self.pieces[self.next];
            // The device may still copy from this piece since its last turn.
            fetched.synchronize()?;
            let bytes = count * unit_bytes;
            job.source
                .read(first..first + count, &mut piece.as_mut_slice()[..bytes]);
            let target = job.offset + first * unit_bytes;
            self.stream
                .copy_in((piece, 0..bytes), (&job.target, target))?;
            fetched.record(&self.stream)?;
            self.next = 1 - self.next;
            first += count;
        }
        Ok(())
    }
}

impl UploadSource {
    /// Returns the number of units that are read as a whole, and the bytes of each on the device.
    /// Units are single elements, since a row may be longer than a piece; quantised tensors are
    /// read by rows, which are shorter.
    fn units(&self) -> (usize, usize) {
        match self {
            Self::Tensor(tensor, precision) => {
                (tensor.rows() * tensor.columns(), precision.element_bytes())
            }
            Self::Packed(RowPacking { tensor, stack }) => (tensor.rows(), stack.row_bytes()),
            Self::Widened(tensor, precision) => {
                (tensor.rows(), tensor.columns() * precision.element_bytes())
            }
            Self::Words(words) => (words.len(), size_of::<u32>()),
        }
    }

    fn read(&self, units: std::ops::Range<usize>, out: &mut [u8]) {
        match self {
            Self::Words(words) => {
                for (bytes, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(&words[units]) {
                    *bytes = word.to_le_bytes();
                }
            }
            Self::Packed(RowPacking { tensor, stack }) => {
                for (row, out) in units.zip(out.chunks_exact_mut(stack.row_bytes().max(1))) {
                    stack.pack_row(tensor, row, out);
                }
            }
            Self::Widened(tensor, precision) => {
                let mut values = vec![0.0; tensor.columns()];
                let width = values.len() * precision.element_bytes();
                for (row, out) in units.zip(out.chunks_exact_mut(width.max(1))) {
                    tensor.read_row(row, &mut values);
                    match precision {
                        Precision::F32 => put(&values, out, f32::to_le_bytes),
                        Precision::Bf16 => {
                            put(&values, out, |value| bf16::from_f32(value).to_le_bytes());
                        }
                    }
                }
            }
            Self::Tensor(tensor, precision) => {
                let width = tensor.stored().element_bytes();
                let stored = &tensor.bytes()[units.start * width..units.end * width];
                match (tensor.stored(), precision) {
                    (StoredType::Bf16, Precision::Bf16) | (StoredType::F32, Precision::F32) => {
                        out.copy_from_slice(stored);
                    }
                    (_, Precision::F32) => convert(tensor.stored(), stored, out, f32::to_le_bytes),
                    (_, Precision::Bf16) => convert(tensor.stored(), stored, out, |value| {
                        bf16::from_f32(value).to_le_bytes()
                    }),
                }
            }
        }
    }
}

/// Writes each value in the form that `to` returns.
fn put<const N: usize>(values: &[f32], out: &mut [u8], to: impl Fn(f32) -> [u8; N]) {
    for (target, value) in out.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *target = to(*value);
    }
}

/// Widens each stored element and writes it in the form that `to` returns.
fn convert<const N: usize>(
    stored_type: StoredType,
    stored: &[u8],
    out: &mut [u8],
    to: impl Fn(f32) -> [u8; N],
) {
    let elements = stored.chunks_exact(stored_type.element_bytes());
    for (target, element) in out.as_chunks_mut::<N>().0.iter_mut().zip(elements) {
        *target = to(stored_type.widen(element));
    }
}

/// Locks a mutex even after a panic; the guarded state is consistent after every statement.
fn lock<T>(mutex: &Mutex<T>) -> parking_lot::MutexGuard<'_, T> {
    mutex.lock()
}
