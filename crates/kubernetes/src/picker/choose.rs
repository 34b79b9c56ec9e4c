//! The choice of a router for a request.
//!
//! Owns: the choice, a function of the known facts. Never asks a router. Invariant: equal facts
//! give equal choices, in every picker, so that several pickers keep a conversation together.
//!
//! A request with a key (a session, the beginning of a prompt) goes where others with the key went,
//! since that router has cached blocks for it: routers are ranked by a hash of key and address, and
//! the first whose load is below the mean plus a quarter and a few takes it (consistent hashing
//! with bounded loads). A request without a key goes to the router with the fewest sequences.

use cleave_telemetry::PickerChoice;
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

/// Chooses among `endpoints`, limited to `subset` if there is one. Without a `key`, routers with
/// equal loads take turns.
pub(crate) fn choose(
    endpoints: &[EndpointState],
    subset: Option<&BTreeSet<SocketAddr>>,
    key: Option<&[u8]>,
    turn: u64,
) -> PickerChoice {
    let allowed =
        |endpoint: &&EndpointState| subset.is_none_or(|subset| subset.contains(&endpoint.address));
    let ready: Vec<&EndpointState> = endpoints
        .iter()
        .filter(allowed)
        .filter(|endpoint| endpoint.ready)
        .collect();
    if ready.is_empty() {
        return PickerChoice::NoneReady;
    }
    let has_room =
        |endpoint: &EndpointState| endpoint.load_max.is_none_or(|max| endpoint.load < max);
    let mut open: Vec<&EndpointState> = ready
        .iter()
        .copied()
        .filter(|endpoint| has_room(endpoint))
        .collect();
    let Some(share) = load_limit(&open) else {
        return PickerChoice::Full;
    };
    let turn = turn.to_le_bytes();
    let rank = |endpoint: &&EndpointState| {
        std::cmp::Reverse(rendezvous_rank(key.unwrap_or(&turn), endpoint.address))
    };
    open.sort_by_key(rank);
    let of_key = key.and_then(|_| open.iter().find(|endpoint| endpoint.load < share));
    let least = || open.iter().min_by_key(|endpoint| endpoint.load);
    of_key
        .or_else(least)
        .map_or(PickerChoice::Full, |endpoint| {
            PickerChoice::Endpoint(endpoint.address)
        })
}

/// The load limit of each router, with one more request: the mean plus a quarter and a few; `None`
/// without routers.
fn load_limit(endpoints: &[&EndpointState]) -> Option<u64> {
    let count = u64::try_from(endpoints.len())
        .ok()
        .filter(|count| *count > 0)?;
    let total: u64 = endpoints.iter().map(|endpoint| endpoint.load).sum();
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

    fn endpoint(port: u16, load: u64) -> EndpointState {
        EndpointState {
            address: SocketAddr::from(([10, 0, 0, 1], port)),
            ready: true,
            load,
            load_max: Some(10),
        }
    }

    fn chosen(endpoints: &[EndpointState], key: Option<&[u8]>, turn: u64) -> u16 {
        match choose(endpoints, None, key, turn) {
            PickerChoice::Endpoint(address) => address.port(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_least_loaded_router_is_chosen() {
        let endpoints = [endpoint(1, 5), endpoint(2, 3), endpoint(3, 4)];
        assert_eq!(chosen(&endpoints, None, 0), 2);
        let level = [endpoint(1, 3), endpoint(2, 3), endpoint(3, 3)];
        let turns: BTreeSet<u16> = (0..50).map(|turn| chosen(&level, None, turn)).collect();
        assert_eq!(turns.len(), 3, "nobody is left out");
    }

    #[test]
    fn equal_keys_go_to_the_same_router() {
        let key: Option<&[u8]> = Some(b"session-7");
        let endpoints = [endpoint(1, 2), endpoint(2, 3), endpoint(3, 2)];
        let home = chosen(&endpoints, key, 0);
        for turn in 0..20 {
            assert_eq!(chosen(&endpoints, key, turn), home);
        }
        // Another router's coming or going moves few of the others' keys.
        let keys: Vec<String> = (0..300).map(|number| format!("key {number}")).collect();
        let homes = |endpoints: &[EndpointState]| -> Vec<u16> {
            let home = |key: &String| chosen(endpoints, Some(key.as_bytes()), 0);
            keys.iter().map(home).collect()
        };
        let (three, two) = (homes(&endpoints), homes(&endpoints[..2]));
        let moved = three.iter().zip(&two).filter(|(a, b)| a != b).count();
        let of_third = three.iter().filter(|home| **home == 3).count();
        assert_eq!(moved, of_third);
        assert!((60..=140).contains(&of_third), "{of_third}");
    }

    #[test]
    fn one_hot_key_is_spread_over_routers() {
        let key: Option<&[u8]> = Some(b"a prompt that everybody uses");
        let mut endpoints = [1, 2, 3].map(|port| EndpointState {
            load_max: None,
            ..endpoint(port, 0)
        });
        for turn in 0..300 {
            let port = chosen(&endpoints, key, turn);
            endpoints[usize::from(port) - 1].load += 1;
        }
        let loads = endpoints.map(|endpoint| endpoint.load);
        assert!(
            loads.iter().all(|load| (15..=145).contains(load)),
            "{loads:?}"
        );
        assert_eq!(
            choose(&endpoints, None, key, 0),
            choose(&endpoints, None, key, 1)
        );
    }

    #[test]
    fn full_away_or_excluded_routers_are_not_chosen() {
        let full = endpoint(1, 10);
        let away = EndpointState {
            ready: false,
            ..endpoint(2, 0)
        };
        let pick = |endpoints: &[EndpointState], subset| choose(endpoints, subset, None, 0);
        assert_eq!(pick(&[], None), PickerChoice::NoneReady);
        assert_eq!(pick(&[away], None), PickerChoice::NoneReady);
        assert_eq!(pick(&[full, away], None), PickerChoice::Full);
        let only = BTreeSet::from([endpoint(3, 0).address]);
        let endpoints = [endpoint(4, 0), endpoint(3, 9)];
        assert_eq!(
            pick(&endpoints, Some(&only)),
            PickerChoice::Endpoint(endpoints[1].address)
        );
        assert_eq!(pick(&endpoints[..1], Some(&only)), PickerChoice::NoneReady);
    }
}
