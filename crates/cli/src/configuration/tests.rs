//! Tests of the origins of flags, against clap's own definition of all commands.
//!
//! Never: starts a command.

use super::definition::{CONFIG, find, is_secret, variable, without_variables};
use super::*;
use crate::args::{CliCommand, ServeArgs};
use clap::Arg;
use clap::builder::ArgAction;
use std::collections::BTreeMap;
use std::io::Write;
use tempfile::NamedTempFile;

fn file(text: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn resolved(words: &str, text: &str) -> Result<Resolved, String> {
    let file = file(text);
    let words = words
        .split(' ')
        .map(OsString::from)
        .chain(["--config".into(), file.path().into()]);
    Resolved::of(words.collect()).map_err(|error| match error {
        ConfigurationError::Words(error) => error.to_string(),
        ConfigurationError::File { error, .. } => {
            let path = file.path().display().to_string();
            format!("{error:#}").replace(&path, "FILE")
        }
    })
}

fn serve(words: &str, text: &str) -> ServeArgs {
    let resolved = resolved(words, text).unwrap();
    match Cli::from_arg_matches(&resolved.matches).unwrap().command {
        CliCommand::Serve(args) => *args,
        _ => panic!("a server was asked for"),
    }
}

/// The flags of a command and of those below it, but for help and version.
fn flags(root: &Command) -> BTreeMap<(String, String), Arg> {
    let mut found = BTreeMap::new();
    let mut open = vec![(String::new(), root)];
    while let Some((name, command)) = open.pop() {
        for argument in command.get_arguments() {
            let long = argument.get_long();
            if let Some(long) = long.filter(|long| !["help", "version"].contains(long)) {
                found.insert((name.clone(), long.to_owned()), argument.clone());
            }
        }
        open.extend(command.get_subcommands().map(|inside| {
            let name = format!("{name} {}", inside.get_name());
            (name.trim().to_owned(), inside)
        }));
    }
    found
}

#[test]
fn each_flag_of_a_server_or_model_has_its_variable() {
    let tools = [
        "synth",
        "sim",
        "check",
        "replay",
        "key",
        "config",
        "man",
        "metrics",
        "completions",
    ];
    let mut counted = 0;
    for ((name, long), argument) in flags(&command()) {
        let is_tool = tools.contains(&name.split(' ').next().unwrap());
        let is_other = matches!(name.as_str(), "bench run" | "bench goodput")
            && ["model", "prompt", "threads"].contains(&long.as_str());
        let has = argument.get_env().map(|name| name.to_str().unwrap());
        if is_tool || is_other {
            assert_eq!(has, None, "{name} --{long}");
            continue;
        }
        counted += 1;
        let expected = format!("CLEAVE_{}", long.to_uppercase().replace('-', "_"));
        assert_eq!(has, Some(expected.as_str()), "{name} --{long}");
        assert_eq!(variable(&long), expected);
        assert!(argument.is_hide_env_values_set(), "{name} --{long}");
    }
    assert!(counted > 200, "{counted} flags are found");
}

#[test]
fn flags_with_keys_are_secret() {
    for ((name, long), argument) in flags(&command()) {
        let is_switch = matches!(argument.get_action(), ArgAction::SetTrue);
        let is_key = long.ends_with("-key") || long == "header" || long.contains("token-key");
        if is_key && !is_switch {
            assert!(is_secret(&argument), "{name} --{long}");
        }
    }
}

#[test]
fn the_command_line_counts_before_the_file() {
    let text = "port: 9000\nmax-num-seqs: 7\nno-prefix-cache: true\n";
    let args = serve("cleave serve --port 9001", text);
    assert_eq!(args.port, 9001);
    assert_eq!(args.host.engine.max_num_seqs, Some(7));
    assert!(args.host.engine.no_prefix_cache);
    assert_eq!(args.address.to_string(), "127.0.0.1", "the default");
    assert_eq!(serve("cleave serve", text).port, 9000);
}

#[test]
fn a_negative_number_is_a_wrong_value() {
    for words in [
        "cleave serve --port -1",
        "cleave serve --step-max -0.5",
        "cleave sim goodput --devices 2 --rate -1",
        "cleave bench run --rate -1",
        "cleave chat --temperature -1",
    ] {
        let parsed = command().try_get_matches_from(words.split(' '));
        let error = parsed.unwrap_err().to_string();
        assert!(error.contains("invalid value '-"), "{words}: {error}");
    }
}

#[test]
fn lists_json_and_flags_of_every_command_fit_a_file() {
    let text = "served-model-name: [a, 'b']\nlog-level: debug\nspeculative-config:\n  method: ngram\n  \
                num_speculative_tokens: 3\ngpu-memory-utilization: 0.5\nno-prefix-cache: false\n";
    let args = serve("cleave --log-format json serve", text);
    assert_eq!(args.models.served_model_name, ["a", "b"]);
    let speculation = args.host.limits.speculation.speculative_config.0;
    assert_eq!(speculation.unwrap().drafts_max, 3);
    assert!((args.host.engine.gpu_memory_utilization - 0.5).abs() < 1e-9);
    assert!(!args.host.engine.no_prefix_cache);
    let name = serve("cleave serve --served-model-name c", text).models;
    assert_eq!(name.served_model_name, ["c"], "not added to the file's");
}

#[test]
fn a_file_gives_what_a_command_requires() {
    let worker = resolved("cleave worker", "leg: decode\nrouter: [a:1, b:2]\n").unwrap();
    let Ok(CliCommand::Worker(args)) =
        Cli::from_arg_matches(&worker.matches).map(|cli| cli.command)
    else {
        panic!("a worker was asked for");
    };
    assert_eq!(args.router, ["a:1", "b:2"]);
    let half = resolved("cleave serve --ssl-certfile c", "ssl-keyfile: k\n");
    assert!(half.is_ok(), "requirements hold across origins");
}

#[test]
fn each_mistake_of_a_file_has_its_line_and_column() {
    let refused = |words: &str, text: &str| resolved(words, text).err().unwrap();
    let text = "prot: 8000\nport: many\nmax_num_seqs: 3\nport: 1\ndevice: [a]\nno-prefix-cache: 1\nleg: decode\n\
                served-model-name: 1.10\nisa:\nkv-cache: true\nconfig: x\n--host: h\n";
    let error = refused("cleave serve", text);
    for expected in [
        "the configuration FILE has 12 mistakes",
        "FILE:1:1: `cleave serve` has no flag `prot`; is `port` meant?",
        "FILE:2:7: invalid value 'many' for '--port <PORT>'",
        "FILE:3:1: `cleave serve` has no flag `max_num_seqs`; is `max-num-seqs` meant?",
        "FILE:4:1: `port` is there a second time",
        "FILE:5:9: `device` has one value, not a list",
        "FILE:6:18: `no-prefix-cache` is true or false, not 1",
        "FILE:7:1: `cleave serve` has no flag `leg`; `cleave worker` has it",
        "FILE:8:20: `served-model-name` is a text; put 1.1 in quotes",
        "`isa` has no value",
        "FILE:10:11: `kv-cache` takes a value (SIZE), not true",
        "FILE:11:1: `cleave serve` has no flag `config`",
        "FILE:12:1: `cleave serve` has no flag `--host`; is `host` meant?",
    ] {
        assert!(error.contains(expected), "{expected}\n{error}");
    }
    assert!(refused("cleave serve", "- a\n").contains("FILE:1:1: a configuration is a map"));
    assert!(resolved("cleave serve", "# port: 8000\n").is_ok());
    let conflict = refused(
        "cleave bench run --url u --workload w",
        "trace: t\nrate: 1\n",
    );
    assert!(conflict.contains("cannot be used with"), "{conflict}");
    assert!(conflict.contains("--trace is set at "), "{conflict}");
    assert!(conflict.contains(":1:8\n"), "{conflict}");
    let conflict = refused("cleave serve", "api-key: [k]\npolicy: p.yaml\n");
    assert!(conflict.contains("--policy is set at "), "{conflict}");
}

#[test]
fn printed_values_are_a_file_that_sets_them_again() {
    let text = "max-num-seqs: 7\nno-prefix-cache: false\nadmin-key: do-not-show-this-key\n";
    let first = resolved("cleave serve --host ::1 --served-model-name 1.10 a,b", text).unwrap();
    let first = first.text();
    for expected in [
        "max-num-seqs: 7  # file\n",
        "no-prefix-cache: false  # file\n",
        "host: \"::1\"  # command line\n",
        "served-model-name: [\"1.10\", \"a,b\"]  # command line\n",
        "port: 8000  # default\n",
        "# admin-key: hidden  # file\n",
    ] {
        assert!(first.contains(expected), "{expected}\n{first}");
    }
    assert!(!first.contains("do-not-show"), "{first}");
    for words in [
        "cleave serve",
        "cleave router",
        "cleave worker --leg both --router h:1",
        "cleave generate --prompt p",
        "cleave chat",
        "cleave bench run --url u --workload w --rate 1",
        "cleave bench goodput --url u --workload w",
        "cleave bench engine",
        "cleave plan calibrate",
        "cleave autoscale --local --router h:1",
    ] {
        let values = |text: String| -> Vec<String> {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            let values =
                lines.map(|line| line.rsplit_once("  # ").map_or(line, |(value, _)| value));
            values.map(str::to_owned).collect()
        };
        let printed = resolved(words, "").unwrap().text();
        let command: Vec<&str> = words
            .split(' ')
            .take_while(|word| !word.starts_with('-'))
            .collect();
        let again = resolved(&command.join(" "), &printed).unwrap_or_else(|error| {
            panic!("{words}: {error}\n{printed}");
        });
        assert_eq!(values(again.text()), values(printed), "{words}");
    }
}

#[test]
fn each_flag_of_a_configurable_command_has_a_section() {
    let root = without_variables();
    for name in definition::configurable() {
        let command = find(&root, name).unwrap();
        let longs: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
        for most_used in definition::most_used(name).unwrap() {
            assert!(longs.contains(&most_used), "{name} --{most_used}");
        }
        for argument in command.get_arguments() {
            let has = argument.get_help_heading().is_some() || argument.get_long().is_none();
            assert!(has, "{name} --{}", argument.get_id());
        }
    }
}

#[test]
fn the_short_help_explains_the_ten_most_used_flags() {
    let mut root = without_variables();
    root.build();
    for name in definition::configurable() {
        let help = find(&root, name).unwrap().clone().render_help().to_string();
        let explained = help.lines().map(str::trim_start);
        let explained = explained.filter(|line| line.starts_with("--")).count();
        assert!(explained <= 10 + 3 * 10, "{name}: {help}");
        for argument in find(&root, name).unwrap().get_arguments() {
            if let Some(long) = argument.get_long() {
                assert!(
                    help.contains(&format!("--{long}")),
                    "{name} --{long}:\n{help}"
                );
            }
        }
        assert!(help.contains("CLEAVE_MAX_NUM_SEQS"));
        assert!(help.contains(CONFIG));
    }
}

#[test]
fn the_name_of_a_command_is_found_behind_flags() {
    let root = command();
    let at = |words: &str| {
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        let (path, after) = command_path(&root, &words);
        (path.join(" "), after)
    };
    assert_eq!(at("cleave serve --port 1"), ("serve".to_owned(), 2));
    let log = "cleave --log-level debug --log-format=json bench run --url serve";
    assert_eq!(at(log), ("bench run".to_owned(), 6));
    assert_eq!(
        at("cleave --log-level serve router"),
        ("router".to_owned(), 4)
    );
    assert_eq!(at("cleave --version"), (String::new(), 1));
}
