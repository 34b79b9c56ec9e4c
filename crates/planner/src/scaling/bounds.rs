//! From the need of each leg to the workers to start and those to flip.
//!
//! Owns: bounds, the number of devices, the pool in which an additional worker is started, and how
//! often a pool may reverse. Never: looks at demand. Invariant: the result keeps every pool's
//! bounds and takes no more devices than there are.

use cleave_domain::{PoolCounts, Role, ScalingPolicy, Time};
use std::collections::VecDeque;
use std::time::Duration;

pub(super) const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];
/// The time over which reversals are counted.
const HOUR: Duration = Duration::from_secs(3600);

/// Devices of these workers.
pub(super) fn devices(workers: &PoolCounts, scaling: &ScalingPolicy) -> u64 {
    let of = |role| u64::from(workers.for_role(role)) * u64::from(scaling.pool(role).devices);
    POOLS.into_iter().map(of).sum()
}

/// Whether prefill workers may become decode workers and the other way round.
pub(super) fn can_flip(scaling: &ScalingPolicy) -> bool {
    let (prefill, decode) = (&scaling.prefill, &scaling.decode);
    scaling.flip && prefill.max > 0 && decode.max > 0 && prefill.devices == decode.devices
}

/// Each leg within the bounds of its pool, or of both pools where workers flip.
pub(super) fn within_bounds(mut legs: PoolCounts, scaling: &ScalingPolicy) -> PoolCounts {
    for role in POOLS {
        let pool = scaling.pool(role);
        let most = match role {
            Role::Prefill if can_flip(scaling) => both_max(scaling) - scaling.decode.min,
            Role::Decode if can_flip(scaling) => both_max(scaling) - scaling.prefill.min,
            Role::Prefill | Role::Decode | Role::Both => pool.max,
        };
        *legs.for_role_mut(role) = legs.for_role(role).min(most).max(pool.min);
    }
    while can_flip(scaling) && legs.prefill + legs.decode > both_max(scaling) {
        take_one(&mut legs, &[Role::Prefill, Role::Decode], scaling);
    }
    legs
}

fn both_max(scaling: &ScalingPolicy) -> u32 {
    scaling.prefill.max + scaling.decode.max
}

/// At most the given number of devices: the largest leg is reduced first.
pub(super) fn within_devices(mut legs: PoolCounts, scaling: &ScalingPolicy) -> PoolCounts {
    while devices(&legs, scaling) > u64::from(scaling.devices_max) {
        if !take_one(&mut legs, &POOLS, scaling) {
            break;
        }
    }
    legs
}

/// Removes one from the largest leg above its minimum; false if there is none.
fn take_one(legs: &mut PoolCounts, of: &[Role], scaling: &ScalingPolicy) -> bool {
    let above = of
        .iter()
        .filter(|role| legs.for_role(**role) > scaling.pool(**role).min);
    let most = above.max_by_key(|role| legs.for_role(**role));
    if let Some(role) = most {
        *legs.for_role_mut(*role) -= 1;
    }
    most.is_some()
}

/// Workers to run for these legs, starting from those wanted before: as many in all, and where
/// workers flip, none is replaced by one of the other pool.
pub(super) fn workers_to_start(
    before: PoolCounts,
    legs: PoolCounts,
    scaling: &ScalingPolicy,
) -> PoolCounts {
    let mut workers = legs;
    if !can_flip(scaling) {
        return workers;
    }
    for role in [Role::Prefill, Role::Decode] {
        let pool = scaling.pool(role);
        *workers.for_role_mut(role) = before.for_role(role).clamp(pool.min, pool.max);
    }
    // Only the sum matters where workers flip: a missing one is added where it is missed most, a
    // superfluous one removed where it is missed least.
    let needed = legs.prefill + legs.decode;
    loop {
        let have = workers.prefill + workers.decode;
        let lacks = |role: Role| i64::from(legs.for_role(role)) - i64::from(workers.for_role(role));
        let legs = [Role::Prefill, Role::Decode].into_iter();
        if have < needed {
            let open = legs.filter(|role| workers.for_role(*role) < scaling.pool(*role).max);
            let Some(role) = open.max_by_key(|role| lacks(*role)) else {
                return workers;
            };
            *workers.for_role_mut(role) += 1;
        } else if have > needed {
            let open = legs.filter(|role| workers.for_role(*role) > scaling.pool(*role).min);
            let Some(role) = open.min_by_key(|role| lacks(*role)) else {
                return workers;
            };
            *workers.for_role_mut(role) -= 1;
        } else {
            return workers;
        }
    }
}

/// The legs that these workers serve: as wanted, with any difference in numbers added or removed.
pub(super) fn legs_served(
    legs: PoolCounts,
    workers: PoolCounts,
    scaling: &ScalingPolicy,
) -> PoolCounts {
    if !can_flip(scaling) {
        return workers;
    }
    let mut served = PoolCounts {
        both: workers.both,
        ..legs
    };
    let have = workers.prefill + workers.decode;
    // More workers than wanted: the extra one serves the leg in whose pool it was started.
    while served.prefill + served.decode < have {
        if workers.decode > served.decode {
            served.decode += 1
        } else {
            served.prefill += 1
        }
    }
    while served.prefill + served.decode > have {
        if served.decode >= served.prefill {
            served.decode -= 1
        } else {
            served.prefill -= 1
        }
    }
    served
}

/// Reversals, from growing to shrinking or back, in the last hour.
#[derive(Clone, Debug, Default)]
pub(super) struct Reversals {
    grew: Option<bool>,
    at: VecDeque<Time>,
}

impl Reversals {
    pub(super) fn count(&self, now: Time) -> u32 {
        let late = self.at.iter().filter(|at| now.since(**at) < HOUR);
        u32::try_from(late.count()).unwrap_or(u32::MAX)
    }

    /// Whether it may shrink, with a reversal left to grow again after that.
    pub(super) fn may_shrink(&self, now: Time, most: u32) -> bool {
        self.grew != Some(true) || self.count(now) + 2 <= most
    }

    pub(super) fn record_change(&mut self, now: Time, grew: bool) {
        if self.grew.replace(grew).is_some_and(|before| before != grew) {
            self.record(now);
        }
    }

    /// Counts an event by itself.
    pub(super) fn record(&mut self, now: Time) {
        self.at.retain(|at| now.since(*at) < HOUR);
        self.at.push_back(now);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use cleave_domain::PoolScaling;
    use proptest::prelude::*;

    pub(crate) fn counts(prefill: u32, decode: u32, both: u32) -> PoolCounts {
        PoolCounts {
            prefill,
            decode,
            both,
        }
    }

    fn scaling(prefill: u32, decode: u32, devices: u32) -> ScalingPolicy {
        let pool = |role, max| PoolScaling {
            min: 1,
            max,
            ..PoolScaling::absent(role)
        };
        ScalingPolicy {
            prefill: pool(Role::Prefill, prefill),
            decode: pool(Role::Decode, decode),
            ..ScalingPolicy::new(devices)
        }
    }

    // Lesson: 30.
    #[test]
    fn a_spare_worker_flips_before_one_is_started() {
        let scaling = scaling(8, 8, 16);
        // Prefill has two to spare, decode needs two more: no worker is started.
        let before = counts(4, 4, 0);
        assert_eq!(workers_to_start(before, counts(2, 6, 0), &scaling), before);
        // One more in all: it is started where it is missing.
        assert_eq!(
            workers_to_start(before, counts(3, 6, 0), &scaling),
            counts(4, 5, 0)
        );
        // One fewer in all: it is removed from the pool that has too many.
        assert_eq!(
            workers_to_start(before, counts(2, 5, 0), &scaling),
            counts(3, 4, 0)
        );
        let fixed = ScalingPolicy {
            flip: false,
            ..scaling
        };
        assert_eq!(
            workers_to_start(before, counts(2, 6, 0), &fixed),
            counts(2, 6, 0)
        );
    }

    // Invariant: I40.
    #[test]
    fn a_pool_shrinks_only_within_its_reversal_limit() {
        let at = |minute: u64| Time::from_nanos(minute * 60_000_000_000);
        let mut turns = Reversals::default();
        turns.record_change(at(0), true);
        assert!(turns.may_shrink(at(1), 2));
        turns.record_change(at(1), false);
        turns.record_change(at(2), true);
        assert_eq!(turns.count(at(2)), 2);
        assert!(!turns.may_shrink(at(3), 2));
        assert!(turns.may_shrink(at(62), 2), "an hour later it may");
    }

    proptest! {
        // Invariant: I40.
        #[test]
        fn worker_counts_stay_within_every_bound(
            before in (0u32..20, 0u32..20), legs in (0u32..20, 0u32..20),
            max in (1u32..10, 1u32..10), devices_max in 2u32..24, flip: bool,
        ) {
            let mut scaling = scaling(max.0, max.1, devices_max);
            scaling.flip = flip;
            let legs = within_bounds(counts(legs.0, legs.1, 0), &scaling);
            let legs = within_devices(legs, &scaling);
            let workers = workers_to_start(counts(before.0, before.1, 0), legs, &scaling);
            prop_assert!(devices(&workers, &scaling) <= u64::from(devices_max));
            for role in [Role::Prefill, Role::Decode] {
                let pool = scaling.pool(role);
                prop_assert!((pool.min..=pool.max).contains(&workers.for_role(role)), "{workers:?}");
            }
            let served = legs_served(legs, workers, &scaling);
            prop_assert_eq!(served.total(), workers.total());
            prop_assert!(served.prefill > 0 && served.decode > 0);
        }
    }

    fn rigid(scaling: &ScalingPolicy) -> ScalingPolicy {
        ScalingPolicy {
            flip: false,
            ..scaling.clone()
        }
    }

    #[test]
    fn devices_are_counted_by_those_of_each_worker() {
        let mut scaling = scaling(8, 8, 16);
        (scaling.decode.devices, scaling.both.devices) = (2, 4);
        assert_eq!(devices(&counts(1, 2, 3), &scaling), 1 + 4 + 12);
    }

    #[test]
    fn workers_flip_between_two_pools_of_equal_devices_only() {
        let both = scaling(8, 8, 16);
        assert!(can_flip(&both));
        assert!(!can_flip(&rigid(&both)));
        assert!(!can_flip(&scaling(0, 8, 16)));
        assert!(!can_flip(&scaling(8, 0, 16)));
        let mut larger = both;
        larger.decode.devices = 2;
        assert!(!can_flip(&larger));
    }

    #[test]
    fn bounds_hold_for_a_pool_and_for_both_where_workers_flip() {
        let flips = scaling(4, 6, 99);
        let bounded = |legs| within_bounds(legs, &flips);
        // Ten workers in all, and one of each pool stays.
        assert_eq!(bounded(counts(20, 0, 0)), counts(9, 1, 0));
        assert_eq!(bounded(counts(0, 20, 0)), counts(1, 9, 0));
        assert_eq!(bounded(counts(7, 3, 0)), counts(7, 3, 0));
        assert_eq!(bounded(counts(9, 5, 0)), counts(5, 5, 0));
        let mut fixed = rigid(&flips);
        fixed.both.max = 2;
        let bounded = within_bounds(counts(20, 0, 5), &fixed);
        assert_eq!(bounded, counts(4, 1, 2));
    }

    #[test]
    fn the_largest_leg_loses_its_devices_first() {
        let of = |legs, devices| within_devices(legs, &scaling(8, 8, devices));
        assert_eq!(of(counts(6, 3, 0), 9), counts(6, 3, 0));
        assert_eq!(of(counts(6, 3, 0), 7), counts(4, 3, 0));
        assert_eq!(of(counts(3, 3, 0), 5), counts(3, 2, 0));
        assert_eq!(of(counts(3, 2, 0), 1), counts(1, 1, 0), "the least stays");
    }

    #[test]
    fn workers_serve_the_leg_of_the_target() {
        let scaling = scaling(8, 8, 16);
        let of = |legs, workers| legs_served(legs, workers, &scaling);
        assert_eq!(of(counts(2, 6, 0), counts(4, 4, 3)), counts(2, 6, 3));
        // More than are wanted serve where they were started, as far as they can.
        assert_eq!(of(counts(2, 6, 0), counts(4, 5, 0)), counts(3, 6, 0));
        assert_eq!(of(counts(2, 2, 0), counts(3, 4, 0)), counts(3, 4, 0));
        assert_eq!(of(counts(1, 3, 0), counts(2, 4, 0)), counts(2, 4, 0));
        assert_eq!(of(counts(4, 2, 0), counts(6, 2, 0)), counts(6, 2, 0));
        // Of fewer than are wanted the larger leg has fewer.
        assert_eq!(of(counts(4, 6, 0), counts(2, 3, 0)), counts(3, 2, 0));
        let fixed = rigid(&scaling);
        let workers = counts(4, 4, 0);
        assert_eq!(legs_served(counts(2, 6, 0), workers, &fixed), workers);
    }

    #[test]
    fn a_turn_is_a_change_of_direction_within_the_hour() {
        let at = |minute: u64| Time::from_nanos(minute * 60_000_000_000);
        let mut turns = Reversals::default();
        turns.record_change(at(0), true);
        turns.record_change(at(1), true);
        assert_eq!(turns.count(at(1)), 0, "it went on growing");
        turns.record_change(at(2), false);
        assert!(turns.may_shrink(at(2), 0), "it shrinks already");
        assert_eq!([turns.count(at(61)), turns.count(at(62))], [1, 0]);
        turns.record(at(62));
        assert_eq!(turns.at.len(), 1, "older ones are forgotten");
        turns.record_change(at(63), true);
        assert_eq!(turns.count(at(63)), 2);
        assert!(turns.may_shrink(at(63), 4) && !turns.may_shrink(at(63), 3));
    }
}
