//! Operators, filters and methods of chat templates that charge the budget before they run.
//!
//! Owns: the environment in which each step's cost (see `cost`) is charged to the rendering's
//! budget before the library runs the step. Never: changes a result. Invariant: no single step of a
//! template makes more than the budget has left, builds a value of unlimited depth, or returns a
//! list that is computed anew on each read.

use super::budget::{charge, check_time};
use super::cost::{
    ChargedWriter, ENTRY_BYTES, ITEM_BYTES, call_method, charge_add, charge_compared,
    charge_filter, charge_members, charge_repeat, charge_text, check_stored, check_walkable,
};
use super::json_value::{BodyList, slice_indices};
use minijinja::value::{Kwargs, ObjectRepr, Rest, Tuple, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, Output, State, filters, functions, tests};
use std::fmt::Write;

/// Names of the filters that wrap the library's instructions. No template can write them.
pub(super) mod steps {
    pub(crate) const ADD: &str = "\u{1}+";
    pub(crate) const REPEAT: &str = "\u{1}*";
    pub(crate) const CONCAT: &str = "\u{1}~";
    pub(crate) const COMPARE: &str = "\u{1}=";
    pub(crate) const SLICE: &str = "\u{1}:";
    pub(crate) const MATERIALIZE: &str = "\u{1}made";
    pub(crate) const CHECK_BUILT: &str = "\u{1}built";
    pub(crate) const CHECK_STORED: &str = "\u{1}kept";
    pub(crate) const CHARGE_LOOP_VALUE: &str = "\u{1}looped";
    pub(crate) const CHECK_TIME: &str = "\u{1}read";
    pub(crate) const MERGE: &str = "\u{1}merge";
}

/// Creates an environment whose filters, tests, functions and methods charge the budget.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.remove_global("debug");
    environment.add_function("range", |args: Rest<Value>| {
        check_time()?;
        let whole = |at: usize| {
            args.get(at)
                .map(|arg| isize::try_from(arg.clone()))
                .transpose()
        };
        let lower = whole(0)?.ok_or_else(|| Error::from(ErrorKind::MissingArgument))?;
        materialize(functions::range(lower, whole(1)?, whole(2)?)?)
    });
    environment.add_function(
        "dict",
        |value: Option<Value>, members: Kwargs| -> Result<Value, Error> {
            value.iter().try_for_each(charge_members)?;
            charge(ENTRY_BYTES.saturating_mul(members.args().count()))?;
            functions::dict(value, members)
        },
    );
    environment.add_function(
        "namespace",
        |members: Option<ValueOrKwargs>| -> Result<Value, Error> {
            let members = members.map(ValueOrKwargs::into_value);
            members.iter().try_for_each(charge_members)?;
            functions::namespace(members.map(ValueOrKwargs::from))
        },
    );
    environment.set_formatter(format);
    environment.set_unknown_method_callback(call_method);
    add_filters(&mut environment);
    add_tests(&mut environment);
    add_steps(&mut environment);
    environment
}

/// Adds the library's filters, each behind a check with the same name.
fn add_filters(environment: &mut Environment<'static>) {
    macro_rules! checked {
        ($($name:ident)*) => {$(
            environment.add_filter(concat!("\u{1}", stringify!($name)), filters::$name);
            add_checked(environment, stringify!($name), stringify!($name));
        )*};
    }
    checked! {
        safe escape lower upper title capitalize replace length dictsort items reverse trim join split lines
        default round abs int float attr first last min max sort list string bool batch slice sum indent select
        reject selectattr rejectattr map groupby unique chain zip pprint format
    }
    add_checked(environment, "e", "escape");
    add_checked(environment, "count", "length");
    add_checked(environment, "d", "default");
    environment.remove_filter("urlencode");
}

fn add_checked(environment: &mut Environment<'static>, name: &'static str, own: &'static str) {
    let hidden = format!("\u{1}{own}");
    environment.add_filter(
        name,
        move |state: &mut State, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let args = args.into_values();
            charge_filter(own, &args)?;
            let result = state.apply_filter(&hidden, &args)?;
            // The result of `items` iterates over an existing mapping; other lazy results may build
            // on each other and are materialized.
            if own == "items" {
                Ok(result)
            } else {
                materialize(result)
            }
        },
    );
}

fn add_tests(environment: &mut Environment<'static>) {
    macro_rules! checked {
        ($($name:literal $test:ident;)*) => {$(
            environment.add_test(concat!("\u{1}", $name), tests::$test);
            environment.add_test(
                $name,
                |state: &mut State, args: Rest<Value>| -> Result<bool, Error> {
                    args.iter().try_for_each(charge_compared)?;
                    state.perform_test(concat!("\u{1}", $name), &args)
                },
            );
        )*};
    }
    checked! {
        "eq" is_eq; "equalto" is_eq; "==" is_eq; "ne" is_ne; "!=" is_ne; "lt" is_lt; "lessthan" is_lt; "<" is_lt;
        "le" is_le; "<=" is_le; "gt" is_gt; "greaterthan" is_gt; ">" is_gt; "ge" is_ge; ">=" is_ge; "in" is_in;
        "sameas" is_sameas;
    }
}

fn add_steps(environment: &mut Environment<'static>) {
    type PairCheck = fn(&Value, &Value) -> Result<(), Error>;
    let checks: [(&'static str, PairCheck); 5] = [
        (steps::ADD, charge_add),
        (steps::REPEAT, charge_repeat),
        (steps::CONCAT, |a, b| {
            charge_text(a)?;
            charge_text(b)
        }),
        (steps::COMPARE, |a, b| {
            charge_compared(a)?;
            charge_compared(b)
        }),
        (steps::CHECK_STORED, check_stored),
    ];
    for (name, check) in checks {
        // The two operands return as a list that is unpacked again, its first item on top of the
        // stack.
        environment.add_filter(name, move |a: Value, b: Value| -> Result<Value, Error> {
            check_time()?;
            check(&a, &b)?;
            Ok(Value::from(vec![b, a]))
        });
    }
    environment.add_filter(steps::SLICE, slice);
    environment.add_filter(steps::MATERIALIZE, materialize);
    environment.add_filter(steps::CHECK_BUILT, |value: Value| -> Result<Value, Error> {
        charge(ITEM_BYTES * 2 * value.len().unwrap_or(0))?;
        check_walkable(&value)?;
        Ok(value)
    });
    environment.add_filter(
        steps::CHARGE_LOOP_VALUE,
        |value: Value| -> Result<Value, Error> {
            charge(value.as_str().map_or(0, str::len))?;
            Ok(value)
        },
    );
    environment.add_filter(
        steps::CHECK_TIME,
        |value: ValueOrKwargs| -> Result<Value, Error> {
            check_time()?;
            Ok(value.into_value())
        },
    );
    // The mappings return as a list that is unpacked again, its first item on top of the stack.
    environment.add_filter(steps::MERGE, |mappings: Value| -> Result<Value, Error> {
        let mut list: Vec<Value> = mappings.try_iter()?.collect();
        list.iter().try_for_each(charge_members)?;
        list.reverse();
        Ok(Value::from(list))
    });
}

/// Writes a value that a template outputs.
fn format(out: &mut Output, _: &mut State, value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        charge(text.len())?;
        return out.write_str(text).map_err(Error::from);
    }
    check_walkable(value)?;
    write!(ChargedWriter::new(out), "{value}").map_err(Error::from)
}

/// Returns the result of a step, with a lazy list replaced by its items.
fn materialize(value: Value) -> Result<Value, Error> {
    let lazy = value
        .as_object()
        .filter(|object| object.repr() == ObjectRepr::Iterable);
    let Some(items) = lazy.and_then(|object| object.try_iter()) else {
        return Ok(value);
    };
    let mut list = Vec::new();
    for item in items {
        let tuple = item.as_object().filter(|_| item.is_tuple());
        let tuple_items = tuple.and_then(|tuple| tuple.enumerator_len()).unwrap_or(0);
        // A growing list takes up to three times the memory of its items.
        charge(3 * ITEM_BYTES + tuple_items * ITEM_BYTES)?;
        list.push(item);
    }
    Ok(Value::from(list))
}

/// Evaluates the slice `value[start:stop:step]`.
fn slice(value: &Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let whole = |index: Value| {
        if index.is_none() || index.is_undefined() {
            Ok(None)
        } else {
            i64::try_from(index).map(Some)
        }
    };
    let (start, stop, step) = (whole(start)?, whole(stop)?, whole(step)?.unwrap_or(1));
    if step == 0 {
        let reason = "cannot slice by step size of 0";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    check_time()?;
    if let Some(list) = value.downcast_object_ref::<BodyList>() {
        return Ok(list.slice(start, stop, step));
    }
    if let Some(text) = value.as_str() {
        charge(text.len() * if step < 0 { 5 } else { 1 })?;
        let indices = slice_indices(text.chars().count(), start, stop, step);
        let (first, count) = (indices.first.unwrap_or(0), indices.count);
        let size = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
        let sliced: String = if step > 0 {
            text.chars().skip(first).step_by(size).take(count).collect()
        } else {
            let before: Vec<char> = text.chars().take(first + 1).collect();
            before.into_iter().rev().step_by(size).take(count).collect()
        };
        return Ok(Value::from(sliced));
    }
    let items = match value.kind() {
        ValueKind::Undefined | ValueKind::None => Vec::new(),
        ValueKind::Seq | ValueKind::Iterable => {
            charge(ITEM_BYTES * value.len().unwrap_or(0))?;
            value.try_iter()?.collect()
        }
        kind => {
            let reason = format!("value of type {kind} cannot be sliced");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    };
    let indices = slice_indices(items.len(), start, stop, step);
    let at = |nth: usize| indices.first.map(|first| first as i64 + nth as i64 * step);
    let items = (0..indices.count).filter_map(|nth| items.get(at(nth)? as usize).cloned());
    let items: Vec<Value> = items.collect();
    Ok(if value.is_tuple() {
        Value::from(Tuple::from(items))
    } else {
        Value::from(items)
    })
}
