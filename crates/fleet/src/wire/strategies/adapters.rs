//! Strategies that draw what routers and workers say about adapters.

use cleave_domain::{AdapterCommand, AdapterId, AdapterOffer, AdapterPlace};
use proptest::collection::btree_map;
use proptest::option;
use proptest::prelude::*;

pub(super) fn adapters() -> impl Strategy<Value = Vec<AdapterOffer>> {
    let place = prop_oneof![
        Just(AdapterPlace::Resident),
        Just(AdapterPlace::OnDisk),
        Just(AdapterPlace::InHost)
    ];
    let folders = (".{0,20}", option::of(".{0,20}"));
    let named = btree_map("[a-z]{1,8}", (any::<[u8; 16]>(), folders, place), 0..4);
    named.prop_map(|named| {
        let offer = |(name, (digest, (root, loaded_from), place))| AdapterOffer {
            name,
            adapter: AdapterId(digest),
            root,
            loaded_from,
            place,
        };
        named.into_iter().map(offer).collect()
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
