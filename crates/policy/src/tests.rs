//! Every mistake that a policy's file can have, reported at its line and column.

use super::*;
use cleave_domain::{OnSloMiss, SloClass, TenantQuota};
use std::time::Duration;

/// The example that users start from.
const EXAMPLE: &str = include_str!("../../../assets/policy.yaml");

#[test]
fn the_example_policy_parses_as_commented() {
    let policy = parse(EXAMPLE).unwrap();
    let names: Vec<_> = policy.classes.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["interactive", "standard", "batch"]);
    assert_eq!(policy.default_class, "standard");
    let interactive = SloClass {
        name: "interactive".to_owned(),
        ttft: Some(Duration::from_millis(500)),
        tpot: Some(Duration::from_millis(50)),
        e2e: None,
        attainment_permille: 950,
        priority: 0,
        weight: 1,
        queue_max: Some(256),
        unmet: OnSloMiss::Reject,
        by_name: true,
    };
    assert_eq!(policy.classes[0], interactive);
    let standard = &policy.classes[1];
    assert_eq!(standard.unmet, OnSloMiss::Queue(Duration::from_secs(5)));
    assert_eq!(policy.tenants.len(), 2);
    assert_eq!(policy.tenants[0].share, 3);
    let quota = TenantQuota {
        requests_per_minute: Some(600),
        tokens_per_minute: Some(200_000),
        streams_max: Some(32),
        priority_min: Some(0),
    };
    assert_eq!(policy.tenants[1].quota, quota);
    assert_eq!(policy.tenants[0].quota, TenantQuota::default());
    assert_eq!(policy.rules.len(), 3);
    let lengths = [0, 1].map(|rule: usize| policy.rules[rule].prompt_tokens.clone());
    assert_eq!(lengths, [Some(0..=4000), Some(8000..=u32::MAX)]);
    let scaling = policy.scaling.expect("the example has some");
    assert_eq!((scaling.devices_max, scaling.prefill.max), (8, 6));
    assert_eq!(scaling.decode.down_after, Duration::from_secs(600));
    assert_eq!(scaling.mode, cleave_domain::ScalingMode::Advise);
    assert_eq!(policy.models, []);
}

#[test]
fn listed_models_have_their_own_scaling_or_the_common_one() {
    let begin = EXAMPLE.find("# models:").unwrap();
    let listed = EXAMPLE[begin..].replace("\n# ", "\n");
    let text = format!("{}{}", &EXAMPLE[..begin], listed.trim_start_matches("# "));
    let policy = parse(&text).unwrap();
    let names: Vec<_> = policy.models.iter().map(|one| one.name.as_str()).collect();
    assert_eq!(names, ["llama", "embedder"]);
    assert_eq!(policy.models[0].aliases, ["gpt-4o"]);
    let devices = |model: &str| policy.scaling_of(model).map(|scaling| scaling.devices_max);
    assert_eq!((devices("llama"), devices("embedder")), (Some(4), Some(8)));
    assert_eq!(devices("another"), Some(8));
}

#[test]
fn missing_keys_have_their_defaults() {
    let policy = parse("classes:\n- name: only\n").unwrap();
    let only = SloClass {
        name: "only".to_owned(),
        ..SloClass::default()
    };
    assert_eq!(policy.classes, [only]);
    assert_eq!(policy.default_class, "only");
    assert_eq!(policy.trust, HeaderTrust::default());
}

/// Texts with mistakes; the snapshot holds everything that is reported about them.
const WRONG: &[(&str, &str)] = &[
    ("empty", ""),
    ("not a map", "- a\n- b\n"),
    ("not YAML", "classes:\n  - name: a\n ttft: [1\n"),
    ("two documents", "classes:\n- name: a\n---\nclasses: []\n"),
    ("no classes", "classes: []\n"),
    ("classes as a map", "classes:\n  fast: {ttft: 1s}\n"),
    (
        "unknown keys",
        "classes:\n- name: a\n  tfft: 1s\n  colour: red\nrule: []\n",
    ),
    (
        "a key twice, and more",
        "classes:\n- name: a\n  ttft: 1s\n  ttft: 2s\n  weight: 0\n",
    ),
    ("a class without a name", "classes:\n- ttft: 1s\n"),
    (
        "names",
        "classes:\n- name: \"a b\"\n- name: \"\"\n- name: 7\n- name: [x]\n- name: c\n",
    ),
    (
        "a class twice",
        "classes:\n- name: a\n- name: b\n- name: a\ndefault_class: b\n",
    ),
    (
        "times",
        "classes:\n- name: a\n  ttft: 0ms\n  tpot: 50\n  e2e: soon\n- name: b\n  ttft: -1s\n  tpot: [1s]\n  e2e: 2000m\ndefault_class: a\n",
    ),
    (
        "a part longer than the whole",
        "classes:\n- name: a\n  ttft: 3s\n  tpot: 4s\n  e2e: 2s\n",
    ),
    (
        "shares and numbers",
        "classes:\n- name: a\n  attainment: 1.01\n  priority: 1.5\n  weight: -1\n  queue_max: 0\n  by_name: yes\n- name: b\n  attainment: 0\n- name: c\n  attainment: 95%\ndefault_class: a\n",
    ),
    (
        "unmet",
        "classes:\n- name: a\n  unmet: drop\n- name: b\n  unmet: {queue: 1s, downgrade: a}\n- name: c\n  unmet: {queue: 0s}\n- name: d\n  unmet: {wait: 1s}\n- name: e\n  unmet: {downgrade: z}\ndefault_class: a\n",
    ),
    (
        "downgrades in circles",
        "classes:\n- name: a\n  unmet: {downgrade: b}\n- name: b\n  unmet: {downgrade: c}\n- name: c\n  unmet: {downgrade: b}\n- name: d\n  unmet: {downgrade: d}\ndefault_class: a\n",
    ),
    ("no default", "classes:\n- name: a\n- name: b\n"),
    (
        "unknown classes",
        "default_class: z\nclasses:\n- name: a\nrules:\n- model: m\n  class: y\n- model: n\n",
    ),
    (
        "a class that nothing leads to",
        "default_class: a\nclasses:\n- name: a\n  by_name: false\n- name: b\n  by_name: false\n  unmet: {downgrade: c}\n- name: c\n  by_name: false\n- name: d\n",
    ),
    (
        "rules that never decide",
        "classes:\n- name: a\nrules:\n- header: {name: X-App}\n  class: a\n- header: {name: x-app, value: chat}\n  class: a\n- prompt_tokens: {max: 100}\n  class: a\n- prompt_tokens: {min: 7, max: 100}\n  model: m\n  class: a\n- class: a\n- tenant: t\n  class: a\ntenants:\n- name: t\ntrust: {tenant: true}\n",
    ),
    (
        "conditions",
        "classes:\n- name: a\nrules:\n- header: {name: Authorization}\n  class: a\n- header: {name: \"a b\"}\n  class: a\n- header: x-app\n  class: a\n- header: {name: x, value: 1}\n  class: a\n- prompt_tokens: {min: 9, max: 3}\n  class: a\n- prompt_tokens: {}\n  class: a\n- prompt_tokens: {min: -1}\n  class: a\n- model: 3\n  class: a\n",
    ),
    (
        "tenants",
        "classes:\n- name: a\ntenants:\n- name: t\n- name: u\n  share: 0\n  api_key_sha256: [abc]\n- name: u\n  api_key_sha256:\n  - 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef\n- name: v\n  api_key_sha256: [\"0123456789ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef\"]\n- share: 2\nrules:\n- tenant: w\n  class: a\n",
    ),
    (
        "keys in clear, and keys taken away",
        "classes:\n- name: a\nrules:\n- header: {name: X-Api-Key, value: sk-1}\n  class: a\ntenants:\n- name: t\n  api_key_sha256: []\n- name: u\n  api_key_sha256:\n",
    ),
    (
        "quotas",
        "classes:\n- name: a\ntrust: {tenant: true, require_key: true}\ntenants:\n- name: t\n  requests_per_minute: 0\n  tokens_per_minute: many\n  streams_max: -1\n  priority_min: 2000\n  request_per_minute: 5\n",
    ),
    (
        "numbers that are none",
        "classes:\n- name: a\n  attainment: .nan\n- name: b\n  attainment: .inf\ndefault_class: a\n",
    ),
    (
        "scaling",
        "classes:\n- name: a\nscaling:\n  mode: maybe\n  devices_max: 0\n  turns_max: 1\n  flip: yes\n  idle_after: 5\n  pool: {}\n  pools:\n    prefill: {min: 3, max: 2, up_after: 0s}\n    decode: {}\n    mixed: {max: 1}\n",
    ),
    (
        "a fleet that could serve nobody",
        "classes:\n- name: a\nscaling: {devices_max: 4, pools: {prefill: {max: 4}}}\n",
    ),
    (
        "a fleet that there are no devices for",
        "classes:\n- name: a\nscaling: {devices_max: 4, pools: {prefill: {max: 4}, decode: {max: 2, devices: 4}}}\n",
    ),
    (
        "trust",
        "classes:\n- name: a\ntrust: {tenants: true, targets: 1}\n",
    ),
    (
        "models",
        "classes:\n- name: a\nmodels:\n- name: m\n  scaling: {devices_max: 1}\n- scaling: off\n- name: m\n  weight: 2\n- m\n- name: n\n  aliases: [o, m, o]\n- name: o\n  aliases: p\n",
    ),
];

#[test]
fn every_mistake_is_reported_with_its_line() {
    let mut report = String::new();
    for (name, text) in WRONG {
        let diagnostics = parse(text).expect_err(name);
        assert!(!diagnostics.is_empty(), "{name}");
        report += &format!("## {name}\n{text}\n");
        for diagnostic in diagnostics {
            report += &format!("> {diagnostic}\n");
        }
        report += "\n";
    }
    insta::assert_snapshot!(report);
}

#[test]
fn an_oversized_policy_has_an_error_of_its_own() {
    for text in [
        "[".repeat(100) + &"]".repeat(100),
        format!("classes: [{}]", "x,".repeat(300_000)),
    ] {
        let diagnostics = parse(&text).unwrap_err();
        let message = &diagnostics[0].message;
        assert!(message.contains("than any such file needs"), "{message}");
    }
}

#[test]
fn policy_errors_name_the_path_and_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.yaml");
    let missing = PolicyFile::open(&path).unwrap_err();
    assert!(matches!(missing, PolicyError::Unreadable(..)));
    std::fs::write(&path, "classes:\n- nme: a\n").unwrap();
    let wrong = PolicyFile::open(&path).unwrap_err().to_string();
    let place = format!("{}:2:3: ", path.display());
    assert!(wrong.contains("has 2 mistakes"), "{wrong}");
    assert!(wrong.contains(&place), "{wrong}");
    std::fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
    assert!(PolicyFile::open(&path).is_err());
    std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    let large = PolicyFile::open(&path).unwrap_err();
    assert!(matches!(large, PolicyError::Unreadable(..)));
}

// Invariant: I35.
#[test]
fn a_swapped_symlink_reloads_and_a_bad_file_reports_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let path = at("policy.yaml");
    // As a ConfigMap is mounted: the file is a link through a link to a folder.
    let publish = |version: &str, text: &str| {
        std::fs::create_dir(at(version)).unwrap();
        std::fs::write(at(version).join("policy.yaml"), text).unwrap();
        std::os::unix::fs::symlink(version, at("..next")).unwrap();
        std::fs::rename(at("..next"), at("..data")).unwrap();
    };
    publish("..1", "classes:\n- name: one\n");
    std::os::unix::fs::symlink("..data/policy.yaml", &path).unwrap();
    let mut watch = PolicyWatcher::new(PolicyFile::open(&path).unwrap());
    let mut name = || match watch.poll_file() {
        Some(PolicyReload::Changed(policy, _)) => policy.default_class.clone(),
        Some(PolicyReload::Same(_)) => "same".to_owned(),
        Some(PolicyReload::Rejected(_)) => "rejected".to_owned(),
        Some(PolicyReload::Unreadable(_)) => "unreadable".to_owned(),
        None => "nothing".to_owned(),
    };
    assert_eq!(name(), "nothing");
    publish("..2", "classes:\n- name: two\n");
    assert_eq!([name(), name()], ["two", "nothing"]);
    publish("..3", "classes:\n- name: two # as before\n");
    assert_eq!([name(), name()], ["same", "nothing"]);
    publish("..4", "classes:\n- nam: x\n");
    assert_eq!([name(), name()], ["rejected", "nothing"]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!([name(), name()], ["unreadable", "nothing"]);
    publish("..5", "classes:\n- name: five\n");
    std::os::unix::fs::symlink("..data/policy.yaml", &path).unwrap();
    assert_eq!([name(), name()], ["five", "nothing"]);
}

#[test]
fn a_damaged_policy_is_refused_with_a_reason_and_a_place() {
    let samples = [
        EXAMPLE.as_bytes().to_vec(),
        b"classes:\n- {name: one, ttft: 1s, tpot: 50ms}\n- {name: two, unmet: queue}\ndefault: one\n".to_vec(),
    ];
    cleave_fuzz::check_samples("policy", &samples, 4_000, crate::fuzzing::policy);
}
