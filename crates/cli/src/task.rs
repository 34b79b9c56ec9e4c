//! The task that a model is served for, from its folder and the flags.
//!
//! Owns: the choice. Never: serves. Invariant: a task that the model cannot do is an error before a
//! port is bound.

use crate::args::{ModelFormArgs, PoolingArg, RunnerArg};
use anyhow::bail;
use cleave_domain::Pooling;
use cleave_text::{EmbedTask, ModelTask, RerankTask};
use std::path::Path;

/// Chooses the task of a folder's model; the bundled model has no folder.
///
/// # Errors
/// One that names the flag or the file.
pub(crate) fn model_task(args: &ModelFormArgs, folder: Option<&Path>) -> anyhow::Result<ModelTask> {
    let pools = match args.runner {
        RunnerArg::Generate => Some(false),
        RunnerArg::Pooling => Some(true),
        RunnerArg::Auto => None,
    };
    if pools == Some(false) && (args.pooling.is_some() || args.classifier_from_token.is_some()) {
        bail!("--pooling and --classifier-from-token are for --runner pooling");
    }
    if let Some(words) = &args.classifier_from_token {
        if args.pooling.is_some() {
            bail!("--classifier-from-token reads the last token's logits; leave --pooling out");
        }
        let [negative, positive] = words.as_slice() else {
            bail!("--classifier-from-token takes two words, as in `no,yes`");
        };
        if negative == positive {
            bail!("--classifier-from-token takes two different words, as in `no,yes`");
        }
        return Ok(ModelTask::Rerank(RerankTask {
            negative: negative.clone(),
            positive: positive.clone(),
        }));
    }
    if pools == Some(false) {
        return Ok(ModelTask::Generate);
    }
    let given = args.pooling.map(|pooling| match pooling {
        PoolingArg::Last => Pooling::LastToken,
        PoolingArg::Mean => Pooling::Mean,
        PoolingArg::Cls => Pooling::FirstToken,
    });
    let described = folder.map(EmbedTask::read).transpose()?.flatten();
    Ok(match (described, given, pools) {
        (Some(described), given, _) => ModelTask::Embed(EmbedTask {
            pooling: given.unwrap_or(described.pooling.clone()),
            ..described
        }),
        (None, Some(given), _) => ModelTask::Embed(EmbedTask::of(given)),
        (None, None, Some(true)) => ModelTask::Embed(EmbedTask::of(Pooling::LastToken)),
        (None, None, _) => ModelTask::Generate,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand};
    use clap::Parser;

    #[test]
    fn a_classifier_has_two_different_words() {
        for (words, reason) in [
            ("no,yes", None),
            ("a,a", Some("two different words")),
            ("a", Some("two words")),
        ] {
            let line = ["cleave", "chat", "--classifier-from-token", words];
            let CliCommand::Chat(args) = Cli::parse_from(line).command else {
                panic!("a chat was asked for");
            };
            let task = model_task(&args.model.form, None);
            let error = task.err().map(|error| error.to_string());
            let is_so = error
                .as_deref()
                .map(|error| reason.is_some_and(|r| error.contains(r)));
            assert_eq!(is_so, reason.map(|_| true), "{words}: {error:?}");
        }
    }
}
