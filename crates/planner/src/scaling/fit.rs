//! From what each leg needs to whom to start and whom to give another leg.
//!
//! Owns: bounds, the devices there are, which pool an additional worker is started in, and how often a pool
//! may turn. Never: looks at demand. Invariant: what comes out keeps every pool's bounds and takes no more
//! devices than there are.

use cleave_domain::{PoolCounts, Role, Scaling, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// Every pool.
pub(super) const POOLS: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];
/// What turns are counted over.
const HOUR: Duration = Duration::from_secs(3600);

/// Devices of so many workers.
pub(super) fn devices(workers: &PoolCounts, scaling: &Scaling) -> u64 {
    let of = |role| u64::from(workers.of(role)) * u64::from(scaling.pool(role).devices);
    POOLS.into_iter().map(of).sum()
}

/// Whether prefill workers may become decode workers and the other way round.
pub(super) fn can_flip(scaling: &Scaling) -> bool {
    let (prefill, decode) = (&scaling.prefill, &scaling.decode);
    scaling.flip && prefill.max > 0 && decode.max > 0 && prefill.devices == decode.devices
}

/// Each leg within what its pool, or both pools where workers flip, may have.
pub(super) fn within_bounds(mut legs: PoolCounts, scaling: &Scaling) -> PoolCounts {
    for role in POOLS {
        let pool = scaling.pool(role);
        let most = match role {
            Role::Prefill if can_flip(scaling) => both_max(scaling) - scaling.decode.min,
            Role::Decode if can_flip(scaling) => both_max(scaling) - scaling.prefill.min,
            Role::Prefill | Role::Decode | Role::Both => pool.max,
        };
        *legs.of_mut(role) = legs.of(role).min(most).max(pool.min);
    }
    while can_flip(scaling) && legs.prefill + legs.decode > both_max(scaling) {
        lessen(&mut legs, &[Role::Prefill, Role::Decode], scaling);
    }
    legs
}

fn both_max(scaling: &Scaling) -> u32 {
    scaling.prefill.max + scaling.decode.max
}

/// No more devices than there are: the leg that has the most gives first.
pub(super) fn within_devices(mut legs: PoolCounts, scaling: &Scaling) -> PoolCounts {
    while devices(&legs, scaling) > u64::from(scaling.devices_max) {
        if !lessen(&mut legs, &POOLS, scaling) {
            break;
        }
    }
    legs
}

/// Takes one of the largest; the last one of a leg only where nothing else is left.
fn lessen(legs: &mut PoolCounts, of: &[Role], scaling: &Scaling) -> bool {
    let above = of
        .iter()
        .filter(|role| legs.of(**role) > scaling.pool(**role).min);
    let most = above.max_by_key(|role| legs.of(**role));
    if let Some(role) = most {
        *legs.of_mut(*role) -= 1;
    }
    most.is_some()
}

/// Workers to be started for these legs, from those that were wanted before: as many in all, and where
/// workers flip no other ones than there are.
pub(super) fn workers(before: PoolCounts, legs: PoolCounts, scaling: &Scaling) -> PoolCounts {
    let mut workers = legs;
    if !can_flip(scaling) {
        return workers;
    }
    for role in [Role::Prefill, Role::Decode] {
        let pool = scaling.pool(role);
        *workers.of_mut(role) = before.of(role).clamp(pool.min, pool.max);
    }
    let wanted = legs.prefill + legs.decode;
    loop {
        let have = workers.prefill + workers.decode;
        let lacks = |role: Role| i64::from(legs.of(role)) - i64::from(workers.of(role));
        let legs = [Role::Prefill, Role::Decode].into_iter();
        if have < wanted {
            let open = legs.filter(|role| workers.of(*role) < scaling.pool(*role).max);
            let Some(role) = open.max_by_key(|role| lacks(*role)) else {
                return workers;
            };
            *workers.of_mut(role) += 1;
        } else if have > wanted {
            let open = legs.filter(|role| workers.of(*role) > scaling.pool(*role).min);
            let Some(role) = open.min_by_key(|role| lacks(*role)) else {
                return workers;
            };
            *workers.of_mut(role) -= 1;
        } else {
            return workers;
        }
    }
}

/// The legs that so many workers serve: as wanted, and what is more or less of them where it is.
pub(super) fn served(legs: PoolCounts, workers: PoolCounts, scaling: &Scaling) -> PoolCounts {
    if !can_flip(scaling) {
        return workers;
    }
    let mut served = PoolCounts {
        both: workers.both,
        ..legs
    };
    let have = workers.prefill + workers.decode;
    while served.prefill + served.decode < have {
        let decode = workers.decode > served.decode
            && (workers.prefill <= served.prefill || served.decode < served.prefill);
        match decode {
            true => served.decode += 1,
            false => served.prefill += 1,
        }
    }
    while served.prefill + served.decode > have {
        match served.decode >= served.prefill {
            true => served.decode -= 1,
            false => served.prefill -= 1,
        }
    }
    served
}

/// How often something turned in the last hour.
#[derive(Clone, Debug, Default)]
pub(super) struct Turns {
    grew: Option<bool>,
    at: VecDeque<Time>,
}

impl Turns {
    pub(super) fn count(&self, now: Time) -> u32 {
        let late = self.at.iter().filter(|at| now.since(**at) < HOUR);
        u32::try_from(late.count()).unwrap_or(u32::MAX)
    }

    /// Whether it may shrink: so that it may grow again after that.
    pub(super) fn may_shrink(&self, now: Time, most: u32) -> bool {
        self.grew != Some(true) || self.count(now) + 2 <= most
    }

    /// It changed.
    pub(super) fn take(&mut self, now: Time, grew: bool) {
        if self.grew.replace(grew).is_some_and(|before| before != grew) {
            self.add(now);
        }
    }

    /// Something happened that counts by itself.
    pub(super) fn add(&mut self, now: Time) {
        self.at.retain(|at| now.since(*at) < HOUR);
        self.at.push_back(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::PoolScaling;
    use proptest::prelude::*;

    fn counts(prefill: u32, decode: u32, both: u32) -> PoolCounts {
        PoolCounts {
            prefill,
            decode,
            both,
        }
    }

    fn scaling(prefill: u32, decode: u32, devices: u32) -> Scaling {
        let pool = |role, max| PoolScaling {
            min: 1,
            max,
            ..PoolScaling::none(role)
        };
        Scaling {
            prefill: pool(Role::Prefill, prefill),
            decode: pool(Role::Decode, decode),
            ..Scaling::new(devices)
        }
    }

    #[test]
    fn a_worker_was_started_where_one_to_spare_could_have_changed_its_leg() {
        let scaling = scaling(8, 8, 16);
        // Prefill has two to spare, decode needs two more: nobody is started.
        let before = counts(4, 4, 0);
        assert_eq!(workers(before, counts(2, 6, 0), &scaling), before);
        // One more in all: where it is missing.
        assert_eq!(workers(before, counts(3, 6, 0), &scaling), counts(4, 5, 0));
        // Fewer in all: of the pool that has too many.
        assert_eq!(workers(before, counts(2, 5, 0), &scaling), counts(3, 4, 0));
        let fixed = Scaling {
            flip: false,
            ..scaling
        };
        assert_eq!(workers(before, counts(2, 6, 0), &fixed), counts(2, 6, 0));
    }

    #[test]
    fn a_pool_may_always_grow_and_shrinks_no_oftener_than_it_may_turn() {
        let at = |minute: u64| Time::from_nanos(minute * 60_000_000_000);
        let mut turns = Turns::default();
        turns.take(at(0), true);
        assert!(turns.may_shrink(at(1), 2));
        turns.take(at(1), false);
        turns.take(at(2), true);
        assert_eq!(turns.count(at(2)), 2);
        assert!(!turns.may_shrink(at(3), 2));
        assert!(turns.may_shrink(at(62), 2), "an hour later it may");
    }

    proptest! {
        #[test]
        fn no_bound_is_broken(
            before in (0u32..20, 0u32..20), legs in (0u32..20, 0u32..20),
            max in (1u32..10, 1u32..10), devices_max in 2u32..24, flip: bool,
        ) {
            let mut scaling = scaling(max.0, max.1, devices_max);
            scaling.flip = flip;
            let legs = within_bounds(counts(legs.0, legs.1, 0), &scaling);
            let legs = within_devices(legs, &scaling);
            let workers = workers(counts(before.0, before.1, 0), legs, &scaling);
            prop_assert!(devices(&workers, &scaling) <= u64::from(devices_max));
            for role in [Role::Prefill, Role::Decode] {
                let pool = scaling.pool(role);
                prop_assert!((pool.min..=pool.max).contains(&workers.of(role)), "{workers:?}");
            }
            let served = served(legs, workers, &scaling);
            prop_assert_eq!(served.total(), workers.total());
            prop_assert!(served.prefill > 0 && served.decode > 0);
        }
    }
}
