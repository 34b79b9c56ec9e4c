//! The served models, and which of them a request is for.
//!
//! Owns: each model's text side by its served name, and the turns of its requests for vectors.
//! Never: reads a tokenizer, or knows a worker. Invariant: a model that was served once stays here,
//! so a request for it while its workers are away is answered 503 and not 404.

use crate::error::ApiError;
use crate::input_turns::InputTurns;
use crate::response_store::member;
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

    /// The model that a request is for; `listed` are the names that the policy has.
    pub(crate) fn choose(&self, requested: &RequestedModel, listed: &[String]) -> ModelChoice {
        let found = |name: &str| {
            let served = self.0.get(name);
            served.map(|served| ModelChoice::Found(Arc::clone(&served.model)))
        };
        let awaited = |name: &str| ModelChoice::Awaited(name.to_owned());
        let expects_any = self.0.is_empty() && listed.is_empty();
        match requested {
            RequestedModel::Named(name) => found(name).unwrap_or_else(|| {
                if listed.contains(name) {
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
    fn known<'a>(&'a self, listed: &'a [String]) -> Vec<&'a str> {
        let names: BTreeSet<&str> = self.0.keys().chain(listed).map(String::as_str).collect();
        names.into_iter().collect()
    }

    /// The names of all models, for messages; of very many, the first.
    fn names(&self, listed: &[String]) -> String {
        let known = self.known(listed);
        let shown = known.iter().take(NAMES_SHOWN_MAX);
        let mut names: Vec<String> = shown.map(|name| format!("`{name}`")).collect();
        if known.len() > NAMES_SHOWN_MAX {
            names.push(format!("and {} more", known.len() - NAMES_SHOWN_MAX));
        }
        names.join(", ")
    }

    /// The error of a request for a model that is not here; `others` are names besides those of
    /// the served models.
    pub(crate) fn not_found(&self, requested: &str, others: &[String]) -> ApiError {
        ApiError::model_not_found(requested, &self.names(others))
    }

    /// The error of a request that names no model where there are several.
    pub(crate) fn unnamed(&self, listed: &[String]) -> ApiError {
        let message = format!(
            "`model`: several models are served here; name one of {}.",
            self.names(listed)
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
