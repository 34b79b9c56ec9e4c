//! From a mapped checkpoint to the device, at the speed of the link.
//!
//! Owns: threads that read tensors and copy them, each through two pieces of pinned memory: while the device
//! fetches one, the next is read (and converted, where the file has another format).
//! Never: holds more than its pieces and a short queue in memory.
//! Invariant: when [`Uploader::finish`] returns, every byte that was queued is on the device, or the first error
//! was told.

use crate::driver::{Device, DeviceMemory, Event, PinnedMemory, Stream};
use crate::error::CudaError;
use crate::narrow::Packing;
use cleave_engine::checkpoint::{NarrowTensor, StoredTensor, StoredType};
use cleave_engine::ops::Precision;
use half::bf16;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Threads that read at once: one cannot read a file as fast as a link takes it.
const READERS: usize = 4;
/// Bytes of one piece. Large enough that starting a copy costs nothing beside it.
const PIECE_BYTES: usize = 8 << 20;
/// Tensors that wait for a reader.
const QUEUED: usize = 2 * READERS;

/// A piece of work: where it comes from and where it goes.
struct Job {
    source: Source,
    target: Arc<DeviceMemory>,
    offset: usize,
}

/// What is copied.
pub(crate) enum Source {
    /// A tensor, as elements of this precision.
    Tensor(StoredTensor, Precision),
    /// A quantised tensor's codes, in the kernels' order.
    Packed(Packing),
    /// A quantised tensor, as elements of this precision.
    Widened(Arc<NarrowTensor>, Precision),
    /// Words as they are.
    Words(Vec<u32>),
}

/// Copies in the background.
#[derive(Debug)]
pub(crate) struct Uploader {
    device: Arc<Device>,
    /// `None` when dropped: readers end then.
    queue: Option<SyncSender<Job>>,
    readers: Vec<JoinHandle<()>>,
    state: Arc<Shared>,
}

/// How far it is.
#[derive(Debug, Default)]
struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// Jobs that are not yet with the device.
    pending: usize,
    failure: Option<CudaError>,
}

impl Uploader {
    /// Starts the readers.
    ///
    /// # Errors
    /// If pinned memory or threads cannot be had.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let (queue, jobs) = sync_channel(QUEUED);
        let jobs = Arc::new(Mutex::new(jobs));
        // Made first, so that the readers there are end with it if another cannot be had.
        let mut uploader = Self {
            device: Arc::clone(device),
            queue: Some(queue),
            readers: Vec::new(),
            state: Arc::new(Shared::default()),
        };
        for number in 0..READERS {
            let mut reader = Reader::new(device)?;
            let (jobs, state) = (Arc::clone(&jobs), Arc::clone(&uploader.state));
            let work = move || reader.run(&jobs, &state);
            let thread = std::thread::Builder::new().name(format!("upload-{number}"));
            let started = thread.spawn(work).map_err(|error| CudaError::Call {
                call: "starting a thread",
                name: "upload".to_owned(),
                text: error.to_string(),
                is_for_good: false,
            });
            uploader.readers.push(started?);
        }
        Ok(uploader)
    }

    /// Queues a copy; waits while many are queued.
    ///
    /// # Errors
    /// What failed earlier.
    pub(crate) fn push(
        &self,
        source: Source,
        target: &Arc<DeviceMemory>,
        offset: usize,
    ) -> Result<(), CudaError> {
        let mut progress = lock(&self.state.progress);
        if let Some(failure) = &progress.failure {
            return Err(failure.clone());
        }
        progress.pending += 1;
        drop(progress);
        let job = Job {
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

    /// Waits until everything queued so far is there.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) fn finish(&self) -> Result<(), CudaError> {
        let progress = lock(&self.state.progress);
        let done = |progress: &mut Progress| progress.pending > 0;
        let waited = self.state.changed.wait_while(progress, done);
        let progress = waited.unwrap_or_else(PoisonError::into_inner);
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
            // A reader that panicked has said so.
            let _ = reader.join();
        }
    }
}

/// One thread's stream and memory.
struct Reader {
    stream: Stream,
    pieces: [(PinnedMemory, Event); 2],
    next: usize,
}

impl Reader {
    fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let piece = || -> Result<_, CudaError> {
            let memory = PinnedMemory::new(device, PIECE_BYTES)?;
            Ok((memory, Event::new(device)?))
        };
        Ok(Self {
            stream: Stream::new(device)?,
            pieces: [piece()?, piece()?],
            next: 0,
        })
    }

    /// Takes jobs until there are no more to come. After a failure they are only counted, so that nobody
    /// waits for them.
    fn run(&mut self, jobs: &Mutex<Receiver<Job>>, state: &Shared) {
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

    fn copy(&mut self, job: &Job) -> Result<(), CudaError> {
        let (units, unit_bytes) = job.source.units();
        let units_each = (PIECE_BYTES / unit_bytes.max(1)).max(1);
        let mut first = 0;
        while first < units {
            let count = units_each.min(units - first);
            let (piece, fetched) = &mut self.pieces[self.next];
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

impl Source {
    /// What is read whole, how many there are, and the bytes that each becomes: elements, since a row may
    /// be longer than a piece, but rows where they are packed; those are shorter.
    fn units(&self) -> (usize, usize) {
        match self {
            Self::Tensor(tensor, precision) => {
                (tensor.rows() * tensor.columns(), precision.element_bytes())
            }
            Self::Packed(Packing { tensor, narrow }) => (tensor.rows(), narrow.row_bytes()),
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
            Self::Packed(Packing { tensor, narrow }) => {
                for (row, out) in units.zip(out.chunks_exact_mut(narrow.row_bytes().max(1))) {
                    narrow.pack_row(tensor, row, out);
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

/// Writes each value as `to` says.
fn put<const N: usize>(values: &[f32], out: &mut [u8], to: impl Fn(f32) -> [u8; N]) {
    for (target, value) in out.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *target = to(*value);
    }
}

/// Widens each stored element and writes it as `to` says.
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

/// A lock that outlives a panic: what it guards is whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
