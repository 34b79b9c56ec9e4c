//! Both spellings of each golden checkpoint's config.json: its own, and that which transformers 5
//! saves after it read it (`testdata/spellings`, made by `scripts/models/spellings.py`).

use cleave_models::{ConfigError, ConfigFields, DescribedModel, ModelSpec, families, read_model};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

/// Names of all golden checkpoints.
pub(crate) fn folders() -> Vec<String> {
    let entries = fs::read_dir(testdata()).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let golden = paths.filter(|path| path.join("goldens.json").exists());
    let mut names: Vec<String> = golden
        .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

pub(crate) fn object(file: &Path) -> Map<String, Value> {
    let text = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_slice(&text).unwrap()
}

/// Reads a config.json of this name.
pub(crate) fn described(name: &str, config: Map<String, Value>) -> DescribedModel {
    let fields = ConfigFields::new(Path::new("config.json"), config);
    let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
    read.unwrap_or_else(|error| panic!("{name}: {error}")).0
}

/// Reads a description. One without `tie_word_embeddings` becomes that of a class that ties them.
fn read(name: &str, config: Map<String, Value>) -> ModelSpec {
    let model = described(name, config);
    ModelSpec {
        tied: Some(model.spec.tied.unwrap_or(true)),
        ..model.spec
    }
}

/// The spelling of transformers 4: a base and a scaling beside each other. `None` if layers have
/// different rotary embeddings, which it spells otherwise in each class.
fn older(mut config: Map<String, Value>) -> Option<Map<String, Value>> {
    let Value::Object(mut rope) = config.remove("rope_parameters")? else {
        return None;
    };
    if rope.contains_key("full_attention") {
        return None;
    }
    config.insert("rope_theta".to_owned(), rope.remove("rope_theta")?);
    if let Some(share) = rope.remove("partial_rotary_factor") {
        config.insert("partial_rotary_factor".to_owned(), share);
    }
    let is_plain = rope.get("rope_type").is_some_and(|kind| kind == "default");
    let scaling = if is_plain {
        Value::Null
    } else {
        Value::Object(rope)
    };
    config.insert("rope_scaling".to_owned(), scaling);
    let dtype = config.remove("dtype")?;
    config.insert("torch_dtype".to_owned(), dtype);
    Some(config)
}

#[test]
fn both_spellings_describe_the_same_model() {
    let mut respelled = 0;
    for name in folders() {
        let own = read(&name, object(&testdata().join(&name).join("config.json")));
        let saved = object(&testdata().join(format!("spellings/{name}.json")));
        assert_eq!(read(&name, saved.clone()), own, "{name}");
        if let Some(older) = older(saved) {
            assert_eq!(read(&name, older), own, "{name}, the older spelling");
            respelled += 1;
        }
    }
    assert!(respelled > 10, "{respelled} files in the older spelling");
}

#[test]
fn every_family_has_both_spellings() {
    let described = folders().into_iter().map(|name| {
        let own = object(&testdata().join(&name).join("config.json"));
        read(&name, own).family
    });
    let described: BTreeSet<&str> = described.collect();
    let all: BTreeSet<&str> = families().map(|family| family.name).collect();
    assert_eq!(described, all);
}
