//! The table of classes in docs/models.md, made from the registry and the golden checkpoints.

use crate::spellings;
use cleave_models::{DescribedModel, TensorRole, families, wrappers};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const COMMAND: &str = "UPDATE_PAGES=1 cargo test -p cleave-models --test all the_page";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Golden checkpoints with their descriptions, by the class that their config.json names.
fn goldens() -> BTreeMap<String, Vec<(String, DescribedModel)>> {
    let mut by_class: BTreeMap<String, Vec<(String, DescribedModel)>> = BTreeMap::new();
    for name in spellings::folders() {
        let file = root().join("testdata").join(&name).join("config.json");
        let config = spellings::object(&file);
        let class = config["architectures"][0].as_str().unwrap().to_owned();
        let model = spellings::described(&name, config);
        by_class.entry(class).or_default().push((name, model));
    }
    by_class
}

/// Every class with its models, in order.
fn classes() -> BTreeMap<&'static str, &'static str> {
    let alone = families().flat_map(|family| {
        let classes = family.classes.iter();
        classes.map(|class| (*class, family.models))
    });
    let wrapped = wrappers().map(|wrapper| (wrapper.class, wrapper.models));
    alone.chain(wrapped).collect()
}

/// Columns of a class: devices that run its models, and those that run them quantised. Tests of
/// each device compare the goldens.
fn devices(goldens: &[(String, DescribedModel)]) -> (&'static str, &'static str) {
    let count = |has: &dyn Fn(&DescribedModel) -> bool| {
        let models = goldens.iter().map(|(_, model)| model);
        models.filter(|model| has(model)).count()
    };
    let has_experts = |model: &DescribedModel| {
        let mut layers = model.spec.layers.iter();
        layers.any(|layer| layer.experts().is_some())
    };
    // Of experts that are one tensor of a layer, gpt-oss's MXFP4 is the only quantised form read.
    let has_whole_tensors = |model: &DescribedModel| {
        let names = model.family.tensors.iter().copied().flatten();
        let mut roles = names.map(|(_, role)| role);
        has_experts(model) && roles.any(|role| matches!(role, TensorRole::Experts { .. }))
    };
    let quantized = match count(&has_whole_tensors) {
        0 => "CPU, GPU",
        _ => "CPU, GPU; experts at load",
    };
    ("CPU, GPU", quantized)
}

/// The table of classes.
fn table() -> String {
    let goldens = goldens();
    let mut text =
        "| class in config.json | models | goldens | f32, bf16, f16 | eight and four bits |\n\
                    |---|---|---|---|---|\n"
            .to_owned();
    for (class, models) in classes() {
        let own = goldens.get(class).map_or(&[][..], Vec::as_slice);
        assert!(!own.is_empty(), "{class} has no golden checkpoint");
        let folders: Vec<String> = own.iter().map(|(name, _)| format!("`{name}`")).collect();
        let (devices, quantized) = devices(own);
        let folders = folders.join(", ");
        text += &format!("| `{class}` | {models} | {folders} | {devices} | {quantized} |\n");
    }
    text
}

#[test]
fn the_page_of_models_lists_every_class() {
    let path = root().join("docs/models.md");
    let page = fs::read_to_string(&path).unwrap();
    let (begin, end) = (
        format!("<!-- classes: begin, by {COMMAND} -->\n"),
        "<!-- classes: end -->",
    );
    let (before, rest) = page.split_once(&begin).expect("the page has the mark");
    let (_, after) = rest.split_once(end).expect("the page has both marks");
    let made = format!("{before}{begin}\n{}\n{end}{after}", table());
    if page == made {
        return;
    }
    assert!(
        std::env::var_os("UPDATE_PAGES").is_some(),
        "docs/models.md is not what the registry says: {COMMAND}"
    );
    fs::write(&path, made).unwrap();
}
