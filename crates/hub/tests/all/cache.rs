//! The cache: its layout, the choice of files, listing and removing.

use super::{
    LastCounts, Pair, WEIGHTS, WEIGHTS_BYTES, content, files, model, model_files, names_in,
};
use cleave_hub::HubError;
use cleave_test_hub::{COMMIT, MODEL, TestHub, checksum};
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn the_layout_is_that_of_huggingface_hub() {
    let pair = Pair::new();
    let folder = pair.pull_whole();
    let root = pair.settings.cache.join("models--org--tiny");
    assert_eq!(folder, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let weights = checksum(&model_files()[WEIGHTS]);
    assert_eq!(weights.len(), 64, "a large file is named by its SHA-256");
    let link = |name: &str| fs::read_link(folder.join(name)).unwrap();
    assert_eq!(link(WEIGHTS), Path::new("../../blobs").join(weights));
    let nested = checksum(&model_files()["1_Pooling/config.json"]);
    assert_eq!(nested.len(), 40, "a small file is named by git's checksum");
    assert_eq!(
        link("1_Pooling/config.json"),
        Path::new("../../../blobs").join(nested)
    );
    let lock = format!(
        ".locks/models--org--tiny/{}.lock",
        checksum(&model_files()[WEIGHTS])
    );
    assert!(pair.settings.cache.join(lock).exists());
}

#[test]
fn a_pull_of_the_newest_commit_downloads_nothing() {
    let pair = Pair::new();
    pair.pull_whole();
    pair.pull(&format!("{MODEL}@v1")).unwrap();
    assert_eq!(pair.weight_ranges(), [None]);
    let refs = pair.settings.cache.join("models--org--tiny/refs");
    assert_eq!(names_in(&refs), ["main", "v1"]);
    let found = pair
        .client()
        .cache()
        .find(&model(&format!("{MODEL}@{COMMIT}")));
    assert!(found.is_some(), "a commit is a revision");
}

#[test]
fn only_the_weights_of_the_index_are_downloaded() {
    let index = r#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#;
    let mut all = files(&[
        "config.json",
        "tokenizer.json",
        "m-1.safetensors",
        "m-2.safetensors",
        "m-3.safetensors",
        "consolidated.safetensors",
    ]);
    all.insert("model.safetensors.index.json".to_owned(), index.into());
    let pair = Pair::of(all);
    let folder = pair.pull(MODEL).unwrap().folder;
    let expected = [
        "config.json",
        "m-1.safetensors",
        "m-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names_in(&folder), expected);
    fs::remove_file(folder.join("m-2.safetensors")).unwrap();
    let found = pair.client().cache().find(&model(MODEL));
    assert_eq!(found, None, "a snapshot without a shard is not whole");
}

#[test]
fn an_adapter_has_no_weights_of_a_model() {
    let pair = Pair::of(files(&["adapter_config.json", "adapter_model.safetensors"]));
    let hub = pair.client();
    let folder = hub
        .folder(&model(MODEL), &mut LastCounts::default())
        .unwrap();
    assert_eq!(names_in(&folder).len(), 2);
    hub.folder(&model(MODEL), &mut LastCounts::default())
        .unwrap();
    assert_eq!(pair.hub.requests("blobs=true").len(), 1, "the cache has it");
}

#[test]
fn checksums_come_from_the_files_where_the_listing_has_none() {
    let pair = Pair::new();
    pair.hub.list_names_only();
    pair.pull_whole();
    let methods: Vec<_> = pair.hub.requests(WEIGHTS);
    let methods: Vec<_> = methods
        .iter()
        .map(|request| request.method.as_str())
        .collect();
    assert_eq!(methods, ["HEAD", "GET"]);
}

/// Adds another commit to a cache, which shares the weights with the pulled one.
fn add_commit(pair: &Pair, folder: &Path) -> (String, PathBuf) {
    let commit = "b".repeat(40);
    let root = pair.settings.cache.join("models--org--tiny");
    let other = root.join("snapshots").join(&commit);
    fs::create_dir_all(&other).unwrap();
    fs::write(pair.blobs().join("own"), content(700)).unwrap();
    std::os::unix::fs::symlink("../../blobs/own", other.join("config.json")).unwrap();
    let weights = fs::read_link(folder.join(WEIGHTS)).unwrap();
    std::os::unix::fs::symlink(weights, other.join(WEIGHTS)).unwrap();
    fs::create_dir_all(root.join("refs/pr")).unwrap();
    fs::write(root.join("refs/pr/1"), &commit).unwrap();
    (commit, other)
}

#[test]
fn the_list_has_each_commit_with_its_revisions() {
    let pair = Pair::new();
    assert_eq!(pair.client().cache().list().unwrap(), []);
    let folder = pair.pull_whole();
    let (commit, _) = add_commit(&pair, &folder);
    let list = pair.client().cache().list().unwrap();
    let found: Vec<_> = list
        .iter()
        .map(|one| {
            (
                one.commit.as_str(),
                one.revisions.join(","),
                one.is_complete,
            )
        })
        .collect();
    let expected = [
        (COMMIT, "main".to_owned(), true),
        (commit.as_str(), "pr/1".to_owned(), false),
    ];
    assert_eq!(found, expected);
    assert_eq!(list[1].bytes, (WEIGHTS_BYTES + WEIGHTS.len() + 700) as u64);
    assert!(list[0].used.is_some());
}

#[test]
fn removing_a_revision_keeps_blobs_of_another() {
    let pair = Pair::new();
    let folder = pair.pull_whole();
    let (_, other) = add_commit(&pair, &folder);
    let cache = pair.client().cache().clone();
    let freed = cache.remove(&model(&format!("{MODEL}@pr/1"))).unwrap();
    assert_eq!((freed.snapshots_count, freed.bytes), (1, 700));
    assert!(!other.exists() && !pair.blobs().join("own").exists());
    pair.pull_whole();
    assert_eq!(pair.weight_ranges(), [None], "its blobs are there");
    let again = cache.remove(&model(&format!("{MODEL}@pr/1"))).unwrap_err();
    assert!(matches!(again, HubError::NotCached { .. }), "{again}");
}

#[test]
fn removing_a_tag_keeps_the_commit_that_a_branch_names() {
    let pair = Pair::new();
    let folder = pair.pull_whole();
    let tag = model(&format!("{MODEL}@v1"));
    pair.pull(&format!("{MODEL}@v1")).unwrap();
    let cache = pair.client().cache().clone();
    let freed = cache.remove(&tag).unwrap();
    assert_eq!((freed.snapshots_count, freed.bytes), (0, 0));
    assert_eq!(cache.find(&model(MODEL)), Some(folder));
    assert_eq!(cache.find(&tag), None);
    let commit = model(&format!("{MODEL}@{COMMIT}"));
    assert_eq!(cache.remove(&commit).unwrap().snapshots_count, 1);
    assert_eq!(cache.find(&model(MODEL)), None);
}

#[test]
fn removing_a_model_leaves_nothing_of_it() {
    let pair = Pair::new();
    let bytes = pair.pull(MODEL).unwrap().bytes;
    let cache = pair.client().cache().clone();
    let freed = cache.remove(&model(MODEL)).unwrap();
    assert_eq!((freed.snapshots_count, freed.bytes), (1, bytes));
    assert_eq!(names_in(&pair.settings.cache), [".locks"]);
    assert_eq!(
        names_in(&pair.settings.cache.join(".locks")),
        Vec::<String>::new()
    );
    let again = cache.remove(&model(MODEL)).unwrap_err();
    assert!(matches!(again, HubError::NotCached { .. }), "{again}");
}

#[test]
fn links_out_of_the_cache_are_not_followed() {
    let pair = Pair::new();
    let folder = pair.pull_whole();
    let (_, other) = add_commit(&pair, &folder);
    let outside = pair.cache.path().join("outside");
    fs::write(&outside, "kept").unwrap();
    std::os::unix::fs::symlink(&outside, other.join("tokenizer.json")).unwrap();
    let cache = pair.client().cache().clone();
    cache.remove(&model(&format!("{MODEL}@pr/1"))).unwrap();
    assert!(outside.exists());
}

/// The hub of the tests is not our code's mirror image: git's checksum of this file is known.
#[test]
fn the_test_hub_has_gits_checksums() {
    let hub = TestHub::start([("a.json".to_owned(), b"hello\n".to_vec())].into());
    assert_eq!(
        checksum(b"hello\n"),
        "ce013625030ba8dba906f756967f9e9ca394464a"
    );
    assert_eq!(hub.requests(""), []);
}
