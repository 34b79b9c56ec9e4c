//! Windows of attention: which layers see the latest tokens alone, and how many.
//!
//! Owns: the keys that say so, and the rules of classes whose files leave them out.
//! Never: reads another key.

use super::{CONTEXT_MAX, LAYERS_MAX};
use crate::error::ConfigError;
use crate::fields::ConfigFields;

/// Window of nearly every class that has one.
const WINDOW: usize = 4096;

/// Number of layers, with a window in none.
pub(in crate::families) fn no_windows(
    fields: &ConfigFields,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let layers_count = fields.size("num_hidden_layers", LAYERS_MAX)?;
    layer_types(fields)?;
    Ok(vec![None; layers_count])
}

/// Windows of families where `use_sliding_window` turns them on, from `max_window_layers` on.
pub(in crate::families) fn optional_windows(
    fields: &ConfigFields,
) -> Result<Vec<Option<usize>>, ConfigError> {
    if !has_windows(fields)? {
        return no_windows(fields);
    }
    let first = fields.count("max_window_layers", LAYERS_MAX)?;
    windows(fields, first.unwrap_or(28))
}

/// Windows of families where `use_sliding_window` turns them on, in the layers that the class gives
/// one.
pub(in crate::families) fn switched_windows(
    fields: &ConfigFields,
    is_sliding_by_default: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ConfigError> {
    if !has_windows(fields)? {
        return no_windows(fields);
    }
    windows_where(fields, WINDOW, is_sliding_by_default)
}

fn has_windows(fields: &ConfigFields) -> Result<bool, ConfigError> {
    Ok(fields.flag("use_sliding_window")?.unwrap_or(false))
}

/// Windows of the layers that `layer_types` names, or else of every layer from `first` on.
pub(in crate::families) fn windows(
    fields: &ConfigFields,
    first: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    windows_where(fields, WINDOW, |layer| layer >= first)
}

/// The window of every layer, if `sliding_window` states one.
pub(in crate::families) fn stated_windows(
    fields: &ConfigFields,
) -> Result<Vec<Option<usize>>, ConfigError> {
    if fields.get("sliding_window").is_none() {
        return no_windows(fields);
    }
    windows(fields, 0)
}

/// Windows of the layers that `layer_types` names, or else of all but the last of every period of
/// `sliding_window_pattern` layers; `default` is the class's own period.
pub(in crate::families) fn periodic_windows(
    fields: &ConfigFields,
    default: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    const PATTERN: &str = "sliding_window_pattern";
    // A pattern of letters is explained by the list of layers beside it.
    let period = if fields.get("layer_types").is_some() {
        fields.ignore(&[PATTERN]);
        None
    } else {
        fields.count(PATTERN, LAYERS_MAX)?
    };
    let period = period.unwrap_or(default).max(1);
    windows_where(fields, WINDOW, |layer| !(layer + 1).is_multiple_of(period))
}

/// Windows of the layers that `layer_types` names, or else of those that the class gives one;
/// `default` is the class's own window, and an explicit null means none.
pub(in crate::families) fn windows_where(
    fields: &ConfigFields,
    default: usize,
    is_sliding_by_default: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let layers_count = fields.size("num_hidden_layers", LAYERS_MAX)?;
    let stated = fields.has("sliding_window");
    let mut window = fields.count("sliding_window", CONTEXT_MAX)?;
    if window == Some(0) {
        let problem = format!("is 0; should be null or a whole number from 1 to {CONTEXT_MAX}");
        return Err(fields.damaged("sliding_window", problem));
    }
    if window.is_none() && !stated {
        window = Some(default);
    }
    let Some(types) = layer_types(fields)? else {
        return Ok((0..layers_count)
            .map(|layer| window.filter(|_| is_sliding_by_default(layer)))
            .collect());
    };
    if types.len() != layers_count {
        let problem = format!("{} entries for {layers_count} layers", types.len());
        return Err(fields.damaged("layer_types", problem));
    }
    let window = |is_sliding: bool| window.filter(|_| is_sliding);
    Ok(types.into_iter().map(window).collect())
}

/// Whether each layer's attention is sliding, if `layer_types` says so; other types are refused.
fn layer_types(fields: &ConfigFields) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(types) = fields.texts("layer_types")? else {
        return Ok(None);
    };
    let is_sliding = |layer: &&str| match *layer {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => {
            let problem = format!("{other} is not supported; sliding and full attention are");
            Err(fields.unsupported("layer_types", problem))
        }
    };
    types
        .iter()
        .map(is_sliding)
        .collect::<Result<_, _>>()
        .map(Some)
}
