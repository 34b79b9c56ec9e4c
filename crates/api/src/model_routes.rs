//! The routes that list and describe the served models.
//!
//! Never: waits for a model. Invariant: a listed model has a tokenizer here, whether or not a
//! worker serves it now.

use crate::app::{App, no_model_yet};
use crate::caller::AuthenticatedCaller;
use crate::error::ApiError;
use crate::frontend::{Frontend, ServedAdapter};
use crate::models::{ListedModels, ServedModel, ServedModels};
use crate::surface::anthropic_messages::{is_of_anthropic, model_info, model_list};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use cleave_text::ModelText;
use serde_json::{Value, json};

pub(crate) async fn models(
    State(app): State<App>,
    headers: HeaderMap,
) -> Result<axum::Json<Value>, ApiError> {
    AuthenticatedCaller::of(&app, &headers)?;
    let (served, listed) = (app.models(), app.listed_models());
    if is_of_anthropic(&headers) {
        let adapters = app.adapters();
        let names = served.iter().map(|it| it.model.name());
        let names = names.chain(adapters.iter().map(|it| it.name.as_str()));
        let names = names.chain(aliases(&served, &listed).map(|(alias, _)| alias));
        return Ok(axum::Json(model_list(
            &names.map(model_info).collect::<Vec<_>>(),
        )));
    }
    let mut data: Vec<Value> = served.iter().map(|it| model_json(&app, it)).collect();
    data.extend(app.adapters().iter().filter_map(|it| {
        let base = served.get(&it.base)?;
        Some(adapter_json(&app, base, it))
    }));
    data.extend(aliases(&served, &listed).map(|(alias, it)| alias_json(&app, alias, it)));
    // Codex reads `models`, with descriptions that only its maker's server has.
    let list = json!({"object": "list", "data": data, "models": []});
    Ok(axum::Json(list))
}

pub(crate) async fn model(
    State(app): State<App>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<axum::Json<Value>, ApiError> {
    AuthenticatedCaller::of(&app, &headers)?;
    let Path(id) = id.map_err(|_| {
        ApiError::invalid("model", "The model's name in the path is not UTF-8 text.")
    })?;
    let (models, listed) = (app.models(), app.listed_models());
    if models.get(&id).is_none()
        && let Some(adapter) = app.frontend().adapter(&id)
        && let Some(base) = models.get(&adapter.base)
    {
        return Ok(axum::Json(if is_of_anthropic(&headers) {
            model_info(&id)
        } else {
            adapter_json(&app, base, &adapter)
        }));
    }
    match models.get(listed.own_name(&id)) {
        Some(_) if is_of_anthropic(&headers) => Ok(axum::Json(model_info(&id))),
        Some(served) if served.model.name() == id => Ok(axum::Json(model_json(&app, served))),
        Some(served) => Ok(axum::Json(alias_json(&app, &id, served))),
        None if models.is_empty() || listed.knows(&id) => Err(no_model_yet()),
        None => Err(app.model_not_found(&id)),
    }
}

/// The aliases of served models, each with its model.
fn aliases<'a>(
    served: &'a ServedModels,
    listed: &'a ListedModels,
) -> impl Iterator<Item = (&'a str, &'a ServedModel)> {
    let aliases = listed.aliases();
    aliases.filter_map(|(alias, name)| Some((alias, served.get(name)?)))
}

fn model_json(app: &App, served: &ServedModel) -> Value {
    json!({
        "id": served.model.name(),
        "object": "model",
        "created": served.since,
        "owned_by": "cleave",
        "root": served.model.name(),
        "parent": null,
        "max_model_len": max_model_len(app.frontend(), &served.model),
        "task": served.model.task().name(),
    })
}

/// Another name of a model, which is its root.
fn alias_json(app: &App, alias: &str, served: &ServedModel) -> Value {
    let mut value = model_json(app, served);
    value["id"] = alias.into();
    value
}

/// A LoRA adapter: a model of its own, whose parent is the base model.
fn adapter_json(app: &App, base: &ServedModel, adapter: &ServedAdapter) -> Value {
    let mut value = model_json(app, base);
    value["id"] = adapter.name.as_str().into();
    value["root"] = adapter.root.as_str().into();
    value["parent"] = adapter.base.as_str().into();
    value
}

/// Longest sequence that can be served: the model's context, or less where every worker's KV cache
/// holds less.
pub(crate) fn max_model_len(frontend: &dyn Frontend, model: &ModelText) -> u32 {
    let context = model.context_tokens_max();
    let held = frontend.sequence_tokens_max(model.base_name());
    held.unwrap_or(context).min(context)
}
