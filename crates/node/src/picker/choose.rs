//! The choice of a router for a request.
//!
//! Owns: the choice, a function of the known facts. Never asks a router. Invariant: equal facts
//! give equal choices, in every picker, so that several pickers keep a conversation together.
//!
//! A request with a key (a session, the beginning of a prompt) goes where others with the key went,
//! since that router has cached blocks for it: routers are ranked by a hash of key and address, and
//! the first whose load is below the mean plus a quarter and a few takes it (consistent hashing
//! with bounded loads). A request without a key goes to the router with the fewest sequences.

use std::collections::BTreeSet;
use std::net::SocketAddr;

/// A difference in load that does not matter to a router, which carries hundreds of sequences; and
/// the known load is up to half a second old.
const LOAD_SLACK: u64 = 16;

/// The facts about a router that the choice uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndpointState {
    pub(crate) address: SocketAddr,
    /// Whether it was ready at its last poll.
    pub(crate) ready: bool,
    /// Number of its open sequences.
    pub(crate) load: u64,
    /// The limit on open sequences; `None` for no limit.
    pub(crate) load_max: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PickerChoice {
    Endpoint(SocketAddr),
    /// All ready routers are at their limits.
    Full,
    /// No allowed router is ready.
    NoneReady,
}

/// Chooses among `seats`, limited to `subset` if there is one. Without a `key`, routers with equal
/// loads take turns.
pub(crate) fn choose(
    seats: &[EndpointState],
    subset: Option<&BTreeSet<SocketAddr>>,
    key: Option<&[u8]>,
    turn: u64,
) -> PickerChoice {
    let allowed =
        |seat: &&EndpointState| subset.is_none_or(|subset| subset.contains(&seat.address));
    let ready: Vec<&EndpointState> = seats
        .iter()
        .filter(allowed)
        .filter(|seat| seat.ready)
        .collect();
    if ready.is_empty() {
        return PickerChoice::NoneReady;
    }
    let has_room = |seat: &EndpointState| seat.load_max.is_none_or(|max| seat.load < max);
    let mut open: Vec<&EndpointState> = ready
        .iter()
        .copied()
        .filter(|seat| has_room(seat))
        .collect();
    let Some(share) = load_limit(&open) else {
        return PickerChoice::Full;
    };
    let turn = turn.to_le_bytes();
    let rank = |seat: &&EndpointState| {
        std::cmp::Reverse(rendezvous_rank(key.unwrap_or(&turn), seat.address))
    };
    open.sort_by_key(rank);
    let of_key = key.and_then(|_| open.iter().find(|seat| seat.load < share));
    let least = || open.iter().min_by_key(|seat| seat.load);
    of_key.or_else(least).map_or(PickerChoice::Full, |seat| {
        PickerChoice::Endpoint(seat.address)
    })
}

/// The load limit of each router, with one more request: the mean plus a quarter and a few; `None`
/// without routers.
fn load_limit(seats: &[&EndpointState]) -> Option<u64> {
    let count = u64::try_from(seats.len()).ok().filter(|count| *count > 0)?;
    let total: u64 = seats.iter().map(|seat| seat.load).sum();
    Some(((total + 1) * 5).div_ceil(4 * count) + LOAD_SLACK)
}

/// The rank of a router for a key: another order for each key, the same in each process (rendezvous
/// hashing).
fn rendezvous_rank(key: &[u8], address: SocketAddr) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(address.to_string().as_bytes());
    hasher.update(&[0]);
    hasher.update(key);
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(port: u16, load: u64) -> EndpointState {
        EndpointState {
            address: SocketAddr::from(([10, 0, 0, 1], port)),
            ready: true,
            load,
            load_max: Some(10),
        }
    }

    fn chosen(seats: &[EndpointState], key: Option<&[u8]>, turn: u64) -> u16 {
        match choose(seats, None, key, turn) {
            PickerChoice::Endpoint(address) => address.port(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_least_loaded_router_is_chosen() {
        let seats = [seat(1, 5), seat(2, 3), seat(3, 4)];
        assert_eq!(chosen(&seats, None, 0), 2);
        let level = [seat(1, 3), seat(2, 3), seat(3, 3)];
        let turns: BTreeSet<u16> = (0..50).map(|turn| chosen(&level, None, turn)).collect();
        assert_eq!(turns.len(), 3, "nobody is left out");
    }

    #[test]
    fn equal_keys_go_to_the_same_router() {
        let key: Option<&[u8]> = Some(b"session-7");
        let seats = [seat(1, 2), seat(2, 3), seat(3, 2)];
        let home = chosen(&seats, key, 0);
        for turn in 0..20 {
            assert_eq!(chosen(&seats, key, turn), home);
        }
        // Another router's coming or going moves few of the others' keys.
        let keys: Vec<String> = (0..300).map(|number| format!("key {number}")).collect();
        let homes = |seats: &[EndpointState]| -> Vec<u16> {
            let home = |key: &String| chosen(seats, Some(key.as_bytes()), 0);
            keys.iter().map(home).collect()
        };
        let (three, two) = (homes(&seats), homes(&seats[..2]));
        let moved = three.iter().zip(&two).filter(|(a, b)| a != b).count();
        let of_third = three.iter().filter(|home| **home == 3).count();
        assert_eq!(moved, of_third);
        assert!((60..=140).contains(&of_third), "{of_third}");
    }

    #[test]
    fn one_hot_key_is_spread_over_routers() {
        let key: Option<&[u8]> = Some(b"a prompt that everybody uses");
        let mut seats = [1, 2, 3].map(|port| EndpointState {
            load_max: None,
            ..seat(port, 0)
        });
        for turn in 0..300 {
            let port = chosen(&seats, key, turn);
            seats[usize::from(port) - 1].load += 1;
        }
        let loads = seats.map(|seat| seat.load);
        assert!(
            loads.iter().all(|load| (15..=145).contains(load)),
            "{loads:?}"
        );
        assert_eq!(choose(&seats, None, key, 0), choose(&seats, None, key, 1));
    }

    #[test]
    fn full_away_or_excluded_routers_are_not_chosen() {
        let full = seat(1, 10);
        let away = EndpointState {
            ready: false,
            ..seat(2, 0)
        };
        let pick = |seats: &[EndpointState], subset| choose(seats, subset, None, 0);
        assert_eq!(pick(&[], None), PickerChoice::NoneReady);
        assert_eq!(pick(&[away], None), PickerChoice::NoneReady);
        assert_eq!(pick(&[full, away], None), PickerChoice::Full);
        let only = BTreeSet::from([seat(3, 0).address]);
        let seats = [seat(4, 0), seat(3, 9)];
        assert_eq!(
            pick(&seats, Some(&only)),
            PickerChoice::Endpoint(seats[1].address)
        );
        assert_eq!(pick(&seats[..1], Some(&only)), PickerChoice::NoneReady);
    }
}
