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
        let types = Self::types(schema, whole);
        let is_text = |name: &&str| *name == "string";
        let is_any = |name: &&str| matches!(*name, "object" | "array" | "any");
        if !types.iter().any(is_text) || types.iter().any(is_any) {
            Self::Json
        } else if types.iter().all(is_text) {
            Self::Text
        } else if types.iter().all(|name| is_text(name) || *name == "null") {
            Self::TextOrNull
        } else {
            Self::TextOrScalar
        }
    }

    /// Names of the types that a schema allows; `any` stands for an unknown one.
    pub(super) fn types<'a>(schema: &'a Value, whole: Option<&'a Value>) -> Vec<&'a str> {
        let mut types = Vec::new();
        collect_types(schema, whole, ALTERNATIVES_DEPTH_MAX, &mut types);
        types
    }
}

/// The schema to which a schema refers, if it is a part of the whole; otherwise itself.
pub(super) fn resolved<'a>(schema: &'a Value, whole: Option<&'a Value>) -> &'a Value {
    let mut found = schema;
    for _ in 0..ALTERNATIVES_DEPTH_MAX {
        let pointer = found.get("$ref").and_then(Value::as_str);
        let pointer = pointer.and_then(|pointer| pointer.strip_prefix('#'));
        match pointer.and_then(|pointer| whole?.pointer(pointer)) {
            Some(target) => found = target,
            None => break,
        }
    }
    found
}

fn collect_types<'a>(
    schema: &'a Value,
    whole: Option<&'a Value>,
    depth: u32,
    types: &mut Vec<&'a str>,
) {
    let schema = resolved(schema, whole);
    let alternatives = ["anyOf", "oneOf"]
        .iter()
        .find_map(|key| schema.get(*key)?.as_array());
    let name_of = |value: &Value| match value {
        Value::String(_) => "string",
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::Array(_) | Value::Object(_) => "any",
    };
    match (schema.get("type"), alternatives, schema.get("enum")) {
        (Some(Value::String(name)), ..) => types.push(name),
        (Some(Value::Array(names)), ..) => {
            types.extend(names.iter().map(|name| name.as_str().unwrap_or("any")));
        }
        (None, Some(schemas), _) if depth > 0 => {
            for schema in schemas {
                collect_types(schema, whole, depth - 1, types);
            }
        }
        (None, None, Some(Value::Array(values))) => types.extend(values.iter().map(name_of)),
        (None, None, None) if schema.get("const").is_some_and(Value::is_string) => {
            types.push("string");
        }
        _ => types.push("any"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tagged_call::json_of;
    use super::*;
    use serde_json::json;

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
