//! Loading and unloading LoRA adapters at run time, by the routes that vLLM has.
//!
//! Owns: the bodies and answers of these two routes. Never: reads a folder; the workers do.
//! Invariant: an answer of 200 means that every worker of the model that is connected has carried
//! the command out.

use crate::admin::{OperatorState, read_command};
use crate::error::ApiError;
use crate::field::{
    JsonFields, ObjectSpec, TextShape, request_fields, request_object, text as text_field,
};
use crate::openapi::RouteDoc;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use cleave_domain::AdapterCommand;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::time::Duration;

/// Time limit of the workers' answers: they read the whole adapter.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(60);

request_fields! {
    NAME_FIELDS {
        LORA_NAME: TextShape = text_field(
            "lora_name",
            TextShape::ANY,
            "Name of the adapter, by which requests name it as their model.",
        ).required();
    }
}

request_fields! {
    PATH_FIELDS {
        LORA_PATH: TextShape = text_field(
            "lora_path",
            TextShape::ANY,
            "Folder of the adapter, below the workers' --lora-root.",
        ).required();
        BASE_MODEL_NAME: TextShape = text_field(
            "base_model_name",
            TextShape::ANY,
            "Model that the adapter is for; may be left out where one model is served.",
        );
    }
}

pub(crate) const LOAD_ORDER: ObjectSpec =
    request_object!("LoadAdapter", &[&[NAME_FIELDS, PATH_FIELDS]]).refusing_unknown();
pub(crate) const UNLOAD_ORDER: ObjectSpec =
    request_object!("UnloadAdapter", &[&[NAME_FIELDS]]).refusing_unknown();

pub(crate) const CHANGE_DOC: RouteDoc = RouteDoc {
    description: "Every worker of the model has carried it out.",
    schema: "AdapterChange",
    errors: &[400, 401, 403, 413, 415, 500, 503],
    ..RouteDoc::GET
};

/// A change of the adapters that workers serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterChange {
    /// The model whose workers are asked; `None` for the only one.
    pub model: Option<String>,
    pub command: AdapterCommand,
}

pub(crate) async fn load_adapter(
    State(operator): OperatorState,
    headers: HeaderMap,
    body: Body,
) -> Result<axum::Json<Value>, ApiError> {
    let order = read_command(&headers, body, &LOAD_ORDER).await?;
    let fields = JsonFields::of_body(&order, &LOAD_ORDER)?;
    let name = fields.required_text(&LORA_NAME)?.into_owned();
    let change = AdapterChange {
        model: fields.text(&BASE_MODEL_NAME)?.map(Cow::into_owned),
        command: AdapterCommand::Load {
            folder: fields.required_text(&LORA_PATH)?.into_owned(),
            name: name.clone(),
            content: None,
        },
    };
    carry_out(operator.change_adapter(change), &name, "loaded").await
}

pub(crate) async fn unload_adapter(
    State(operator): OperatorState,
    headers: HeaderMap,
    body: Body,
) -> Result<axum::Json<Value>, ApiError> {
    let order = read_command(&headers, body, &UNLOAD_ORDER).await?;
    let fields = JsonFields::of_body(&order, &UNLOAD_ORDER)?;
    let name = fields.required_text(&LORA_NAME)?.into_owned();
    let change = AdapterChange {
        model: None,
        command: AdapterCommand::Unload { name: name.clone() },
    };
    carry_out(operator.change_adapter(change), &name, "unloaded").await
}

/// Waits for the workers' answers.
async fn carry_out(
    change: BoxFuture<'static, Result<(), String>>,
    name: &str,
    state: &str,
) -> Result<axum::Json<Value>, ApiError> {
    match tokio::time::timeout(ANSWER_WAIT_MAX, change).await {
        Ok(Ok(())) => Ok(axum::Json(
            json!({"object": "adapter", "id": name, "state": state}),
        )),
        Ok(Err(reason)) => Err(ApiError::bad_request("adapter_refused", reason)),
        Err(_) => Err(ApiError::unavailable(
            "adapter_pending",
            "Not every worker has answered in time; GET /v1/models shows the adapters.",
        )),
    }
}
