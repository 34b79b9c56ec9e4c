//! Which router a request goes to.
//!
//! Owns: the choice, a function of what is known. Never: asks anybody. Invariant: equal facts give equal
//! choices, in every picker, so that several of them keep a conversation together.
//!
//! A request with a key (a session, the beginning of a prompt) goes where others with the key went, since
//! that router knows what is cached for it: routers are ranked by a hash of both, and the first that
//! has no more than its share, a quarter and a few takes it (consistent hashing with bounded loads). One
//! without a key goes to the router with the fewest sequences.

use std::collections::BTreeSet;
use std::net::SocketAddr;

/// So many sequences more or less are nothing to a router, which carries hundreds; and its word is up to half
/// a second old.
const FEW: u64 = 16;

/// A router, as far as the choice goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    pub(crate) address: SocketAddr,
    /// Whether it said, when last asked, that it would serve a request.
    pub(crate) ready: bool,
    /// Sequences it has open.
    pub(crate) load: u64,
    /// With so many it refuses the next one; `None`: never.
    pub(crate) load_max: Option<u64>,
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// There.
    Endpoint(SocketAddr),
    /// All that are ready have as much as they take.
    Full,
    /// None is ready.
    Nobody,
}

/// Chooses among `seats`, of which only those in `subset` may be, if there is one. Without a `key`
/// those with equal loads take turns.
pub(crate) fn choose(
    seats: &[Seat],
    subset: Option<&BTreeSet<SocketAddr>>,
    (key, turn): (Option<&[u8]>, u64),
) -> Choice {
    let allowed = |seat: &&Seat| subset.is_none_or(|subset| subset.contains(&seat.address));
    let ready: Vec<&Seat> = seats
        .iter()
        .filter(allowed)
        .filter(|seat| seat.ready)
        .collect();
    if ready.is_empty() {
        return Choice::Nobody;
    }
    let has_room = |seat: &Seat| seat.load_max.is_none_or(|max| seat.load < max);
    let mut open: Vec<&Seat> = ready
        .iter()
        .copied()
        .filter(|seat| has_room(seat))
        .collect();
    let Some(share) = share(&open) else {
        return Choice::Full;
    };
    let turn = turn.to_le_bytes();
    let rank = |seat: &&Seat| std::cmp::Reverse(rank(key.unwrap_or(&turn), seat.address));
    open.sort_by_key(rank);
    let of_key = key.and_then(|_| open.iter().find(|seat| seat.load < share));
    let least = || open.iter().min_by_key(|seat| seat.load);
    of_key
        .or_else(least)
        .map_or(Choice::Full, |seat| Choice::Endpoint(seat.address))
}

/// What each may have when one more has come: the mean, a quarter and a few; none without any.
fn share(seats: &[&Seat]) -> Option<u64> {
    let count = u64::try_from(seats.len()).ok().filter(|count| *count > 0)?;
    let total: u64 = seats.iter().map(|seat| seat.load).sum();
    Some(((total + 1) * 5).div_ceil(4 * count) + FEW)
}

/// How much this router is the key's: any other order for another key, the same in each process.
fn rank(key: &[u8], address: SocketAddr) -> u64 {
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

    fn seat(port: u16, load: u64) -> Seat {
        Seat {
            address: SocketAddr::from(([10, 0, 0, 1], port)),
            ready: true,
            load,
            load_max: Some(10),
        }
    }

    fn chosen(seats: &[Seat], key: Option<&[u8]>, turn: u64) -> u16 {
        match choose(seats, None, (key, turn)) {
            Choice::Endpoint(address) => address.port(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_fullest_router_was_given_more() {
        let seats = [seat(1, 5), seat(2, 3), seat(3, 4)];
        assert_eq!(chosen(&seats, None, 0), 2);
        let level = [seat(1, 3), seat(2, 3), seat(3, 3)];
        let turns: BTreeSet<u16> = (0..50).map(|turn| chosen(&level, None, turn)).collect();
        assert_eq!(turns.len(), 3, "nobody is left out");
    }

    #[test]
    fn a_conversation_went_from_router_to_router() {
        let key: Option<&[u8]> = Some(b"session-7");
        let seats = [seat(1, 2), seat(2, 3), seat(3, 2)];
        let home = chosen(&seats, key, 0);
        for turn in 0..20 {
            assert_eq!(chosen(&seats, key, turn), home);
        }
        // Another router's coming or going moves few of the others' keys.
        let keys: Vec<String> = (0..300).map(|number| format!("key {number}")).collect();
        let homes = |seats: &[Seat]| -> Vec<u16> {
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
    fn one_key_filled_one_router() {
        let key: Option<&[u8]> = Some(b"a prompt that everybody uses");
        let mut seats = [1, 2, 3].map(|port| Seat {
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
        assert_eq!(
            choose(&seats, None, (key, 0)),
            choose(&seats, None, (key, 1))
        );
    }

    #[test]
    fn who_may_not_or_cannot_was_named() {
        let full = seat(1, 10);
        let away = Seat {
            ready: false,
            ..seat(2, 0)
        };
        let pick = |seats: &[Seat], subset| choose(seats, subset, (None, 0));
        assert_eq!(pick(&[], None), Choice::Nobody);
        assert_eq!(pick(&[away], None), Choice::Nobody);
        assert_eq!(pick(&[full, away], None), Choice::Full);
        let only = BTreeSet::from([seat(3, 0).address]);
        let seats = [seat(4, 0), seat(3, 9)];
        assert_eq!(
            pick(&seats, Some(&only)),
            Choice::Endpoint(seats[1].address)
        );
        assert_eq!(pick(&seats[..1], Some(&only)), Choice::Nobody);
    }
}
