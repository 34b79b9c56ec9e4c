//! Fields of a JSON object, read with errors that name them.
//!
//! Owns: paths such as `messages[1].content`, checks of types and ranges, which the declarations
//! give (`declaration.rs`). Never: builds a value that nothing reads. Invariant: `null` equals
//! absence, as in OpenAI's clients; of duplicate names the last counts.

mod declaration;
pub(crate) mod schema;

pub(crate) use declaration::*;

use crate::error::ApiError;
use cleave_text::NumberBounds;
use cleave_text::json::{Document, Json, JsonItems, JsonMembers, JsonPart, JsonShape};
use std::borrow::Cow;
use std::ops::{Bound, RangeBounds, RangeInclusive};

/// A JSON object with its path in the body.
#[derive(Clone, Debug)]
pub(crate) struct JsonFields<'a> {
    spec: &'static ObjectSpec,
    document: &'a Document,
    members: JsonMembers<'a>,
    /// Members whose names are declared.
    known_members: Vec<(&'static str, Json<'a>)>,
    path: String,
}

impl<'a> JsonFields<'a> {
    pub(crate) fn of_body(
        document: &'a Document,
        spec: &'static ObjectSpec,
    ) -> Result<Self, ApiError> {
        match document.root().shape() {
            JsonShape::Object(members) => Ok(Self::new(spec, document, String::new(), members)),
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
    pub(crate) fn of_part(part: &'a JsonPart, spec: &'static ObjectSpec) -> Result<Self, ApiError> {
        match part.json().shape() {
            JsonShape::Object(members) => {
                Ok(Self::new(spec, part.document(), String::new(), members))
            }
            _ => Err(wrong_type("", "an object", part.json())),
        }
    }

    fn new(
        spec: &'static ObjectSpec,
        document: &'a Document,
        path: String,
        members: JsonMembers<'a>,
    ) -> Self {
        let mut known_members: Vec<(&'static str, Json<'a>)> = Vec::new();
        let listed = (!spec.names.is_empty()).then(|| members.clone());
        for (key, value) in listed.into_iter().flatten() {
            let key = key.get();
            let Ok(at) = spec.names.binary_search(&&*key) else {
                continue;
            };
            let declared = spec.names[at];
            match known_members.iter_mut().find(|(name, _)| *name == declared) {
                Some((_, earlier)) => *earlier = value,
                None => known_members.push((declared, value)),
            }
        }
        Self {
            spec,
            document,
            members,
            known_members,
            path,
        }
    }

    /// Reads an object of the same body at this path.
    pub(crate) fn object_at(
        &self,
        path: String,
        value: Json<'a>,
        spec: &'static ObjectSpec,
    ) -> Result<Self, ApiError> {
        Self::of_value(self.document, path, value, spec)
    }

    /// Reads an object of another text.
    pub(crate) fn of_value(
        document: &'a Document,
        path: String,
        value: Json<'a>,
        spec: &'static ObjectSpec,
    ) -> Result<Self, ApiError> {
        match value.shape() {
            JsonShape::Object(members) => Ok(Self::new(spec, document, path, members)),
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

    /// Full path of a declared field of this object.
    pub(crate) fn path_of<K: Copy>(&self, field: &RequestField<K>) -> String {
        self.path(field.name())
    }

    /// Returns those fields of a group that are given, with their names.
    pub(crate) fn given(
        &self,
        group: FieldGroup,
    ) -> impl Iterator<Item = (&'static str, Json<'a>)> + '_ {
        let given = |field: &'static FieldSpec| Some((field.name, self.known(field.name)?));
        group.iter().filter_map(given)
    }

    /// Returns the field unless it is absent or `null`.
    pub(crate) fn any<K: Copy>(&self, field: &RequestField<K>) -> Option<Json<'a>> {
        let name = field.name();
        debug_assert!(
            self.spec.names.binary_search(&name).is_ok(),
            "{name} is not declared in this object"
        );
        self.known(name)
    }

    fn known(&self, name: &str) -> Option<Json<'a>> {
        let mut members = self.known_members.iter();
        let found = members.find(|(known_name, _)| *known_name == name);
        found
            .map(|(_, value)| *value)
            .filter(|value| !value.is_null())
    }

    pub(crate) fn text(
        &self,
        field: &RequestField<TextShape>,
    ) -> Result<Option<Cow<'a, str>>, ApiError> {
        self.any(field)
            .map(|value| text_value(|| self.path_of(field), value, field.kind))
            .transpose()
    }

    /// Reads a text that must be there.
    pub(crate) fn required_text(
        &self,
        field: &RequestField<TextShape>,
    ) -> Result<Cow<'a, str>, ApiError> {
        self.text(field)?.ok_or_else(|| self.missing(field))
    }

    pub(crate) fn flag(&self, field: &RequestField<FlagValue>) -> Result<Option<bool>, ApiError> {
        let read = |value: Json<'a>| match value.shape() {
            JsonShape::Bool(flag) => Ok(flag),
            _ => Err(wrong_type(&self.path_of(field), "a boolean", value)),
        };
        self.any(field).map(read).transpose()
    }

    pub(crate) fn integer(
        &self,
        field: &RequestField<IntegerRange>,
    ) -> Result<Option<i64>, ApiError> {
        let IntegerRange { low, high } = field.kind;
        self.any(field)
            .map(|value| integer_value(&self.path_of(field), value, low..=high))
            .transpose()
    }

    pub(crate) fn number(
        &self,
        field: &RequestField<NumberBounds>,
    ) -> Result<Option<f32>, ApiError> {
        self.any(field)
            .map(|value| number_value(&self.path_of(field), value, field.kind))
            .transpose()
    }

    pub(crate) fn object(
        &self,
        field: &RequestField<&'static ObjectSpec>,
    ) -> Result<Option<JsonFields<'a>>, ApiError> {
        self.any(field)
            .map(|value| self.object_at(self.path_of(field), value, field.kind))
            .transpose()
    }

    /// Reads an object whose names the client chose; [`Self::members`] lists them.
    pub(crate) fn map(
        &self,
        field: &RequestField<MapShape>,
    ) -> Result<Option<JsonFields<'a>>, ApiError> {
        let Some(value) = self.any(field) else {
            return Ok(None);
        };
        let path = self.path_of(field);
        let map = self.object_at(path, value, &ObjectSpec::EMPTY)?;
        if let Some(count_max) = field.kind.count_max {
            limit_list(&map.path, map.members().count(), count_max)?;
        }
        Ok(Some(map))
    }

    pub(crate) fn list(
        &self,
        field: &RequestField<ListShape>,
    ) -> Result<Option<JsonItems<'a>>, ApiError> {
        let Some(value) = self.any(field) else {
            return Ok(None);
        };
        let JsonShape::Array(items) = value.shape() else {
            return Err(wrong_type(&self.path_of(field), "an array", value));
        };
        if let Some(count_max) = field.kind.count_max {
            limit_list(&self.path_of(field), items.clone().count(), count_max)?;
        }
        Ok(Some(items))
    }

    /// An error for a field that must be there.
    pub(crate) fn missing<K: Copy>(&self, field: &RequestField<K>) -> ApiError {
        let path = self.path_of(field);
        ApiError::invalid(&*path, format!("`{path}` is missing."))
    }

    /// An error for a value of this field; the message names the field itself.
    pub(crate) fn invalid<K: Copy>(
        &self,
        field: &RequestField<K>,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError::invalid(self.path_of(field), message)
    }

    /// An error for a value of this field that would need what Cleave does not do.
    pub(crate) fn unsupported<K: Copy>(
        &self,
        field: &RequestField<K>,
        message: impl Into<String>,
    ) -> ApiError {
        ApiError::unsupported(self.path_of(field), message)
    }

    /// Refuses fields that would change the answer, if they ask for something.
    pub(crate) fn check_refused(&self) -> Result<(), ApiError> {
        let asks = |value: Json<'_>| match value.shape() {
            JsonShape::Bool(flag) => flag,
            JsonShape::Array(mut items) => items.next().is_some(),
            JsonShape::Object(mut members) => members.next().is_some(),
            JsonShape::String(text) => !text.is_empty(),
            JsonShape::Null | JsonShape::Number(_) => true,
        };
        let mut refused = self.spec.refused.iter().copied().flatten();
        match refused.find(|field| self.known(field.name).is_some_and(asks)) {
            None => Ok(()),
            Some(RefusedField { name, .. }) => Err(ApiError::unsupported(
                self.path(name),
                format!("`{name}` is not supported; leave it out."),
            )),
        }
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

/// Refuses a list or an object that is longer than `count_max`.
pub(crate) fn limit_list(path: &str, count: usize, count_max: usize) -> Result<(), ApiError> {
    if count <= count_max {
        return Ok(());
    }
    Err(ApiError::invalid(
        path,
        format!("`{path}` has {count} entries; at most {count_max} are allowed."),
    ))
}

/// Reads a text within the limits of its length. `path` is made for an error only.
pub(crate) fn text_value<'a>(
    path: impl FnOnce() -> String,
    value: Json<'a>,
    shape: TextShape,
) -> Result<Cow<'a, str>, ApiError> {
    let JsonShape::String(text) = value.shape() else {
        return Err(wrong_type(&path(), "a string", value));
    };
    let text = text.get();
    if text.is_empty() && !shape.is_empty_allowed {
        let path = path();
        return Err(ApiError::invalid(
            &*path,
            format!("`{path}` must not be empty."),
        ));
    }
    if let Some(bytes_max) = shape.bytes_max {
        check_bytes(path, &text, bytes_max)?;
    }
    Ok(text)
}

/// Refuses a text of more bytes.
pub(crate) fn check_bytes(
    path: impl FnOnce() -> String,
    text: &str,
    bytes_max: usize,
) -> Result<(), ApiError> {
    if text.len() <= bytes_max {
        return Ok(());
    }
    let (path, bytes) = (path(), text.len());
    let message = format!("`{path}` has {bytes} bytes; at most {bytes_max} are allowed.");
    Err(ApiError::invalid(path, message))
}

/// Reads an integer in `range`; `5.0` and `5e2` count as integers.
pub(crate) fn integer_value(
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
pub(crate) fn number_value(
    path: &str,
    value: Json<'_>,
    range: NumberBounds,
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
    fn names_of_an_object_are_sorted() {
        request_fields! {
            LAST {
                ZETA: FlagValue = flag("zeta", "The last name.");
                BETA: FlagValue = flag("beta", "A name in the middle.");
            }
        }
        request_fields! {
            FIRST {
                ALPHA: FlagValue = flag("alpha", "The first name.");
            }
        }
        const REFUSED_FIELDS: &[RefusedField] = &[RefusedField::new("be", "It sorts first.")];
        const SPEC: ObjectSpec = request_object!("", &[&[LAST, FIRST]], &[REFUSED_FIELDS]);
        assert_eq!(SPEC.names, ["alpha", "be", "beta", "zeta"]);
        let body = Document::check(r#"{"zeta": false, "other": 1, "zeta": true}"#.to_owned());
        let body = body.unwrap();
        let fields = JsonFields::of_body(&body, &SPEC).unwrap();
        assert_eq!(
            fields.flag(&ZETA).unwrap(),
            Some(true),
            "the last one counts"
        );
        let absent = [&ALPHA, &BETA].map(|field| fields.flag(field).unwrap());
        assert_eq!(absent, [None, None]);
        assert_eq!(fields.known_members.len(), 1, "unknown names are skipped");
    }
}
