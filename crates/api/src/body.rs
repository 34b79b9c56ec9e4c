//! Request bodies: reading them within a limit for each body and one for all together.
//!
//! Owns: the memory that bodies may take, and the queue for it.
//! Never: knows a field.
//! Invariant: for the bytes that have arrived of a body, [`BYTES_PER_BYTE`] times their number are
//! reserved, and a reservation ends with its body, even if the client has disconnected.
//!
//! Short bodies have a quarter of the memory to themselves, so that long ones never block ordinary
//! requests. An announced body reserves nothing before it arrives. Up to 64 KiB a body reserves in
//! steps; beyond that it reserves at once all that it needs to its end, so that two long bodies
//! never wait for each other's rest. All waits end, and a body that stalls while another waits for
//! memory is refused. A long body that waits keeps the 64 KiB that have arrived, outside the limit,
//! like the buffers of its connection.

use crate::body_work::SHORT_BYTES;
use crate::error::ApiError;
use crate::memory_budget::{SharedMemoryBudget, units};
use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use cleave_text::json::Document;
use http_body_util::BodyExt;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

/// Memory that reading a body takes at most, per byte of the body: the body and everything made of
/// it until only tokens are left. tests/bodies.rs measures it. The output of a chat template is
/// separate, with its own limits: see `template` of the crate `text`.
pub(crate) const BYTES_PER_BYTE: usize = 4;
/// Length of a body from which on it is parsed and tokenized on a blocking thread.
const LONG_BYTES: usize = 8 * 1024;
/// First step in which a short body reserves, in bytes of the body; each further step is four times
/// as large.
const STEP_BYTES: usize = 4 * 1024;
/// Period in which a body must bring [`PROGRESS_BYTES`] while another request waits for memory.
const PROGRESS_SPAN: Duration = Duration::from_secs(2);
/// Progress that a body must make; see [`PROGRESS_SPAN`].
const PROGRESS_BYTES: usize = 32 * 1024;
/// Limit of the bytes that are read and dropped of a refused body, so that its client reads the
/// answer.
const DISCARD_BYTES_MAX: usize = 64 << 20;
/// Time limit of the same.
const DISCARD_MAX: Duration = Duration::from_secs(5);

pub(crate) struct BodyMemory {
    short: SharedMemoryBudget,
    long: SharedMemoryBudget,
}

/// A body that is arriving.
struct ArrivingBody<'a> {
    pool: &'a SharedMemoryBudget,
    /// Bytes of the body for which memory is reserved.
    reserved: usize,
    permit: Option<OwnedSemaphorePermit>,
    bytes: Vec<u8>,
    /// Deadline for progress, and the length of the body when the deadline was set.
    progress_due: (Instant, usize),
}

impl ArrivingBody<'_> {
    /// Returns the next bytes; `None` at the end of the body.
    async fn next(&mut self, body: &mut Body) -> Result<Option<Bytes>, ApiError> {
        loop {
            let frame = tokio::time::timeout_at(self.progress_due.0, body.frame()).await;
            self.check_progress()?;
            let Ok(frame) = frame else {
                continue;
            };
            let Some(frame) = frame else {
                return Ok(None);
            };
            let broken = |_| ApiError::bad_request("body_broken", "The body broke off.");
            if let Ok(bytes) = frame.map_err(broken)?.into_data() {
                return Ok(Some(bytes));
            }
        }
    }

    /// Refuses a body that has stalled while another request waits for memory.
    fn check_progress(&mut self) -> Result<(), ApiError> {
        let (until, len) = self.progress_due;
        if Instant::now() < until {
            return Ok(());
        }
        let is_slow = self.bytes.len() < len + PROGRESS_BYTES;
        let holds = self.permit.is_some();
        if is_slow && holds && self.pool.has_waiting() {
            return Err(ApiError::body_stalled());
        }
        self.progress_due = (Instant::now() + PROGRESS_SPAN, self.bytes.len());
        Ok(())
    }
}

impl BodyMemory {
    /// Creates the pools of `bytes` in all, in which a body of `body_bytes_max` always fits.
    pub(crate) fn new(bytes: usize, body_bytes_max: usize) -> Self {
        let short_units = units(bytes / 4).max(units(SHORT_BYTES * BYTES_PER_BYTE));
        let long_units = units(bytes - bytes / 4).max(units(body_bytes_max * BYTES_PER_BYTE));
        Self {
            short: SharedMemoryBudget::new(short_units),
            long: SharedMemoryBudget::new(long_units),
        }
    }

    /// Creates a pool for short bodies only, which share all of it.
    pub(crate) fn of_short(bytes: usize) -> Self {
        Self::new(bytes.saturating_mul(4), SHORT_BYTES)
    }

    /// Free units of the pool of short bodies and of that of long ones.
    #[cfg(test)]
    fn free_units(&self) -> (usize, usize) {
        (self.short.free_units(), self.long.free_units())
    }

    /// Reads the whole body, `bytes_max` at most.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        mut body: Body,
        bytes_max: usize,
    ) -> Result<ReservedBody, ApiError> {
        let announced = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|n| n.to_str().ok()?.parse().ok());
        if announced.is_some_and(|bytes: usize| bytes > bytes_max) {
            drain_refused_body(headers, body).await;
            return Err(ApiError::body_too_large(bytes_max));
        }
        let mut arriving = ArrivingBody {
            pool: &self.short,
            reserved: 0,
            permit: None,
            bytes: Vec::new(),
            progress_due: (Instant::now() + PROGRESS_SPAN, 0),
        };
        while let Some(bytes) = arriving.next(&mut body).await? {
            let len = arriving.bytes.len() + bytes.len();
            let fits = if len > bytes_max {
                Err(ApiError::body_too_large(bytes_max))
            } else {
                self.grow_reservation(&mut arriving, len, announced, bytes_max)
                    .await
            };
            if let Err(error) = fits {
                // The reservation is released before the rest of the body is read and dropped.
                drop(arriving);
                drop(bytes);
                discard(body).await;
                return Err(error);
            }
            arriving.bytes.extend_from_slice(&bytes);
        }
        let ArrivingBody {
            pool,
            permit,
            bytes,
            ..
        } = arriving;
        let mut permit = match permit {
            Some(permit) => permit,
            None => pool.reserve(0).await?,
        };
        let used = units(bytes.len() * BYTES_PER_BYTE) as usize;
        drop(permit.split(permit.num_permits().saturating_sub(used)));
        Ok(ReservedBody {
            bytes,
            earlier_bytes: 0,
            permit: Some(permit),
        })
    }

    /// Grows the reservation for a body of `len` bytes.
    async fn grow_reservation<'a>(
        &'a self,
        arriving: &mut ArrivingBody<'a>,
        len: usize,
        announced: Option<usize>,
        bytes_max: usize,
    ) -> Result<(), ApiError> {
        if len > arriving.reserved && len <= SHORT_BYTES {
            let step = (arriving.reserved * 4).max(STEP_BYTES).max(len);
            let reserved = step.min(announced.unwrap_or(SHORT_BYTES)).max(len);
            let more = self
                .short
                .reserve((reserved - arriving.reserved) * BYTES_PER_BYTE)
                .await?;
            match &mut arriving.permit {
                Some(permit) => permit.merge(more),
                None => arriving.permit = Some(more),
            }
            arriving.reserved = reserved;
        } else if len > arriving.reserved {
            // A body of unknown length may reach the limit. It waits without holding memory.
            arriving.permit = None;
            let reserved = announced.unwrap_or(bytes_max).max(len);
            arriving.pool = &self.long;
            arriving.permit = Some(self.long.reserve(reserved * BYTES_PER_BYTE).await?);
            arriving.reserved = reserved;
        } else {
            return Ok(());
        }
        arriving.progress_due = (Instant::now() + PROGRESS_SPAN, arriving.bytes.len());
        // A vector that doubles takes twice the body's memory: the buffer of an announced body
        // grows once, that of others in small steps.
        if len > arriving.bytes.capacity() {
            let capacity = announced.map_or(len + len / 8, |bytes| bytes.min(arriving.reserved));
            let buffer = &mut arriving.bytes;
            buffer.reserve_exact(capacity.max(len) - buffer.len());
        }
        Ok(())
    }

    /// Reserves again the memory that [`ReservedBody::release_parse_memory`] released, and that of
    /// an earlier conversation.
    pub(crate) async fn reserve_parse_memory(
        &self,
        body: &mut ReservedBody,
    ) -> Result<(), ApiError> {
        let bytes = body.len();
        let held = body
            .permit
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        if held >= units(bytes * BYTES_PER_BYTE) as usize {
            return Ok(());
        }
        let pool = if bytes <= SHORT_BYTES {
            &self.short
        } else {
            &self.long
        };
        body.permit = None;
        body.permit = Some(pool.reserve(bytes * BYTES_PER_BYTE).await?);
        Ok(())
    }
}

/// A body that was read, with its reservation.
pub(crate) struct ReservedBody {
    bytes: Vec<u8>,
    /// Length of the stored conversation that is read with it.
    earlier_bytes: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl ReservedBody {
    /// Releases the reservation except for the body's own bytes, while nothing is made of it.
    pub(crate) fn release_parse_memory(&mut self) {
        let text = units(self.bytes.len()) as usize;
        if let Some(permit) = &mut self.permit {
            drop(permit.split(permit.num_permits().saturating_sub(text)));
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Length of the body, with the stored conversation before it.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() + self.earlier_bytes
    }

    /// Whether it is read on a blocking thread, not on the event loop.
    pub(crate) fn is_long(&self) -> bool {
        self.len() >= LONG_BYTES
    }

    /// Counts a stored conversation of this length as a part of the body.
    pub(crate) fn add_earlier(&mut self, bytes: usize) {
        self.earlier_bytes += bytes;
    }

    /// Parses the body and calls `read` with it. Afterwards only the result of `read` is left of
    /// the body.
    pub(crate) fn parse<T>(
        self,
        read: impl FnOnce(&Document) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        Ok(self.parse_keeping(read, |_| 0)?.0)
    }

    /// As [`Self::parse`]; `kept_bytes` stay reserved for the result.
    pub(crate) fn parse_keeping<T>(
        self,
        read: impl FnOnce(&Document) -> Result<T, ApiError>,
        kept_bytes: impl FnOnce(&T) -> usize,
    ) -> Result<(T, Option<OwnedSemaphorePermit>), ApiError> {
        let found = parse_json(self.bytes).and_then(|document| read(&document))?;
        let kept = units(kept_bytes(&found)) as usize;
        let kept = self.permit.filter(|_| kept > 0).and_then(|mut permit| {
            let kept = kept.min(permit.num_permits());
            permit.split(kept)
        });
        Ok((found, kept))
    }
}

/// Parses and checks the JSON of a body.
pub(crate) fn parse_json(bytes: Vec<u8>) -> Result<Document, ApiError> {
    let text = String::from_utf8(bytes).map_err(|error| {
        let message = format!(
            "The body is not UTF-8, from byte {} on.",
            error.utf8_error().valid_up_to()
        );
        ApiError::bad_request("invalid_utf8", message)
    })?;
    Document::check(text).map_err(|error| {
        ApiError::bad_request("invalid_json", format!("The body is not JSON: {error}."))
    })
}

/// Reads and drops the body of a request that is refused unread, so that its client receives the
/// answer.
pub(crate) async fn drain_refused_body(headers: &HeaderMap, body: Body) {
    // A client that sent `Expect` has sent nothing of its body yet.
    if !headers.contains_key(header::EXPECT) {
        discard(body).await;
    }
}

/// Reads on without keeping anything: a client that writes its whole body before it reads would
/// otherwise find the connection reset and no answer. The time is limited.
async fn discard(body: Body) {
    // The outcome does not matter.
    let _ = tokio::time::timeout(DISCARD_MAX, read_to_end(body)).await;
}

async fn read_to_end(mut body: Body) {
    let mut bytes = 0;
    while let Some(Ok(frame)) = body.frame().await {
        bytes += frame.data_ref().map_or(0, Bytes::len);
        if bytes > DISCARD_BYTES_MAX {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use futures::channel::mpsc::{UnboundedSender, unbounded};
    use std::convert::Infallible;
    use std::sync::Arc;

    const MIB: usize = 1 << 20;

    fn announced(bytes: usize) -> HeaderMap {
        let value = HeaderValue::from(bytes);
        HeaderMap::from_iter([(header::CONTENT_LENGTH, value)])
    }

    fn blanks(bytes: usize) -> Body {
        Body::from(vec![b' '; bytes])
    }

    /// A body whose pieces the test sends.
    fn slow() -> (UnboundedSender<Result<Bytes, Infallible>>, Body) {
        let (sender, receiver) = unbounded();
        (sender, Body::from_stream(receiver))
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_wait_in_order_for_memory_and_are_then_refused() {
        let memory = Arc::new(BodyMemory::new(16 * MIB, MIB));
        let free = memory.free_units();
        let read = |bytes: usize| {
            let memory = Arc::clone(&memory);
            let reading =
                async move { memory.read(&announced(bytes), blanks(bytes), 2 * MIB).await };
            tokio::spawn(reading)
        };
        let first = read(2 * MIB).await.unwrap().unwrap();
        let second = read(MIB).await.unwrap().unwrap();
        // No memory is left for a third long body; short bodies have their own.
        let refused = read(MIB).await.unwrap();
        let error = refused.err().unwrap();
        assert_eq!(
            (error.status().as_u16(), error.code()),
            (429, Some("bodies_full"))
        );
        assert!(read(1000).await.unwrap().is_ok());
        let waiting = read(2 * MIB);
        tokio::task::yield_now().await;
        let behind = read(MIB);
        tokio::task::yield_now().await;
        drop(second);
        tokio::task::yield_now().await;
        assert!(!behind.is_finished(), "one that came later went first");
        drop(first);
        let waited = waiting.await.unwrap().unwrap();
        let after = behind.await.unwrap().unwrap();
        drop((waited, after));
        assert_eq!(memory.free_units(), free);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_disconnects_frees_its_body_memory() {
        let memory = Arc::new(BodyMemory::new(16 * MIB, MIB));
        let free = memory.free_units();
        let (sender, body) = slow();
        let own = Arc::clone(&memory);
        let reading = tokio::spawn(async move { own.read(&announced(MIB), body, MIB).await });
        sender.unbounded_send(Ok(Bytes::from_static(b"{"))).unwrap();
        tokio::task::yield_now().await;
        assert!(memory.free_units().0 < free.0);
        reading.abort();
        assert!(reading.await.is_err());
        assert_eq!(memory.free_units(), free);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_of_unknown_length_reserves_memory_as_it_grows() {
        let memory = BodyMemory::new(16 * MIB, MIB);
        let free = memory.free_units();
        let (sender, body) = slow();
        for _ in 0..8 {
            let piece = Bytes::from(vec![b' '; 16 * 1024]);
            sender.unbounded_send(Ok(piece)).unwrap();
        }
        drop(sender);
        let held = memory.read(&HeaderMap::new(), body, MIB).await.unwrap();
        assert_eq!(held.bytes().len(), 128 * 1024);
        let reserved_units = free.1 - memory.free_units().1;
        assert_eq!(
            reserved_units,
            128 * BYTES_PER_BYTE,
            "what it turned out to need"
        );
        assert_eq!(memory.free_units().0, free.0);
        drop(held);
        assert_eq!(memory.free_units(), free);
    }

    #[tokio::test(start_paused = true)]
    async fn an_announced_body_reserves_nothing_before_it_arrives() {
        let memory = Arc::new(BodyMemory::new(4 * MIB, MIB));
        let free = memory.free_units();
        let mut silent = Vec::new();
        for _ in 0..64 {
            for bytes in [SHORT_BYTES, MIB] {
                let (sender, body) = slow();
                let own = Arc::clone(&memory);
                let reading = async move { own.read(&announced(bytes), body, MIB).await };
                silent.push((sender, tokio::spawn(reading)));
            }
        }
        tokio::task::yield_now().await;
        assert_eq!(memory.free_units(), free, "nothing has arrived");
        let began = Instant::now();
        for bytes in [1000, SHORT_BYTES, MIB] {
            let held = memory.read(&announced(bytes), blanks(bytes), MIB).await;
            assert_eq!(held.unwrap().bytes().len(), bytes);
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(silent.iter().all(|(_, reading)| !reading.is_finished()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_body_is_refused_while_another_waits() {
        let memory = Arc::new(BodyMemory::new(4 * MIB, MIB));
        let free = memory.free_units();
        let (sender, body) = slow();
        let own = Arc::clone(&memory);
        let stopped = tokio::spawn(async move { own.read(&announced(MIB), body, MIB).await });
        let begun = Bytes::from(vec![b' '; SHORT_BYTES + 1]);
        sender.unbounded_send(Ok(begun)).unwrap();
        tokio::time::sleep(10 * PROGRESS_SPAN).await;
        assert!(!stopped.is_finished(), "nobody waits");
        assert_eq!(memory.free_units().1, 0);
        let held = memory.read(&announced(MIB), blanks(MIB), MIB).await;
        assert_eq!(held.unwrap().bytes().len(), MIB);
        let error = stopped.await.unwrap().err().unwrap();
        assert_eq!(
            (error.status().as_u16(), error.code()),
            (408, Some("body_stalled"))
        );
        assert_eq!(memory.free_units(), free);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_waiting_for_a_model_reserves_only_its_own_bytes() {
        let memory = BodyMemory::new(16 * MIB, MIB);
        let free = memory.free_units();
        let held = memory.read(&announced(MIB), blanks(MIB), MIB).await;
        let mut held = held.unwrap();
        held.release_parse_memory();
        assert_eq!(free.1 - memory.free_units().1, 1024);
        memory.reserve_parse_memory(&mut held).await.unwrap();
        assert_eq!(free.1 - memory.free_units().1, 1024 * BYTES_PER_BYTE);
    }
}
