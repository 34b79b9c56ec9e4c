//! `POST /v1/completions`: the body.

use super::sampling::{Room, StopFields, logprobs_count, output, sampling, token_ids};
use super::{Ask, Prompt, UNSUPPORTED, Wanted};
use crate::error::ApiError;
use crate::field::{Fields, wrong};
use crate::json::{Document, Items, Json, Shape};
use crate::model::{ModelText, Special};
use cleave_domain::TokenId;
use std::borrow::Cow;

/// Output tokens if the client sets no limit, as OpenAI's API has it.
const TOKENS_DEFAULT: u32 = 16;
/// Prompts in one body.
const PROMPTS_MAX: usize = 1024;

/// A prompt as it was given.
enum Given<'a> {
    Text(Cow<'a, str>),
    Tokens(Items<'a>),
}

/// Checks a body and tokenizes its prompts.
pub(crate) fn completion(body: &Document, model: &ModelText) -> Result<Ask, ApiError> {
    let fields = Fields::of_body(body)?;
    super::check_model(&fields, model)?;
    super::refuse(&fields, UNSUPPORTED)?;
    super::refuse(&fields, &["suffix", "messages", "tools"])?;
    super::check_format(&fields)?;
    let delivery = super::delivery(&fields)?;
    let given = prompts(&fields)?;
    let choices = super::choices(&fields, given.len())?;
    check_best_of(&fields, choices)?;
    let logprobs = logprobs_count(&fields, "logprobs")?;
    let output = output(&fields, logprobs)?;
    let echo = fields.flag("echo")?.unwrap_or(false);
    let mut sampling = sampling(&fields, model)?;
    sampling.logprobs = logprobs;
    sampling.prompt_logprobs = logprobs.filter(|_| echo);
    let stop = StopFields::read(&fields, model)?;
    let wanted = wanted(&stop, echo)?;
    let special = match fields.flag("add_special_tokens")? {
        Some(false) => Special::Skipped,
        Some(true) | None => Special::Kept,
    };
    let context = model.context_tokens_max();
    let room = Room {
        param: "prompt",
        context,
        default: Some(TOKENS_DEFAULT),
    };
    let prompt = |(path, given): (String, Given)| {
        let (tokens, text) = tokens(&path, &given, model, special)?;
        let text = text.filter(|_| echo);
        let mut stop = stop.rules(tokens.len(), room)?;
        // The engine has no step without an output token; it is thrown away.
        stop.max_tokens = stop.max_tokens.max(1);
        let start = super::start(model, &tokens, output.special);
        let text = || match text {
            Some(text) => text.to_owned(),
            None => model.decode(&tokens, output.special),
        };
        let echo = echo.then(text);
        Ok(Prompt {
            tokens: tokens.into(),
            stop,
            start,
            echo,
            wanted,
        })
    };
    let prompts = given
        .into_iter()
        .map(prompt)
        .collect::<Result<Vec<_>, ApiError>>()?;
    let (priority, cache_salt) = (super::priority(&fields)?, super::cache_salt(&fields)?);
    Ok(Ask {
        prompts,
        choices,
        sampling,
        output,
        delivery,
        priority,
        cache_salt,
        warnings: Vec::new(),
    })
}

/// No output at all makes sense only for the scores of a repeated prompt.
fn wanted(stop: &StopFields, echo: bool) -> Result<Wanted, ApiError> {
    match stop.max_tokens() {
        Some((_, 0)) if echo => Ok(Wanted::PromptOnly),
        Some((name, 0)) => Err(ApiError::invalid(
            name,
            format!("`{name}` must be at least 1; 0 is allowed with `echo` only."),
        )),
        _ => Ok(Wanted::Output),
    }
}

/// Best-of needs the scores of whole answers; with `best_of` equal to `n` there is nothing to do.
fn check_best_of(fields: &Fields, choices: u32) -> Result<(), ApiError> {
    match fields.integer("best_of", 1..=super::CHOICES_MAX)? {
        Some(best_of) if best_of != i64::from(choices) => Err(ApiError::unsupported(
            "best_of",
            format!(
                "`best_of` is not supported unless it equals `n` ({choices}); ask for more choices with `n`."
            ),
        )),
        _ => Ok(()),
    }
}

/// The prompts with their paths.
fn prompts<'a>(fields: &Fields<'a>) -> Result<Vec<(String, Given<'a>)>, ApiError> {
    let expected =
        "a string, an array of strings, an array of token ids, or an array of arrays of token ids";
    let path = || "prompt".to_owned();
    let missing = || ApiError::invalid("prompt", "`prompt` is missing.");
    let prompt = fields.any("prompt").ok_or_else(missing)?;
    let items = match prompt.shape() {
        Shape::String(text) => return Ok(vec![(path(), Given::Text(text.get()))]),
        Shape::Array(items) => items,
        _ => return Err(wrong("prompt", expected, prompt)),
    };
    match items.clone().next().map(Json::shape) {
        None => {
            return Err(ApiError::invalid(
                "prompt",
                "`prompt` must not be an empty array.",
            ));
        }
        Some(Shape::Number(_)) => return Ok(vec![(path(), Given::Tokens(items))]),
        Some(_) => super::sampling::limit_list("prompt", items.clone().count(), PROMPTS_MAX)?,
    }
    let given = |(index, item): (usize, Json<'a>)| {
        let path = format!("prompt[{index}]");
        match item.shape() {
            Shape::String(text) => Ok((path, Given::Text(text.get()))),
            Shape::Array(tokens) => Ok((path, Given::Tokens(tokens))),
            _ => Err(wrong(&path, "a string or an array of token ids", item)),
        }
    };
    items.enumerate().map(given).collect()
}

/// The tokens, and the text if it was one. An empty prompt is the model's begin token.
fn tokens<'a>(
    path: &str,
    given: &'a Given<'_>,
    model: &ModelText,
    special: Special,
) -> Result<(Vec<TokenId>, Option<&'a str>), ApiError> {
    let (tokens, text) = match given {
        Given::Text(text) => (
            super::text::encode(text, special, model, "prompt")?,
            Some(&**text),
        ),
        Given::Tokens(ids) => {
            let context = model.context_tokens_max();
            let count = ids.clone().count();
            if count > context as usize {
                return Err(super::text::too_long("prompt", count, context, ""));
            }
            (token_ids(path, ids.clone(), model)?, None)
        }
    };
    match (tokens.is_empty(), model.bos()) {
        (false, _) => Ok((tokens, text)),
        (true, Some(bos)) => Ok((vec![bos], Some(""))),
        (true, None) => Err(ApiError::invalid(
            path,
            format!("`{path}` is empty, and the model has no token to begin a text with."),
        )),
    }
}
