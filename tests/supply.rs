//! What we build on is what deny.toml allows.
//!
//! Owns: the comparison of all crates that a build may take, on any platform, with the lists of deny.toml.
//! Never: keeps a list of its own. cargo-deny reads the same file where it is installed; this needs cargo
//! and the manifests of all crates (`cargo fetch --locked`).

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The part of cargo-deny's file that is ours.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Licenses {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: String,
    wildcards: String,
    deny: Vec<Ban>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Ban {
    #[serde(rename = "crate")]
    name: String,
    /// One version is welcome, a second one is not.
    #[serde(default)]
    deny_multiple_versions: bool,
    reason: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    unknown_registry: String,
    unknown_git: String,
    allow_registry: BTreeSet<String>,
}

/// A crate of somebody else.
#[derive(Clone, Debug)]
struct Taken {
    name: String,
    version: String,
    license: Option<String>,
    source: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn rules() -> Rules {
    let text = std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml is there");
    toml::from_str(&text).expect("deny.toml has what is read here and nothing else")
}

/// Everything in Cargo.lock that is not ours.
fn taken() -> Vec<Taken> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .other_options(vec!["--locked".to_owned()])
        .exec()
        .expect("cargo metadata runs");
    let members: BTreeSet<_> = metadata.workspace_members.iter().cloned().collect();
    let others = metadata.packages.into_iter();
    let others = others.filter(|package| !members.contains(&package.id));
    others
        .map(|package| Taken {
            name: package.name.to_string(),
            version: package.version.to_string(),
            license: package.license,
            source: package.source.map_or("a folder".to_owned(), |it| it.repr),
        })
        .collect()
}

/// Whether an SPDX expression is fulfilled by these licences alone; an old crate's `/` is an `OR`.
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

/// What is wrong with them, in words.
fn flaws(rules: &Rules, taken: &[Taken]) -> Vec<String> {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for one in taken {
        versions.entry(&one.name).or_default().push(&one.version);
    }
    let banned = rules.bans.deny.iter().filter_map(|ban| {
        let found = versions.get(ban.name.as_str())?;
        let most = usize::from(ban.deny_multiple_versions);
        let Ban { name, reason, .. } = ban;
        let found = found.join(" and ");
        (versions[name.as_str()].len() > most).then(|| format!("{name} {found}: {reason}"))
    });
    let unlicensed = taken.iter().filter_map(|one| {
        let license = one.license.as_deref();
        let fine = license.is_some_and(|license| permits(license, &rules.licenses.allow));
        let license = license.unwrap_or("none told");
        (!fine).then(|| format!("{}: the licence is {license}", one.name))
    });
    let known = |source: &str| {
        let registry = source.strip_prefix("registry+");
        registry.is_some_and(|registry| rules.sources.allow_registry.contains(registry))
    };
    let strange = taken.iter().filter(|one| !known(&one.source));
    let strange = strange.map(|one| format!("{} comes from {}", one.name, one.source));
    banned.chain(unlicensed).chain(strange).collect()
}

#[test]
fn a_crate_came_in_that_deny_toml_forbids() {
    let (rules, taken) = (rules(), taken());
    assert!(taken.len() > 100, "cargo metadata named {}", taken.len());
    assert_eq!(flaws(&rules, &taken), [""; 0]);
    // A ban of a second version bans nothing once the crate is gone or has another name.
    for ban in rules.bans.deny.iter().filter(|b| b.deny_multiple_versions) {
        let there = taken.iter().any(|one| one.name == ban.name);
        assert!(there, "nobody takes {}: strike it from deny.toml", ban.name);
    }
    // cargo-deny would read these otherwise than is checked here.
    let Bans {
        multiple_versions,
        wildcards,
        ..
    } = &rules.bans;
    let sources = (&rules.sources.unknown_registry, &rules.sources.unknown_git);
    assert_eq!((&**multiple_versions, &**wildcards), ("allow", "allow"));
    assert_eq!((&**sources.0, &**sources.1), ("deny", "deny"));
}

#[test]
fn each_rule_catches_what_it_is_about() {
    let (rules, taken) = (rules(), taken());
    let with = |change: &dyn Fn(&mut Taken)| {
        let mut more = taken.clone();
        let mut one = taken[0].clone();
        "one more".clone_into(&mut one.name);
        change(&mut one);
        more.push(one);
        flaws(&rules, &more)
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
fn a_licence_is_read_as_spdx_has_it() {
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
