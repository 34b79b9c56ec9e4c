//! The router's guarantees, in a world that keeps to its prices: admitted requests are served in
//! time, others are refused at once and with a true reason, tenants get their shares, and batch
//! work harms no target.

use crate::priced_world::{PricedOutcome, PricedRng, PricedWorld, millis, request};
use cleave_domain::{
    OnSloMiss, Refusal, Request, RequestSlo, Role, SloClass, SloPolicy, SloVerdict, Tenant,
    TenantQuota, Time,
};
use cleave_router::{LegPlacement, PlacementReason, RouterLimits, RoutingMode};
use std::sync::Arc;
use std::time::Duration;

fn class(name: &str, ttft: Option<u64>, tpot: Option<u64>) -> SloClass {
    SloClass {
        name: name.to_owned(),
        ttft: ttft.map(millis),
        tpot: tpot.map(millis),
        ..SloClass::default()
    }
}

fn policy(classes: Vec<SloClass>) -> SloPolicy {
    SloPolicy {
        default_class: classes[0].name.clone(),
        classes,
        ..SloPolicy::default()
    }
}

fn limits(policy: SloPolicy) -> RouterLimits {
    RouterLimits {
        policy: Arc::new(policy),
        expected_output_tokens: 64,
        queue_wait_max: Duration::from_secs(600),
        renew_every: Duration::from_secs(3600),
        reserve_timeout: Duration::from_secs(3600),
        ..RouterLimits::default()
    }
}

fn slo(class: &SloClass, tenant: &str) -> RequestSlo {
    RequestSlo {
        class: class.name.clone(),
        tenant: tenant.to_owned(),
        ttft: class.ttft,
        tpot: class.tpot,
        e2e: class.e2e,
        priority: class.priority,
    }
}

const TWO_AND_TWO: [Role; 4] = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];

/// So many requests, with this mean interval, of lengths in these ranges.
struct ArrivalBurst {
    seed: u64,
    count: u64,
    gap_micros: u64,
    prompt: (u32, u32),
    output: (u32, u32),
}

impl ArrivalBurst {
    fn arrive(&self, world: &mut PricedWorld, of: impl Fn(u64) -> RequestSlo) {
        let mut rng = PricedRng(self.seed);
        let mut at = 0;
        let mut within = |(least, most): (u32, u32)| {
            (
                least + rng.below(u64::from(most - least) + 1) as u32,
                rng.below(1000),
            )
        };
        for number in 0..self.count {
            let (prompt, chance) = within(self.prompt);
            let (output, _) = within(self.output);
            // Exponential gaps would do as well; these have the same mean and some bursts.
            at += self.gap_micros * chance * chance / 333_000;
            let request = request(prompt, output, of(number));
            world.arrive(Time::from_nanos(at * 1000), request);
        }
    }
}

fn end() -> Time {
    Time::from_nanos(3_600_000_000_000)
}

// Invariant: I26.
/// Requests come twice as fast as the fleet can serve them.
#[test]
fn admitted_requests_meet_their_targets() {
    for seed in 1..4 {
        let chat = class("chat", Some(600), Some(12));
        let mut world = PricedWorld::new(&limits(policy(vec![chat.clone()])), 1, &TWO_AND_TWO);
        let burst = ArrivalBurst {
            seed,
            count: 600,
            gap_micros: 6_000,
            prompt: (100, 2000),
            output: (20, 100),
        };
        burst.arrive(&mut world, |_| slo(&chat, ""));
        world.run(end());
        let (good, late) = (world.good(), world.late());
        let refused = world.count(|o| o.refused.is_some());
        let mut refused_late = 0;
        for outcome in world.outcomes.values() {
            if let Some((at, refusal)) = &outcome.refused {
                assert!(matches!(refusal, Refusal::Late { .. }), "{refusal:?}");
                // A request that a worker refused waits until its router knows more of the fleet.
                refused_late += usize::from(at.since(outcome.submitted) > millis(60));
            }
        }
        assert_eq!(good + late + refused, 600);
        assert!(refused > 100, "there is no overload");
        assert!(
            refused_late * 10 <= refused,
            "{refused_late} were refused late"
        );
        // The share of the class's goal; the slowest of the admitted ones are at the limit of their
        // time.
        let attained = good * 1000 / (good + late);
        assert!(
            attained >= chat.attainment_permille as usize,
            "{attained} ‰"
        );
    }
}

// Invariant: I26.
#[test]
fn retry_after_leads_to_admission() {
    let chat = class("chat", Some(400), None);
    let mut world = PricedWorld::new(&limits(policy(vec![chat.clone()])), 1, &TWO_AND_TWO);
    let mut tried = 0;
    for _ in 0..60 {
        world.submit(0, request(2000, 20, slo(&chat, "")));
    }
    let first_refusal = world.outcomes.values().find_map(|o| o.refused.clone());
    let (at, refusal) = first_refusal.expect("sixty at once are too many");
    assert_eq!(at, Time::ZERO);
    let Refusal::Late {
        retry_after,
        predicted,
        ..
    } = refusal
    else {
        panic!("{refusal:?}");
    };
    assert!(
        predicted > millis(400) && retry_after < millis(400),
        "{retry_after:?}"
    );
    for share in [0_u32, 1, 4] {
        // Well before that it is refused again; then it is accepted, and in time.
        world.run(Time::ZERO + retry_after * share / 4);
        let flight = world.submit(0, request(2000, 20, slo(&chat, "")));
        let refused = world.outcomes[&flight].refused.is_some();
        assert_eq!(
            refused,
            share < 4,
            "after {share} quarters of {retry_after:?}"
        );
        tried += 1;
        if !refused {
            world.run(end());
            let outcome = &world.outcomes[&flight];
            assert_eq!(outcome.verdict, Some(SloVerdict::Good), "{}", outcome.words);
            break;
        }
    }
    assert!(tried > 1);
}

// Invariant: I30.
#[test]
fn tenants_are_served_by_their_shares() {
    let batch = SloClass {
        name: "batch".to_owned(),
        ..SloClass::default()
    };
    let mut policy = policy(vec![batch.clone()]);
    for (name, share) in [("one", 1), ("three", 3)] {
        policy.tenants.push(Tenant {
            name: name.to_owned(),
            key_digests: Vec::new(),
            share,
            quota: TenantQuota::default(),
        });
    }
    let mut world = PricedWorld::new(&limits(policy), 1, &[Role::Prefill, Role::Decode]);
    let burst = ArrivalBurst {
        seed: 5,
        count: 900,
        gap_micros: 100,
        prompt: (200, 1000),
        output: (40, 160),
    };
    burst.arrive(&mut world, |number| {
        let tenant = if number % 2 == 0 { "one" } else { "three" };
        slo(&batch, tenant)
    });
    // Until one tenant has no waiting requests left.
    world.run(Time::ZERO + Duration::from_secs(10));
    let served = |tenant: &str| {
        let of = |o: &&PricedOutcome| o.tenant == tenant && o.verdict.is_some();
        world.outcomes.values().filter(of).count()
    };
    let (one, three) = (served("one"), served("three"));
    assert!(three < 440, "nobody waits any more");
    let ratio = three * 100 / one.max(1);
    assert!((240..360).contains(&ratio), "{one} and {three}");
}

#[test]
fn batch_work_leaves_interactive_goodput_intact() {
    let chat = class("chat", Some(500), Some(12));
    let batch = class("batch", None, None);
    let both = policy(vec![chat.clone(), batch.clone()]);
    let good = |with_batch: bool| {
        let mut world = PricedWorld::new(&limits(both.clone()), 1, &TWO_AND_TWO);
        let burst = ArrivalBurst {
            seed: 7,
            count: 400,
            gap_micros: 25_000,
            prompt: (100, 1500),
            output: (20, 80),
        };
        burst.arrive(&mut world, |_| slo(&chat, ""));
        if with_batch {
            let burst = ArrivalBurst {
                seed: 8,
                count: 300,
                gap_micros: 10_000,
                prompt: (500, 3000),
                output: (50, 150),
            };
            burst.arrive(&mut world, |_| slo(&batch, ""));
        }
        world.run(end());
        let chats = world.count(|o| o.class == "chat" && o.verdict == Some(SloVerdict::Good));
        let batches = world.count(|o| o.class == "batch" && o.verdict == Some(SloVerdict::Good));
        (chats, batches)
    };
    let (alone, _) = good(false);
    let (with, batches) = good(true);
    assert!(alone > 300, "{alone}");
    assert!(with * 100 >= alone * 90, "{with} of {alone}");
    assert!(batches > 200, "{batches}");
}

/// A yielding stream would have to yield all the time where prompts run.
#[test]
fn batch_streams_never_run_on_a_prefill_worker() {
    let chat = class("chat", Some(500), Some(40));
    let batch = class("batch", None, None);
    let both = policy(vec![chat.clone(), batch.clone()]);
    let placed = |class: &SloClass| {
        let mut world = PricedWorld::new(&limits(both.clone()), 1, &[Role::Prefill, Role::Decode]);
        for number in 0..30 {
            let at = Time::ZERO + millis(200 * number);
            world.arrive(at, request(100, 2 + number as u32, slo(class, "")));
        }
        world.run(end());
        assert_eq!(world.good(), 30);
        world.count(|o| o.placed == Some(PlacementReason::OnPrefill))
    };
    assert!(placed(&chat) > 0, "there is no reason to stay there");
    assert_eq!(placed(&batch), 0);
}

/// A class that may wait is served when it can be; a downgraded one runs as another.
#[test]
fn an_unmet_target_queues_or_downgrades_by_its_class() {
    let patient = SloClass {
        unmet: OnSloMiss::Queue(Duration::from_secs(20)),
        ..class("patient", Some(400), None)
    };
    let modest = SloClass {
        unmet: OnSloMiss::Downgrade("rest".to_owned()),
        ..class("modest", Some(400), None)
    };
    let rest = class("rest", None, None);
    let classes = policy(vec![patient.clone(), modest.clone(), rest]);
    let mut world = PricedWorld::new(&limits(classes), 1, &TWO_AND_TWO);
    for number in 0..60 {
        let class = if number % 2 == 0 { &patient } else { &modest };
        world.submit(0, request(2000, 20, slo(class, "")));
    }
    world.run(end());
    assert_eq!(world.count(|o| o.refused.is_some()), 0);
    assert!(world.count(|o| o.verdict == Some(SloVerdict::Good)) > 30);
}

#[test]
fn a_downgrade_respects_the_tenants_priority_limit() {
    // A class with lower targets that is served before all others.
    let one_off = SloClass {
        priority: -10,
        ..class("errand", None, None)
    };
    let hasty = SloClass {
        priority: 5,
        unmet: OnSloMiss::Downgrade("errand".to_owned()),
        ..class("hasty", Some(1), None)
    };
    let tenant = |name: &str, priority_min| Tenant {
        name: name.to_owned(),
        key_digests: Vec::new(),
        share: 1,
        quota: TenantQuota {
            priority_min,
            ..TenantQuota::default()
        },
    };
    let policy = SloPolicy {
        tenants: vec![tenant("capped", Some(-2)), tenant("free", None)],
        ..policy(vec![hasty.clone(), one_off])
    };
    let mut world = PricedWorld::new(&limits(policy), 1, &TWO_AND_TWO);
    for (tenant, priority) in [("capped", -2), ("free", -10)] {
        let flight = world.submit(0, request(1000, 5, slo(&hasty, tenant)));
        world.run(end());
        let received = &world.slo_received[&flight];
        assert_eq!((&*received.class, received.priority), ("errand", priority));
    }
}

// Invariant: I31.
/// Two routers see each other's requests in the workers' reports only.
#[test]
fn two_routers_never_overbook_a_worker() {
    let chat = class("chat", Some(600), Some(12));
    let good = |routers: usize| {
        let limits = limits(policy(vec![chat.clone()]));
        let mut world = PricedWorld::new(&limits, routers, &TWO_AND_TWO);
        let burst = ArrivalBurst {
            seed: 3,
            count: 600,
            gap_micros: 14_000,
            prompt: (100, 2000),
            output: (20, 100),
        };
        burst.arrive(&mut world, |_| slo(&chat, ""));
        world.run(end());
        world.good()
    };
    let (one, two) = (good(1), good(2));
    assert!(two * 100 >= one * 95, "{two} of {one}");
}

// Lesson: 22.
/// For any shape of work, the automatic choice is no worse than a fixed one. Lesson 22.
#[test]
fn automatic_placement_is_never_worse_than_a_fixed_one() {
    let shapes = [
        ("short and short", (50, 200), (10, 40), 4_000),
        ("short and long", (50, 200), (100, 400), 20_000),
        ("long and short", (1000, 4000), (5, 20), 40_000),
        ("long and long", (1000, 4000), (100, 400), 70_000),
    ];
    let mut reasons = std::collections::BTreeSet::new();
    let mut worst = (100, "");
    for (name, prompt, output, gap_micros) in shapes {
        let chat = class("chat", Some(1000), Some(14));
        let mut good = |mode, placement| {
            let limits = RouterLimits {
                mode,
                placement,
                ..limits(policy(vec![chat.clone()]))
            };
            let mut world = PricedWorld::new(&limits, 1, &TWO_AND_TWO);
            let burst = ArrivalBurst {
                seed: 11,
                count: 400,
                gap_micros,
                prompt,
                output,
            };
            burst.arrive(&mut world, |_| slo(&chat, ""));
            world.run(end());
            if placement == LegPlacement::Auto {
                reasons.extend(world.outcomes.values().filter_map(|o| o.placed));
            }
            (world.good(), world.late())
        };
        let auto = good(RoutingMode::Slo, LegPlacement::Auto);
        let split = good(RoutingMode::Slo, LegPlacement::Split);
        let whole = good(RoutingMode::Slo, LegPlacement::Whole);
        let load = good(RoutingMode::Load, LegPlacement::Auto);
        let best = split.0.max(whole.0).max(load.0);
        worst = worst.min((auto.0 * 100 / best, name));
    }
    assert!(worst.0 >= 97, "{worst:?} % of the best");
    assert!(reasons.contains(&PlacementReason::Split), "{reasons:?}");
    assert!(reasons.contains(&PlacementReason::OnDecode), "{reasons:?}");
}

/// A request that is longer than its policy considered is refused by its own target, not by
/// others'.
#[test]
fn an_infeasible_prompt_is_refused_by_its_own_target() {
    let chat = class("chat", Some(50), None);
    let mut world = PricedWorld::new(&limits(policy(vec![chat.clone()])), 1, &TWO_AND_TWO);
    let long: Request = request(8000, 20, slo(&chat, ""));
    let flight = world.submit(0, long);
    let (_, refusal) = world.outcomes[&flight].refused.clone().expect("is refused");
    let Refusal::Late { retry_after, .. } = refusal else {
        panic!("{refusal:?}");
    };
    assert_eq!(retry_after, Duration::from_secs(30), "it never will be");
}

// Invariant: I30.
#[test]
fn an_infeasible_target_does_not_block_its_class() {
    let chat = SloClass {
        unmet: OnSloMiss::Queue(Duration::from_secs(5)),
        ..class("chat", Some(2_000), Some(50))
    };
    let mut world = PricedWorld::new(&limits(policy(vec![chat.clone()])), 1, &TWO_AND_TWO);
    let hopeless = RequestSlo {
        ttft: Some(Duration::from_micros(1)),
        ..slo(&chat, "")
    };
    for number in 0..20 {
        world.arrive(
            Time::ZERO + millis(200 * number),
            request(100, 4, hopeless.clone()),
        );
        world.arrive(
            Time::ZERO + millis(200 * number + 50),
            request(100, 4, slo(&chat, "")),
        );
    }
    world.run(end());
    assert_eq!(world.good(), 20, "the others are served in time");
    for outcome in world.outcomes.values() {
        if let Some((at, refusal)) = &outcome.refused {
            assert_eq!(*at, outcome.submitted, "told at once");
            let Refusal::Late { retry_after, .. } = refusal else {
                panic!("{refusal:?}");
            };
            assert!(*retry_after >= Duration::from_secs(10), "{retry_after:?}");
        }
    }
}

// Invariant: I30.
#[test]
fn an_infeasible_gap_does_not_close_its_worker() {
    let chat = class("chat", Some(600), Some(50));
    let batch = class("batch", None, None);
    let mut world = PricedWorld::new(
        &limits(policy(vec![batch.clone(), chat.clone()])),
        1,
        &TWO_AND_TWO,
    );
    let absurd = RequestSlo {
        tpot: Some(Duration::from_nanos(1)),
        ..slo(&batch, "")
    };
    for _ in 0..8 {
        world.submit(0, request(2000, 1, absurd.clone()));
        world.submit(0, request(2000, 50, absurd.clone()));
    }
    for number in 0..20 {
        let at = Time::ZERO + millis(1_000 + 100 * number);
        world.arrive(at, request(100, 20, slo(&chat, "")));
    }
    world.run(end());
    let chats = world.count(|o| o.class == "chat" && o.verdict == Some(SloVerdict::Good));
    assert_eq!(chats, 20);
}

/// The effects of a burst must not cause refusals, or lateness, when it is over.
#[test]
fn a_past_burst_causes_no_refusals() {
    let chat = class("chat", Some(600), Some(12));
    let mut world = PricedWorld::new(&limits(policy(vec![chat.clone()])), 1, &TWO_AND_TWO);
    for _ in 0..300 {
        world.submit(0, request(2000, 50, slo(&chat, "")));
    }
    let calm = Time::ZERO + millis(2_000);
    for number in 0..100 {
        world.arrive(calm + millis(60 * number), request(500, 40, slo(&chat, "")));
    }
    world.run(end());
    let burst = world.count(|o| o.submitted < calm && o.refused.is_some());
    assert!(burst > 200, "{burst}: there was none");
    let good = world.count(|o| o.submitted >= calm && o.verdict == Some(SloVerdict::Good));
    assert!(good >= 97, "{good} of 100");
}

#[test]
fn a_thousand_downgrades_do_not_recurse() {
    let second = class("second", Some(600_000), None);
    let first = SloClass {
        unmet: OnSloMiss::Downgrade("second".to_owned()),
        ..class("first", Some(1_500), None)
    };
    let limits = limits(policy(vec![first.clone(), second]));
    let mut world = PricedWorld::new(&limits, 1, &TWO_AND_TWO);
    for _ in 0..1000 {
        world.submit(0, request(1500, 30, slo(&first, "")));
    }
    world.run(end());
    let ended = world.count(|o| o.verdict.is_some());
    assert_eq!(ended, 1000);
    assert!(world.good() > 900, "{}", world.good());
}
