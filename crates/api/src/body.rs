//! Request bodies: reading them within a limit for each and one for all together.
//!
//! Owns: the bytes that bodies may take, who waits for some, and giving freed memory back to the system. Never:
//! knows a field. Invariant: a body is read only while [`BYTES_PER_BYTE`] times its length are reserved for it,
//! and a reservation ends with the body, whatever became of its client.
//!
//! Short bodies have a quarter of the memory for themselves: whoever fills the rest keeps no ordinary request out.

use crate::error::ApiError;
use crate::json::Document;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body_util::BodyExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory that reading a body takes at most, for each of its bytes: the body, and what is made of it until only
/// tokens are left. Shown by tests/bodies.rs.
pub(crate) const BYTES_PER_BYTE: usize = 4;
/// Bodies up to this size are short.
const SHORT_BYTES: usize = 64 * 1024;
/// Memory is reserved in pieces of this size.
const UNIT_BYTES: usize = 1024;
/// How long a request waits for memory before it is refused.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(5);
/// Freed memory goes back to the system after bodies of this size.
const GIVEN_BACK_BYTES: usize = 1 << 20;
/// Of a body that is too large, so much is read and dropped for the sake of the answer.
const DISCARD_BYTES_MAX: usize = 64 << 20;
/// And for so long.
const DISCARD_MAX: Duration = Duration::from_secs(5);

/// The memory of all bodies.
pub(crate) struct BodyMemory {
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    long_units: u32,
    give_back: Arc<GiveBack>,
}

impl BodyMemory {
    /// For `bytes` in all, of which bodies of `body_bytes_max` must find room; `give_back` returns freed memory
    /// to the system.
    pub(crate) fn new(bytes: usize, body_bytes_max: usize, give_back: Option<fn()>) -> Self {
        let short_units = units(bytes / 4).max(units(SHORT_BYTES * BYTES_PER_BYTE));
        let long_units = units(bytes - bytes / 4).max(units(body_bytes_max * BYTES_PER_BYTE));
        Self {
            short: Arc::new(Semaphore::new(short_units as usize)),
            long: Arc::new(Semaphore::new(long_units as usize)),
            long_units,
            give_back: Arc::new(GiveBack {
                hook: give_back,
                state: AtomicU8::new(IDLE),
            }),
        }
    }

    /// Bytes that are reserved, of short bodies and of long ones.
    #[cfg(test)]
    fn free_units(&self) -> (usize, usize) {
        (
            self.short.available_permits(),
            self.long.available_permits(),
        )
    }

    /// The whole body, `bytes_max` at most.
    pub(crate) async fn read(
        &self,
        headers: &HeaderMap,
        mut body: Body,
        bytes_max: usize,
    ) -> Result<HeldBody, ApiError> {
        let announced = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|n| n.to_str().ok()?.parse().ok());
        if announced.is_some_and(|bytes: usize| bytes > bytes_max) {
            turn_away(headers, body).await;
            return Err(ApiError::body_too_large(bytes_max));
        }
        let mut reserved = announced.unwrap_or(SHORT_BYTES).min(bytes_max);
        let mut room = match self.reserve(reserved).await {
            Ok(room) => room,
            Err(error) => {
                turn_away(headers, body).await;
                return Err(error);
            }
        };
        let mut kept = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|_| ApiError::bad_request("body_broken", "The body broke off."))?;
            let Ok(bytes) = frame.into_data() else {
                continue;
            };
            let len = kept.len() + bytes.len();
            if len > bytes_max {
                discard(body).await;
                return Err(ApiError::body_too_large(bytes_max));
            }
            if len > reserved {
                // It did not say how long it is: it may be as long as any.
                reserved = bytes_max;
                room = match self.reserve(reserved).await {
                    Ok(room) => room,
                    Err(error) => {
                        discard(body).await;
                        return Err(error);
                    }
                };
            }
            // What is announced is reserved at once, what is not in small steps: a vector that doubles takes
            // memory for twice the body.
            if len > kept.capacity() {
                let capacity = announced.unwrap_or(len + len / 8).max(len);
                kept.reserve_exact(capacity - kept.len());
            }
            kept.extend_from_slice(&bytes);
        }
        let used = units(kept.len() * BYTES_PER_BYTE) as usize;
        drop(room.split(room.num_permits().saturating_sub(used)));
        Ok(HeldBody {
            bytes: kept,
            room: Some(room),
            give_back: Arc::clone(&self.give_back),
        })
    }

    /// Waits in order for the memory of a body of this length.
    async fn reserve(&self, body_bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let wanted = units(body_bytes * BYTES_PER_BYTE);
        let (pool, wanted) = match body_bytes <= SHORT_BYTES {
            true => (&self.short, wanted),
            false => (&self.long, wanted.min(self.long_units)),
        };
        let room = Arc::clone(pool).acquire_many_owned(wanted);
        let waited = tokio::time::timeout(ROOM_WAIT_MAX, room).await;
        waited
            .ok()
            .and_then(Result::ok)
            .ok_or_else(ApiError::bodies_full)
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// A body that was read, and its reservation.
pub(crate) struct HeldBody {
    bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
    give_back: Arc<GiveBack>,
}

impl HeldBody {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Does `read` with what the body says. When this returns, nothing of the body is left but what `read` made.
    pub(crate) fn parse<T>(
        mut self,
        read: impl FnOnce(&Document) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let bytes = std::mem::take(&mut self.bytes);
        let is_long = bytes.len() >= GIVEN_BACK_BYTES;
        let result = json(bytes).and_then(|document| read(&document));
        drop(self.room.take());
        if is_long {
            self.give_back.soon();
        }
        result
    }
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        if self.bytes.len() >= GIVEN_BACK_BYTES {
            self.bytes = Vec::new();
            self.give_back.soon();
        }
    }
}

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
const AGAIN: u8 = 2;

/// Returns freed memory to the system, one at a time and never on a thread that serves.
struct GiveBack {
    hook: Option<fn()>,
    state: AtomicU8,
}

impl GiveBack {
    /// After the call some run of the hook begins.
    fn soon(self: &Arc<Self>) {
        let (Some(hook), Ok(runtime)) = (self.hook, Handle::try_current()) else {
            return;
        };
        let next = |state| Some(if state == IDLE { RUNNING } else { AGAIN });
        let before = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        if before == Ok(IDLE) {
            let own = Arc::clone(self);
            runtime.spawn_blocking(move || own.run(hook));
        }
    }

    fn run(&self, hook: fn()) {
        loop {
            self.state.store(RUNNING, Ordering::Release);
            hook();
            let ended =
                self.state
                    .compare_exchange(RUNNING, IDLE, Ordering::AcqRel, Ordering::Acquire);
            if ended.is_ok() {
                return;
            }
        }
    }
}

/// What a body says.
pub(crate) fn json(bytes: Vec<u8>) -> Result<Document, ApiError> {
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

/// Makes sure that a client who is refused before its body was read gets the answer.
pub(crate) async fn turn_away(headers: &HeaderMap, body: Body) {
    // One that asked before sending has sent nothing yet.
    if !headers.contains_key(header::EXPECT) {
        discard(body).await;
    }
}

/// Reads on without keeping anything: a client that writes its whole body before it reads would
/// otherwise find the connection reset and no answer. It is not waited for for long.
async fn discard(body: Body) {
    // Whether it was read to its end changes nothing.
    let _ = tokio::time::timeout(DISCARD_MAX, drained(body)).await;
}

async fn drained(mut body: Body) {
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
    use std::sync::atomic::AtomicUsize;

    const MIB: usize = 1 << 20;

    fn announced(bytes: usize) -> HeaderMap {
        let value = HeaderValue::from(bytes);
        HeaderMap::from_iter([(header::CONTENT_LENGTH, value)])
    }

    fn blanks(bytes: usize) -> Body {
        Body::from(vec![b' '; bytes])
    }

    /// A body that comes as the test sends it.
    fn slow() -> (UnboundedSender<Result<Bytes, Infallible>>, Body) {
        let (sender, receiver) = unbounded();
        (sender, Body::from_stream(receiver))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_waits_in_order_for_memory_and_is_then_refused() {
        let memory = Arc::new(BodyMemory::new(16 * MIB, MIB, None));
        let free = memory.free_units();
        let read = |bytes: usize| {
            let memory = Arc::clone(&memory);
            let reading =
                async move { memory.read(&announced(bytes), blanks(bytes), 2 * MIB).await };
            tokio::spawn(reading)
        };
        let first = read(2 * MIB).await.unwrap().unwrap();
        let second = read(MIB).await.unwrap().unwrap();
        // No room is left for a third one; short ones have their own.
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
    async fn memory_of_a_client_that_leaves_is_free_again() {
        let memory = Arc::new(BodyMemory::new(16 * MIB, MIB, None));
        let free = memory.free_units();
        let (sender, body) = slow();
        let own = Arc::clone(&memory);
        let reading = tokio::spawn(async move { own.read(&announced(MIB), body, MIB).await });
        sender.unbounded_send(Ok(Bytes::from_static(b"{"))).unwrap();
        tokio::task::yield_now().await;
        assert!(memory.free_units().1 < free.1);
        reading.abort();
        assert!(reading.await.is_err());
        assert_eq!(memory.free_units(), free);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_of_unknown_length_takes_room_as_it_grows() {
        let memory = BodyMemory::new(16 * MIB, MIB, None);
        let free = memory.free_units();
        let (sender, body) = slow();
        for _ in 0..8 {
            let piece = Bytes::from(vec![b' '; 16 * 1024]);
            sender.unbounded_send(Ok(piece)).unwrap();
        }
        drop(sender);
        let held = memory.read(&HeaderMap::new(), body, MIB).await.unwrap();
        assert_eq!(held.bytes().len(), 128 * 1024);
        let taken = free.1 - memory.free_units().1;
        assert_eq!(taken, 128 * BYTES_PER_BYTE, "what it turned out to need");
        assert_eq!(memory.free_units().0, free.0);
        drop(held);
        assert_eq!(memory.free_units(), free);
    }

    #[tokio::test]
    async fn freed_memory_is_given_back_after_a_long_body() {
        static TIMES: AtomicUsize = AtomicUsize::new(0);
        fn hook() {
            TIMES.fetch_add(1, Ordering::Release);
        }
        let memory = BodyMemory::new(64 * MIB, 8 * MIB, Some(hook));
        for bytes in [1000, 2 * MIB] {
            let held = memory.read(&announced(bytes), blanks(bytes), 8 * MIB).await;
            assert!(
                held.unwrap().parse(|_| Ok(())).is_err(),
                "blanks are no JSON"
            );
            if bytes == 1000 {
                assert_eq!(TIMES.load(Ordering::Acquire), 0);
            }
        }
        while TIMES.load(Ordering::Acquire) == 0 {
            tokio::task::yield_now().await;
        }
    }
}
