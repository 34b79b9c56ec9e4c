//! Tests of the pool: states of blocks, reservations, shared holders, the order of eviction.

use super::{BlockReservation, HolderCharge, PlanePool, PrefixChanges, PrefixHits};
use cleave_domain::{BlockHash, Generation};
use std::hash::Hasher;

fn hash(of: u8) -> BlockHash {
    BlockHash([of; 16])
}

// Invariant: I2.
#[test]
fn freeing_a_block_advances_its_generation() {
    let mut pool = PlanePool::new(1, HolderCharge::Nothing);
    let first = pool.take().unwrap();
    pool.release(first);
    let second = pool.take().unwrap();
    assert_eq!(first.block, second.block);
    assert_eq!(second.generation, Generation(1));
    pool.check([second], 0);
}

#[test]
#[should_panic(expected = "is not held")]
fn releasing_a_block_twice_panics() {
    let mut pool = PlanePool::new(2, HolderCharge::Nothing);
    let held = pool.take().unwrap();
    pool.release(held);
    pool.release(held);
}

#[test]
fn generations_wrap() {
    let mut pool = PlanePool::new(1, HolderCharge::Nothing);
    pool.blocks[0].generation = Generation(u32::MAX);
    let last = pool.take().unwrap();
    pool.release(last);
    assert_eq!(pool.take().unwrap().generation, Generation(0));
}

// Invariant: I7.
// Lesson: 10.
#[test]
fn reserved_blocks_are_not_given_to_others() {
    let mut pool = PlanePool::new(3, HolderCharge::Nothing);
    let mut reservation = pool.reserve(2).unwrap();
    let block = pool.take().unwrap();
    assert_eq!(pool.take(), None);
    assert_eq!(pool.reserve(1), None);
    let grown = pool.take_reserved(&mut reservation).unwrap();
    pool.check([block, grown], 1);
    pool.release_all_reserved(&mut reservation);
    assert_eq!(pool.blocks_available(), 1);
    let mut spent = BlockReservation::default();
    assert_eq!(pool.take_reserved(&mut spent), None);
}

#[test]
fn a_reserved_cached_block_cannot_be_held() {
    let mut pool = PlanePool::new(1, HolderCharge::Nothing);
    let held = pool.take().unwrap();
    pool.set_content(held, hash(1));
    pool.release(held);
    let mut reservation = pool.reserve(1).unwrap();
    assert_eq!(pool.hold(hash(1)), None);
    pool.release_all_reserved(&mut reservation);
    assert_eq!(pool.hold(hash(1)), Some(held));
}

#[test]
fn shared_blocks_outlive_a_holder_and_the_oldest_is_evicted() {
    let mut pool = PlanePool::new(2, HolderCharge::Nothing);
    let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
    pool.set_content(a, hash(1));
    pool.set_content(b, hash(2));
    let hits = |blocks, cached| PrefixHits { blocks, cached };
    assert_eq!(pool.prefix_hits(&[hash(1), hash(2), hash(3)]), hits(2, 0));
    assert_eq!(pool.hold(hash(1)), Some(a));
    pool.release(a);
    pool.release(b);
    pool.check([a], 0);
    pool.release(a);
    assert_eq!(pool.prefix_hits(&[hash(1), hash(2)]), hits(2, 2));
    assert_eq!(pool.take_changes().stored, [hash(1), hash(2)]);
    let again = pool.take().unwrap();
    assert_eq!(again.block, b.block);
    assert_ne!(again.generation, b.generation);
    assert_eq!(pool.take_changes().evicted, [hash(2)]);
    pool.check([again], 0);
}

#[test]
fn a_second_block_of_the_same_content_is_freed_not_cached() {
    let mut pool = PlanePool::new(2, HolderCharge::Nothing);
    let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
    pool.set_content(a, hash(1));
    pool.set_content(b, hash(1));
    pool.release(b);
    assert_eq!(pool.blocks_cached(), 0);
    pool.release(a);
    assert_eq!(pool.blocks_cached(), 1);
    pool.check([], 0);
}

#[test]
fn a_cached_content_computed_again_is_evicted_last() {
    let mut pool = PlanePool::new(3, HolderCharge::OneBlock);
    for of in [1, 2] {
        let held = pool.take().unwrap();
        pool.set_content(held, hash(of));
        pool.release(held);
    }
    pool.mark_inspected(1);
    let again = pool.take().unwrap();
    pool.take_changes();
    pool.set_content(again, hash(1));
    pool.check([again], 0);
    assert_eq!(pool.take_changes(), PrefixChanges::default());
    assert_eq!((pool.blocks_free(), pool.blocks_cached()), (1, 1));
    pool.release(again);
    pool.check([], 0);
    let order: Vec<_> = pool.next_to_evict(3).map(|(_, content)| content).collect();
    assert_eq!(order, [hash(2), hash(1)]);
}

#[test]
fn reading_a_cached_block_keeps_its_eviction_order() {
    let mut pool = PlanePool::new(3, HolderCharge::Nothing);
    let held = [1, 2, 3].map(|content| {
        let held = pool.take().unwrap();
        pool.set_content(held, hash(content));
        held
    });
    held.into_iter().for_each(|held| pool.release(held));
    let next: Vec<_> = pool.next_to_evict(2).map(|(_, hash)| hash).collect();
    assert_eq!(next, [hash(1), hash(2)]);
    let pin = pool.pin_for_read(hash(1)).unwrap();
    assert_eq!(pool.pin_for_read(hash(1)), None, "it is read already");
    pool.mark_inspected(pin.touched);
    pool.check([pin.held], 0);
    assert_eq!(pool.blocks_available(), 2);
    // A block taken meanwhile is another one.
    let second = pool.take().unwrap();
    assert!(!pool.contains(hash(2)) && pool.contains(hash(1)));
    pool.unpin(pin);
    assert_eq!(pool.next_to_evict(1).count(), 0, "it was looked at");
    let next: Vec<_> = pool.next_to_evict(9).map(|(_, hash)| hash).collect();
    assert_eq!(next, [hash(3)]);
    pool.check([second], 0);
    // A block that got another holder meanwhile stays held.
    let pin = pool.pin_for_read(hash(1)).unwrap();
    let shared = pool.hold(hash(1)).unwrap();
    pool.unpin(pin);
    pool.check([second, shared], 0);
}

// Invariant: I57.
#[test]
fn a_shared_block_that_is_given_up_pays_for_the_next() {
    let mut pool = PlanePool::new(4, HolderCharge::OneBlock);
    let shared = pool.take().unwrap();
    pool.set_content(shared, hash(1));
    let again = [pool.hold(hash(1)).unwrap(), pool.hold(hash(1)).unwrap()];
    pool.check([shared, again[0], again[1]], 0);
    assert_eq!(pool.blocks_available(), 1);
    let mut last = pool.reserve(1).unwrap();
    assert_eq!(pool.hold(hash(1)), None, "nothing is left to pay with");
    // Each of the three gives it up and has a block in its place.
    let mut own = BlockReservation::default();
    for (left, held) in [shared, again[0], again[1]].into_iter().enumerate() {
        pool.exchange(held, &mut own);
        let holders = [again[0], again[1]];
        pool.check(holders.into_iter().skip(left), own.count() + 1);
    }
    assert_eq!((own.count(), pool.blocks_available()), (3, 0));
    pool.reduce(&mut own, 1);
    assert_eq!((own.count(), pool.blocks_available()), (1, 2));
    pool.reduce(&mut own, 2);
    assert_eq!(own.count(), 1);
    pool.release_all_reserved(&mut last);
    pool.check([], 1);
}

fn print(pool: &PlanePool) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    pool.fingerprint(&mut hasher);
    hasher.finish()
}

#[test]
fn pool_fingerprints_differ_only_where_behaviour_does() {
    let made = |touches: u8| {
        let mut pool = PlanePool::new(3, HolderCharge::Nothing);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        pool.set_content(a, hash(1));
        pool.set_content(b, hash(2));
        pool.take_changes();
        for _ in 0..touches {
            let again = pool.hold(hash(1)).unwrap();
            pool.release(again);
        }
        pool.release(a);
        pool.release(b);
        pool
    };
    let pool = made(0);
    assert_eq!(print(&pool), print(&made(5)), "only touched more often");
    let mut other = made(0);
    let first = other.hold(hash(1)).unwrap();
    assert_ne!(print(&pool), print(&other), "held");
    other.release(first);
    assert_ne!(print(&pool), print(&other), "evicted in another order");
    let second = other.hold(hash(2)).unwrap();
    other.release(second);
    assert_eq!(print(&pool), print(&other));
    let free = other.take().unwrap();
    other.release(free);
    assert_ne!(print(&pool), print(&other), "of another generation");
}

#[test]
fn a_content_stored_and_evicted_is_not_reported() {
    let mut pool = PlanePool::new(1, HolderCharge::Nothing);
    let held = pool.take().unwrap();
    pool.set_content(held, hash(1));
    pool.release(held);
    pool.take().unwrap();
    let changes = pool.take_changes();
    assert!(changes.stored.is_empty() && changes.evicted.is_empty());
}
