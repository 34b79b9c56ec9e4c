//! Declarations of the fields of request bodies.
//!
//! Owns: each field's name, type, range, default and meaning. [`JsonFields`](super::JsonFields)
//! reads by them, `openapi` makes the document of them and docs/api.md its tables. Never: reads a
//! body. Invariant: a field that nobody reads does not compile, see [`request_fields`].

use cleave_text::NumberBounds;
use std::ops::RangeInclusive;

/// A field that a reader reads; `K` is the kind of its values. Readers take it in place of a name
/// and a range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestField<K> {
    pub(super) spec: FieldSpec,
    pub(super) kind: K,
}

/// A field as documents show it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldSpec {
    pub(crate) name: &'static str,
    /// Meaning in a sentence.
    pub(crate) doc: &'static str,
    /// The value that counts where the field is absent, in words.
    pub(crate) default: &'static str,
    pub(crate) is_required: bool,
    pub(crate) shape: ValueShape,
}

/// The values that a field may have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ValueShape {
    Any,
    /// The field belongs to another form of its object.
    Absent,
    Flag,
    Text(TextShape),
    Integer(IntegerRange),
    Number(NumberBounds),
    /// An id of the model's vocabulary, which only a server knows.
    TokenId,
    List(ListShape),
    Map(MapShape),
    Object(&'static ObjectSpec),
    OneOf(&'static [ValueShape]),
}

/// Any value: its reader tells the types apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnyValue;

#[derive(Clone, Copy, Debug)]
pub(crate) struct FlagValue;

/// A text with a limit of its length in bytes. JSON Schema counts characters instead, which are
/// never more.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextShape {
    pub(crate) is_empty_allowed: bool,
    pub(crate) bytes_max: Option<usize>,
    /// The only texts that are served; empty if all are. Readers refuse others, each with its own
    /// reason.
    pub(crate) choices: &'static [&'static str],
    /// Whether the text is JSON itself.
    pub(crate) is_json: bool,
}

/// Integers from `low` to `high`, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntegerRange {
    pub(crate) low: i64,
    pub(crate) high: i64,
}

/// An array with limits of its length. Readers check `count_max`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListShape {
    pub(crate) items: &'static ValueShape,
    pub(crate) count_min: usize,
    pub(crate) count_max: Option<usize>,
}

/// An object whose names the client chooses. Readers check `count_max`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapShape {
    pub(crate) keys: MapKeys,
    pub(crate) values: &'static ValueShape,
    pub(crate) count_max: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapKeys {
    Any,
    TokenIds,
}

/// Fields that are declared together.
pub(crate) type FieldGroup = &'static [FieldSpec];

/// An object with its fields, made by [`request_object`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectSpec {
    /// Name of its schema; empty if the schema stands where it is used.
    pub(crate) title: &'static str,
    /// The forms that the object may have, each a list of groups; most have one.
    pub(crate) forms: &'static [&'static [FieldGroup]],
    pub(crate) refused: &'static [&'static [RefusedField]],
    pub(crate) unknown: UnknownFields,
    /// Rules between fields, as JSON Schema.
    pub(crate) rule: Option<&'static str>,
    /// Names of all fields, sorted. Members with other names are skipped, so the index of an object
    /// is never longer than this list.
    pub(super) names: &'static [&'static str],
}

/// The treatment of fields that are not declared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnknownFields {
    Ignored,
    Refused,
}

/// A field of another server that would change the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RefusedField {
    pub(crate) name: &'static str,
    /// The reason why it is not served, for documents.
    pub(crate) reason: &'static str,
}

/// Declares fields as constants for their reader, and all of them as a group for
/// [`request_object`]. The group has a copy of each declaration, so that the compiler sees a
/// constant that no reader uses, and refuses it.
macro_rules! request_fields {
    (
        $(#[$group_attribute:meta])*
        $visibility:vis $group:ident {
            $( $(#[$attribute:meta])* $field:ident: $kind:ty = $declared:expr; )*
        }
    ) => {
        $(
            $(#[$attribute])*
            #[deny(dead_code)]
            $visibility const $field: $crate::field::RequestField<$kind> = $declared;
        )*
        $(#[$group_attribute])*
        $visibility const $group: $crate::field::FieldGroup = &[$({
            const DECLARED: $crate::field::RequestField<$kind> = $declared;
            DECLARED.as_spec()
        }),*];
    };
}

/// Makes an [`ObjectSpec`] of a title, its forms and the fields that it refuses.
macro_rules! request_object {
    ($title:expr, $forms:expr) => {
        request_object!($title, $forms, &[])
    };
    ($title:expr, $forms:expr, $refused:expr) => {{
        const FORMS: &[&[$crate::field::FieldGroup]] = $forms;
        const REFUSED: &[&[$crate::field::RefusedField]] = $refused;
        const NAMES: [&str; $crate::field::names_count(FORMS, REFUSED)] =
            $crate::field::sorted_names(FORMS, REFUSED);
        $crate::field::ObjectSpec::new($title, FORMS, REFUSED, &NAMES)
    }};
}

pub(crate) use {request_fields, request_object};

impl<K: Copy> RequestField<K> {
    const fn new(name: &'static str, doc: &'static str, shape: ValueShape, kind: K) -> Self {
        let spec = FieldSpec {
            name,
            doc,
            default: "none",
            is_required: false,
            shape,
        };
        Self { spec, kind }
    }

    pub(crate) const fn name(&self) -> &'static str {
        self.spec.name
    }

    pub(crate) const fn as_spec(self) -> FieldSpec {
        self.spec
    }

    /// Documents the value that counts where the field is absent.
    pub(crate) const fn default(mut self, default: &'static str) -> Self {
        self.spec.default = default;
        self
    }

    /// A missing field is an error, which its reader gives.
    pub(crate) const fn required(mut self) -> Self {
        self.spec.is_required = true;
        self.spec.default = "required";
        self
    }
}

pub(crate) const fn flag(name: &'static str, doc: &'static str) -> RequestField<FlagValue> {
    RequestField::new(name, doc, ValueShape::Flag, FlagValue).default("false")
}

pub(crate) const fn text(
    name: &'static str,
    shape: TextShape,
    doc: &'static str,
) -> RequestField<TextShape> {
    RequestField::new(name, doc, ValueShape::Text(shape), shape)
}

pub(crate) const fn integer(
    name: &'static str,
    range: RangeInclusive<i64>,
    doc: &'static str,
) -> RequestField<IntegerRange> {
    let range = IntegerRange {
        low: *range.start(),
        high: *range.end(),
    };
    RequestField::new(name, doc, ValueShape::Integer(range), range)
}

pub(crate) const fn number(
    name: &'static str,
    bounds: NumberBounds,
    doc: &'static str,
) -> RequestField<NumberBounds> {
    RequestField::new(name, doc, ValueShape::Number(bounds), bounds)
}

pub(crate) const fn list(
    name: &'static str,
    shape: ListShape,
    doc: &'static str,
) -> RequestField<ListShape> {
    RequestField::new(name, doc, ValueShape::List(shape), shape)
}

pub(crate) const fn map(
    name: &'static str,
    shape: MapShape,
    doc: &'static str,
) -> RequestField<MapShape> {
    RequestField::new(name, doc, ValueShape::Map(shape), shape)
}

pub(crate) const fn object(
    name: &'static str,
    spec: &'static ObjectSpec,
    doc: &'static str,
) -> RequestField<&'static ObjectSpec> {
    RequestField::new(name, doc, ValueShape::Object(spec), spec)
}

/// A field whose reader tells the types of its values apart.
pub(crate) const fn any(
    name: &'static str,
    shape: ValueShape,
    doc: &'static str,
) -> RequestField<AnyValue> {
    RequestField::new(name, doc, shape, AnyValue)
}

impl FieldSpec {
    /// A field that a chat template may show, and that nothing else reads.
    pub(crate) const fn shown_by_template(name: &'static str) -> Self {
        let shape = ValueShape::Text(TextShape::ANY);
        RequestField::new(name, "Passed to the template.", shape, AnyValue).spec
    }

    /// A field that is accepted and changes nothing, for the reason that its meaning gives.
    pub(crate) const fn ignored(name: &'static str, doc: &'static str) -> Self {
        RequestField::new(name, doc, ValueShape::Any, AnyValue).spec
    }

    /// A field of another form of its object.
    pub(crate) const fn absent(name: &'static str) -> Self {
        RequestField::new(name, "", ValueShape::Absent, AnyValue).spec
    }
}

impl RequestField<IntegerRange> {
    /// Raises the least value, where other fields of a request ask for that.
    pub(crate) fn at_least(mut self, low: i64) -> Self {
        assert!(self.kind.low <= low, "a range is only narrowed");
        self.kind.low = low;
        self.spec.shape = ValueShape::Integer(self.kind);
        self
    }
}

impl RequestField<TextShape> {
    pub(crate) const fn choices(&self) -> &'static [&'static str] {
        self.kind.choices
    }
}

impl TextShape {
    pub(crate) const ANY: Self = Self {
        is_empty_allowed: true,
        bytes_max: None,
        choices: &[],
        is_json: false,
    };

    pub(crate) const JSON: Self = Self {
        is_json: true,
        ..Self::ANY
    };

    pub(crate) const NOT_EMPTY: Self = Self {
        is_empty_allowed: false,
        ..Self::ANY
    };

    pub(crate) const fn one_of(choices: &'static [&'static str]) -> Self {
        Self {
            choices,
            ..Self::ANY
        }
    }
}

impl ListShape {
    pub(crate) const fn of(items: &'static ValueShape) -> Self {
        Self {
            items,
            count_min: 0,
            count_max: None,
        }
    }

    pub(crate) const fn at_least(self, count_min: usize) -> Self {
        Self { count_min, ..self }
    }

    pub(crate) const fn at_most(mut self, count_max: usize) -> Self {
        self.count_max = Some(count_max);
        self
    }
}

impl RefusedField {
    pub(crate) const fn new(name: &'static str, reason: &'static str) -> Self {
        Self { name, reason }
    }
}

impl ObjectSpec {
    /// An object without declared fields.
    pub(super) const EMPTY: Self = Self::new("", &[], &[], &[]);

    /// Called by [`request_object`], which sorts the names.
    pub(crate) const fn new(
        title: &'static str,
        forms: &'static [&'static [FieldGroup]],
        refused: &'static [&'static [RefusedField]],
        names: &'static [&'static str],
    ) -> Self {
        Self {
            title,
            forms,
            refused,
            unknown: UnknownFields::Ignored,
            rule: None,
            names,
        }
    }

    /// Declares that a field of another name is an error, which the reader gives.
    pub(crate) const fn refusing_unknown(mut self) -> Self {
        self.unknown = UnknownFields::Refused;
        self
    }

    /// Adds a rule between fields, as JSON Schema.
    pub(crate) const fn rule(mut self, rule: &'static str) -> Self {
        self.rule = Some(rule);
        self
    }

    /// All declared fields; one of several forms is there once for each.
    pub(crate) fn fields(&self) -> impl Iterator<Item = &'static FieldSpec> {
        let groups = self.forms.iter().copied().flatten();
        groups.copied().flatten()
    }
}

/// Number of names that [`sorted_names`] sorts.
pub(crate) const fn names_count(forms: &[&[FieldGroup]], refused: &[&[RefusedField]]) -> usize {
    let (mut count, mut at) = (0, 0);
    while at < forms.len() {
        let mut group = 0;
        while group < forms[at].len() {
            count += forms[at][group].len();
            group += 1;
        }
        at += 1;
    }
    at = 0;
    while at < refused.len() {
        count += refused[at].len();
        at += 1;
    }
    count
}

/// Sorts the names of all fields while the program is compiled.
pub(crate) const fn sorted_names<const COUNT: usize>(
    forms: &[&[FieldGroup]],
    refused: &[&[RefusedField]],
) -> [&'static str; COUNT] {
    let mut names = [""; COUNT];
    let (mut count, mut at) = (0, 0);
    while at < forms.len() {
        let mut group = 0;
        while group < forms[at].len() {
            let fields = forms[at][group];
            let mut field = 0;
            while field < fields.len() {
                insert_sorted(&mut names, count, fields[field].name);
                count += 1;
                field += 1;
            }
            group += 1;
        }
        at += 1;
    }
    at = 0;
    while at < refused.len() {
        let mut field = 0;
        while field < refused[at].len() {
            insert_sorted(&mut names, count, refused[at][field].name);
            count += 1;
            field += 1;
        }
        at += 1;
    }
    names
}

/// Inserts a name into the first `count` entries, which are sorted.
const fn insert_sorted(names: &mut [&'static str], count: usize, name: &'static str) {
    let mut at = count;
    while at > 0 && is_less(name.as_bytes(), names[at - 1].as_bytes()) {
        names[at] = names[at - 1];
        at -= 1;
    }
    names[at] = name;
}

const fn is_less(left: &[u8], right: &[u8]) -> bool {
    let mut at = 0;
    while at < left.len() && at < right.len() {
        if left[at] != right[at] {
            return left[at] < right[at];
        }
        at += 1;
    }
    left.len() < right.len()
}
