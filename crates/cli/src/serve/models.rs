//! The models of `cleave serve`, from flags to engines.
//!
//! Owns: the workers of each model, and the division of the process among all. Never: serves.
//! Invariant: every reason to refuse a model that its files and flags have is found before a port
//! is bound, and the message names the model; weights are loaded only where the memory for them and
//! for the KV caches of all models is there.

use super::{with_measured_prices, worker_options};
use crate::adapters::with_adapters;
use crate::args::{
    DeviceArg, HostArgs, ModelArgs, ModelNameArgs, ProcessArgs, ServeArgs, WorkerCountArgs,
};
use crate::model::{EngineShare, ProcessWorkers};
use crate::source::{EngineSource, OpenedSource};
use crate::task::model_task;
use anyhow::{Context, bail};
use cleave_domain::Role;
use cleave_engine::Engine;
use cleave_text::ModelTask;
use cleave_worker::WorkerOptions;
use std::collections::BTreeMap;

/// A model to serve, with the flags that hold for it.
pub(super) struct ModelToServe {
    pub(super) model: ModelArgs,
    pub(super) host: HostArgs,
    roles: Vec<Role>,
    /// Names the model in errors; absent for the only one.
    flag: Option<String>,
}

/// A model whose files were checked.
pub(super) struct CheckedModel {
    request: ModelToServe,
    source: OpenedSource,
}

/// A model in memory, with the engines of its workers.
pub(super) struct StartedModel {
    pub(super) source: EngineSource,
    pub(super) workers: Vec<(WorkerOptions, Box<dyn Engine>)>,
}

impl ModelToServe {
    /// Adds the model to an error, where there are several.
    fn blame<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        match &self.flag {
            Some(flag) => result.with_context(|| flag.clone()),
            None => result,
        }
    }
}

/// The models that the flags ask for: the bundled one if they name none.
///
/// # Errors
/// If a flag does not say for which of several models it is, or a model gets no worker for a leg.
pub(super) fn of(args: &ServeArgs) -> anyhow::Result<Vec<ModelToServe>> {
    let ServeArgs {
        models,
        host,
        workers,
        ..
    } = args;
    let names = &models.served_model_name;
    let entries: Vec<_> = models.entries().collect();
    check_flags_of_several(args, entries.len())?;
    if entries.is_empty() {
        let name = ModelNameArgs {
            model: None,
            served_model_name: names.clone(),
        };
        return Ok(vec![request(name, host.clone(), *workers, None)?]);
    }
    let is_sole = entries.len() == 1;
    let requests = entries.iter().map(|entry| {
        let (mut name, own, counts) = entry.apply(host, *workers)?;
        match &name.served_model_name[..] {
            [] => name.served_model_name.clone_from(names),
            [_] if names.is_empty() => {}
            [_, alias, ..] => bail!(
                "{entry}: one of the models of --model has one name; `{alias}` is an alias, which --policy lists: \
                 models: [{{name: …, aliases: [{alias}]}}]"
            ),
            [_] => bail!("{entry}: the model has a name already; leave --served-model-name out"),
        }
        let flag = (!is_sole).then(|| entry.to_string());
        request(name, own, counts, flag)
    });
    requests.collect()
}

/// Refuses flags of the only model where there are several.
fn check_flags_of_several(args: &ServeArgs, count: usize) -> anyhow::Result<()> {
    if count < 2 {
        return Ok(());
    }
    if let Some(name) = args.models.served_model_name.first() {
        bail!(
            "--served-model-name {name}: {count} models are given, and none of them is the only one; name each by \
             --model NAME=DIR"
        );
    }
    if let Some(module) = args.host.adapters.lora_modules.first() {
        let (name, location) = (&module.name, &module.location);
        bail!(
            "--lora-modules {name}={location}: {count} models are given, and an adapter is of one: \
             --model '{{\"model\": …, \"lora-modules\": [\"{name}={location}\"]}}'"
        );
    }
    Ok(())
}

fn request(
    name: ModelNameArgs,
    host: HostArgs,
    counts: WorkerCountArgs,
    flag: Option<String>,
) -> anyhow::Result<ModelToServe> {
    let model = ModelArgs {
        name,
        form: host.form.clone(),
    };
    let mut request = ModelToServe {
        model,
        host,
        roles: Vec::new(),
        flag,
    };
    request.roles = request.blame(roles(&request.model, counts))?;
    Ok(request)
}

fn roles(model: &ModelArgs, counts: WorkerCountArgs) -> anyhow::Result<Vec<Role>> {
    let requested = (counts.prefill, counts.decode, counts.both);
    // A flag for one leg alone implies one worker for the other leg.
    let (prefill, decode, both) = match requested {
        (None, None, both) => (0, 0, both.unwrap_or(1)),
        (prefill, decode, Some(both)) => (prefill.unwrap_or(0), decode.unwrap_or(0), both),
        (prefill, decode, None) => (prefill.unwrap_or(1), decode.unwrap_or(1), 0),
    };
    let many = |role, count: u32| std::iter::repeat_n(role, count as usize);
    let roles: Vec<Role> = many(Role::Prefill, prefill)
        .chain(many(Role::Decode, decode))
        .chain(many(Role::Both, both))
        .collect();
    let is_served = roles.iter().any(|role| role.prefills())
        && (roles.iter().any(|role| role.decodes())
            || model_task(&model.form, model.folder()?)? != ModelTask::Generate);
    if !is_served {
        bail!(
            "--prefill {prefill} --decode {decode} --both {both}: a request needs a worker for each of its legs; \
             only a model of vectors (--runner pooling) needs no decode worker"
        );
    }
    Ok(roles)
}

/// Opens and checks the files of every model, and the memory for all of them.
///
/// # Errors
/// One that names the model, and the file or the flag.
pub(super) fn open(models: Vec<ModelToServe>) -> anyhow::Result<Vec<CheckedModel>> {
    let open = |request: ModelToServe| {
        let source = request.blame(OpenedSource::open(&request.model, &request.host))?;
        Ok(CheckedModel { request, source })
    };
    let opened = models.into_iter().map(open);
    let opened: Vec<_> = opened.collect::<anyhow::Result<_>>()?;
    check_names(&opened)?;
    check_memory(&opened)?;
    Ok(opened)
}

/// Refuses two models or adapters of one name: a request could not say which it is for.
fn check_names(models: &[CheckedModel]) -> anyhow::Result<()> {
    let mut served: BTreeMap<&str, &ModelToServe> = BTreeMap::new();
    for CheckedModel { request, source } in models {
        let name = source.served_name();
        if served.insert(name, request).is_some() {
            let error =
                format!("another model is served as `{name}`, too; name it by --model NAME=DIR");
            return request.blame(Err(anyhow::Error::msg(error)));
        }
    }
    for CheckedModel { request, .. } in models {
        for module in &request.host.adapters.lora_modules {
            let name = module.name.as_str();
            let other = served.insert(name, request);
            // An adapter with the name of its own model, or twice, is refused where it is opened.
            if other.is_some_and(|other| !std::ptr::eq(other, request)) {
                let error = format!(
                    "lora-modules: `{name}` is the name of another model, or of its adapter"
                );
                return request.blame(Err(anyhow::Error::msg(error)));
            }
        }
    }
    Ok(())
}

/// The memory that the models of one device are sure to take.
struct MemoryDemand {
    device: DeviceArg,
    bytes_free: u64,
    bytes: u64,
    /// A line for each model.
    parts: Vec<String>,
}

/// Refuses weights and KV caches of a given size that together exceed the memory of their device.
fn check_memory(models: &[CheckedModel]) -> anyhow::Result<()> {
    let mut demands: Vec<MemoryDemand> = Vec::new();
    for CheckedModel { request, source } in models {
        // A mock engine has no weights, and its blocks are small.
        let OpenedSource::Model(opened) = source else {
            continue;
        };
        let Some(bytes_free) = opened.bytes_free()? else {
            continue;
        };
        let workers =
            ProcessWorkers::of(std::iter::once((&request.host.engine, request.roles.len())));
        let (kv, weights) = (workers.kv_bytes_given, opened.weight_bytes_min());
        let part = format!(
            "{}: KV caches of {} workers {}, weights {}",
            source.served_name(),
            request.roles.len(),
            mib(kv),
            mib(weights)
        );
        let bytes = kv.saturating_add(weights);
        match demands
            .iter_mut()
            .find(|demand| demand.device == opened.device())
        {
            Some(demand) => {
                demand.bytes = demand.bytes.saturating_add(bytes);
                demand.parts.push(part);
            }
            None => demands.push(MemoryDemand {
                device: opened.device(),
                bytes_free,
                bytes,
                parts: vec![part],
            }),
        }
    }
    demands.iter().try_for_each(MemoryDemand::check)
}

impl MemoryDemand {
    fn check(&self) -> anyhow::Result<()> {
        if self.bytes <= self.bytes_free {
            return Ok(());
        }
        bail!(
            "the models need at least {} of the memory of --device {}, of which {} are free ({}); lower --kv-cache or the \
             number of workers, or serve fewer models",
            mib(self.bytes),
            self.device,
            mib(self.bytes_free),
            self.parts.join("; ")
        );
    }
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

/// Loads the weights of every model, and then makes the engines of all workers.
///
/// # Errors
/// One that names the model.
pub(super) fn start(
    models: Vec<CheckedModel>,
    process: &ProcessArgs,
) -> anyhow::Result<Vec<StartedModel>> {
    let load = |CheckedModel { request, source }: CheckedModel| {
        let source = request.blame(source.load(&request.host))?;
        Ok((request, source))
    };
    let loaded = models.into_iter().map(load);
    let loaded: Vec<_> = loaded.collect::<anyhow::Result<_>>()?;
    let counts = loaded.iter();
    let counts = counts.map(|(request, _)| (&request.host.engine, request.roles.len()));
    let workers = ProcessWorkers::of(counts);
    // Every size is found before the first engine takes memory.
    let sizes = loaded.iter().map(|(request, source)| {
        let bytes = source.kv_bytes(&request.host.engine, workers);
        request.blame(bytes)
    });
    let sizes: Vec<u64> = sizes.collect::<anyhow::Result<_>>()?;
    let mut names = WorkerNames::default();
    let mut started = Vec::new();
    for ((request, source), kv_bytes) in loaded.into_iter().zip(sizes) {
        let share = EngineShare {
            kv_bytes,
            workers_before: names.given,
            workers_count: workers.count,
        };
        let made = make_workers(&request, &source, share, |role| {
            worker_options(names.next(role), role, &request.host, process)
        });
        let workers = request.blame(made)?;
        started.push(StartedModel { source, workers });
    }
    Ok(started)
}

/// Makes the engines of one model's workers.
fn make_workers(
    request: &ModelToServe,
    source: &EngineSource,
    share: EngineShare,
    mut options: impl FnMut(Role) -> anyhow::Result<WorkerOptions>,
) -> anyhow::Result<Vec<(WorkerOptions, Box<dyn Engine>)>> {
    let ModelToServe { host, roles, .. } = request;
    let engines = source.engines(&host.engine, roles, share)?;
    let workers = roles.iter().zip(engines).map(|(role, mut engine)| {
        let options = with_adapters(options(*role)?, engine.as_ref(), host, source)?;
        let options = with_measured_prices(options, source, engine.as_mut(), host)?;
        Ok((options, engine))
    });
    workers.collect()
}

/// Names of workers: `prefill-0`, `prefill-1`, `decode-0` …, each once in the process.
#[derive(Default)]
struct WorkerNames {
    given: usize,
    by_role: BTreeMap<Role, usize>,
}

impl WorkerNames {
    fn next(&mut self, role: Role) -> String {
        let number = self.by_role.entry(role).or_default();
        let name = format!("{role}-{number}");
        *number += 1;
        self.given += 1;
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct ServeFlags {
        #[command(flatten)]
        serve: ServeArgs,
    }

    fn requested(words: &[&str]) -> anyhow::Result<Vec<ModelToServe>> {
        let words = std::iter::once(&"test").chain(words);
        of(&ServeFlags::parse_from(words).serve)
    }

    #[track_caller]
    fn count(flags: &str) -> Result<[usize; 3], String> {
        let words: Vec<&str> = flags.split_whitespace().collect();
        let models = requested(&words).map_err(|error| error.to_string())?;
        let [model] = &models[..] else {
            panic!("one model");
        };
        let roles = model.roles.iter();
        let of = |name: &str| {
            roles
                .clone()
                .filter(|role| role.to_string() == name)
                .count()
        };
        Ok([of("prefill"), of("decode"), of("both")])
    }

    #[test]
    fn one_leg_flag_adds_a_worker_for_the_other() {
        assert_eq!(count(""), Ok([0, 0, 1]));
        assert_eq!(count("--both 3"), Ok([0, 0, 3]));
        assert_eq!(count("--prefill 2"), Ok([2, 1, 0]));
        assert_eq!(count("--decode 3"), Ok([1, 3, 0]));
        assert_eq!(count("--prefill 2 --both 1"), Ok([2, 0, 1]));
        assert_eq!(count("--prefill 0 --decode 0 --both 1"), Ok([0, 0, 1]));
        assert!(count("--prefill 0").is_err_and(|error| error.contains("each of its legs")));
    }

    #[test]
    fn only_a_model_of_vectors_needs_no_decode_worker() {
        let pools = |flags: &str| count(&format!("{flags} --runner pooling"));
        assert_eq!(pools("--prefill 2 --decode 0"), Ok([2, 0, 0]));
        assert_eq!(pools(""), Ok([0, 0, 1]));
        assert!(pools("--prefill 0").is_err());
        let refused = count("--prefill 2 --decode 0");
        assert!(refused.is_err_and(|error| error.contains("--runner pooling")));
    }

    #[test]
    fn each_model_gets_workers_of_its_own() {
        let own = r#"{"model":"cleave-demo","served-model-name":"b","prefill":2,"decode":1}"#;
        let models = requested(&["--both", "3", "--model", "a=cleave-demo", "--model", own]);
        let models = models.unwrap();
        let counts: Vec<usize> = models.iter().map(|model| model.roles.len()).collect();
        assert_eq!(counts, [3, 3]);
        assert!(models[0].roles.iter().all(|role| *role == Role::Both));
        assert!(models[1].roles.iter().all(|role| *role != Role::Both));
        let mut names = WorkerNames::default();
        let all = models.iter().flat_map(|model| &model.roles);
        let all: Vec<String> = all.map(|role| names.next(*role)).collect();
        let expected = [
            "both-0",
            "both-1",
            "both-2",
            "prefill-0",
            "prefill-1",
            "decode-0",
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn a_flag_that_fits_no_model_of_several_is_refused() {
        let two = ["--model", "a=cleave-demo", "--model", "b=cleave-demo"];
        for (more, reason) in [
            (&["--served-model-name", "c"][..], "--model NAME=DIR"),
            (
                &["--lora-modules", "sql=/sql"],
                r#""lora-modules": ["sql=/sql"]"#,
            ),
            (&["--prefill", "0"], "--model a=cleave-demo"),
        ] {
            let words = [&two[..], more].concat();
            let error = requested(&words).err().map(|error| format!("{error:#}"));
            let error = error.unwrap_or_default();
            assert!(error.contains(reason), "{more:?}: {error}");
        }
        let twice = requested(&["--model", "a=cleave-demo", "--served-model-name", "b"]);
        assert!(twice.is_err());
    }

    fn opened(words: &[&str]) -> String {
        let checked = requested(words).and_then(open);
        checked
            .err()
            .map(|error| format!("{error:#}"))
            .unwrap_or_default()
    }

    #[test]
    fn one_name_stands_for_one_model() {
        let error = opened(&["--model", "a=cleave-demo", "--model", "a=cleave-demo"]);
        assert!(error.contains("another model is served as `a`"), "{error}");
        let adapter = r#"{"model":"cleave-demo","lora-modules":["a=/sql"]}"#;
        let error = opened(&["--model", "a=cleave-demo", "--model", adapter]);
        assert!(
            error.contains("`a` is the name of another model"),
            "{error}"
        );
        assert_eq!(opened(&["--model", "a=cleave-demo,b=cleave-demo"]), "");
    }

    #[test]
    fn memory_is_checked_for_all_models_together() {
        let free = crate::model::memory_available().unwrap();
        // One fits, two do not.
        let each = (free * 2 / 3).to_string();
        let one = ["--kv-cache", &each, "--model", "a=cleave-demo"];
        assert_eq!(opened(&one), "");
        let error = opened(&[&one[..], &["--model", "b=cleave-demo"]].concat());
        for part in [
            "the models need at least",
            "a: KV caches of 1 workers",
            "; b: KV",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_bad_model_among_several_is_named() {
        let error = opened(&["--model", "a=cleave-demo", "--model", "b=/no/such/folder"]);
        assert!(error.starts_with("--model b=/no/such/folder: "), "{error}");
        assert!(error.contains("no such folder"), "{error}");
    }
}
