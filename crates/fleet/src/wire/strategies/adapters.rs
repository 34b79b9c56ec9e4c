//! Strategies that draw what routers and workers say about adapters.

use cleave_domain::{
    AdapterChangeId, AdapterCommand, AdapterId, AdapterOffer, AdapterPlace, AdapterReport,
    RouterId, UnloadedAdapter,
};
use proptest::collection::btree_map;
use proptest::option;
use proptest::prelude::*;

pub(super) fn adapters() -> impl Strategy<Value = AdapterReport> {
    let place = prop_oneof![
        Just(AdapterPlace::Resident),
        Just(AdapterPlace::OnDisk),
        Just(AdapterPlace::InHost)
    ];
    let folders = (".{0,20}", option::of(".{0,20}"));
    let state = (option::of(adapter_change()), place, option::of(".{0,20}"));
    let named = btree_map("[a-z]{1,8}", (any::<[u8; 16]>(), folders, state), 0..4);
    let unloaded = btree_map("[a-z]{1,8}", adapter_change(), 0..4);
    (named, unloaded).prop_map(|(named, unloaded)| {
        let offer =
            |(name, (digest, (root, loaded_from), (change, place, problem)))| AdapterOffer {
                name,
                adapter: AdapterId(digest),
                root,
                loaded_from,
                change,
                place,
                problem,
            };
        let unloaded = unloaded.into_iter();
        AdapterReport {
            offers: named.into_iter().map(offer).collect(),
            unloaded: unloaded
                .map(|(name, change)| UnloadedAdapter { name, change })
                .collect(),
        }
    })
}

pub(super) fn adapter_change() -> impl Strategy<Value = AdapterChangeId> {
    (0..=1_u64 << 62, any::<u64>()).prop_map(|(number, router)| AdapterChangeId {
        number,
        router: RouterId(router),
    })
}

pub(super) fn adapter_command() -> impl Strategy<Value = AdapterCommand> {
    let content = option::of(any::<[u8; 16]>().prop_map(AdapterId));
    let folder = option::of((".{0,20}", content));
    ("[a-z]{1,8}", folder).prop_map(|(name, folder)| match folder {
        Some((folder, content)) => AdapterCommand::Load {
            name,
            folder,
            content,
        },
        None => AdapterCommand::Unload { name },
    })
}
