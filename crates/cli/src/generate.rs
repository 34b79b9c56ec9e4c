//! `cleave generate`: one prompt, without a server.
//!
//! Owns: the output. Never: adds a special token to the prompt.

use crate::args::GenerateArgs;
use crate::{model, single_request};
use anyhow::{Context, bail};
use cleave_domain::{
    Emission, FinishReason, Request, RequestSlo, SamplingParams, StopRules, TokenId,
};
use cleave_text::{ModelText, SpecialTokens, TextStart, TextStream};
use serde::Serialize;
use std::io::{ErrorKind, Write};
use std::sync::Arc;

/// Number of logits that `--json` reports.
const TOP_LOGITS: u32 = 20;

/// The output of `--json`.
#[derive(Serialize)]
struct GenerateAnswer {
    prompt_tokens: Vec<TokenId>,
    tokens: Vec<TokenId>,
    text: String,
    finish_reason: &'static str,
    /// `[[id, logit]]`, descending, at the last prompt position.
    first_top_logits: Vec<(TokenId, f32)>,
    /// Log-probability of each token, to base e.
    logprobs: Vec<f32>,
}

pub(crate) fn run(args: &GenerateArgs) -> anyhow::Result<()> {
    let loaded = model::load(&args.model, &args.engine)?;
    let text = Arc::new(ModelText::new(loaded.files.clone())?);
    let prompt = prompt(args, &text)?;
    let context = loaded.context_tokens_max();
    if prompt.len() as u64 >= u64::from(context) {
        bail!(
            "the prompt has {} tokens, and the model's context of {context} leaves no room for output",
            prompt.len()
        );
    }
    let output_max = context - prompt.len() as u32;
    let mut engine = loaded.single_sequence_engine(
        &args.engine,
        prompt.len() as u32 + args.max_tokens.min(output_max),
    )?;
    let mut printer = TextPrinter {
        stream: (!args.json)
            .then(|| TextStream::new(text.clone(), SpecialTokens::Skipped, TextStart::Fresh)),
    };
    let mut emissions: Vec<Emission> = Vec::new();
    let request = request(args, &prompt, &text, output_max);
    let speculation = args.speculation.speculative_config.0;
    let reason = single_request::run(engine.as_mut(), speculation, request, &mut |emission| {
        emissions.push(emission.clone());
        printer.print(emission.sampled.token)
    })?;
    printer.finish()?;
    if args.json {
        print_json(prompt, &emissions, reason, &text)?;
    }
    Ok(())
}

fn prompt(args: &GenerateArgs, text: &ModelText) -> anyhow::Result<Vec<TokenId>> {
    let prompt = match (&args.prompt, &args.prompt_tokens) {
        (Some(prompt), _) => text.tokenizer().encode(prompt, SpecialTokens::Skipped)?,
        (None, Some(tokens)) => tokens.clone(),
        (None, None) => Vec::new(),
    };
    if prompt.is_empty() {
        bail!("the prompt is empty; give some text with --prompt");
    }
    let vocabulary = text.vocabulary_count();
    if let Some(unknown) = prompt.iter().find(|token| **token >= vocabulary) {
        bail!("--prompt-tokens: {unknown} is not in the vocabulary of {vocabulary} tokens");
    }
    Ok(prompt)
}

fn request(args: &GenerateArgs, prompt: &[TokenId], text: &ModelText, output_max: u32) -> Request {
    let stop_tokens = if args.ignore_eos {
        Arc::from([])
    } else {
        text.eos().clone()
    };
    Request {
        prompt: prompt.into(),
        generated: Arc::from([]),
        sampling: SamplingParams {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: args.seed,
            logprobs: args.json.then_some(TOP_LOGITS),
            ..SamplingParams::greedy()
        },
        stop: StopRules {
            max_tokens: args.max_tokens.min(output_max),
            min_tokens: 0,
            stop_tokens,
        },
        priority: 0,
        cache_salt: 0,
        adapter: None,
        pooling: None,
        slo: RequestSlo::default(),
    }
}

/// Prints text as it is generated, unless JSON was asked for.
struct TextPrinter {
    stream: Option<TextStream>,
}

impl TextPrinter {
    fn print(&mut self, token: TokenId) -> anyhow::Result<()> {
        match &mut self.stream {
            Some(stream) => write_out(&stream.push(token)),
            None => Ok(()),
        }
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        match &mut self.stream {
            Some(stream) => write_out(&(stream.finish() + "\n")),
            None => Ok(()),
        }
    }
}

/// A closed pipe ends the command without an error; any other failure loses output.
fn write_out(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        written => written.context("cannot write the output"),
    }
}

fn print_json(
    prompt_tokens: Vec<TokenId>,
    emissions: &[Emission],
    reason: FinishReason,
    text: &ModelText,
) -> anyhow::Result<()> {
    let tokens: Vec<TokenId> = emissions
        .iter()
        .map(|emission| emission.sampled.token)
        .collect();
    let scores = |emission: &Emission| emission.sampled.scores.clone();
    let answer = GenerateAnswer {
        text: text.tokenizer().decode(&tokens, SpecialTokens::Skipped),
        finish_reason: match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        },
        first_top_logits: emissions
            .first()
            .and_then(scores)
            .map(|scores| scores.top)
            .unwrap_or_default(),
        logprobs: emissions
            .iter()
            .filter_map(scores)
            .map(|scores| scores.chosen - scores.normalizer)
            .collect(),
        prompt_tokens,
        tokens,
    };
    write_out(&(serde_json::to_string(&answer)? + "\n"))
}
