//! Fields of a JSON object, read with errors that name them.
//!
//! Owns: paths such as `messages[1].content`, checks of types and ranges. Never: builds a value
//! that nothing reads. Invariant: `null` equals absence, as in OpenAI's clients; of duplicate names
//! the last counts.

use crate::error::ApiError;
use cleave_text::json::{Document, Json, JsonItems, JsonMembers, JsonPart, JsonShape};
use std::borrow::Cow;
use std::ops::{Bound, RangeBounds, RangeInclusive};

/// Every field name that any reader uses, sorted. Members with other names are skipped, so the
/// index of an object is never longer than this list.
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

/// A JSON object with its path in the body.
#[derive(Clone, Debug)]
pub(crate) struct JsonFields<'a> {
    document: &'a Document,
    members: JsonMembers<'a>,
    /// Members whose names are in [`NAMES`].
    known_members: Vec<(&'static str, Json<'a>)>,
    path: String,
}

impl<'a> JsonFields<'a> {
    pub(crate) fn of_body(document: &'a Document) -> Result<Self, ApiError> {
        match document.root().shape() {
            JsonShape::Object(members) => Ok(Self::new(document, String::new(), members)),
            _ => Err(ApiError::bad_request(
                "invalid_json",
                format!(
                    "The body must be a JSON object, not {}.",
                    type_name(document.root())
                ),
            )),
        }
    }

    /// Reads an object that was parsed before.
    pub(crate) fn of_part(part: &'a JsonPart) -> Result<Self, ApiError> {
        match part.json().shape() {
            JsonShape::Object(members) => Ok(Self::new(part.document(), String::new(), members)),
            _ => Err(wrong_type("", "an object", part.json())),
        }
    }

    fn new(document: &'a Document, path: String, members: JsonMembers<'a>) -> Self {
        let mut known_members: Vec<(&'static str, Json<'a>)> = Vec::new();
        for (key, value) in members.clone() {
            let key = key.get();
            let Ok(at) = NAMES.binary_search(&&*key) else {
                continue;
            };
            match known_members
                .iter_mut()
                .find(|(name, _)| *name == NAMES[at])
            {
                Some((_, earlier)) => *earlier = value,
                None => known_members.push((NAMES[at], value)),
            }
        }
        Self {
            document,
            members,
            known_members,
            path,
        }
    }

    /// Reads an object of the same body at this path.
    pub(crate) fn object_at(&self, path: String, value: Json<'a>) -> Result<Self, ApiError> {
        match value.shape() {
            JsonShape::Object(members) => Ok(Self::new(self.document, path, members)),
            _ => Err(wrong_type(&path, "an object", value)),
        }
    }

    /// Full path of a field of this object.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() {
            clipped(name).into_owned()
        } else {
            format!("{}.{}", self.path, clipped(name))
        }
    }

    /// All members, whatever their names.
    pub(crate) fn members(&self) -> JsonMembers<'a> {
        self.members.clone()
    }

    /// Copies a value of this body so that it outlives the reader.
    pub(crate) fn part(&self, value: Json<'a>) -> JsonPart {
        self.document.part(value)
    }

    /// Returns the field unless it is absent or `null`.
    pub(crate) fn any(&self, name: &str) -> Option<Json<'a>> {
        debug_assert!(NAMES.binary_search(&name).is_ok(), "{name} is not in NAMES");
        let found = self
            .known_members
            .iter()
            .find(|(known_name, _)| *known_name == name);
        found
            .map(|(_, value)| *value)
            .filter(|value| !value.is_null())
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<Cow<'a, str>>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            JsonShape::String(text) => Ok(text.get()),
            _ => Err(wrong_type(&self.path(name), "a string", value)),
        };
        self.any(name).map(read).transpose()
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            JsonShape::Bool(flag) => Ok(flag),
            _ => Err(wrong_type(&self.path(name), "a boolean", value)),
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

    pub(crate) fn object(&self, name: &str) -> Result<Option<JsonFields<'a>>, ApiError> {
        self.any(name)
            .map(|value| self.object_at(self.path(name), value))
            .transpose()
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<JsonItems<'a>>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            JsonShape::Array(items) => Ok(items),
            _ => Err(wrong_type(&self.path(name), "an array", value)),
        };
        self.any(name).map(read).transpose()
    }
}

/// Characters of a client's text that an error quotes.
const QUOTED_MAX: usize = 80;

/// Shortens a client's text for an error message.
pub(crate) fn clipped(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(QUOTED_MAX) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// An error for a value of the wrong type.
pub(crate) fn wrong_type(path: &str, expected: &str, got: Json<'_>) -> ApiError {
    ApiError::invalid(
        path,
        format!("`{path}` must be {expected}, not {}.", type_name(got)),
    )
}

/// Reads an integer in `range`; `5.0` and `5e2` count as integers.
pub(crate) fn integer(
    path: &str,
    value: Json<'_>,
    range: RangeInclusive<i64>,
) -> Result<i64, ApiError> {
    let JsonShape::Number(number) = value.shape() else {
        return Err(wrong_type(path, "an integer", value));
    };
    let found = number.as_i64().or_else(|| whole_number(value.text()));
    match found {
        Some(found) if range.contains(&found) => Ok(found),
        None if !number.is_u64() => Err(wrong_type(path, "an integer", value)),
        _ => Err(ApiError::invalid(
            path,
            format!(
                "`{path}` must be {}, not {}.",
                range_text(*range.start(), *range.end()),
                clipped(&number.to_string())
            ),
        )),
    }
}

/// Returns the integer that a JSON number is exactly. A number of 64 bits would not tell: it rounds
/// `1e-400` to 0.
fn whole_number(text: &str) -> Option<i64> {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (units, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{units}{fraction}");
    let significant = digits.trim_end_matches('0');
    if matches!(significant, "" | "-") {
        return Some(0);
    }
    let dropped = (digits.len() - significant.len()) as i64;
    let exponent = exponent.parse::<i64>().ok()?;
    let scale = exponent
        .checked_add(dropped)?
        .checked_sub(fraction.len() as i64)?;
    let power = 10_i64.checked_pow(u32::try_from(scale).ok()?)?;
    significant.parse::<i64>().ok()?.checked_mul(power)
}

/// Reads a number in `range`.
pub(crate) fn number(
    path: &str,
    value: Json<'_>,
    range: impl RangeBounds<f64>,
) -> Result<f32, ApiError> {
    let found = match value.shape() {
        JsonShape::Number(number) => number.as_f64(),
        _ => None,
    };
    let Some(found) = found else {
        return Err(wrong_type(path, "a number", value));
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

fn range_text(low: i64, high: i64) -> String {
    match (low, high) {
        (i64::MIN, i64::MAX) => "a signed integer of 64 bits".to_owned(),
        (low, i64::MAX) => format!("at least {low}"),
        (i64::MIN, high) => format!("at most {high}"),
        (low, high) => format!("between {low} and {high}"),
    }
}

/// Name of a JSON type, for messages.
fn type_name(value: Json<'_>) -> &'static str {
    match value.shape() {
        JsonShape::Null => "null",
        JsonShape::Bool(_) => "a boolean",
        JsonShape::Number(number) if number.is_f64() => {
            "a number with a fraction or an exponent, or beyond 64 bits"
        }
        JsonShape::Number(_) => "an integer",
        JsonShape::String(_) => "a string",
        JsonShape::Array(_) => "an array",
        JsonShape::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_exactly() {
        for (text, number) in [
            ("5.0", Some(5)),
            ("-0.0", Some(0)),
            ("0e-999", Some(0)),
            ("-1.5e1", Some(-15)),
            ("120e-1", Some(12)),
            ("9.223372036854775807e18", Some(i64::MAX)),
            ("1e19", None),
            ("1e-400", None),
            ("5.00000000000000000000001", None),
            ("1e-99999999999999999999", None),
        ] {
            assert_eq!(whole_number(text), number, "{text}");
        }
    }

    #[test]
    fn field_names_are_sorted() {
        assert!(NAMES.is_sorted());
    }
}
