//! The tools of a request, as far as the reading of calls needs them.

use serde_json::Value;

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolSpec {
    name: String,
    /// Parameters by name. Formats that write values without quotes need their kinds.
    parameters: Vec<(String, ParameterKind)>,
}

/// The values that the schema of a parameter allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ParameterKind {
    Text,
    TextOrNull,
    /// A text, or something else that is no object and no list.
    TextOrScalar,
    /// Anything else, or unknown.
    Json,
}

/// Depth to which alternatives of a schema are followed.
const ALTERNATIVES_DEPTH_MAX: u32 = 8;

/// Parts of a schema that are looked at for the kind of one parameter.
const SCHEMAS_MAX: u32 = 1000;

impl ToolSpec {
    /// A tool with the JSON Schema of its arguments, if it has one.
    pub fn new(name: String, schema: Option<&Value>) -> Self {
        let properties = schema.and_then(|schema| schema.get("properties")?.as_object());
        let properties = properties.into_iter().flatten();
        let parameters =
            properties.map(|(name, value)| (name.clone(), ParameterKind::of(value, schema)));
        Self {
            name,
            parameters: parameters.collect(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn kind(&self, parameter: &str) -> ParameterKind {
        let found = self.parameters.iter().find(|(name, _)| name == parameter);
        found.map_or(ParameterKind::Json, |(_, kind)| *kind)
    }
}

impl ParameterKind {
    /// The kind of a schema's values; `whole` has the definitions to which it refers.
    pub(super) fn of(schema: &Value, whole: Option<&Value>) -> Self {
        match TypeSet::of(schema, whole) {
            TypeSet::TEXT => Self::Text,
            types if types == TypeSet::TEXT.or(TypeSet::NULL) => Self::TextOrNull,
            types if types.has(TypeSet::TEXT) && !types.has(TypeSet::NESTED) => Self::TextOrScalar,
            _ => Self::Json,
        }
    }
}

/// JSON's types, as far as a schema tells that its values have one of them: its other keywords may
/// allow fewer values, and none of another type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TypeSet(u8);

impl TypeSet {
    const NONE: Self = Self(0);
    const NULL: Self = Self(1);
    const TEXT: Self = Self(2);
    const BOOLEAN: Self = Self(4);
    const INTEGER: Self = Self(8);
    /// Whole numbers are among these, as in JSON Schema.
    const NUMBER: Self = Self(8 | 16);
    const ARRAY: Self = Self(32);
    const OBJECT: Self = Self(64);
    const NESTED: Self = Self(32 | 64);
    const ALL: Self = Self(127);

    /// The types of a schema's values; `whole` has the definitions to which it refers.
    pub(super) fn of(schema: &Value, whole: Option<&Value>) -> Self {
        let mut walk = SchemaWalk {
            whole,
            left: SCHEMAS_MAX,
        };
        walk.types(schema, ALTERNATIVES_DEPTH_MAX)
    }

    /// Whether a value may be a text.
    pub(super) fn has_text(self) -> bool {
        self.has(Self::TEXT)
    }

    /// Whether a value may be of one of these types.
    fn has(self, types: Self) -> bool {
        self.and(types) != Self::NONE
    }

    const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The types of the keyword `type`: a name, or several.
    fn named(names: &Value) -> Self {
        let of_name = |name: &Value| match name.as_str() {
            Some("null") => Self::NULL,
            Some("string") => Self::TEXT,
            Some("boolean") => Self::BOOLEAN,
            Some("integer") => Self::INTEGER,
            Some("number") => Self::NUMBER,
            Some("array") => Self::ARRAY,
            Some("object") => Self::OBJECT,
            _ => Self::ALL,
        };
        match names {
            Value::Array(names) => names.iter().map(of_name).fold(Self::NONE, Self::or),
            name => of_name(name),
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::String(_) => Self::TEXT,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(_) => Self::NUMBER,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }
}

/// Follows a schema to the parts that name types.
struct SchemaWalk<'a> {
    whole: Option<&'a Value>,
    /// Schemas that may still be visited: those that refer to themselves in each of their
    /// alternatives have no end in practice.
    left: u32,
}

impl SchemaWalk<'_> {
    fn types(&mut self, schema: &Value, depth: u32) -> TypeSet {
        let Some(members) = schema.as_object().filter(|_| depth > 0 && self.left > 0) else {
            return TypeSet::ALL;
        };
        self.left -= 1;
        let mut types = TypeSet::ALL;
        for (keyword, value) in members {
            types = types.and(self.of_keyword(keyword, value, depth - 1));
        }
        // OpenAPI 3.0 writes it so.
        match members.get("nullable") {
            Some(Value::Bool(true)) => types.or(TypeSet::NULL),
            _ => types,
        }
    }

    fn of_keyword(&mut self, keyword: &str, value: &Value, depth: u32) -> TypeSet {
        let values = || value.as_array().into_iter().flatten();
        match keyword {
            "type" => TypeSet::named(value),
            "enum" => values()
                .map(TypeSet::of_value)
                .fold(TypeSet::NONE, TypeSet::or),
            "const" => TypeSet::of_value(value),
            "anyOf" | "oneOf" => values()
                .map(|schema| self.types(schema, depth))
                .fold(TypeSet::NONE, TypeSet::or),
            "allOf" => values()
                .map(|schema| self.types(schema, depth))
                .fold(TypeSet::ALL, TypeSet::and),
            "$ref" => match target(value, self.whole) {
                Some(schema) => self.types(schema, depth),
                None => TypeSet::ALL,
            },
            _ => TypeSet::ALL,
        }
    }
}

/// The schema to which a schema refers, if it is a part of the whole; otherwise itself.
pub(super) fn resolved<'a>(schema: &'a Value, whole: Option<&'a Value>) -> &'a Value {
    let mut found = schema;
    for _ in 0..ALTERNATIVES_DEPTH_MAX {
        let reference = found.get("$ref");
        match reference.and_then(|reference| target(reference, whole)) {
            Some(target) => found = target,
            None => break,
        }
    }
    found
}

/// The part of the whole that a reference names.
fn target<'a>(reference: &Value, whole: Option<&'a Value>) -> Option<&'a Value> {
    let pointer = reference.as_str()?.strip_prefix('#')?;
    whole?.pointer(&percent_decoded(pointer))
}

/// A part of an address without `%` and two digits for a byte.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        let digits = more.first_chunk::<2>().filter(|_| *first == b'%');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tagged_call::json_of;
    use super::*;
    use serde_json::json;

    /// Names are those of the conformance suite of ai-dynamo/frontend-crates.
    #[test]
    fn every_keyword_of_a_schema_counts_for_its_kind() {
        use ParameterKind::{Json, Text, TextOrNull, TextOrScalar};
        let whole = json!({"$defs": {
            "name": {"type": "string"},
            "a name+é": {"type": "string"},
            "a/~name": {"type": "string"},
            "perhaps": {"type": ["string", "null"]},
            "either": {"type": ["string", "integer"]},
            "colour": {"enum": ["red", "1"]},
            "loop": {"$ref": "#/$defs/loop"},
        }});
        for (name, schema, kind) in [
            (
                "7-4",
                json!({"type": "string", "nullable": true}),
                TextOrNull,
            ),
            ("7-4", json!({"const": null}), Json),
            (
                "7-5",
                json!({"type": ["string", "null"], "allOf": [{"type": "string"}]}),
                Text,
            ),
            (
                "7-5",
                json!({"anyOf": [{"type": "string"}, {"type": "null"}], "type": "string"}),
                Text,
            ),
            ("7-4.ref", json!({"$ref": "#/$defs/perhaps"}), TextOrNull),
            ("7-5.ref", json!({"$ref": "#/$defs/name"}), Text),
            ("7-11", json!({"$ref": "#/$defs/a%20name+%C3%A9"}), Text),
            ("7-11", json!({"$ref": "#/$defs/a~1~0name"}), Text),
            (
                "7-13",
                json!({"$ref": "#/$defs/either", "type": "integer"}),
                Json,
            ),
            (
                "7-13",
                json!({"$ref": "#/$defs/perhaps", "type": "string"}),
                Text,
            ),
            ("7-18", json!({"const": "42"}), Text),
            (
                "7-19",
                json!({"anyOf": [{"const": "42"}, {"type": "integer"}]}),
                TextOrScalar,
            ),
            ("7-21", json!({"allOf": [{"$ref": "#/$defs/colour"}]}), Text),
            (
                "7-22",
                json!({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}),
                Text,
            ),
            ("7-23", json!({"type": "string", "enum": ["1", 2]}), Text),
            ("7-24", json!({"type": ["string", "null"]}), TextOrNull),
            ("unknown", json!({"$ref": "#/$defs/absent"}), Json),
            ("endless", json!({"$ref": "#/$defs/loop"}), Json),
            ("of no kind", json!(true), Json),
        ] {
            assert_eq!(
                ParameterKind::of(&schema, Some(&whole)),
                kind,
                "{name} {schema}"
            );
        }
    }

    #[test]
    fn a_schema_of_references_to_itself_has_no_kind() {
        let itself = json!({"$ref": "#/$defs/a"});
        let whole = json!({"$defs": {"a": {"anyOf": vec![itself.clone(); 100]}}});
        assert_eq!(
            ParameterKind::of(&itself, Some(&whole)),
            ParameterKind::Json
        );
    }

    #[test]
    fn a_percent_that_writes_no_byte_stays() {
        for (text, decoded) in [
            ("100%", "100%"),
            ("%4", "%4"),
            ("%zz%41", "%zzA"),
            ("é%C3%A9", "éé"),
        ] {
            assert_eq!(percent_decoded(text), decoded);
        }
    }

    #[test]
    fn a_value_is_what_its_schema_allows() {
        let nullable = json!({"type": ["string", "null"]});
        let number = json!({"anyOf": [{"type": "string"}, {"type": "integer"}]});
        let listed = json!({"enum": ["[1]", 2, true]});
        let any = json!({"type": ["string", "object"]});
        for (schema, text, expected) in [
            (&nullable, r#"{"a": 1}"#, json!(r#"{"a": 1}"#)),
            (&nullable, " null ", Value::Null),
            (&nullable, "None", json!("None")),
            (&number, "[1]", json!("[1]")),
            (&number, "12", json!(12)),
            (&number, "{", json!("{")),
            (&listed, "[1]", json!("[1]")),
            (&listed, "true", json!(true)),
            (&any, r#"{"a": 1}"#, json!({"a": 1})),
        ] {
            let json = json_of(text, ParameterKind::of(schema, None));
            let value: Value = serde_json::from_str(&json).unwrap();
            assert_eq!(value, expected, "{schema}: {text}");
        }
    }
}
