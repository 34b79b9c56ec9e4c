//! Models that cannot be had: each error says why, and what to do.

use super::{Pair, files, model};
use cleave_hub::{HubError, NetworkUse};
use cleave_test_hub::{HubFault, MODEL};

#[track_caller]
fn refusal(pair: &Pair, name: &str, words: &[&str]) -> HubError {
    let error = pair.pull(name).unwrap_err();
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
    error
}

#[test]
fn absent_models_and_revisions_are_distinct() {
    let pair = Pair::new();
    let error = refusal(&pair, "org/other", &["no such model", "HF_TOKEN"]);
    assert!(matches!(error, HubError::NoModel { .. }));
    let name = format!("{MODEL}@v9");
    let error = refusal(&pair, &name, &["no such revision", "v9"]);
    assert!(matches!(error, HubError::NoRevision { .. }));
}

#[test]
fn an_endpoint_that_is_no_address_is_named() {
    for endpoint in ["nonsense", "hub.example", "ftp://hub.example", ""] {
        let mut pair = Pair::new();
        pair.settings.endpoint = endpoint.to_owned();
        let named = format!("HF_ENDPOINT: `{endpoint}`");
        let error = refusal(&pair, MODEL, &[&named, "https://"]);
        assert!(matches!(error, HubError::Endpoint { .. }));
    }
}

#[test]
fn a_cache_that_is_no_folder_names_its_variables() {
    let mut pair = Pair::new();
    pair.settings.cache = pair.cache.path().join("file");
    std::fs::write(&pair.settings.cache, "").unwrap();
    let error = pair.client().cache().list().unwrap_err().to_string();
    assert!(error.contains("HF_HUB_CACHE"), "{error}");
    refusal(&pair, MODEL, &["HF_HUB_CACHE"]);
}

#[test]
fn refusals_name_the_licence_or_the_token() {
    let gated = "x-error-code: GatedRepo\r\n";
    for (path, status, code, words) in [
        ("blobs=true", 401, gated, "accept its licence at http"),
        ("tokenizer.json", 403, gated, "accept its licence at http"),
        ("blobs=true", 401, "", "refuses the token"),
        (
            "blobs=true",
            401,
            "x-error-code: RepoNotFound\r\n",
            "no such model",
        ),
    ] {
        let pair = Pair::new();
        pair.hub.fault(path, HubFault::Status(status, code));
        refusal(&pair, MODEL, &[words]);
        assert_eq!(pair.hub.requests(path).len(), 1, "not tried again");
    }
    let mut pair = Pair::new();
    pair.settings.token = None;
    pair.hub.fault("blobs=true", HubFault::Status(401, ""));
    refusal(&pair, MODEL, &["set HF_TOKEN"]);
}

#[test]
fn repositories_without_safetensors_are_refused() {
    for (names, word) in [
        (["config.json", "m-Q4_K_M.gguf"], "GGUF"),
        (["config.json", "pytorch_model.bin"], "PyTorch"),
        (["config.json", "README.md"], "no weights"),
    ] {
        let pair = Pair::of(files(&names));
        refusal(&pair, MODEL, &[word]);
        assert!(!pair.settings.cache.exists(), "nothing is downloaded");
    }
}

#[test]
fn names_of_files_that_lead_out_are_refused() {
    for name in ["../../../out.json", "/tmp/out.json"] {
        let pair = Pair::of(files(&["config.json", "model.safetensors", name]));
        refusal(&pair, MODEL, &["leads out of a folder"]);
        assert!(!pair.settings.cache.exists());
    }
}

#[test]
fn an_index_that_names_an_absent_file_is_refused() {
    let index = r#"{"weight_map": {"w": "../../x.safetensors"}}"#;
    let mut all = files(&["config.json", "tokenizer.json"]);
    all.insert("model.safetensors.index.json".to_owned(), index.into());
    refusal(
        &Pair::of(all),
        MODEL,
        &["x.safetensors, which is not in the repository"],
    );
}

#[test]
fn offline_takes_the_cache_and_asks_no_hub() {
    let mut pair = Pair::new();
    pair.settings.network = NetworkUse::Forbidden;
    let error = pair
        .client()
        .folder(&model(MODEL), &mut super::LastCounts::default());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE") && error.contains("cleave pull"),
        "{error}"
    );
    pair.settings.network = NetworkUse::Allowed;
    let folder = pair.pull_whole();
    let asked = pair.hub.requests("").len();
    pair.settings.network = NetworkUse::Forbidden;
    let found = pair
        .client()
        .folder(&model(MODEL), &mut super::LastCounts::default());
    assert_eq!(found.unwrap(), folder);
    assert_eq!(pair.hub.requests("").len(), asked);
}

#[test]
fn a_disk_without_room_is_found_before_the_download() {
    let pair = Pair::new();
    // A listing may say any size; no disk has this one.
    let commit = cleave_test_hub::COMMIT;
    let listing = serde_json::json!({"sha": commit, "siblings": [
        {"rfilename": "model.safetensors", "size": 1_u64 << 62, "blobId": commit},
    ]});
    pair.hub.answer("blobs=true", listing.to_string());
    let error = refusal(&pair, MODEL, &["free", "HF_HUB_CACHE"]);
    assert!(matches!(error, HubError::NoRoom { .. }));
    assert_eq!(pair.weight_ranges(), []);
}
