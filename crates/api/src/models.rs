//! The served models, and which of them a request is for.
//!
//! Owns: each model's text side by its served name, and the turns of its requests for vectors.
//! Never: reads a tokenizer, or knows a worker. Invariant: a model that was served once stays here,
//! so a request for it while its workers are away is answered 503 and not 404.

use crate::error::ApiError;
use crate::input_turns::InputTurns;
use crate::response_store::member;
use cleave_domain::SloPolicy;
use cleave_text::ModelText;
use cleave_text::json::{Json, JsonShape};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Names in an error's message, at most.
const NAMES_SHOWN_MAX: usize = 50;

/// The text side of one served model.
#[derive(Clone)]
pub(crate) struct ServedModel {
    pub(crate) model: Arc<ModelText>,
    /// Time at which it was set, in Unix seconds.
    pub(crate) since: u64,
    /// Turns of its requests for vectors, which stay when its text side changes.
    pub(crate) input_turns: Arc<InputTurns>,
}

/// All models, by their served names.
#[derive(Clone, Default)]
pub(crate) struct ServedModels(BTreeMap<String, ServedModel>);

/// The names that requests may use, beside those of the served models.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListedModels {
    /// Names that the policy lists.
    names: Vec<String>,
    /// The listed or served name of each alias.
    aliases: BTreeMap<String, String>,
}

impl ListedModels {
    /// The names of a policy; `further` are aliases of the only served model, if there is one.
    pub(crate) fn of(policy: &SloPolicy, further: &[String], served: &ServedModels) -> Self {
        let listed = policy.models.iter();
        let aliases = listed.clone().flat_map(|model| {
            let aliases = model.aliases.iter();
            aliases.map(|alias| (alias.clone(), model.name.clone()))
        });
        let mut aliases: BTreeMap<_, _> = aliases.collect();
        if let (Some(only), 1) = (served.0.keys().next(), served.0.len()) {
            let further = further.iter();
            aliases.extend(further.map(|alias| (alias.clone(), only.clone())));
        }
        Self {
            names: listed.map(|model| model.name.clone()).collect(),
            aliases,
        }
    }

    /// Whether a request may use this name before a worker brings its model.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.names
            .iter()
            .any(|listed| listed == self.own_name(name))
    }

    /// The name of the model: of an alias, its model's.
    pub(crate) fn own_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.aliases.get(name).map_or(name, String::as_str)
    }

    /// Each alias with the name of its model.
    pub(crate) fn aliases(&self) -> impl Iterator<Item = (&str, &str)> {
        let aliases = self.aliases.iter();
        aliases.map(|(alias, name)| (alias.as_str(), name.as_str()))
    }
}

/// The name by which a body asks for its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequestedModel {
    /// The body names none.
    Absent,
    Named(String),
    /// The reader of the body checks the name, for any model: only one is served, or the body is no
    /// JSON object with a text.
    LeftToReader,
}

/// The model of a request, as far as it is known.
pub(crate) enum ModelChoice {
    Found(Arc<ModelText>),
    /// No worker brought the model of this name yet; the name is empty where any worker that comes
    /// may be of it.
    Awaited(String),
    /// Other models are served.
    Unknown(String),
    /// Several models are served, and the request names none.
    Unnamed,
}

impl RequestedModel {
    /// Reads the name from a body.
    pub(crate) fn of_body(body: &[u8]) -> Self {
        let text = std::str::from_utf8(body).ok();
        let Some(root) = text.and_then(|text| Json::check(text).ok()) else {
            return Self::LeftToReader;
        };
        if !matches!(root.shape(), JsonShape::Object(_)) {
            return Self::LeftToReader;
        }
        match member(root, "model") {
            None => Self::Absent,
            Some(value) if value.is_null() => Self::Absent,
            Some(value) => match value.shape() {
                JsonShape::String(name) => Self::Named(name.get().into_owned()),
                _ => Self::LeftToReader,
            },
        }
    }
}

impl ServedModels {
    /// Serves this model in place of an earlier one of its name.
    pub(crate) fn serve(&mut self, model: ModelText, since: u64) {
        let name = model.name().to_owned();
        let earlier = self.0.get(&name);
        let input_turns = earlier.map(|served| Arc::clone(&served.input_turns));
        let served = ServedModel {
            model: Arc::new(model),
            since,
            input_turns: input_turns.unwrap_or_else(|| Arc::new(InputTurns::new())),
        };
        self.0.insert(name, served);
    }

    pub(crate) fn retire(&mut self, name: &str) {
        self.0.remove(name);
    }

    pub(crate) fn get(&self, name: &str) -> Option<&ServedModel> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &ServedModel> {
        self.0.values()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The model that a request is for.
    pub(crate) fn choose(&self, requested: &RequestedModel, listed: &ListedModels) -> ModelChoice {
        let found = |name: &str| {
            let own = listed.own_name(name);
            let model = &self.0.get(own)?.model;
            Some(ModelChoice::Found(if own == name {
                Arc::clone(model)
            } else {
                Arc::new(model.of_alias(name))
            }))
        };
        let awaited = |name: &str| ModelChoice::Awaited(listed.own_name(name).to_owned());
        let expects_any = self.0.is_empty() && listed.names.is_empty();
        match requested {
            RequestedModel::Named(name) => found(name).unwrap_or_else(|| {
                if listed.knows(name) {
                    awaited(name)
                } else if expects_any {
                    awaited("")
                } else {
                    ModelChoice::Unknown(name.clone())
                }
            }),
            RequestedModel::Absent => match &self.known(listed)[..] {
                [] => awaited(""),
                [only] => found(only).unwrap_or_else(|| awaited(only)),
                _ => ModelChoice::Unnamed,
            },
            RequestedModel::LeftToReader => {
                let first = self.0.keys().next();
                first
                    .and_then(|name| found(name))
                    .unwrap_or_else(|| awaited(""))
            }
        }
    }

    /// The names of the served and the listed models.
    fn known<'a>(&'a self, listed: &'a ListedModels) -> Vec<&'a str> {
        let names = self.0.keys().chain(&listed.names);
        let names: BTreeSet<&str> = names.map(String::as_str).collect();
        names.into_iter().collect()
    }

    /// The names of all models, and `more` names, for messages; of very many, the first.
    fn names(&self, listed: &ListedModels, more: &[String]) -> String {
        let names = self.known(listed).into_iter();
        let names = names.chain(listed.aliases().map(|(alias, _)| alias));
        let all: Vec<&str> = names.chain(more.iter().map(String::as_str)).collect();
        let shown = all.iter().take(NAMES_SHOWN_MAX);
        let mut names: Vec<String> = shown.map(|name| format!("`{name}`")).collect();
        if all.len() > NAMES_SHOWN_MAX {
            names.push(format!("and {} more", all.len() - NAMES_SHOWN_MAX));
        }
        names.join(", ")
    }

    /// The error of a request for a model that is not here, neither as a model nor as one of these
    /// adapters.
    pub(crate) fn not_found(
        &self,
        requested: &str,
        listed: &ListedModels,
        adapters: &[String],
    ) -> ApiError {
        ApiError::model_not_found(requested, &self.names(listed, adapters))
    }

    /// The error of a request that names no model where there are several.
    pub(crate) fn unnamed(&self, listed: &ListedModels) -> ApiError {
        let message = format!(
            "`model`: several models are served here; name one of {}.",
            self.names(listed, &[])
        );
        ApiError::invalid("model", message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_of_a_body_is_its_own_member() {
        let named = |name: &str| RequestedModel::Named(name.to_owned());
        for (body, expected) in [
            (
                r#"{"model": "a", "messages": [{"model": "b"}]}"#,
                named("a"),
            ),
            (
                r#"{"metadata": {"model": "b"}, "model": "\u0061"}"#,
                named("a"),
            ),
            (r#"{"prompt": "model"}"#, RequestedModel::Absent),
            (r#"{"model": null}"#, RequestedModel::Absent),
            (r#"{"model": 7}"#, RequestedModel::LeftToReader),
            (r#"["model"]"#, RequestedModel::LeftToReader),
            (r#"{"model": "a""#, RequestedModel::LeftToReader),
        ] {
            assert_eq!(RequestedModel::of_body(body.as_bytes()), expected, "{body}");
        }
        assert_eq!(
            RequestedModel::of_body(b"\xff"),
            RequestedModel::LeftToReader
        );
    }
}
