//! Request bodies: reading them within a limit for each and one for all together.
//!
//! Owns: the bytes that bodies may take, who waits for some, and giving freed memory back to the system. Never:
//! knows a field. Invariant: for what has arrived of a body, [`BYTES_PER_BYTE`] times its length are reserved, and a
//! reservation ends with the body, whatever became of its client.
//!
//! Short bodies have a quarter of the memory for themselves: long ones keep no ordinary request out. A body that
//! is announced reserves nothing before it arrives; up to 64 KiB it reserves in steps, and beyond, at once what it
//! needs to its end, so that long bodies never wait for each other's rest. All waits have an end, and a body that
//! stops while another one waits for memory is refused. A long body that waits keeps the 64 KiB that arrived, beside
//! the limit, like the buffers of its connection.

use crate::error::ApiError;
use crate::json::Document;
use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body_util::BodyExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Memory that reading a body takes at most, for each of its bytes: the body, and what is made of it until only
/// tokens are left. Shown by tests/bodies.rs. What a chat template makes is apart, within limits of its own: see
/// model/template.rs.
pub(crate) const BYTES_PER_BYTE: usize = 4;
/// Bodies up to this size are short.
const SHORT_BYTES: usize = 64 * 1024;
/// Memory is reserved in pieces of this size.
const UNIT_BYTES: usize = 1024;
/// How long a request waits for memory before it is refused.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(5);
/// The first step in which a short body reserves, in bytes of the body; each further one is four times as large.
const STEP_BYTES: usize = 4 * 1024;
/// While a request waits for memory, a body has to bring [`PROGRESS_BYTES`] in this time.
const PROGRESS_SPAN: Duration = Duration::from_secs(2);
/// See [`PROGRESS_SPAN`].
const PROGRESS_BYTES: usize = 32 * 1024;
/// Freed memory goes back to the system after bodies of this size.
const GIVEN_BACK_BYTES: usize = 1 << 20;
/// Of a body that is too large, so much is read and dropped for the sake of the answer.
const DISCARD_BYTES_MAX: usize = 64 << 20;
/// And for so long.
const DISCARD_MAX: Duration = Duration::from_secs(5);

/// Memory that requests share.
struct Pool {
    free: Arc<Semaphore>,
    units_max: u32,
    /// Requests that wait for some.
    waiting: AtomicUsize,
}

impl Pool {
    fn new(units: u32) -> Self {
        Self {
            free: Arc::new(Semaphore::new(units as usize)),
            units_max: units,
            waiting: AtomicUsize::new(0),
        }
    }

    /// Waits in order, and not for ever, for the memory of so many bytes of a body.
    async fn reserve(&self, body_bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let wanted = units(body_bytes * BYTES_PER_BYTE).min(self.units_max);
        let free = || Arc::clone(&self.free);
        if let Ok(room) = free().try_acquire_many_owned(wanted) {
            return Ok(room);
        }
        let _waiting = Waiting::begin(&self.waiting);
        let waited = tokio::time::timeout(ROOM_WAIT_MAX, free().acquire_many_owned(wanted)).await;
        waited
            .ok()
            .and_then(Result::ok)
            .ok_or_else(ApiError::bodies_full)
    }
}

/// One of the requests that wait.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The memory of all bodies.
pub(crate) struct BodyMemory {
    short: Pool,
    long: Pool,
    give_back: Arc<GiveBack>,
}

/// A body while it arrives.
struct Arriving<'a> {
    pool: &'a Pool,
    /// Bytes of the body for which memory is reserved.
    reserved: usize,
    room: Option<OwnedSemaphorePermit>,
    kept: Vec<u8>,
    /// When it must have made progress, and its length when that was set.
    due: (Instant, usize),
}

impl Arriving<'_> {
    /// The next bytes; none at the end.
    async fn next(&mut self, body: &mut Body) -> Result<Option<Bytes>, ApiError> {
        loop {
            let frame = tokio::time::timeout_at(self.due.0, body.frame()).await;
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

    /// Refuses a body that has stopped while a request waits for memory.
    fn check_progress(&mut self) -> Result<(), ApiError> {
        let (until, len) = self.due;
        if Instant::now() < until {
            return Ok(());
        }
        let is_slow = self.kept.len() < len + PROGRESS_BYTES;
        let holds = self.room.is_some();
        if is_slow && holds && self.pool.waiting.load(Ordering::Acquire) > 0 {
            return Err(ApiError::body_stalled());
        }
        self.due = (Instant::now() + PROGRESS_SPAN, self.kept.len());
        Ok(())
    }
}

impl BodyMemory {
    /// For `bytes` in all, of which bodies of `body_bytes_max` must find room; `give_back` returns freed memory
    /// to the system.
    pub(crate) fn new(bytes: usize, body_bytes_max: usize, give_back: Option<fn()>) -> Self {
        let short_units = units(bytes / 4).max(units(SHORT_BYTES * BYTES_PER_BYTE));
        let long_units = units(bytes - bytes / 4).max(units(body_bytes_max * BYTES_PER_BYTE));
        Self {
            short: Pool::new(short_units),
            long: Pool::new(long_units),
            give_back: Arc::new(GiveBack {
                hook: give_back,
                state: AtomicU8::new(IDLE),
            }),
        }
    }

    /// For bodies all of which are short: they share all of it.
    pub(crate) fn of_short(bytes: usize) -> Self {
        Self::new(bytes.saturating_mul(4), SHORT_BYTES, None)
    }

    /// Bytes that are reserved, of short bodies and of long ones.
    #[cfg(test)]
    fn free_units(&self) -> (usize, usize) {
        (
            self.short.free.available_permits(),
            self.long.free.available_permits(),
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
        let mut arriving = Arriving {
            pool: &self.short,
            reserved: 0,
            room: None,
            kept: Vec::new(),
            due: (Instant::now() + PROGRESS_SPAN, 0),
        };
        while let Some(bytes) = arriving.next(&mut body).await? {
            let len = arriving.kept.len() + bytes.len();
            let fits = match len > bytes_max {
                true => Err(ApiError::body_too_large(bytes_max)),
                false => {
                    self.make_room(&mut arriving, len, announced, bytes_max)
                        .await
                }
            };
            if let Err(error) = fits {
                // Its memory is for others while the rest of it is read and dropped.
                drop(arriving);
                drop(bytes);
                discard(body).await;
                return Err(error);
            }
            arriving.kept.extend_from_slice(&bytes);
        }
        let Arriving {
            pool, room, kept, ..
        } = arriving;
        let mut room = match room {
            Some(room) => room,
            None => pool.reserve(0).await?,
        };
        let used = units(kept.len() * BYTES_PER_BYTE) as usize;
        drop(room.split(room.num_permits().saturating_sub(used)));
        Ok(HeldBody {
            bytes: kept,
            room: Some(room),
            give_back: Arc::clone(&self.give_back),
        })
    }

    /// Reserves memory for a body that has grown to `len` bytes.
    async fn make_room<'a>(
        &'a self,
        arriving: &mut Arriving<'a>,
        len: usize,
        announced: Option<usize>,
        bytes_max: usize,
    ) -> Result<(), ApiError> {
        if len > arriving.reserved && len <= SHORT_BYTES {
            let step = (arriving.reserved * 4).max(STEP_BYTES).max(len);
            let reserved = step.min(announced.unwrap_or(SHORT_BYTES)).max(len);
            let more = self.short.reserve(reserved - arriving.reserved).await?;
            match &mut arriving.room {
                Some(room) => room.merge(more),
                None => arriving.room = Some(more),
            }
            arriving.reserved = reserved;
        } else if len > arriving.reserved {
            // One that did not say how long it is may be as long as any. It waits without holding any memory.
            arriving.room = None;
            let reserved = announced.unwrap_or(bytes_max).max(len);
            arriving.pool = &self.long;
            arriving.room = Some(self.long.reserve(reserved).await?);
            arriving.reserved = reserved;
        } else {
            return Ok(());
        }
        arriving.due = (Instant::now() + PROGRESS_SPAN, arriving.kept.len());
        // A vector that doubles takes memory for twice the body: one that was announced grows once, the others
        // in small steps.
        if len > arriving.kept.capacity() {
            let capacity = announced.map_or(len + len / 8, |bytes| bytes.min(arriving.reserved));
            let kept = &mut arriving.kept;
            kept.reserve_exact(capacity.max(len) - kept.len());
        }
        Ok(())
    }

    /// Reserves again what [`HeldBody::rest`] gave up.
    pub(crate) async fn resume(&self, body: &mut HeldBody) -> Result<(), ApiError> {
        let bytes = body.bytes.len();
        let held = body
            .room
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits);
        if held >= units(bytes * BYTES_PER_BYTE) as usize {
            return Ok(());
        }
        let pool = match bytes <= SHORT_BYTES {
            true => &self.short,
            false => &self.long,
        };
        body.room = None;
        body.room = Some(pool.reserve(bytes).await?);
        Ok(())
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
    /// Keeps memory for the text alone while nothing is made of it.
    pub(crate) fn rest(&mut self) {
        let text = units(self.bytes.len()) as usize;
        if let Some(room) = &mut self.room {
            drop(room.split(room.num_permits().saturating_sub(text)));
        }
    }

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

/// Lets the next body begin a run after a hook that panicked.
struct EndsOnPanic<'a>(&'a AtomicU8);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        self.0.store(IDLE, Ordering::Release);
    }
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
            let ends = EndsOnPanic(&self.state);
            hook();
            std::mem::forget(ends);
            let ended =
                self.state
                    .compare_exchange(RUNNING, IDLE, Ordering::AcqRel, Ordering::Acquire);
            if ended.is_ok() {
                return;
            }
        }
    }
}

/// The checked JSON of a body.
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
        assert!(memory.free_units().0 < free.0);
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

    #[tokio::test(start_paused = true)]
    async fn announced_bodies_that_do_not_come_keep_nobody_out() {
        let memory = Arc::new(BodyMemory::new(4 * MIB, MIB, None));
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
    async fn a_body_that_stops_gives_way_to_one_that_waits() {
        let memory = Arc::new(BodyMemory::new(4 * MIB, MIB, None));
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
    async fn a_body_that_waits_for_a_model_reserves_its_text_alone() {
        let memory = BodyMemory::new(16 * MIB, MIB, None);
        let free = memory.free_units();
        let held = memory.read(&announced(MIB), blanks(MIB), MIB).await;
        let mut held = held.unwrap();
        held.rest();
        assert_eq!(free.1 - memory.free_units().1, 1024);
        memory.resume(&mut held).await.unwrap();
        assert_eq!(free.1 - memory.free_units().1, 1024 * BYTES_PER_BYTE);
    }

    #[test]
    fn the_hook_runs_again_after_one_that_panicked() {
        let give_back = GiveBack {
            hook: None,
            state: AtomicU8::new(RUNNING),
        };
        let panics = std::panic::AssertUnwindSafe(|| give_back.run(|| panic!("a broken hook")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(give_back.state.load(Ordering::Acquire), IDLE);
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
