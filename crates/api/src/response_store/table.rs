//! The stored responses as data: who has which, and how many bytes they take.
//!
//! Owns: the order of age, each tenant's share, the turns of conversations and their holders.
//! Never: reads a clock or waits. Invariant: the bytes of all tenants add up to the whole, no limit
//! is exceeded, and nothing of a tenant is given to another, or removed for another.

use super::items::input_place;
use super::{ConversationTurn, EvictionReason, ItemList, NotKept, ResponseStoreLimits};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::size_of;
use std::sync::Arc;
use tokio::time::Instant;

/// Bytes of a shared text beside its characters: its two counters.
const SHARED_TEXT_BYTES: usize = 2 * size_of::<usize>();
/// Bytes of the entries of a response in the three maps that list it.
const RESPONSE_BYTES: usize =
    size_of::<(Arc<str>, ShelvedResponse)>() + size_of::<(u64, Arc<str>)>() + size_of::<u64>();
const TURN_BYTES: usize = size_of::<(Arc<str>, HeldTurn)>();
const TENANT_BYTES: usize = size_of::<(Arc<str>, TenantResponses)>();
/// Bytes of an item's entry in the index, beside its id.
const ITEM_BYTES: usize = size_of::<(ItemKey, IndexedItem)>();

/// A response to store, with its conversation.
#[derive(Clone, Debug)]
pub(super) struct NewResponse {
    pub(super) tenant: Arc<str>,
    /// The members of the response but `output`, the text of a JSON object.
    pub(super) members: Arc<str>,
    pub(super) turn: ConversationTurn,
    /// The turns before it, the oldest first.
    pub(super) earlier: Arc<[ConversationTurn]>,
}

#[derive(Debug)]
struct ShelvedResponse {
    tenant: Arc<str>,
    number: u64,
    expires: Instant,
    members: Arc<str>,
}

/// Responses of one tenant.
#[derive(Debug, Default)]
struct TenantResponses {
    bytes: usize,
    /// Numbers of its responses, the oldest first.
    numbers: BTreeSet<u64>,
    /// Turns by the ids of their responses, which may be gone.
    turns: BTreeMap<Arc<str>, HeldTurn>,
    /// Items of the turns, by their ids.
    items: BTreeMap<ItemKey, IndexedItem>,
}

/// The id of an item, and the number of a turn that has it; several turns may.
type ItemKey = (Arc<str>, u64);

/// The place of an item in a turn.
#[derive(Debug)]
struct IndexedItem {
    turn: Arc<str>,
    side: TurnSide,
    index: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnSide {
    Input,
    Output,
}

/// An item that was found by its id.
#[derive(Clone, Debug)]
pub(super) enum FoundItem {
    /// The item, the text of a JSON object.
    Whole(Arc<str>),
    /// The item of a request, whose id is only shown: the text of a JSON object.
    OfInput {
        text: Arc<str>,
        response: String,
        index: usize,
    },
}

/// A turn with the number of those that need it: its response, and the turns right after it.
#[derive(Debug)]
struct HeldTurn {
    turn: ConversationTurn,
    /// A higher number was stored later.
    number: u64,
    previous: Option<Arc<str>>,
    holders: usize,
}

impl HeldTurn {
    /// Its items that have ids, with their places.
    fn items(&self) -> impl Iterator<Item = (ItemKey, IndexedItem)> {
        let sides = [
            (TurnSide::Input, &self.turn.input),
            (TurnSide::Output, &self.turn.output),
        ];
        let items = sides.into_iter().flat_map(|(side, list)| {
            let ids = list.ids();
            ids.map(move |(index, id)| (side, index, id))
        });
        items.map(|(side, index, id)| {
            let turn = Arc::clone(&self.turn.id);
            let place = IndexedItem { turn, side, index };
            ((id.into(), self.number), place)
        })
    }
}

/// All stored responses of one router.
#[derive(Debug)]
pub(super) struct ResponseTable {
    limits: ResponseStoreLimits,
    responses: BTreeMap<Arc<str>, ShelvedResponse>,
    /// Ids by number; a higher number was stored later.
    order: BTreeMap<u64, Arc<str>>,
    tenants: BTreeMap<Arc<str>, TenantResponses>,
    next_number: u64,
    next_turn: u64,
    bytes: usize,
    /// Removed responses that nobody has counted yet.
    evictions: Vec<EvictionReason>,
}

fn text_bytes(text: &str) -> usize {
    SHARED_TEXT_BYTES + text.len()
}

fn turn_bytes(turn: &ConversationTurn) -> usize {
    let ConversationTurn { id, input, output } = turn;
    TURN_BYTES + text_bytes(id) + list_bytes(input) + list_bytes(output)
}

fn list_bytes(list: &ItemList) -> usize {
    let index = list.ids().map(|(_, id)| ITEM_BYTES + text_bytes(id));
    2 * SHARED_TEXT_BYTES + list.bytes() + index.sum::<usize>()
}

fn response_bytes(members: &str) -> usize {
    // The id is the turn's, which is counted there.
    RESPONSE_BYTES + text_bytes(members)
}

impl ResponseTable {
    pub(super) fn new(limits: ResponseStoreLimits) -> Self {
        Self {
            limits,
            responses: BTreeMap::new(),
            order: BTreeMap::new(),
            tenants: BTreeMap::new(),
            next_number: 0,
            next_turn: 0,
            bytes: 0,
            evictions: Vec::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn count(&self) -> usize {
        self.responses.len()
    }

    /// Takes the reasons of the removals since the last call.
    pub(super) fn take_evictions(&mut self) -> Vec<EvictionReason> {
        std::mem::take(&mut self.evictions)
    }

    /// When the oldest response has to go.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let (_, id) = self.order.first_key_value()?;
        Some(self.responses[id].expires)
    }

    /// Removes what is too old.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((_, id)) = self.order.first_key_value() {
            if self.responses[id].expires > now {
                return;
            }
            let id = Arc::clone(id);
            self.remove(&id, EvictionReason::Age);
        }
    }

    /// Stores a response, in place of the oldest ones of its tenant where there is no room.
    ///
    /// # Errors
    /// If there is no room even without them; then nothing is removed.
    pub(super) fn insert(&mut self, now: Instant, new: &NewResponse) -> Result<(), NotKept> {
        self.expire(now);
        let own = self.tenants.get(&new.tenant).map_or(0, |share| share.bytes);
        let turns = new.earlier.iter().chain([&new.turn]);
        let least = TENANT_BYTES
            + text_bytes(&new.tenant)
            + response_bytes(&new.members)
            + turns.map(turn_bytes).sum::<usize>();
        if least > self.limits.tenant_bytes_max || least > self.limits.bytes_max {
            return Err(NotKept::TooLong);
        }
        // Room that other tenants take is theirs.
        if self.bytes - own + least > self.limits.bytes_max {
            return Err(NotKept::Full);
        }
        self.add(now, new);
        loop {
            let share = &self.tenants[&new.tenant];
            let reason = if share.bytes > self.limits.tenant_bytes_max {
                EvictionReason::TenantBytes
            } else if self.bytes > self.limits.bytes_max {
                EvictionReason::Bytes
            } else {
                return Ok(());
            };
            let oldest = share.numbers.first().expect("the new response is there");
            let oldest = Arc::clone(&self.order[oldest]);
            assert_ne!(oldest, new.turn.id, "the new response fits alone");
            self.remove(&oldest, reason);
        }
    }

    fn add(&mut self, now: Instant, new: &NewResponse) {
        let NewResponse {
            tenant,
            members,
            turn,
            earlier,
        } = new;
        let share = match self.tenants.get_mut(tenant) {
            Some(share) => share,
            None => {
                let bytes = TENANT_BYTES + text_bytes(tenant);
                self.bytes += bytes;
                let share = self.tenants.entry(Arc::clone(tenant)).or_default();
                share.bytes = bytes;
                share
            }
        };
        let mut previous: Option<Arc<str>> = None;
        let mut added = response_bytes(members);
        for turn in earlier.iter().chain([turn]) {
            if !share.turns.contains_key(&turn.id) {
                if let Some(previous) = previous.as_ref().and_then(|id| share.turns.get_mut(id)) {
                    previous.holders += 1;
                }
                added += turn_bytes(turn);
                let held = HeldTurn {
                    turn: turn.clone(),
                    number: self.next_turn,
                    previous: previous.clone(),
                    holders: 0,
                };
                self.next_turn += 1;
                share.items.extend(held.items());
                share.turns.insert(Arc::clone(&turn.id), held);
            }
            previous = Some(Arc::clone(&turn.id));
        }
        let own = share.turns.get_mut(&turn.id).expect("it was added");
        own.holders += 1;
        share.bytes += added;
        self.bytes += added;
        let number = self.next_number;
        self.next_number += 1;
        share.numbers.insert(number);
        self.order.insert(number, Arc::clone(&turn.id));
        let response = ShelvedResponse {
            tenant: Arc::clone(tenant),
            number,
            expires: now + self.limits.age_max,
            members: Arc::clone(members),
        };
        let earlier = self.responses.insert(Arc::clone(&turn.id), response);
        assert!(earlier.is_none(), "an id is drawn once");
    }

    fn remove(&mut self, id: &str, reason: EvictionReason) {
        let Some(response) = self.responses.remove(id) else {
            return;
        };
        self.evictions.push(reason);
        self.order.remove(&response.number);
        let tenant = &response.tenant;
        let share = self.tenants.get_mut(tenant).expect("it has a response");
        share.numbers.remove(&response.number);
        let mut freed = response_bytes(&response.members);
        let mut released = Some(Arc::<str>::from(id));
        while let Some(id) = released.take() {
            let held = share.turns.get_mut(&id).expect("its holder is there");
            held.holders -= 1;
            if held.holders == 0 {
                freed += turn_bytes(&held.turn);
                released.clone_from(&held.previous);
                for (key, _) in held.items() {
                    share.items.remove(&key);
                }
                share.turns.remove(&id);
            }
        }
        if share.numbers.is_empty() {
            assert!(share.turns.is_empty(), "turns have holders");
            assert!(share.items.is_empty(), "items have turns");
            freed += TENANT_BYTES + text_bytes(tenant);
            self.tenants.remove(tenant);
        } else {
            share.bytes -= freed;
        }
        self.bytes -= freed;
    }

    /// Removes a tenant's response at its wish; whether it was there.
    pub(super) fn delete(&mut self, now: Instant, tenant: &str, id: &str) -> bool {
        self.expire(now);
        let is_there = self.get(tenant, id).is_some();
        if is_there {
            self.remove(id, EvictionReason::Deleted);
        }
        is_there
    }

    /// The members of a tenant's response, and its turn.
    pub(super) fn response(
        &mut self,
        now: Instant,
        tenant: &str,
        id: &str,
    ) -> Option<(Arc<str>, ConversationTurn)> {
        self.expire(now);
        let members = Arc::clone(&self.get(tenant, id)?.members);
        Some((members, self.tenants[tenant].turns[id].turn.clone()))
    }

    /// The conversation that ends with a tenant's response, the oldest turn first.
    pub(super) fn conversation(
        &mut self,
        now: Instant,
        tenant: &str,
        id: &str,
    ) -> Option<Vec<ConversationTurn>> {
        self.expire(now);
        self.get(tenant, id)?;
        let turns = &self.tenants[tenant].turns;
        let next = |held: &&HeldTurn| held.previous.as_ref().map(|id| &turns[id]);
        let newest_first = std::iter::successors(Some(&turns[id]), next);
        let mut conversation: Vec<_> = newest_first.map(|held| held.turn.clone()).collect();
        conversation.reverse();
        Some(conversation)
    }

    /// An item of a tenant's turns by its id: that of the newest turn, where several have it.
    pub(super) fn item(&mut self, now: Instant, tenant: &str, id: &str) -> Option<FoundItem> {
        self.expire(now);
        let share = self.tenants.get(tenant)?;
        let id: Arc<str> = id.into();
        let places = (Arc::clone(&id), 0)..=(Arc::clone(&id), u64::MAX);
        if let Some((_, place)) = share.items.range(places).next_back() {
            let turn = &share.turns[&place.turn].turn;
            let list = match place.side {
                TurnSide::Input => &turn.input,
                TurnSide::Output => &turn.output,
            };
            return Some(FoundItem::Whole(list.item(place.index)?.into()));
        }
        let (response, index) = input_place(&id)?;
        let input = &share.turns.get(&*response)?.turn.input;
        Some(FoundItem::OfInput {
            text: input.item(index)?.into(),
            response,
            index,
        })
    }

    fn get(&self, tenant: &str, id: &str) -> Option<&ShelvedResponse> {
        let response = self.responses.get(id)?;
        (*response.tenant == *tenant).then_some(response)
    }

    /// Panics if bytes, counts or holders do not agree.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut bytes = 0;
        for (name, share) in &self.tenants {
            assert!(!share.numbers.is_empty());
            let ids = share.numbers.iter().map(|number| &self.order[number]);
            let responses = ids.map(|id| &self.responses[id]);
            let responses: usize = responses
                .inspect(|response| assert_eq!(response.tenant, *name))
                .map(|response| response_bytes(&response.members))
                .sum();
            for (id, held) in &share.turns {
                let after = share.turns.values();
                let after = after.filter(|other| other.previous.as_ref() == Some(id));
                let own = usize::from(self.get(name, id).is_some());
                assert_eq!(held.holders, after.count() + own);
                assert!(held.holders > 0);
            }
            let items = share.turns.values().flat_map(HeldTurn::items);
            let keys: BTreeSet<ItemKey> = items.map(|(key, _)| key).collect();
            assert!(
                keys.iter().eq(share.items.keys()),
                "the index is that of all turns"
            );
            let turns: usize = share
                .turns
                .values()
                .map(|held| turn_bytes(&held.turn))
                .sum();
            let all = TENANT_BYTES + text_bytes(name) + responses + turns;
            assert_eq!(share.bytes, all);
            assert!(all <= self.limits.tenant_bytes_max);
            bytes += all;
        }
        assert_eq!(self.bytes, bytes);
        assert!(bytes <= self.limits.bytes_max);
        assert_eq!(self.order.len(), self.responses.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_text::json::Json;
    use proptest::prelude::*;
    use std::time::Duration;

    fn limits(bytes_max: usize, tenant_bytes_max: usize) -> ResponseStoreLimits {
        ResponseStoreLimits {
            bytes_max,
            tenant_bytes_max,
            age_max: Duration::from_secs(100),
        }
    }

    fn turn(id: &str, bytes: usize) -> ConversationTurn {
        ConversationTurn {
            id: id.into(),
            input: list(&format!(r#"["{}"]"#, "i".repeat(bytes))),
            output: list(&format!(r#"["{}"]"#, "o".repeat(bytes))),
        }
    }

    fn list(items: &str) -> ItemList {
        ItemList::of(Json::check(items).unwrap())
    }

    /// A turn with an item of its own, and one whose id every turn has.
    fn turn_with_items(id: &str) -> ConversationTurn {
        ConversationTurn {
            id: id.into(),
            input: list(&format!(r#"[{{"id": "same", "of": "{id}"}}]"#)),
            output: list(&format!(r#"[{{"id": "out_{id}"}}]"#)),
        }
    }

    fn new(tenant: &str, id: &str, bytes: usize, earlier: &[ConversationTurn]) -> NewResponse {
        NewResponse {
            tenant: tenant.into(),
            members: "m".repeat(bytes).into(),
            turn: turn(id, bytes),
            earlier: earlier.into(),
        }
    }

    #[test]
    fn the_oldest_of_the_own_tenant_goes_first() {
        let now = Instant::now();
        let mut table = ResponseTable::new(limits(11_000, 8_800));
        // Another tenant's is older than all of its own.
        table.insert(now, &new("b", "b1", 1000, &[])).unwrap();
        table.insert(now, &new("a", "a1", 1000, &[])).unwrap();
        table.insert(now, &new("a", "a2", 1000, &[])).unwrap();
        // The whole is full before the share of the tenant is.
        table.insert(now, &new("a", "a3", 500, &[])).unwrap();
        assert_eq!(table.take_evictions(), [EvictionReason::Bytes]);
        let ids = ["a1", "a2", "a3"].map(|id| table.response(now, "a", id).is_some());
        assert_eq!(ids, [false, true, true]);
        assert!(table.response(now, "b", "b1").is_some());
        assert!(table.response(now, "a", "b1").is_none(), "another tenant's");
        assert!(!table.delete(now, "a", "b1"));
        // One tenant's share is full before the whole is.
        table.delete(now, "b", "b1");
        table.insert(now, &new("a", "a4", 1100, &[])).unwrap();
        assert_eq!(
            table.take_evictions(),
            [EvictionReason::Deleted, EvictionReason::TenantBytes]
        );
        table.check();
    }

    #[test]
    fn a_response_without_room_removes_nothing() {
        let now = Instant::now();
        let mut table = ResponseTable::new(limits(10_000, 8_000));
        table.insert(now, &new("a", "a1", 2000, &[])).unwrap();
        let bytes = table.bytes();
        let too_long = table.insert(now, &new("a", "a2", 4000, &[]));
        assert_eq!(too_long, Err(NotKept::TooLong));
        let full = table.insert(now, &new("b", "b1", 2000, &[]));
        assert_eq!(full, Err(NotKept::Full), "the room is another tenant's");
        assert_eq!((table.bytes(), table.count()), (bytes, 1));
        assert!(table.take_evictions().is_empty());
    }

    #[test]
    fn a_conversation_outlives_the_responses_before_its_last() {
        let now = Instant::now();
        let mut table = ResponseTable::new(limits(100_000, 100_000));
        let mut turns: Vec<ConversationTurn> = Vec::new();
        for id in ["1", "2", "3"] {
            table.insert(now, &new("", id, 10, &turns)).unwrap();
            turns = table.conversation(now, "", id).unwrap();
        }
        table.insert(now, &new("", "2b", 10, &turns[..1])).unwrap();
        assert_eq!(table.tenants[""].turns.len(), 4, "turns are held once");
        table.delete(now, "", "1");
        table.delete(now, "", "2");
        assert!(table.conversation(now, "", "2").is_none());
        let ids = |turns: Vec<ConversationTurn>| {
            let ids: Vec<String> = turns.iter().map(|turn| turn.id.to_string()).collect();
            ids.join(" ")
        };
        assert_eq!(ids(table.conversation(now, "", "3").unwrap()), "1 2 3");
        assert_eq!(ids(table.conversation(now, "", "2b").unwrap()), "1 2b");
        table.check();
        table.delete(now, "", "3");
        assert_eq!(ids(table.conversation(now, "", "2b").unwrap()), "1 2b");
        table.delete(now, "", "2b");
        assert_eq!((table.bytes(), table.count()), (0, 0));
    }

    #[test]
    fn an_item_is_found_while_a_turn_has_it() {
        let now = Instant::now();
        let mut table = ResponseTable::new(limits(100_000, 100_000));
        let turns = ["1", "2"].map(turn_with_items);
        for (count, turn) in turns.iter().enumerate() {
            let response = NewResponse {
                turn: turn.clone(),
                earlier: turns[..count].into(),
                ..new("a", "", 10, &[])
            };
            table.insert(now, &response).unwrap();
        }
        let text = |table: &mut ResponseTable, tenant: &str, id: &str| {
            let found = table.item(now, tenant, id)?;
            let FoundItem::Whole(text) = found else {
                panic!("{found:?}");
            };
            Some(text.to_string())
        };
        let newest = text(&mut table, "a", "same").unwrap();
        assert_eq!(newest, r#"{"id": "same", "of": "2"}"#);
        assert_eq!(text(&mut table, "b", "same"), None, "another tenant's");
        // The conversation of the second response needs the turn of the first.
        table.delete(now, "a", "1");
        assert!(text(&mut table, "a", "out_1").is_some());
        table.delete(now, "a", "2");
        for id in ["same", "out_1", "out_2"] {
            assert_eq!(text(&mut table, "a", id), None);
        }
        assert_eq!(table.bytes(), 0);
    }

    #[test]
    fn responses_go_when_they_are_old() {
        let start = Instant::now();
        let mut table = ResponseTable::new(limits(100_000, 100_000));
        table.insert(start, &new("", "1", 10, &[])).unwrap();
        let later = start + Duration::from_secs(60);
        table.insert(later, &new("", "2", 10, &[])).unwrap();
        assert_eq!(table.deadline(), Some(start + Duration::from_secs(100)));
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(table.response(at(99), "", "1").is_some());
        assert!(table.response(at(100), "", "1").is_none());
        assert!(table.response(at(159), "", "2").is_some());
        table.expire(at(160));
        assert_eq!((table.bytes(), table.count()), (0, 0));
        assert_eq!(table.take_evictions(), [EvictionReason::Age; 2]);
        assert_eq!(table.deadline(), None);
    }

    proptest! {
        #[test]
        fn any_order_of_events_keeps_the_invariants(
            events in prop::collection::vec((0_u8..10, 0_usize..3, 0_usize..40, 1_u64..30), 1..200)
        ) {
            let mut now = Instant::now();
            let mut table = ResponseTable::new(limits(6_000, 4_000));
            let mut known: [Vec<String>; 3] = Default::default();
            for (count, (kind, tenant, size, wait)) in events.into_iter().enumerate() {
                let name = ["", "a", "b"][tenant];
                let chosen = known[tenant].get(size % known[tenant].len().max(1)).cloned();
                let chosen = chosen.unwrap_or_default();
                match kind {
                    0 => now += Duration::from_secs(wait),
                    1 | 2 => {
                        let was_there = table.response(now, name, &chosen).is_some();
                        prop_assert_eq!(table.delete(now, name, &chosen), was_there);
                    }
                    _ => {
                        let id = format!("{name}{count}");
                        let earlier = table.conversation(now, name, &chosen).unwrap_or_default();
                        let mut response = new(name, &id, size * 8, &earlier);
                        if size % 2 == 0 {
                            response.turn = turn_with_items(&id);
                        }
                        if table.insert(now, &response).is_ok() {
                            let turns = table.conversation(now, name, &id).unwrap();
                            prop_assert_eq!(turns.len(), earlier.len() + 1);
                            prop_assert_eq!(&turns[..earlier.len()], &earlier[..]);
                            known[tenant].push(id);
                        }
                    }
                }
                table.check();
            }
            table.expire(now + Duration::from_secs(100));
            prop_assert_eq!((table.bytes(), table.count()), (0, 0));
        }
    }
}
