//! The values that a message may have.
//!
//! Owns: the bounds of every type that travels. Never passes on a number by which a receiver would
//! divide, multiply or count, or an order of entries that it relies on, unchecked. Invariant: a
//! message that passes is one that this release could have sent, up to generous ceilings. The
//! checks name every field of a type with bounds, and every variant, so that one added to the
//! domain does not compile until it is looked at here.

use super::{FleetWireError, nanos, within};
use crate::connection::{LinkState, Registration, invalid_name_reason};
use crate::grpc::SILENCE_MIN;
use cleave_domain::{
    AdapterChangeId, AdapterCommand, AdapterOffer, AdapterReport, Capacity, Deadline, DecodeTiming,
    DeviceId, Emission, Failure, FleetDemand, HandoffId, MigrateOrder, Order, PrefillOrder,
    PrefillTiming, Prices, PromptFacts, Refusal, Report, Request, RequestSlo, ReserveOrder,
    RunOrder, ScalingGossip, StateCapacity, WindowCapacity, WorkerDescription, WorkerLoad,
    WorkerRef,
};
use cleave_telemetry::RequestContext;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// A value from another process.
pub(crate) trait Bounded {
    /// Cuts what may be cut, such as durations of centuries, to its bounds.
    ///
    /// # Errors
    /// If anything else is out of its bounds.
    fn bound(&mut self) -> Result<(), FleetWireError>;
}

/// The longest duration of a message: sums of several stay far from overflow.
const SPAN_LONGEST: Duration = Duration::from_nanos(u64::MAX);
/// The longest id of a request that is taken from another process.
const ID_BYTES_MAX: usize = 256;
/// More classes than any policy has.
const CLASSES_MAX: u64 = 1024;
/// Far more rows than any worker measures.
const ROWS_MAX: usize = 1024;
/// A router wraps the last failure once. Tapes are JSON, whose readers stop at 128 levels.
pub(super) const FAILURES_NESTED_MAX: u64 = 16;
/// Far more adapters than a worker serves.
const ADAPTERS_MAX: usize = 4096;
/// Far more changes of adapters than a fleet sees.
const ADAPTER_CHANGES_MAX: u64 = 1 << 62;
/// The longest name of an adapter, and the longest path of one.
const ADAPTER_NAME_BYTES_MAX: usize = 256;
const ROOT_BYTES_MAX: usize = 4096;
/// Far more links than a worker has peers.
const LINKS_MAX: usize = 1 << 16;

// Least and most; the ceilings are far above any machine, and far below where sums overflow.
const QUEUE: RangeInclusive<u64> = 0..=1 << 24;
const BLOCK_TOKENS: RangeInclusive<u64> = 1..=1 << 16;
const BLOCK_BYTES: RangeInclusive<u64> = 1..=1 << 30;
const BLOCKS: RangeInclusive<u64> = 1..=1 << 28;
const SLOTS: RangeInclusive<u64> = 1..=1 << 16;
const STEP_TOKENS: RangeInclusive<u64> = 1..=1 << 24;
const CONTEXT_TOKENS: RangeInclusive<u64> = 1..=1 << 28;
const STATE_BYTES: RangeInclusive<u64> = 1..=u32::MAX as u64;
const STATE_PIECES: RangeInclusive<u64> = 1..=1 << 16;

/// Types of which every value is within bounds.
macro_rules! unbounded {
    ($($name:ty),*) => {$(
        impl Bounded for $name {
            fn bound(&mut self) -> Result<(), FleetWireError> {
                Ok(())
            }
        }
    )*};
}

unbounded!(HandoffId, String, WorkerRef, [u8; 32], u64, Result<(), String>);

impl<A: Bounded, B: Bounded> Bounded for (A, B) {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        self.0.bound()?;
        self.1.bound()
    }
}

impl<T: Bounded> Bounded for Option<T> {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        self.iter_mut().try_for_each(T::bound)
    }
}

impl<T: Bounded> Bounded for Vec<T> {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        self.iter_mut().try_for_each(T::bound)
    }
}

impl<T: Bounded + Clone> Bounded for Arc<T> {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        // Nobody else has a value that was just decoded, so nothing is cloned.
        Self::make_mut(self).bound()
    }
}

impl Bounded for Failure {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let (mut depth, mut failure) = (0, &*self);
        while let Self::RetriesSpent(last) = failure {
            (depth, failure) = (depth + 1, last);
        }
        within("failure.retries_spent", depth, 0..=FAILURES_NESTED_MAX)
    }
}

impl Bounded for Duration {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        *self = SPAN_LONGEST.min(*self);
        Ok(())
    }
}

/// Structs that are within bounds if their fields are. A row names every field: first those that
/// have bounds, behind the semicolon the others.
macro_rules! bounded_fields {
    ($($name:ident { $($bounded:ident),*; $($free:ident),* })*) => {$(
        impl Bounded for $name {
            fn bound(&mut self) -> Result<(), FleetWireError> {
                let Self { $($bounded,)* $($free: _),* } = self;
                $($bounded.bound()?;)*
                Ok(())
            }
        }
    )*};
}

/// The same for enums, with the fields of each variant.
macro_rules! bounded_variants {
    ($($name:ident {
        $($variant:ident $(($one:ident))? $({ $($bounded:ident),*; $($free:ident),* })?,)*
    })*) => {$(
        impl Bounded for $name {
            fn bound(&mut self) -> Result<(), FleetWireError> {
                match self {
                    $(Self::$variant $(($one))? $({ $($bounded,)* $($free: _),* })? => {
                        $($one.bound()?;)?
                        $($($bounded.bound()?;)*)?
                    })*
                }
                Ok(())
            }
        }
    )*};
}

bounded_fields! {
    ReserveOrder {
        request, waited, due; handoff, sender, expected_output_tokens, ahead_tokens
    }
    RunOrder { request, waited, due; handoff, expected_output_tokens }
    MigrateOrder { ; handoff, of, target, tokens }
    PrefillOrder { request, waited, due; handoff, target }
    Deadline { left; unmet }
    // A scheduler checks sampling, lengths and tokens, and refuses the request alone.
    Request {
        slo; prompt, generated, sampling, stop, priority, cache_salt, adapter, pooling
    }
    RequestSlo { ttft, tpot, e2e; class, tenant, priority }
    PrefillTiming { wait, run; }
    DecodeTiming { wait, first; }
    WorkerLoad {
        tpot_least, step_left;
        queue_tokens, sequences_waiting, sequences_running, blocks_free, states_free, windows_free, progress,
        context_tokens, streams, backlog, orders_received
    }
    Emission { prompt; index, sampled }
    PromptFacts { timing; cached_tokens, scores, pooled }
    LinkState { latency; peer, transport, bytes_per_second }
}

bounded_variants! {
    Order {
        Reserve(order),
        Prefill(order),
        Run(order),
        Relay(gossip),
        Migrate(order),
        Renew { ; handoffs },
        Cancel { ; handoff },
        Drain,
        Serve { ; role },
        FetchAdapter { ; adapter },
    }
    Report {
        Refused { refusal; handoff },
        Prefilled { timing; handoff },
        Finished { timing, prefill; handoff, reason, output_tokens },
        Load(load),
        Prices(prices),
        Relayed(gossip),
        MigrationAborted { failure; handoff },
        LegFailed { failure; handoff },
        Reserved { ; handoff, present, blocks, state, window },
        Running { ; handoff, present },
        Landed { ; handoff },
        MemoryPressure { ; handoff },
        Released { ; handoff },
        Draining,
        Serves { ; role },
        Prefix { ; stored, evicted },
        Adapters(report),
    }
    Refusal {
        QueueFull { retry_after; },
        NoBlocks { retry_after; },
        Late { predicted, retry_after; aim },
        TooLong { ; tokens_max },
        OutOfVocabulary { ; vocab_size },
        NoWorker,
        Draining,
        WrongWorker,
        NoAdapter { ; reason },
    }
}

impl Bounded for RequestContext {
    /// Never fails: an id that is too long counts as empty, and a trace of zeros as none.
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self { request_id, trace } = self;
        if request_id.len() > ID_BYTES_MAX {
            *request_id = Arc::default();
        }
        *trace = trace.filter(|trace| trace.trace != 0 && trace.span != 0);
        if let Some(trace) = trace {
            trace.flags &= 1;
        }
        Ok(())
    }
}

impl Bounded for AdapterCommand {
    /// Refuses names and folders that no router sends.
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let (Self::Load { name, .. } | Self::Unload { name }) = &*self;
        let names = 1..=ADAPTER_NAME_BYTES_MAX as u64;
        within("adapter.name", name.len() as u64, names)?;
        match self {
            Self::Load {
                name: _,
                folder,
                content: _,
            } => within(
                "adapter.folder",
                folder.len() as u64,
                0..=ROOT_BYTES_MAX as u64,
            ),
            Self::Unload { name: _ } => Ok(()),
        }
    }
}

impl Bounded for AdapterChangeId {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self { number, router: _ } = self;
        within("adapter.change", *number, 0..=ADAPTER_CHANGES_MAX)
    }
}

impl Bounded for AdapterReport {
    /// Refuses names that no request could give, and lists in another order.
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let problem = |problem| {
            let field = "adapters";
            Err(FleetWireError::List { field, problem })
        };
        let Self { offers, unloaded } = self;
        if offers.len().max(unloaded.len()) > ADAPTERS_MAX {
            return problem("has more than 4096 entries");
        }
        let is_sorted = offers.is_sorted_by(|one, next| one.name < next.name);
        if !is_sorted || !unloaded.is_sorted_by(|one, next| one.name < next.name) {
            return problem("is not in ascending order");
        }
        let changes = offers.iter_mut().filter_map(|offer| offer.change.as_mut());
        let ended = unloaded.iter_mut().map(|ended| &mut ended.change);
        changes.chain(ended).try_for_each(Bounded::bound)?;
        let is_name = |name: &str| (1..=ADAPTER_NAME_BYTES_MAX).contains(&name.len());
        let sizes = |offer: &AdapterOffer| {
            let AdapterOffer {
                name,
                adapter: _,
                root,
                loaded_from,
                change: _,
                place: _,
                problem: _,
            } = offer;
            let mut folders = [root].into_iter().chain(loaded_from);
            let is_short = folders.all(|folder| folder.len() <= ROOT_BYTES_MAX);
            is_name(name) && is_short
        };
        let mut ended = unloaded.iter();
        if !offers.iter().all(sizes) || !ended.all(|ended| is_name(&ended.name)) {
            return problem("has a name or a folder of an impossible length");
        }
        Ok(())
    }
}

impl Bounded for ScalingGossip {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            router: _,
            number: _,
            demand,
            wanted: _,
        } = self;
        let FleetDemand {
            slow: _,
            quick: _,
            classes,
            waiting: _,
            waiting_tokens: _,
            open: _,
        } = demand;
        within("demand.classes", classes.len() as u64, 0..=CLASSES_MAX)
    }
}

impl Bounded for Prices {
    /// Refuses prices that would make a router panic when it searches or interpolates them.
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            rows,
            pair_picos: _,
            context_picos: _,
            draw_nanos: _,
            link: _,
            links,
            error_permille: _,
        } = self;
        let problem = |field, problem| Err(FleetWireError::List { field, problem });
        if rows.len() > ROWS_MAX {
            return problem("prices.rows", "has more than 1024 entries");
        }
        if !rows.is_sorted_by(|one, next| one.rows < next.rows) {
            return problem("prices.rows", "is not in ascending order");
        }
        if links.len() > LINKS_MAX {
            return problem("prices.links", "has more than 65536 entries");
        }
        if !links.is_sorted_by(|(one, _), (next, _)| one < next) {
            return problem("prices.links", "is not in ascending order");
        }
        Ok(())
    }
}

impl Bounded for Registration {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            worker: _,
            name,
            description,
            data_address: _,
            files: _,
            silence,
        } = self;
        if let Some(reason) = invalid_name_reason(name) {
            return Err(FleetWireError::Name(reason));
        }
        silence.bound()?;
        let silences = nanos(SILENCE_MIN)..=u64::MAX;
        within("hello.silence_nanos", nanos(*silence), silences)?;
        description.bound()
    }
}

impl Bounded for WorkerDescription {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            role: _,
            home: _,
            model: _,
            fingerprint: _,
            capacity,
            queue_max,
            device,
        } = self;
        within("description.queue_max", u64::from(*queue_max), QUEUE)?;
        if let Some(DeviceId(name)) = device
            && name.is_empty()
        {
            *device = None;
        }
        capacity.bound()
    }
}

impl Bounded for Capacity {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            block_tokens,
            block_bytes,
            blocks_count,
            slots_count,
            step_tokens_max,
            context_tokens_max,
            states,
            windows,
        } = *self;
        let bounded = [
            ("capacity.block_tokens", block_tokens, BLOCK_TOKENS),
            ("capacity.block_bytes", block_bytes, BLOCK_BYTES),
            ("capacity.blocks_count", blocks_count, BLOCKS),
            ("capacity.slots_count", slots_count, SLOTS),
            ("capacity.step_tokens_max", step_tokens_max, STEP_TOKENS),
            (
                "capacity.context_tokens_max",
                context_tokens_max,
                CONTEXT_TOKENS,
            ),
        ];
        bounded
            .into_iter()
            .try_for_each(|(field, value, bounds)| within(field, u64::from(value), bounds))?;
        if let Some(StateCapacity { bytes, count }) = states {
            within("capacity.states.bytes", u64::from(bytes), STATE_BYTES)?;
            within("capacity.states.count", u64::from(count), SLOTS)?;
            let pieces = u64::from(self.state_pieces());
            within("capacity.states.pieces", pieces, STATE_PIECES)?;
        }
        let Some(windows) = windows else {
            return Ok(());
        };
        let WindowCapacity {
            tokens,
            bytes,
            count,
        } = windows;
        within("capacity.windows.tokens", u64::from(tokens), CONTEXT_TOKENS)?;
        within("capacity.windows.bytes", u64::from(bytes), STATE_BYTES)?;
        within("capacity.windows.count", u64::from(count), BLOCKS)?;
        let pieces = u64::from(self.window_pieces());
        within("capacity.windows.pieces", pieces, STATE_PIECES)
    }
}
