//! JSON Schema of declared fields.
//!
//! Owns: the schema of each shape. Never: reads a body. Invariant: a field that is not required may
//! be `null`, which equals absence.

use super::{
    FieldGroup, FieldSpec, IntegerRange, ListShape, MapKeys, MapShape, ObjectSpec, TextShape,
    UnknownFields, ValueShape,
};
use serde_json::{Map, Value, json};
use std::ops::Bound;

/// Adds the schemas of an object and of the objects in it to `schemas`, if they have a title.
pub(crate) fn add_titled(spec: &'static ObjectSpec, schemas: &mut Map<String, Value>) {
    for field in spec.fields() {
        add_of_shape(&field.shape, schemas);
    }
    if !spec.title.is_empty() {
        schemas.insert(spec.title.to_owned(), object_schema(spec));
    }
}

fn add_of_shape(shape: &ValueShape, schemas: &mut Map<String, Value>) {
    match shape {
        ValueShape::Object(spec) => add_titled(spec, schemas),
        ValueShape::List(ListShape { items: inner, .. })
        | ValueShape::Map(MapShape { values: inner, .. }) => add_of_shape(inner, schemas),
        ValueShape::OneOf(shapes) => {
            for shape in *shapes {
                add_of_shape(shape, schemas);
            }
        }
        ValueShape::Any
        | ValueShape::Absent
        | ValueShape::Flag
        | ValueShape::Text(_)
        | ValueShape::Integer(_)
        | ValueShape::Number(_)
        | ValueShape::TokenId => {}
    }
}

fn object_schema(spec: &ObjectSpec) -> Value {
    let mut schema = match spec.forms {
        [] => json!({"type": "object"}),
        [form] => form_schema(form, spec.unknown),
        forms => {
            let forms = forms.iter().map(|form| form_schema(form, spec.unknown));
            json!({"oneOf": forms.collect::<Value>()})
        }
    };
    let refused = spec.refused.iter().copied().flatten();
    let refused: Map<String, Value> = refused
        .map(|field| (field.name.to_owned(), field.reason.into()))
        .collect();
    if !refused.is_empty() {
        schema["x-refused"] = refused.into();
    }
    if let Some(rule) = spec.rule {
        let rule: Map<String, Value> =
            serde_json::from_str(rule).expect("a rule is an object of JSON");
        for (name, value) in rule {
            schema[name] = value;
        }
    }
    schema
}

fn form_schema(groups: &[FieldGroup], unknown: UnknownFields) -> Value {
    let fields = || groups.iter().copied().flatten();
    let required = fields().filter(|field| field.is_required);
    let required: Vec<&str> = required.map(|field| field.name).collect();
    let properties = fields().map(|field| (field.name.to_owned(), field_schema(field)));
    let mut schema = json!({"type": "object"});
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema["properties"] = properties.collect::<Map<_, _>>().into();
    if unknown == UnknownFields::Refused {
        schema["additionalProperties"] = false.into();
    }
    schema
}

fn field_schema(field: &FieldSpec) -> Value {
    let shape = shape_schema(&field.shape);
    if let ValueShape::Absent = field.shape {
        return shape;
    }
    let mut schema = if field.is_required {
        shape
    } else {
        nullable(shape)
    };
    schema["description"] = field.doc.into();
    schema
}

/// Schema that allows `null`, too.
fn nullable(mut schema: Value) -> Value {
    let absent = json!({"type": "null"});
    if let Some(one) = schema.get("const") {
        return json!({"enum": [one, null]});
    }
    for list in ["enum", "anyOf"] {
        if let Some(Value::Array(allowed)) = schema.get_mut(list) {
            let more = match list {
                "enum" => Value::Null,
                _ => absent,
            };
            allowed.push(more);
            return schema;
        }
    }
    let is_plain = schema.get("properties").is_none();
    match schema.get_mut("type") {
        Some(kind) if is_plain => {
            *kind = json!([kind, "null"]);
            schema
        }
        _ => json!({"anyOf": [schema, absent]}),
    }
}

/// Schema of a value that is there.
pub(crate) fn shape_schema(shape: &ValueShape) -> Value {
    match shape {
        ValueShape::Any => json!({}),
        ValueShape::Absent => json!({"type": "null"}),
        ValueShape::Flag => json!({"type": "boolean"}),
        ValueShape::Text(shape) => text_schema(shape),
        ValueShape::Integer(IntegerRange { low, high }) => {
            json!({"type": "integer", "minimum": low, "maximum": high})
        }
        ValueShape::Number((low, high)) => {
            let mut schema = json!({"type": "number"});
            for (bound, included, excluded) in [
                (low, "minimum", "exclusiveMinimum"),
                (high, "maximum", "exclusiveMaximum"),
            ] {
                match bound {
                    Bound::Included(limit) => schema[included] = shortest(*limit),
                    Bound::Excluded(limit) => schema[excluded] = shortest(*limit),
                    Bound::Unbounded => {}
                }
            }
            schema
        }
        ValueShape::TokenId => json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}),
        ValueShape::List(ListShape {
            items,
            count_min,
            count_max,
        }) => {
            let mut schema = json!({"type": "array", "items": shape_schema(items)});
            if *count_min > 0 {
                schema["minItems"] = (*count_min).into();
            }
            if let Some(count_max) = count_max {
                schema["maxItems"] = (*count_max).into();
            }
            schema
        }
        ValueShape::Map(MapShape {
            keys,
            values,
            count_max,
        }) => {
            let mut schema = json!({"type": "object"});
            if let Some(count_max) = count_max {
                schema["maxProperties"] = (*count_max).into();
            }
            if *keys == MapKeys::TokenIds {
                schema["propertyNames"] = json!({"pattern": "^[0-9]+$"});
                schema["additionalProperties"] = shape_schema(values);
            }
            schema
        }
        ValueShape::Object(spec) if spec.title.is_empty() => object_schema(spec),
        ValueShape::Object(spec) => {
            json!({"$ref": format!("#/components/schemas/{}", spec.title)})
        }
        ValueShape::OneOf(shapes) => {
            let shapes = shapes.iter().map(shape_schema);
            json!({"anyOf": shapes.collect::<Value>()})
        }
    }
}

fn text_schema(shape: &TextShape) -> Value {
    let mut schema = match shape.choices {
        [] => json!({"type": "string"}),
        [one] => json!({"const": one}),
        choices => json!({"enum": choices}),
    };
    if !shape.is_empty_allowed {
        schema["minLength"] = 1.into();
    }
    if let Some(bytes_max) = shape.bytes_max {
        schema["maxLength"] = bytes_max.into();
    }
    if shape.is_json {
        schema["contentMediaType"] = "application/json".into();
    }
    schema
}

/// A whole number without a fraction, as it stands in the source.
fn shortest(limit: f64) -> Value {
    if limit.fract() == 0.0 {
        (limit as i64).into()
    } else {
        limit.into()
    }
}
