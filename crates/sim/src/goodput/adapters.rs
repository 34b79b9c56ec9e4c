//! LoRA adapters of a goodput run: which a request names, where each is, and what that costs.
//!
//! Owns: the draw of adapters, and for each worker the time of its loads. Never: decides which
//! adapter leaves; [`AdapterAdmission`] does, as in a worker.
//! Invariant: an order with an adapter reaches a worker's brain once the adapter is loaded.

use super::RequestArrival;
use super::run::{GoodputEvent, GoodputWorld};
use cleave_domain::{
    AdapterId, AdapterOffer, AdapterReport, Order, Report, SlotIndex, SplitMix64, StepPlan, Time,
};
use cleave_planner::AdapterPrices;
use cleave_sched::{
    AdapterAdmission, AdapterLimits, AdapterPassage, AdapterWork, LoadOutcome, LoadSource,
    WorkerInput,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The adapters that every worker of a fleet serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterFleet {
    /// Number of adapters; requests name those below it.
    pub count: u32,
    /// The places of each worker.
    pub limits: AdapterLimits,
    /// The price of an adapter, on every worker.
    pub prices: AdapterPrices,
}

/// Gives each arrival one of `count` adapters, with draws from a seed: the `n`-th has a share of
/// one `n`-th of the first one's (the law of Zipf).
pub fn with_adapters(arrivals: Vec<RequestArrival>, count: u32, seed: u64) -> Vec<RequestArrival> {
    let mut rng = SplitMix64::new(SplitMix64::finalize(seed));
    let mut sum = 0;
    // Shares in millionths of the first one's, added up.
    let sums: Vec<u64> = (1..=u64::from(count.max(1)))
        .map(|place| {
            sum += 1_000_000 / place;
            sum
        })
        .collect();
    let mut draw = || {
        let throw = rng.range(0, sum - 1);
        sums.partition_point(|sum| *sum <= throw) as u32
    };
    let drawn = arrivals.into_iter().map(|arrival| RequestArrival {
        adapter: Some(draw()),
        ..arrival
    });
    drawn.collect()
}

/// The content of the `number`-th adapter.
pub(super) fn adapter_id(number: u32) -> AdapterId {
    AdapterId(u128::from(number).to_be_bytes())
}

/// An order with the index of its router.
type RoutedOrder = (usize, Order);

/// The adapters of one worker.
#[derive(Debug)]
pub(crate) struct WorkerAdapters {
    admission: AdapterAdmission<RoutedOrder>,
    fleet: AdapterFleet,
    /// The adapter of the sequence in each slot.
    of_slot: BTreeMap<SlotIndex, AdapterId>,
    offers_shown: Vec<AdapterOffer>,
}

impl WorkerAdapters {
    pub(crate) fn new(fleet: AdapterFleet) -> Self {
        let mut admission = AdapterAdmission::new(fleet.limits);
        (0..fleet.count).for_each(|number| admission.add_name(adapter_id(number)));
        Self {
            admission,
            fleet,
            of_slot: BTreeMap::new(),
            offers_shown: Vec::new(),
        }
    }

    /// Time that the adapters of a step add to it.
    pub(crate) fn step(&mut self, plan: &StepPlan) -> Duration {
        for open in &plan.opens {
            match open.adapter {
                Some(adapter) => self.of_slot.insert(open.slot, adapter),
                None => self.of_slot.remove(&open.slot),
            };
        }
        let of_segment = |slot| self.of_slot.get(slot);
        let mut adapters = BTreeSet::new();
        let mut rows = 0;
        for segment in &plan.segments {
            if let Some(adapter) = of_segment(&segment.slot) {
                adapters.insert(adapter);
                rows += segment.len;
            }
        }
        self.fleet.prices.step(adapters.len() as u32, rows)
    }

    fn offers(&self) -> Vec<AdapterOffer> {
        let offer = |number| AdapterOffer {
            name: format!("adapter-{number:06}"),
            adapter: adapter_id(number),
            root: String::new(),
            loaded_from: None,
            change: None,
            place: self.admission.state(adapter_id(number)).into(),
            problem: None,
        };
        (0..self.fleet.count).map(offer).collect()
    }

    /// The loads that begin now, each with the time that it takes.
    fn loads(&mut self) -> Vec<(AdapterId, Duration)> {
        let AdapterPrices {
            load_nanos,
            load_from_host_nanos,
            ..
        } = self.fleet.prices;
        let work = std::iter::from_fn(|| self.admission.poll());
        let loads = work.filter_map(|work| match work {
            AdapterWork::Load(adapter, LoadSource::Host) => Some((adapter, load_from_host_nanos)),
            AdapterWork::Load(adapter, LoadSource::Disk | LoadSource::DiskThroughHost) => {
                Some((adapter, load_nanos))
            }
            // Memory is freed in no time.
            AdapterWork::Unload(_) | AdapterWork::DropHostCopy(_) | AdapterWork::Close(_) => None,
        });
        loads
            .map(|(adapter, nanos)| (adapter, Duration::from_nanos(nanos)))
            .collect()
    }
}

impl GoodputWorld<'_> {
    /// An order reaches a worker; it waits there for its adapter.
    pub(super) fn order_arrives(&mut self, place: usize, router: usize, order: Order) {
        if !self.workers[place].phase.is_running() {
            return;
        }
        let Some(adapters) = &mut self.workers[place].adapters else {
            return self.give_order(place, router, order);
        };
        if let Order::FetchAdapter { adapter } = &order {
            adapters.admission.fetch(*adapter);
        }
        let (handoff, request) = order.subject();
        let adapter = request.and_then(|request| request.adapter);
        let passage = match handoff {
            Some(handoff) => adapters.admission.pass(handoff, adapter, (router, order)),
            None => AdapterPassage::Open((router, order)),
        };
        self.adapters_changed(place);
        self.go(place, passage);
    }

    /// A load has ended.
    pub(super) fn adapter_loaded(&mut self, place: usize, adapter: AdapterId) {
        let Some(adapters) = &mut self.workers[place].adapters else {
            return;
        };
        let passages = adapters.admission.load_ended(adapter, &LoadOutcome::Loaded);
        self.adapters_changed(place);
        for passage in passages {
            self.go(place, passage);
        }
    }

    /// Gives back the adapter of a hand-off that has ended.
    pub(super) fn give_adapter_back(&mut self, place: usize, report: &Report) {
        if let Some(adapters) = &mut self.workers[place].adapters
            && let Report::Refused { handoff, .. } | Report::Released { handoff, .. } = report
        {
            adapters.admission.release(*handoff);
        }
    }

    /// Begins the loads that a worker asks for, and tells every router the places that changed.
    pub(super) fn adapters_changed(&mut self, place: usize) {
        let Some(adapters) = &mut self.workers[place].adapters else {
            return;
        };
        for (adapter, takes) in adapters.loads() {
            let event = GoodputEvent::AdapterLoaded {
                worker: place,
                adapter,
            };
            let at: Time = self.scenario.timer_time(self.now + takes);
            self.event_queue.push(at, event);
        }
        let offers = adapters.offers();
        if offers == adapters.offers_shown {
            return;
        }
        adapters.offers_shown.clone_from(&offers);
        for router in 0..self.routers.len() {
            let report = AdapterReport {
                offers: offers.clone(),
                unloaded: Vec::new(),
            };
            self.send_report(place, router, Report::Adapters(report));
        }
    }

    fn go(&mut self, place: usize, passage: AdapterPassage<RoutedOrder>) {
        match passage {
            AdapterPassage::Open((router, order)) => self.give_order(place, router, order),
            AdapterPassage::Held => {}
            AdapterPassage::Refused(handoff, (router, _), refusal) => {
                self.send_report(place, router, Report::Refused { handoff, refusal });
            }
        }
    }

    fn give_order(&mut self, place: usize, router: usize, order: Order) {
        let router = self.routers[router].id;
        self.handle_worker_input(place, WorkerInput::Ordered { router, order });
    }

    /// Sends a router a report.
    pub(super) fn send_report(&mut self, place: usize, router: usize, report: Report) {
        let event = GoodputEvent::ToRouter {
            router,
            from: self.devices[place].worker_ref(),
            report,
        };
        let at = self.now + self.scenario.message_time;
        self.event_queue.push_in_order(at, event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goodput::PromptRecipe;
    use cleave_domain::RequestSlo;

    #[test]
    fn shares_of_adapters_follow_zipf() {
        let arrival = |_| RequestArrival {
            at: Time::ZERO,
            prompt: PromptRecipe::unshared(0, 1),
            output_tokens: 1,
            slo: RequestSlo::default(),
            priority: 0,
            adapter: None,
        };
        let arrivals = || (0..20_000).map(arrival).collect();
        let drawn = with_adapters(arrivals(), 8, 3);
        assert_eq!(drawn, with_adapters(arrivals(), 8, 3));
        let count = |number| {
            drawn
                .iter()
                .filter(|one| one.adapter == Some(number))
                .count()
        };
        let parts: f64 = (1..=8).map(|number| 1.0 / f64::from(number)).sum();
        for (number, share) in [(0, 1.0), (1, 0.5), (3, 0.25), (7, 0.125)] {
            let expected = 20_000.0 * share / parts;
            let off = count(number) as f64 / expected - 1.0;
            assert!(off.abs() < 0.06, "{number}: {off}");
        }
        assert_eq!(count(8), 0);
    }
}
