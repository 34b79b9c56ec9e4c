//! The models of one process: `--model` of `serve`, once for each.
//!
//! Owns: the forms of the value, and the flags that hold for one model alone. Never: opens a model.
//! Invariant: an entry that was parsed has flags of one model only, each with a valid value.

use super::{HostArgs, ModelNameArgs, WorkerCountArgs};
use clap::builder::Resettable;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;

/// Flags of the models that one process serves.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ServedModelsArgs {
    /// Hugging Face folder (config.json, tokenizer.json, *.safetensors), or a model of a hub, such
    /// as `Qwen/Qwen3-0.6B` or `Qwen/Qwen3-0.6B@v1`, which is downloaded unless the cache has it;
    /// the bundled demo model, `cleave-demo`, if absent. A path that exists is the path. May be
    /// repeated: each model then has workers of its own, and `NAME=DIR` gives its name in the API.
    /// JSON has flags that hold for one model alone, such as
    /// `{"model":"./m","served-model-name":"m","kv-cache":"1GiB","lora-modules":["sql=./sql"]}`.
    #[arg(long, value_name = "[NAME=]DIR|[NAME=]ORG/NAME[@REVISION]|JSON", value_parser = parse_entries)]
    pub(crate) model: Vec<ModelEntries>,
    /// Name under which the API serves the only model, and its aliases; the name of the folder or
    /// of the hub's model if absent. One of several models is named by `--model NAME=DIR`.
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = crate::values::parse_model_name)]
    pub(crate) served_model_name: Vec<String>,
}

impl ServedModelsArgs {
    /// The models in the order in which they were given; none for the bundled one alone.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &ModelEntry> {
        self.model.iter().flat_map(|entries| &entries.0)
    }
}

/// The models of one value.
#[derive(Clone, Debug)]
pub(crate) struct ModelEntries(Vec<ModelEntry>);

/// A model with the flags that hold for it alone.
#[derive(Clone, Debug)]
pub(crate) struct ModelEntry {
    given: String,
    /// The flags as words of a command line.
    words: Vec<String>,
}

impl fmt::Display for ModelEntry {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "--model {}", self.given)
    }
}

impl ModelEntry {
    fn parse(given: String, words: Vec<String>) -> Result<Self, String> {
        matches_of(&words)?;
        Ok(Self { given, words })
    }

    /// Its name and place, and the flags of all models as they hold for it.
    ///
    /// # Errors
    /// As clap words them.
    pub(crate) fn apply(
        &self,
        host: &HostArgs,
        workers: WorkerCountArgs,
    ) -> Result<(ModelNameArgs, HostArgs, WorkerCountArgs), clap::Error> {
        let matches = command().try_get_matches_from(&self.words)?;
        let name = ModelNameArgs::from_arg_matches(&matches)?;
        let mut own = host.clone();
        own.update_from_arg_matches(&matches)?;
        // Counts of all models say nothing of a model that has counts.
        let has_counts = ["prefill", "decode", "both"]
            .iter()
            .any(|id| matches.contains_id(id));
        let mut counts = if has_counts {
            WorkerCountArgs::default()
        } else {
            workers
        };
        counts.update_from_arg_matches(&matches)?;
        Ok((name, own, counts))
    }
}

/// Flags of the process as a whole, which divides these among its workers.
const OF_PROCESS: [&str; 2] = ["threads", "cpu-bind"];

/// The flags of one model, without defaults: a flag that is absent holds as for all models.
fn command() -> Command {
    let command = Command::new("model").no_binary_name(true);
    let command = ModelNameArgs::augment_args(command);
    let command = HostArgs::augment_args_for_update(command);
    let command = WorkerCountArgs::augment_args_for_update(command);
    command.mut_args(|argument| {
        let argument = argument.default_value(Resettable::Reset).required(false);
        // A switch has a default that cannot be removed.
        if matches!(argument.get_action(), ArgAction::SetTrue) {
            argument
                .action(ArgAction::Set)
                .value_parser(value_parser!(bool))
        } else {
            argument
        }
    })
}

fn matches_of(words: &[String]) -> Result<ArgMatches, String> {
    let matches = command().try_get_matches_from(words);
    matches.map_err(|error| {
        let text = error.to_string();
        let paragraph = text.split("\n\n").next().unwrap_or_default();
        paragraph.trim_start_matches("error: ").replace('\n', " ")
    })
}

fn parse_entries(text: &str) -> Result<ModelEntries, String> {
    let json = |text: &str| {
        serde_json::from_str::<Value>(text).map_err(|error| format!("not JSON: {error}"))
    };
    let entries = match text.chars().next() {
        Some('{') => vec![entry_of(json(text)?)?],
        Some('[') => match json(text)? {
            Value::Array(values) => values.into_iter().map(entry_of).collect::<Result<_, _>>()?,
            _ => Vec::new(),
        },
        _ if Path::new(text).exists() => vec![named_entry(text)?],
        _ => text.split(',').map(named_entry).collect::<Result<_, _>>()?,
    };
    if entries.is_empty() {
        return Err("a list of no model".to_owned());
    }
    Ok(ModelEntries(entries))
}

/// A model of `DIR` or `NAME=DIR`.
fn named_entry(text: &str) -> Result<ModelEntry, String> {
    let named = text.split_once('=').filter(|_| !Path::new(text).exists());
    let words = match named {
        Some((name, location)) => vec![
            format!("--served-model-name={name}"),
            format!("--model={location}"),
        ],
        None => vec![format!("--model={text}")],
    };
    ModelEntry::parse(text.to_owned(), words)
}

fn entry_of(value: Value) -> Result<ModelEntry, String> {
    match value {
        Value::String(text) => named_entry(&text),
        Value::Object(flags) => {
            let words = words_of(&flags)?;
            ModelEntry::parse(Value::from(flags).to_string(), words)
        }
        other => Err(format!("a model is a name or a map of flags, not {other}")),
    }
}

fn words_of(flags: &Map<String, Value>) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    for (key, value) in flags {
        check_key(key)?;
        let values = match value {
            Value::Array(values) => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in values {
            words.push(match value {
                Value::Null => return Err(format!("`{key}` has no value")),
                Value::String(text) => format!("--{key}={text}"),
                // Maps are JSON on a command line, too.
                other => format!("--{key}={other}"),
            });
        }
    }
    Ok(words)
}

fn check_key(key: &str) -> Result<(), String> {
    if OF_PROCESS.contains(&key) {
        return Err(format!(
            "`{key}` is for the whole process, which divides it among the workers of all models: give --{key} beside \
             --model"
        ));
    }
    let command = command();
    let longs = || command.get_arguments().filter_map(Arg::get_long);
    if longs().any(|long| long == key) {
        return Ok(());
    }
    let near = longs().min_by_key(|long| cleave_yaml::distance(long, key));
    let near = near.filter(|long| cleave_yaml::distance(long, key) <= 2);
    let near = near.map_or(String::new(), |long| format!("; is `{long}` meant?"));
    Err(format!("no flag of one model is `{key}`{near}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand, ServeArgs};
    use clap::Parser;

    fn serve(words: &[&str]) -> Result<Box<ServeArgs>, String> {
        let words = ["cleave", "serve"].iter().chain(words);
        match Cli::try_parse_from(words)
            .map_err(|error| error.to_string())?
            .command
        {
            CliCommand::Serve(args) => Ok(args),
            _ => Err("another command".to_owned()),
        }
    }

    type Applied = (ModelNameArgs, HostArgs, WorkerCountArgs);

    fn applied(words: &[&str]) -> Vec<Applied> {
        let args = serve(words).unwrap();
        let entries = args.models.entries();
        let apply = |entry: &ModelEntry| entry.apply(&args.host, args.workers).unwrap();
        entries.map(apply).collect()
    }

    /// Name and place of each model.
    fn named(words: &[&str]) -> Vec<(Option<String>, String)> {
        let named = applied(words).into_iter().map(|(name, ..)| {
            let location = name.model.map(|location| location.to_string());
            (
                name.served_model_name.first().cloned(),
                location.unwrap_or_default(),
            )
        });
        named.collect()
    }

    #[test]
    fn a_list_of_models_has_one_shape_in_every_origin() {
        let two = vec![
            (Some("a".to_owned()), "/x".to_owned()),
            (None, "org/b@v1".to_owned()),
        ];
        assert_eq!(named(&["--model", "a=/x", "--model", "org/b@v1"]), two);
        assert_eq!(named(&["--model", "a=/x,org/b@v1"]), two);
        assert_eq!(
            named(&["--model", r#"["a=/x", {"model": "org/b@v1"}]"#]),
            two
        );
        assert_eq!(named(&[]), []);
    }

    #[test]
    fn a_path_that_exists_is_no_list_and_no_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a=b", "a,b"] {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            let path = path.display().to_string();
            assert_eq!(named(&["--model", &path]), [(None, path)]);
        }
    }

    #[test]
    fn a_models_flags_hold_for_it_alone() {
        let chat = r#"{"model":"/x","kv-cache":"1GiB","no-prefix-cache":true,"both":2,"lora-modules":["s=/s","t=/t"],"speculative-config":{"method":"ngram","num_speculative_tokens":3}}"#;
        let plain =
            "--kv-cache 2MiB --max-num-seqs 3 --prefill 1 --step-max 7 --model b=/y --model";
        let words: Vec<&str> = plain.split(' ').chain([chat]).collect();
        let [(_, other, others), (_, host, counts)] = &applied(&words)[..] else {
            panic!("two models were given");
        };
        assert_eq!(
            (other.engine.kv_cache, host.engine.kv_cache),
            (Some(2 << 20), Some(1 << 30))
        );
        assert_eq!(
            (other.engine.max_num_seqs, host.engine.max_num_seqs),
            (Some(3), Some(3))
        );
        assert!(host.engine.no_prefix_cache && !other.engine.no_prefix_cache);
        assert_eq!((others.prefill, others.both), (Some(1), None));
        assert_eq!((counts.prefill, counts.both), (None, Some(2)));
        assert_eq!(
            (
                other.adapters.lora_modules.len(),
                host.adapters.lora_modules.len()
            ),
            (0, 2)
        );
        let drafts = |host: &HostArgs| {
            host.limits
                .speculation
                .speculative_config
                .0
                .unwrap()
                .drafts_max
        };
        assert_eq!((drafts(other), drafts(host)), (4, 3));
        // A flag that the entry lacks keeps its value, and not its default.
        assert_eq!(host.limits.step_max, other.limits.step_max);
        assert_eq!(host.limits.step_max.0.as_secs(), 7);
    }

    #[test]
    fn a_wrong_entry_is_refused_with_its_reason() {
        for (value, reason) in [
            (r#"{"kv_cache":"1GiB"}"#, "is `kv-cache` meant?"),
            (r#"{"threads":2}"#, "for the whole process"),
            (r#"{"port":80}"#, "no flag of one model is `port`"),
            (
                r#"{"kv-cache":"much"}"#,
                "invalid value 'much' for '--kv-cache",
            ),
            (r#"{"model":null}"#, "`model` has no value"),
            (r#"{"model""#, "not JSON"),
            ("[]", "no model"),
            ("[3]", "not 3"),
            ("", "empty"),
            ("=/x", "is empty"),
        ] {
            let error = serve(&["--model", value]).unwrap_err();
            assert!(error.contains(reason), "{value}: {error}");
        }
    }
}
