//! Dependencies keep the rules of deny.toml.
//!
//! Owns: the comparison of all crates of a build, on any platform, with the lists of deny.toml.
//! Never: keeps a list of its own. cargo-deny reads the same file where it is installed; this test
//! needs only cargo and the manifests of all crates (`cargo fetch --locked`).

use crate::root;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// The parts of deny.toml that this test reads.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DenyRules {
    licenses: LicenseRules,
    bans: BanRules,
    sources: SourceRules,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LicenseRules {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct BanRules {
    multiple_versions: String,
    wildcards: String,
    deny: Vec<CrateBan>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CrateBan {
    #[serde(rename = "crate")]
    name: String,
    /// One version is allowed, a second one is not.
    #[serde(default)]
    deny_multiple_versions: bool,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct SourceRules {
    unknown_registry: String,
    unknown_git: String,
    allow_registry: BTreeSet<String>,
}

/// A crate from outside the workspace.
#[derive(Clone, Debug)]
struct ExternalCrate {
    name: String,
    version: String,
    license: Option<String>,
    source: String,
}

fn rules() -> DenyRules {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml is there");
    toml::from_str(&text).expect("deny.toml has what is read here and nothing else")
}

/// All crates in Cargo.lock from outside the workspace.
fn external_crates() -> Vec<ExternalCrate> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .other_options(vec!["--locked".to_owned()])
        .exec()
        .expect("cargo metadata runs");
    let members: BTreeSet<_> = metadata.workspace_members.iter().cloned().collect();
    let others = metadata.packages.into_iter();
    let others = others.filter(|package| !members.contains(&package.id));
    others
        .map(|package| ExternalCrate {
            name: package.name.to_string(),
            version: package.version.to_string(),
            license: package.license,
            source: package.source.map_or("a folder".to_owned(), |it| it.repr),
        })
        .collect()
}

/// Whether these licences alone fulfil an SPDX expression; an old crate's `/` is an `OR`.
fn permits(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ");
    let spaced = spaced.replace('/', " OR ").replace(" WITH ", "+WITH+");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let fulfilled = any_of(&mut rest, allowed);
    assert!(rest.is_empty(), "`{expression}` is no SPDX expression");
    fulfilled
}

fn any_of(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut fulfilled = all_of(words, allowed);
    while let ["OR", rest @ ..] = words {
        *words = rest;
        fulfilled |= all_of(words, allowed);
    }
    fulfilled
}

fn all_of(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    let mut fulfilled = one(words, allowed);
    while let ["AND", rest @ ..] = words {
        *words = rest;
        fulfilled &= one(words, allowed);
    }
    fulfilled
}

fn one(words: &mut &[&str], allowed: &BTreeSet<String>) -> bool {
    match words {
        ["(", rest @ ..] => {
            *words = rest;
            let fulfilled = any_of(words, allowed);
            *words = words.strip_prefix(&[")"]).expect("brackets are closed");
            fulfilled
        }
        [name, rest @ ..] => {
            *words = rest;
            allowed.contains(&name.replace("+WITH+", " WITH "))
        }
        [] => panic!("a licence is missing"),
    }
}

/// Violations of the rules, in words.
fn violations(rules: &DenyRules, crates: &[ExternalCrate]) -> Vec<String> {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for one in crates {
        versions.entry(&one.name).or_default().push(&one.version);
    }
    let banned = rules.bans.deny.iter().filter_map(|ban| {
        let found = versions.get(ban.name.as_str())?;
        let most = usize::from(ban.deny_multiple_versions);
        let CrateBan { name, reason, .. } = ban;
        let found = found.join(" and ");
        (versions[name.as_str()].len() > most).then(|| format!("{name} {found}: {reason}"))
    });
    let unlicensed = crates.iter().filter_map(|one| {
        let license = one.license.as_deref();
        let fine = license.is_some_and(|license| permits(license, &rules.licenses.allow));
        let license = license.unwrap_or("none told");
        (!fine).then(|| format!("{}: the licence is {license}", one.name))
    });
    let is_allowed = |source: &str| {
        let registry = source.strip_prefix("registry+");
        registry.is_some_and(|registry| rules.sources.allow_registry.contains(registry))
    };
    let strange = crates.iter().filter(|one| !is_allowed(&one.source));
    let strange = strange.map(|one| format!("{} comes from {}", one.name, one.source));
    banned.chain(unlicensed).chain(strange).collect()
}

#[test]
fn dependencies_keep_the_rules_of_deny_toml() {
    let (rules, crates) = (rules(), external_crates());
    assert!(crates.len() > 100, "cargo metadata named {}", crates.len());
    assert_eq!(violations(&rules, &crates), [""; 0]);
    // A ban of second versions must name a crate that is in use.
    for ban in rules.bans.deny.iter().filter(|b| b.deny_multiple_versions) {
        let there = crates.iter().any(|one| one.name == ban.name);
        assert!(there, "nobody takes {}: strike it from deny.toml", ban.name);
    }
    // cargo-deny would treat other values differently than this test.
    let BanRules {
        multiple_versions,
        wildcards,
        ..
    } = &rules.bans;
    let sources = (&rules.sources.unknown_registry, &rules.sources.unknown_git);
    assert_eq!((&**multiple_versions, &**wildcards), ("allow", "allow"));
    assert_eq!((&**sources.0, &**sources.1), ("deny", "deny"));
}

#[test]
fn each_deny_rule_catches_its_violation() {
    let (rules, crates) = (rules(), external_crates());
    let with = |change: &dyn Fn(&mut ExternalCrate)| {
        let mut more = crates.clone();
        let mut one = crates[0].clone();
        "one more".clone_into(&mut one.name);
        change(&mut one);
        more.push(one);
        violations(&rules, &more)
    };
    for ban in &rules.bans.deny {
        let caught = with(&|one| one.name.clone_from(&ban.name));
        assert_eq!(caught.len(), 1, "{caught:?}");
        assert!(caught[0].starts_with(&ban.name) && caught[0].ends_with(&ban.reason));
    }
    for license in ["GPL-3.0-only", "MIT AND GPL-3.0-only", "AGPL-3.0"] {
        let caught = with(&|one| one.license = Some(license.to_owned()));
        assert_eq!(caught, [format!("one more: the licence is {license}")]);
    }
    let caught = with(&|one| one.license = None);
    assert_eq!(caught, ["one more: the licence is none told"]);
    for source in [
        "git+https://forge.invalid/x",
        "registry+https://x.invalid",
        "a folder",
    ] {
        let caught = with(&|one| source.clone_into(&mut one.source));
        assert_eq!(caught, [format!("one more comes from {source}")]);
    }
}

#[test]
fn licence_expressions_follow_spdx() {
    let allowed = ["MIT", "ISC"].map(str::to_owned).into();
    for (expression, fulfilled) in [
        ("MIT", true),
        ("GPL-2.0 OR MIT", true),
        ("GPL-2.0/MIT", true),
        ("MIT AND GPL-2.0", false),
        ("MIT AND ISC", true),
        ("(GPL-2.0 OR MIT) AND BSL-1.0", false),
        ("(GPL-2.0 OR MIT) AND ISC", true),
        ("GPL-2.0 OR MIT AND ISC", true),
        ("MIT WITH LLVM-exception", false),
    ] {
        assert_eq!(permits(expression, &allowed), fulfilled, "{expression}");
    }
}
