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
    Capacity, Deadline, DecodeTiming, DeviceId, Emission, Failure, FleetDemand, HandoffId,
    MigrateOrder, Order, PrefillOrder, PrefillTiming, Prices, PromptFacts, Refusal, Report,
    Request, RequestSlo, ReserveOrder, RunOrder, ScalingGossip, StateCapacity, WorkerDescription,
    WorkerLoad, WorkerRef,
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

unbounded!(HandoffId, String, WorkerRef, [u8; 32]);

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

impl Bounded for Order {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        match self {
            Self::Reserve(reserve) => reserve.bound(),
            Self::Prefill(prefill) => prefill.bound(),
            Self::Run(run) => run.bound(),
            Self::Relay(gossip) => gossip.bound(),
            Self::Migrate(migrate) => migrate.bound(),
            Self::Renew { handoffs: _ }
            | Self::Cancel { handoff: _ }
            | Self::Drain
            | Self::Serve { role: _ } => Ok(()),
        }
    }
}

impl Bounded for ReserveOrder {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            handoff: _,
            request,
            sender: _,
            expected_output_tokens: _,
            ahead_tokens: _,
            waited,
            due,
        } = self;
        request.bound()?;
        waited.bound()?;
        due.bound()
    }
}

impl Bounded for RunOrder {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            handoff: _,
            request,
            expected_output_tokens: _,
            waited,
            due,
        } = self;
        request.bound()?;
        waited.bound()?;
        due.bound()
    }
}

impl Bounded for MigrateOrder {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            handoff: _,
            of: _,
            target: _,
            tokens: _,
        } = self;
        Ok(())
    }
}

impl Bounded for PrefillOrder {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            handoff: _,
            request,
            target: _,
            waited,
            due,
        } = self;
        request.bound()?;
        waited.bound()?;
        due.bound()
    }
}

impl Bounded for Deadline {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self { left, unmet: _ } = self;
        left.bound()
    }
}

impl Bounded for Request {
    /// A scheduler checks sampling, lengths and tokens, and refuses the request alone.
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            prompt: _,
            generated: _,
            sampling: _,
            stop: _,
            priority: _,
            cache_salt: _,
            slo,
        } = self;
        slo.bound()
    }
}

impl Bounded for RequestSlo {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            class: _,
            tenant: _,
            ttft,
            tpot,
            e2e,
            priority: _,
        } = self;
        ttft.bound()?;
        tpot.bound()?;
        e2e.bound()
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

impl Bounded for Report {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        match self {
            Self::Refused {
                handoff: _,
                refusal,
            } => refusal.bound(),
            Self::Prefilled { handoff: _, timing } => timing.bound(),
            Self::Finished {
                handoff: _,
                reason: _,
                output_tokens: _,
                timing,
                prefill,
            } => {
                timing.bound()?;
                prefill.bound()
            }
            Self::Load(load) => load.bound(),
            Self::Prices(prices) => prices.bound(),
            Self::Relayed(gossip) => gossip.bound(),
            Self::MigrationAborted {
                handoff: _,
                failure,
            }
            | Self::LegFailed {
                handoff: _,
                failure,
            } => failure.bound(),
            Self::Reserved {
                handoff: _,
                present: _,
                blocks: _,
                state: _,
            }
            | Self::Running {
                handoff: _,
                present: _,
            }
            | Self::Landed { handoff: _ }
            | Self::MemoryPressure { handoff: _ }
            | Self::Released { handoff: _ }
            | Self::Draining
            | Self::Serves { role: _ }
            | Self::Prefix {
                stored: _,
                evicted: _,
            } => Ok(()),
        }
    }
}

impl Bounded for Refusal {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        match self {
            Self::QueueFull { retry_after } | Self::NoBlocks { retry_after } => retry_after.bound(),
            Self::Late {
                aim: _,
                predicted,
                retry_after,
            } => {
                predicted.bound()?;
                retry_after.bound()
            }
            Self::TooLong { tokens_max: _ }
            | Self::OutOfVocabulary { vocab_size: _ }
            | Self::NoWorker
            | Self::Draining
            | Self::WrongWorker => Ok(()),
        }
    }
}

impl Bounded for PrefillTiming {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self { wait, run } = self;
        wait.bound()?;
        run.bound()
    }
}

impl Bounded for DecodeTiming {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self { wait, first } = self;
        wait.bound()?;
        first.bound()
    }
}

impl Bounded for WorkerLoad {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            queue_tokens: _,
            sequences_waiting: _,
            sequences_running: _,
            blocks_free: _,
            states_free: _,
            progress: _,
            context_tokens: _,
            streams: _,
            backlog: _,
            tpot_least,
            step_left,
            orders_received: _,
        } = self;
        tpot_least.bound()?;
        step_left.bound()
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

impl Bounded for Emission {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            index: _,
            sampled: _,
            prompt,
        } = self;
        prompt.bound()
    }
}

impl Bounded for PromptFacts {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            cached_tokens: _,
            scores: _,
            timing,
        } = self;
        timing.bound()
    }
}

impl Bounded for LinkState {
    fn bound(&mut self) -> Result<(), FleetWireError> {
        let Self {
            peer: _,
            transport: _,
            bytes_per_second: _,
            latency,
        } = self;
        latency.bound()
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
        let Some(StateCapacity { bytes, count }) = states else {
            return Ok(());
        };
        within("capacity.states.bytes", u64::from(bytes), STATE_BYTES)?;
        within("capacity.states.count", u64::from(count), SLOTS)?;
        let pieces = u64::from(self.state_pieces());
        within("capacity.states.pieces", pieces, STATE_PIECES)
    }
}
