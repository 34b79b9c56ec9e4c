//! Absurd reports of a worker: numbers that no worker could measure, as far as the wire lets them
//! through, and beyond that for workers in the same process.
//!
//! Owns: the draws. Never: knows a flight. Invariant: the same seed gives the same reports.

use cleave_domain::{
    DecodeTiming, LinkPrice, OnSloMiss, PrefillBacklog, PrefillTiming, Prices, Refusal, Report,
    Request, RequestSlo, RowPrice, SloClass, SloMetric, SloPolicy, SplitMix64, StepProgress,
    WorkerId, WorkerLoad,
};
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct AbsurdReports(SplitMix64);

impl AbsurdReports {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Replaces the numbers of a report, and some loads by prices, which honest workers never
    /// report in these tests.
    pub(crate) fn falsify(&mut self, report: &mut Report) {
        match report {
            Report::Load(load) if self.chance() => *load = self.load(),
            Report::Load(_) | Report::Prices(_) => *report = Report::Prices(self.prices()),
            Report::Prefilled { timing, .. } => *timing = self.prefill(),
            Report::Finished {
                output_tokens,
                timing,
                prefill,
                ..
            } => {
                *output_tokens = self.short();
                *timing = self.decode();
                *prefill = self.chance().then(|| self.prefill());
            }
            Report::Refused { refusal, .. } => *refusal = self.refusal(),
            _ => {}
        }
    }

    fn refusal(&mut self) -> Refusal {
        let retry_after = self.span();
        match self.roll() % 3 {
            0 => Refusal::QueueFull { retry_after },
            1 => Refusal::NoBlocks { retry_after },
            _ => Refusal::Late {
                aim: SloMetric::Ttft,
                predicted: self.span(),
                retry_after,
            },
        }
    }

    fn roll(&mut self) -> u64 {
        self.0.draw()
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[(self.roll() % all.len() as u64) as usize]
    }

    fn chance(&mut self) -> bool {
        self.roll().is_multiple_of(2)
    }

    /// Any size, and often a limit of the type.
    fn long(&mut self) -> u64 {
        let size = self.pick(&[0, 4, 10, 20, 30, 40, 62]);
        let some = self.roll() % (1 << size);
        self.pick(&[0, 1, some, some, some, some, u64::MAX / 2, u64::MAX])
    }

    fn short(&mut self) -> u32 {
        let some = self.roll() as u32 % 100;
        self.pick(&[0, 1, some, some, some, u32::MAX - 1, u32::MAX])
    }

    /// Mostly so few that a worker seems to have room: a full one would get no orders.
    fn few(&mut self) -> u32 {
        let lie = self.short();
        self.pick(&[0, 0, 0, 1, 1, lie])
    }

    fn span(&mut self) -> Duration {
        match self.roll() % 12 {
            0 => Duration::MAX,
            1 => Duration::MAX - Duration::from_nanos(1),
            _ => Duration::from_nanos(self.long()),
        }
    }

    fn load(&mut self) -> WorkerLoad {
        let mut backlog = PrefillBacklog::default();
        for micros in backlog.micros.iter_mut().flatten() {
            *micros = self.pick(&[0, 0, 0, 1, 5_000, 1_000_000, u32::MAX]);
        }
        WorkerLoad {
            queue_tokens: self.long(),
            sequences_waiting: self.few(),
            sequences_running: self.few(),
            blocks_free: u32::MAX - self.few(),
            progress: match self.roll() % 8 {
                0 => StepProgress::Stuck,
                _ => StepProgress::Moving,
            },
            context_tokens: self.long(),
            streams: self.short(),
            backlog,
            tpot_least: self.chance().then(|| self.span()),
            step_left: self.span(),
            orders_received: self.long(),
            states_free: 0,
            windows_free: 0,
        }
    }

    /// Knots and links are in order: the wire refuses any others.
    fn prices(&mut self) -> Prices {
        let count = self.pick(&[0, 1, 1, 2, 3, 5]);
        let mut knots: Vec<u32> = (0..count).map(|_| self.short()).collect();
        knots.sort_unstable();
        knots.dedup();
        let row = |rows| RowPrice {
            rows,
            nanos: self.long(),
        };
        let rows = knots.into_iter().map(row).collect();
        let to: Vec<WorkerId> = (0..6).filter(|_| self.chance()).map(WorkerId).collect();
        Prices {
            rows,
            pair_picos: self.long(),
            context_picos: self.long(),
            draw_nanos: self.long(),
            link: self.link(),
            links: to.into_iter().map(|to| (to, self.link())).collect(),
            error_permille: self.short(),
        }
    }

    fn link(&mut self) -> LinkPrice {
        LinkPrice {
            latency_nanos: self.long(),
            byte_picos: self.long(),
        }
    }

    fn prefill(&mut self) -> PrefillTiming {
        PrefillTiming {
            wait: self.span(),
            run: self.span(),
        }
    }

    fn decode(&mut self) -> DecodeTiming {
        DecodeTiming {
            wait: self.span(),
            first: self.span(),
        }
    }

    /// Values that a client may request; its targets are a day at most, as its headers may say.
    pub(crate) fn falsify_request(&mut self, request: &mut Request) {
        let [ttft, tpot, e2e] = self.targets();
        request.stop.max_tokens = self.pick(&[20, 20, 1000, u32::MAX]);
        request.slo = RequestSlo {
            class: self.pick(&["", "soon", "later", "stranger"]).to_owned(),
            ttft,
            tpot,
            e2e,
            priority: self.pick(&[i32::MIN, -1, 0, 0, 1, i32::MAX]),
            ..RequestSlo::default()
        };
    }

    fn targets(&mut self) -> [Option<Duration>; 3] {
        const DAY: u64 = 86_400_000_000_000;
        const SECOND: u64 = 1_000_000_000;
        let all = [0, 1, SECOND / 1000, SECOND / 10, SECOND, 10 * SECOND, DAY];
        [(); 3].map(|()| {
            let nanos = self.pick(&all);
            self.chance().then(|| Duration::from_nanos(nanos))
        })
    }

    /// One class without targets and two with some.
    pub(crate) fn policy(&mut self) -> Arc<SloPolicy> {
        let unmet = [
            OnSloMiss::Reject,
            OnSloMiss::Queue(Duration::from_millis(200)),
            OnSloMiss::Downgrade("later".to_owned()),
        ];
        let mut class = |name: &str| {
            let [ttft, tpot, e2e] = self.targets();
            SloClass {
                name: name.to_owned(),
                ttft,
                tpot,
                e2e,
                weight: self.pick(&[1, 3, u32::MAX]),
                unmet: unmet[(self.roll() % 3) as usize].clone(),
                ..SloClass::default()
            }
        };
        let classes = vec![SloClass::default(), class("soon"), class("later")];
        Arc::new(SloPolicy {
            classes,
            ..SloPolicy::default()
        })
    }
}
