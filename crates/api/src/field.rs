//! Reading fields of a JSON object with errors that name them.
//!
//! Owns: paths such as `messages[1].content`, type and range checks. Never: builds a value that nobody asked
//! for. Invariant: `null` is the same as absent, as in OpenAI's clients; of a name that is given twice the
//! last one counts.

use crate::error::ApiError;
use crate::json::{Document, Items, Json, Members, Part, Shape};
use std::borrow::Cow;
use std::ops::{Bound, RangeBounds, RangeInclusive};

/// Every name that any reader asks for, in order. Members of other names are passed over, however many there
/// are: an object's index is never longer than this list.
const NAMES: &[&str] = &[
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "arguments",
    "audio",
    "bad_words",
    "best_of",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "content",
    "continue_final_message",
    "continuous_usage_stats",
    "documents",
    "ebnf",
    "echo",
    "frequency_penalty",
    "function",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "include_usage",
    "json_schema",
    "logit_bias",
    "logits_processors",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "min_p",
    "min_tokens",
    "modalities",
    "model",
    "n",
    "name",
    "presence_penalty",
    "priority",
    "prompt",
    "prompt_embeds",
    "prompt_logprobs",
    "reasoning_content",
    "refusal",
    "regex",
    "repetition_penalty",
    "response_format",
    "return_token_strs",
    "role",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "structured_outputs",
    "suffix",
    "temperature",
    "text",
    "tokens",
    "tool_call_id",
    "tool_calls",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "truncate_prompt_tokens",
    "type",
    "use_beam_search",
    "web_search_options",
    "worker",
];

/// A JSON object and where it stands in the body.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    document: &'a Document,
    members: Members<'a>,
    /// The fields of [`NAMES`].
    known: Vec<(&'static str, Json<'a>)>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub(crate) fn of_body(document: &'a Document) -> Result<Self, ApiError> {
        match document.root().shape() {
            Shape::Object(members) => Ok(Self::new(document, String::new(), members)),
            _ => Err(ApiError::bad_request(
                "invalid_json",
                format!(
                    "The body must be a JSON object, not {}.",
                    kind(document.root())
                ),
            )),
        }
    }

    /// An object that was read before.
    pub(crate) fn of_part(part: &'a Part) -> Result<Self, ApiError> {
        match part.json().shape() {
            Shape::Object(members) => Ok(Self::new(part.document(), String::new(), members)),
            _ => Err(wrong("", "an object", part.json())),
        }
    }

    fn new(document: &'a Document, path: String, members: Members<'a>) -> Self {
        let mut known: Vec<(&'static str, Json<'a>)> = Vec::new();
        for (key, value) in members.clone() {
            let key = key.get();
            let Ok(at) = NAMES.binary_search(&&*key) else {
                continue;
            };
            match known.iter_mut().find(|(name, _)| *name == NAMES[at]) {
                Some((_, earlier)) => *earlier = value,
                None => known.push((NAMES[at], value)),
            }
        }
        Self {
            document,
            members,
            known,
            path,
        }
    }

    /// An object of the same body, at a path that the caller has built.
    pub(crate) fn at(&self, path: String, value: Json<'a>) -> Result<Self, ApiError> {
        match value.shape() {
            Shape::Object(members) => Ok(Self::new(self.document, path, members)),
            _ => Err(wrong(&path, "an object", value)),
        }
    }

    /// The full name of a field of this object.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            clipped(name).into_owned()
        } else {
            format!("{}.{}", self.path, clipped(name))
        }
    }

    /// All members, of whatever name.
    pub(crate) fn members(&self) -> Members<'a> {
        self.members.clone()
    }

    /// A value of this body that outlives the reading.
    pub(crate) fn part(&self, value: Json<'a>) -> Part {
        self.document.part(value)
    }

    /// The field, unless absent or `null`.
    pub(crate) fn any(&self, name: &str) -> Option<Json<'a>> {
        debug_assert!(NAMES.binary_search(&name).is_ok(), "{name} is not in NAMES");
        let found = self.known.iter().find(|(known, _)| *known == name);
        found
            .map(|(_, value)| *value)
            .filter(|value| !value.is_null())
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<Cow<'a, str>>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            Shape::String(text) => Ok(text.get()),
            _ => Err(wrong(&self.path(name), "a string", value)),
        };
        self.any(name).map(read).transpose()
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            Shape::Bool(flag) => Ok(flag),
            _ => Err(wrong(&self.path(name), "a boolean", value)),
        };
        self.any(name).map(read).transpose()
    }

    pub(crate) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        self.any(name)
            .map(|value| integer(&self.path(name), value, range))
            .transpose()
    }

    pub(crate) fn number(
        &self,
        name: &str,
        range: impl RangeBounds<f64>,
    ) -> Result<Option<f32>, ApiError> {
        self.any(name)
            .map(|value| number(&self.path(name), value, range))
            .transpose()
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.any(name)
            .map(|value| self.at(self.path(name), value))
            .transpose()
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<Items<'a>>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            Shape::Array(items) => Ok(items),
            _ => Err(wrong(&self.path(name), "an array", value)),
        };
        self.any(name).map(read).transpose()
    }
}

/// Characters of a client's text that an error repeats.
const QUOTED_MAX: usize = 80;

/// The beginning of a client's text, for an error.
pub(crate) fn clipped(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(QUOTED_MAX) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// Something of another type was expected there.
pub(crate) fn wrong(path: &str, expected: &str, got: Json<'_>) -> ApiError {
    ApiError::invalid(
        path,
        format!("`{path}` must be {expected}, not {}.", kind(got)),
    )
}

/// A whole number in `range`; `5.0` counts as one.
pub(crate) fn integer(
    path: &str,
    value: Json<'_>,
    range: RangeInclusive<i64>,
) -> Result<i64, ApiError> {
    let whole =
        |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    let Shape::Number(number) = value.shape() else {
        return Err(wrong(path, "an integer", value));
    };
    let found = number.as_i64().or_else(|| number.as_f64().and_then(whole));
    match found {
        Some(found) if range.contains(&found) => Ok(found),
        None if !number.is_u64() => Err(wrong(path, "an integer", value)),
        _ => Err(ApiError::invalid(
            path,
            format!(
                "`{path}` must be {}, not {number}.",
                span(*range.start(), *range.end())
            ),
        )),
    }
}

/// A number in `range`.
pub(crate) fn number(
    path: &str,
    value: Json<'_>,
    range: impl RangeBounds<f64>,
) -> Result<f32, ApiError> {
    let found = match value.shape() {
        Shape::Number(number) => number.as_f64(),
        _ => None,
    };
    let Some(found) = found else {
        return Err(wrong(path, "a number", value));
    };
    if range.contains(&found) {
        return Ok(found as f32);
    }
    let lower = match range.start_bound() {
        Bound::Included(bound) => format!("at least {bound}"),
        Bound::Excluded(bound) => format!("greater than {bound}"),
        Bound::Unbounded => String::new(),
    };
    let upper = match range.end_bound() {
        Bound::Included(bound) => format!("at most {bound}"),
        Bound::Excluded(bound) => format!("less than {bound}"),
        Bound::Unbounded => String::new(),
    };
    let join = if lower.is_empty() || upper.is_empty() {
        ""
    } else {
        " and "
    };
    Err(ApiError::invalid(
        path,
        format!("`{path}` must be {lower}{join}{upper}, not {found}."),
    ))
}

fn span(low: i64, high: i64) -> String {
    match (low, high) {
        (low, i64::MAX) => format!("at least {low}"),
        (i64::MIN, high) => format!("at most {high}"),
        (low, high) => format!("between {low} and {high}"),
    }
}

/// A JSON type in words.
fn kind(value: Json<'_>) -> &'static str {
    match value.shape() {
        Shape::Null => "null",
        Shape::Bool(_) => "a boolean",
        Shape::Number(number) if number.is_f64() => "a number with a fraction",
        Shape::Number(_) => "an integer",
        Shape::String(_) => "a string",
        Shape::Array(_) => "an array",
        Shape::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_order() {
        assert!(NAMES.is_sorted());
    }
}
