//! The `models` section of a policy's file.
//!
//! Owns: its keys. Never: knows whether a worker serves a model.
//! Invariant: each name and alias is listed once.

use super::scaling::scaling;
use cleave_domain::ModelPolicy;
use cleave_yaml::{Diagnostics, YamlNode};

/// As many as a router serves.
const MODELS_MAX: usize = 64;

pub(super) fn models(node: &YamlNode, diagnostics: &mut Diagnostics) -> Vec<ModelPolicy> {
    let entries = diagnostics.list(node, "models");
    if entries.len() > MODELS_MAX {
        let message = format!("there are more than {MODELS_MAX} models");
        diagnostics.add(entries[MODELS_MAX].referenced, message);
    }
    let mut models: Vec<ModelPolicy> = Vec::new();
    for entry in entries {
        let Some(model) = model(entry, diagnostics) else {
            continue;
        };
        let names = |model: &ModelPolicy| {
            let names = [&model.name].into_iter().chain(&model.aliases);
            names.cloned().collect::<Vec<_>>()
        };
        let mut earlier: Vec<String> = models.iter().flat_map(names).collect();
        for name in names(&model) {
            if earlier.contains(&name) {
                let message = format!("the model `{name}` is listed twice");
                diagnostics.add(entry.referenced, message);
            }
            earlier.push(name);
        }
        models.push(model);
    }
    models
}

fn model(node: &YamlNode, diagnostics: &mut Diagnostics) -> Option<ModelPolicy> {
    let mut fields = diagnostics.fields(node, "a model")?;
    let name = fields.take_required("name", diagnostics);
    let (aliases, own) = (fields.take("aliases"), fields.take("scaling"));
    fields.reject_unknown(diagnostics);
    let name = diagnostics.text(name?, "name")?;
    let aliases = aliases.map_or(&[][..], |node| diagnostics.list(node, "aliases"));
    let aliases = aliases
        .iter()
        .filter_map(|alias| diagnostics.text(alias, "an alias"));
    let aliases = aliases.collect();
    let scaling = own.and_then(|node| scaling(node, diagnostics));
    Some(ModelPolicy {
        name,
        aliases,
        scaling,
    })
}
