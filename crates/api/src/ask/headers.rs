//! Request headers.

use crate::error::ApiError;
use axum::http::HeaderMap;
use cleave_domain::Slo;
use std::time::Duration;

const ID_BYTES_MAX: usize = 128;
const CLASS_BYTES_MAX: usize = 64;

/// `x-request-id`, or a new one if it is absent or could not stand in a log line.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let sound = |id: &&str| !id.is_empty() && id.len() <= ID_BYTES_MAX;
    let given = headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .filter(sound);
    given.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

/// The class and the targets of the request. llm-d's spelling counts as well; ours goes first.
pub(crate) fn slo(headers: &HeaderMap) -> Result<Slo, ApiError> {
    let class = first(headers, ["x-slo-class", "x-llm-d-slo-class"])?;
    if let Some((name, class)) = class
        && (class.is_empty() || class.len() > CLASS_BYTES_MAX)
    {
        return Err(ApiError::invalid(
            name,
            format!("The header {name} must have 1 to {CLASS_BYTES_MAX} characters."),
        ));
    }
    Ok(Slo {
        class: class.map_or_else(String::new, |(_, class)| class.to_owned()),
        ttft: milliseconds(headers, ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"])?,
        tpot: milliseconds(headers, ["x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"])?,
    })
}

fn first<'a>(
    headers: &'a HeaderMap,
    names: [&'static str; 2],
) -> Result<Option<(&'static str, &'a str)>, ApiError> {
    let found = names
        .into_iter()
        .find_map(|name| Some((name, headers.get(name)?)));
    let Some((name, value)) = found else {
        return Ok(None);
    };
    match value.to_str() {
        Ok(value) => Ok(Some((name, value.trim()))),
        Err(_) => Err(ApiError::invalid(
            name,
            format!("The header {name} is not plain text."),
        )),
    }
}

/// A positive number of milliseconds; a day is as good as no target.
fn milliseconds(
    headers: &HeaderMap,
    names: [&'static str; 2],
) -> Result<Option<Duration>, ApiError> {
    let Some((name, value)) = first(headers, names)? else {
        return Ok(None);
    };
    match value.parse::<f64>() {
        Ok(millis) if millis > 0.0 && millis <= 86_400_000.0 => {
            Ok(Some(Duration::from_secs_f64(millis / 1000.0)))
        }
        _ => Err(ApiError::invalid(
            name,
            format!("The header {name} must be a positive number of milliseconds, not {value:?}."),
        )),
    }
}
