//! The models that a router speaks for.
//!
//! Owns: for each model, which worker's text files (tokenizer, chat template, defaults) serve, and
//! which worker is turned away for its own. Never: reads a folder; reads a tokenizer under a lock
//! that others wait for. Invariant: all workers of a served name that are welcome have one
//! tokenizer and one context. The files of the first worker serve for as long as a worker that sent
//! the same is connected; one that brings another template or other defaults is let in with a
//! warning, and its files serve once the last worker of those before has left. So a rolling upgrade
//! switches once. A worker counts while it may serve: one that waits for its name brings nothing.
//!
//! Another model of the same name (another tokenizer, vocabulary or context) is welcome only when
//! no worker of the name is connected and no flight of it is open: a flight's tokens mean something
//! in its own vocabulary only. Until then its workers are turned away with the reason, and dial
//! again by themselves. Models of other names do not matter to it.

use super::flights::FlightTable;
use super::readiness::ModelReadiness;
use cleave_api::App;
use cleave_fleet::{ModelAdmission, files_digest};
use cleave_text::{ModelFiles, ModelText};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;
use tracing::{info, warn};

/// Decides whose text files serve.
#[derive(Clone)]
pub struct ModelRegistry {
    app: App,
    flights: Arc<FlightTable>,
    present: Arc<Mutex<ConnectedModels>>,
    /// The names of the models that may be brought; all where it is empty.
    served_names: Arc<[String]>,
    /// Held while a tokenizer is read: a fleet that dials a new router brings one file many times,
    /// and reading takes many times its memory. `present` is never held across a wait.
    reading: Arc<tokio::sync::Mutex<()>>,
}

/// One worker's use of a model; ended by [`ModelAdmission::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelMembership(u64);

impl ModelRegistry {
    /// Models that `known` has no more are forgotten from then on. Must be called within a tokio
    /// runtime.
    pub(crate) fn new(
        app: App,
        flights: Arc<FlightTable>,
        mut known: watch::Receiver<ModelReadiness>,
    ) -> Self {
        let registry = Self {
            app,
            flights,
            present: Arc::default(),
            served_names: Arc::default(),
            reading: Arc::default(),
        };
        let follower = registry.clone();
        tokio::spawn(async move {
            while known.changed().await.is_ok() {
                let known = known.borrow_and_update().clone();
                follower.forget_unknown(&known);
            }
        });
        registry
    }

    /// Turns away workers of other models than these from now on, if any is named.
    pub(crate) fn serving_only(mut self, names: &[String]) -> Self {
        self.served_names = names.into();
        self
    }

    /// Refuses a model that the router is not to serve.
    fn check_served(&self, name: &str) -> Result<(), String> {
        if self.served_names.is_empty() || self.served_names.iter().any(|served| served == name) {
            return Ok(());
        }
        let served = self.served_names.join(", ");
        Err(format!(
            "this router serves {served} (--served-model), and the worker has the model \"{name}\": start it \
             with that model, with --served-model-name if only the name differs, or at another router"
        ))
    }

    /// Forgets models without workers that the router has forgotten.
    fn forget_unknown(&self, known: &ModelReadiness) {
        let mut present = self.present();
        let app = &self.app;
        present.models.retain(|name, model| {
            // A worker that was let in may not have joined yet.
            let stays = known.knows(name) || !model.is_empty();
            if !stays {
                app.retire_model(name);
            }
            stays
        });
    }

    /// Lets a worker in whose files were read before.
    fn join_if_read(&self, files: &Arc<ModelFiles>) -> Result<Option<ModelMembership>, String> {
        let mut present = self.present();
        present.check_room(&files.name)?;
        let knows = present
            .of(&files.name)
            .is_some_and(|model| model.knows(files));
        Ok(knows.then(|| present.join(files)))
    }

    fn join_read(
        &self,
        worker: &str,
        files: &Arc<ModelFiles>,
        text: ModelText,
    ) -> Result<ModelMembership, String> {
        let served = ServedFiles::of(files, &text);
        let flights = self.flights.count_of(&files.name);
        let mut present = self.present();
        // A worker of another name may have come while the files were read.
        present.check_room(&files.name)?;
        let model = present.of_mut(&files.name);
        model.check(&served, flights)?;
        if model.is_empty() {
            self.app.serve_model(text);
            model.serving = Some(served);
        } else if let Some(serving_model) = &model.serving {
            let serving = files_digest(&serving_model.files);
            let arriving = files_digest(files);
            warn!(
                worker,
                model = files.name,
                serving,
                arriving,
                "this worker has another chat template or other defaults than the workers before it: theirs serve until the last of them has left"
            );
        }
        Ok(present.join(files))
    }

    /// Serves the files of the workers that are left of this model.
    async fn serve_successor(&self, name: &str) {
        let _reading = self.reading.lock().await;
        let successor = || self.present().of(name).and_then(ConnectedFiles::successor);
        let Some(files) = successor() else {
            return;
        };
        // They were read when they came.
        let text = match read(&files).await {
            Ok(text) => text,
            Err(reason) => {
                return warn!(reason, "a model's text files cannot be read a second time");
            }
        };
        let mut present = self.present();
        let model = present.of_mut(name);
        if model.successor().as_ref() != Some(&files) {
            return;
        }
        let digest = files_digest(&files);
        info!(
            model = name,
            digest,
            "the workers with the chat template and defaults of before have left: those of the others serve"
        );
        model.serving = Some(ServedFiles::of(&files, &text));
        self.app.serve_model(text);
    }

    fn present(&self) -> MutexGuard<'_, ConnectedModels> {
        self.present.lock()
    }
}

impl ModelAdmission for ModelRegistry {
    type Membership = ModelMembership;

    /// Lets a worker with these files in, and makes sure that the HTTP API serves a model that
    /// it has.
    async fn accept(
        &self,
        worker: &str,
        files: &Arc<ModelFiles>,
    ) -> Result<ModelMembership, String> {
        self.check_served(&files.name)?;
        if let Some(membership) = self.join_if_read(files)? {
            return Ok(membership);
        }
        let _reading = self.reading.lock().await;
        // Another worker may have sent the same meanwhile.
        if let Some(membership) = self.join_if_read(files)? {
            return Ok(membership);
        }
        let text = read(files).await?;
        self.join_read(worker, files, text)
    }

    fn leave(&self, membership: ModelMembership) {
        let successor = self.present().leave(membership);
        if let Some(files) = successor {
            let registry = self.clone();
            tokio::spawn(async move { registry.serve_successor(&files.name).await });
        }
    }
}

async fn read(files: &Arc<ModelFiles>) -> Result<ModelText, String> {
    let files = Arc::clone(files);
    let text = tokio::task::spawn_blocking(move || ModelText::new(files.as_ref().clone()));
    let text = text
        .await
        .map_err(|error| format!("cannot read the model's text side: {error}"))?;
    text.map_err(|error| format!("cannot use the model's text side: {error}"))
}

/// Models of different names that a router knows at a time: each has a tokenizer in memory, and
/// labels in the metrics.
const MODELS_MAX: usize = 64;

/// The models that workers brought, by their served names.
#[derive(Default)]
struct ConnectedModels {
    models: BTreeMap<String, ConnectedFiles>,
    joined_count: u64,
}

/// The workers of one model that are connected, by the files that they sent.
#[derive(Default)]
struct ConnectedFiles {
    serving: Option<ServedFiles>,
    /// In the order in which the workers joined.
    files_by_membership: BTreeMap<ModelMembership, Arc<ModelFiles>>,
}

impl ConnectedModels {
    fn of(&self, name: &str) -> Option<&ConnectedFiles> {
        self.models.get(name)
    }

    fn of_mut(&mut self, name: &str) -> &mut ConnectedFiles {
        self.models.entry(name.to_owned()).or_default()
    }

    /// Refuses one model more than a router serves.
    fn check_room(&self, name: &str) -> Result<(), String> {
        if self.models.contains_key(name) || self.models.len() < MODELS_MAX {
            return Ok(());
        }
        Err(format!(
            "this router has known {MODELS_MAX} models, the most that one serves, and the worker has another one, \
             \"{name}\": start other routers for it, or restart this one to forget models that are gone"
        ))
    }

    fn join(&mut self, files: &Arc<ModelFiles>) -> ModelMembership {
        let membership = ModelMembership(self.joined_count);
        self.joined_count += 1;
        self.of_mut(&files.name).join(membership, files);
        membership
    }

    /// The files that serve from now on, if those of the worker's model change.
    fn leave(&mut self, membership: ModelMembership) -> Option<Arc<ModelFiles>> {
        let has = |model: &&mut ConnectedFiles| model.files_by_membership.contains_key(&membership);
        self.models.values_mut().find(has)?.leave(membership)
    }
}

impl ConnectedFiles {
    fn is_empty(&self) -> bool {
        self.files_by_membership.is_empty()
    }

    /// Whether these files serve, or were read when another worker sent them.
    fn knows(&self, files: &ModelFiles) -> bool {
        let serving = self.serving.iter().map(|served| &served.files);
        serving
            .chain(self.files_by_membership.values())
            .any(|present| **present == *files)
    }

    fn join(&mut self, membership: ModelMembership, files: &Arc<ModelFiles>) {
        // Equal files are kept once: a tokenizer may have tens of megabytes.
        let held = self.serving.iter().map(|served| &served.files);
        let held = held
            .chain(self.files_by_membership.values())
            .find(|held| *held == files);
        let files = Arc::clone(held.unwrap_or(files));
        self.files_by_membership.insert(membership, files);
    }

    /// The files that serve from now on, if they change.
    fn leave(&mut self, membership: ModelMembership) -> Option<Arc<ModelFiles>> {
        self.files_by_membership.remove(&membership);
        self.successor()
    }

    /// The files of the worker that joined first, if no connected worker sent those that serve.
    fn successor(&self) -> Option<Arc<ModelFiles>> {
        let serving = &self.serving.as_ref()?.files;
        if self
            .files_by_membership
            .values()
            .any(|files| files == serving)
        {
            return None;
        }
        self.files_by_membership.values().next().cloned()
    }

    /// Refuses another model of the name of the one that serves, while anything needs that.
    fn check(&self, other: &ServedFiles, flights: usize) -> Result<(), String> {
        let is_in_use = !self.is_empty() || flights > 0;
        let Some(serving) = self.serving.as_ref().filter(|_| is_in_use) else {
            return Ok(());
        };
        serving.check(other).map_err(|difference| {
            let name = &serving.files.name;
            let workers = self.files_by_membership.len();
            format!(
                "this router serves another model of the name \"{name}\" (workers connected: {workers}, requests \
                 open: {flights}): {difference}; give all its workers the same, give the other model another \
                 --served-model-name, or stop the workers of one of them first"
            )
        })
    }
}

/// The files that the HTTP API serves of a model, and of them what all its workers must share:
/// requests become tokens before a worker is chosen. With another tokenizer the rest of the fleet
/// would answer nonsense, and a shorter context would cut everyone's requests.
struct ServedFiles {
    files: Arc<ModelFiles>,
    vocabulary_count: u32,
    context_tokens_max: u32,
}

impl ServedFiles {
    fn of(files: &Arc<ModelFiles>, text: &ModelText) -> Self {
        Self {
            files: Arc::clone(files),
            vocabulary_count: text.vocabulary_count(),
            context_tokens_max: text.context_tokens_max(),
        }
    }

    /// In words, how `other` differs.
    fn check(&self, other: &Self) -> Result<(), String> {
        let differ =
            |property, ours, other| Err(format!("its {property} is {ours}, the worker's {other}"));
        if self.vocabulary_count != other.vocabulary_count {
            return differ("vocabulary", self.vocabulary_count, other.vocabulary_count);
        }
        if self.files.tokenizer != other.files.tokenizer {
            return Err(format!(
                "its tokenizer.json (files {}) differs from the worker's (files {})",
                files_digest(&self.files),
                files_digest(&other.files)
            ));
        }
        if self.context_tokens_max != other.context_tokens_max {
            return differ("context", self.context_tokens_max, other.context_tokens_max);
        }
        let (ours, task) = (&self.files.task, &other.files.task);
        if ours != task {
            return Err(format!("its task is {ours:?}, the worker's {task:?}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GatewayOptions, RouterBody};
    use cleave_api::ApiOptions;
    use cleave_domain::Pooling;
    use cleave_fleet::SILENCE_DEFAULT;
    use cleave_router::RouterLimits;
    use cleave_telemetry::Telemetry;
    use cleave_text::{EmbedTask, ModelTask};
    use std::path::Path;
    use std::time::Duration;
    use tokio::time::timeout;

    #[test]
    fn a_different_tokenizer_or_context_is_refused() {
        let with = |tokenizer: &str, vocabulary_count, context_tokens_max| ServedFiles {
            files: Arc::new(ModelFiles {
                tokenizer: tokenizer.into(),
                ..ModelFiles::default()
            }),
            vocabulary_count,
            context_tokens_max,
        };
        let serving = with("{}", 400, 1024);
        assert_eq!(serving.check(&with("{}", 400, 1024)), Ok(()));
        assert_eq!(
            serving.check(&with("{}", 400, 64)),
            Err("its context is 1024, the worker's 64".into())
        );
        let other = serving.check(&with("{} ", 400, 64));
        assert!(other.unwrap_err().contains("tokenizer.json"));
        let other = serving.check(&with("{} ", 500, 64));
        assert!(other.unwrap_err().contains("400"));
    }

    fn files(template: &str) -> Arc<ModelFiles> {
        Arc::new(ModelFiles {
            chat_template: Some(template.into()),
            ..ModelFiles::default()
        })
    }

    /// As `accept` leaves it, with files that were read.
    fn join(present: &mut ConnectedModels, template: &str) -> ModelMembership {
        let files = files(template);
        let model = present.of_mut("");
        if model.is_empty() && !model.knows(&files) {
            model.serving = Some(ServedFiles {
                files: Arc::clone(&files),
                vocabulary_count: 1,
                context_tokens_max: 1,
            });
        }
        present.join(&files)
    }

    #[test]
    fn the_first_workers_files_serve_until_the_last_has_left() {
        let mut present = ConnectedModels::default();
        let old = [join(&mut present, "old"), join(&mut present, "old")];
        let new = join(&mut present, "new");
        assert_eq!(present.leave(old[0]), None);
        let newer = join(&mut present, "newer");
        let again = join(&mut present, "old");
        assert_eq!(present.leave(old[1]), None, "one of the old came back");
        let next = present.leave(again).unwrap();
        assert_eq!(*next, *files("new"), "the one that came first");
        present.of_mut("").serving.as_mut().unwrap().files = next;
        assert_eq!(present.leave(newer), None);
        // Nobody is left: what serves stays, until somebody comes.
        assert_eq!(present.leave(new), None);
        assert_eq!(
            present.of_mut("").serving.as_ref().unwrap().files,
            files("new")
        );
        join(&mut present, "newest");
        assert_eq!(
            present.of_mut("").serving.as_ref().unwrap().files,
            files("newest")
        );
    }

    fn served(name: &str, vocabulary_count: u32) -> ServedFiles {
        ServedFiles {
            files: Arc::new(ModelFiles {
                name: name.into(),
                tokenizer: vocabulary_count.to_string(),
                ..ModelFiles::default()
            }),
            vocabulary_count,
            context_tokens_max: 1,
        }
    }

    #[test]
    fn a_changed_tokenizer_joins_when_the_old_one_is_unused() {
        let mut present = ConnectedModels::default();
        let old = served("m", 400);
        let membership = present.join(&old.files);
        present.of_mut("m").serving = Some(old);
        let larger = served("m", 500);
        let check =
            |present: &ConnectedModels, flights| present.of("m").unwrap().check(&larger, flights);
        let refused = check(&present, 0).unwrap_err();
        assert!(refused.contains("workers connected: 1"), "{refused}");
        assert_eq!(present.leave(membership), None);
        let refused = check(&present, 2).unwrap_err();
        assert!(refused.contains("requests open: 2"), "{refused}");
        assert_eq!(check(&present, 0), Ok(()));
    }

    #[test]
    fn models_of_other_names_do_not_matter_up_to_a_limit() {
        let mut present = ConnectedModels::default();
        for number in 0..MODELS_MAX {
            let model = served(&number.to_string(), 400);
            assert_eq!(present.check_room(&model.files.name), Ok(()));
            let membership = present.join(&model.files);
            let name = model.files.name.clone();
            present.of_mut(&name).serving = Some(model);
            if number == 3 {
                assert_eq!(present.leave(membership), None, "the last of its model");
            }
        }
        let larger = served("3", 500);
        assert_eq!(present.of("3").unwrap().check(&larger, 0), Ok(()));
        assert!(present.of("4").unwrap().check(&larger, 0).is_err());
        assert_eq!(present.check_room("3"), Ok(()), "it is known");
        assert!(present.check_room("one more").is_err());
    }

    /// Requests are read for one task before a worker is chosen.
    #[test]
    fn a_worker_of_another_task_is_turned_away() {
        let mut present = ConnectedModels::default();
        let generating = served("m", 400);
        present.join(&generating.files);
        let mut embedding = served("m", 400);
        let task = ModelTask::Embed(EmbedTask::of(Pooling::Mean));
        Arc::make_mut(&mut embedding.files).task = task;
        assert_eq!(generating.check(&served("m", 400)), Ok(()));
        present.of_mut("m").serving = Some(generating);
        let reason = present.of_mut("m").check(&embedding, 0).unwrap_err();
        assert!(reason.contains("its task is Generate"), "{reason}");
    }

    /// A registry of a router without workers, and the files of a model.
    fn registry() -> (ModelRegistry, Arc<ModelFiles>) {
        let telemetry = Telemetry::default();
        let options = GatewayOptions {
            served_models: Vec::new(),
            limits: RouterLimits::default(),
            policy: None,
            tape: None,
            silence_max: SILENCE_DEFAULT,
            reader_backlog_max: 1,
        };
        let body = RouterBody::start(&options, &telemetry).unwrap();
        let registry = body.model_registry(App::new(body.frontend(), ApiOptions::default()));
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama3");
        (registry, Arc::new(ModelFiles::read(&folder).unwrap()))
    }

    #[tokio::test(start_paused = true)]
    async fn known_files_join_while_another_tokenizer_is_read() {
        let (registry, files) = registry();
        let first = registry.accept("a", &files).await.unwrap();
        let reading = registry.reading.lock().await;
        let other = Arc::new(ModelFiles {
            chat_template: Some("other".into()),
            ..files.as_ref().clone()
        });
        let waits = registry.accept("b", &other);
        let mut waits = std::pin::pin!(waits);
        let soon = Duration::from_secs(1);
        assert!(timeout(soon, &mut waits).await.is_err());
        let joined = timeout(soon, registry.accept("c", &files)).await;
        assert!(joined.expect("it waits for nobody").is_ok());
        drop(reading);
        waits.await.unwrap();
        registry.leave(first);
        let present = registry.present();
        assert_eq!(
            present.of(&files.name).unwrap().files_by_membership.len(),
            2
        );
    }

    #[tokio::test]
    async fn remaining_workers_files_serve_after_a_switch() {
        let (registry, files) = registry();
        let other = Arc::new(ModelFiles {
            chat_template: Some("other".into()),
            ..files.as_ref().clone()
        });
        let first = registry.accept("a", &files).await.unwrap();
        registry.accept("b", &other).await.unwrap();
        registry.leave(first);
        registry.serve_successor(&files.name).await;
        let serving = || {
            registry
                .present()
                .of_mut(&files.name)
                .serving
                .as_ref()
                .unwrap()
                .files
                .clone()
        };
        assert_eq!(serving(), other);
    }

    #[tokio::test]
    async fn a_pinned_router_turns_other_models_away() {
        let (registry, files) = registry();
        let pinned = registry.clone().serving_only(&["other".to_owned()]);
        let reason = pinned.accept("a", &files).await.unwrap_err();
        assert!(reason.contains("serves other (--served-model)"), "{reason}");
        assert!(reason.contains(&files.name), "{reason}");
        let names = ["other".to_owned(), files.name.clone()];
        let pinned = registry.serving_only(&names);
        assert!(pinned.accept("a", &files).await.is_ok());
    }

    #[tokio::test]
    async fn a_model_that_the_router_forgot_is_retired() {
        let (registry, files) = registry();
        let membership = registry.accept("a", &files).await.unwrap();
        let unknown = ModelReadiness::default();
        registry.forget_unknown(&unknown);
        assert!(
            registry.present().of(&files.name).is_some(),
            "its worker is about to join"
        );
        registry.leave(membership);
        let mut known = ModelReadiness::default();
        known.begin(&Arc::from(files.name.as_str()));
        registry.forget_unknown(&known);
        assert!(registry.present().of(&files.name).is_some());
        registry.forget_unknown(&unknown);
        assert!(registry.present().of(&files.name).is_none());
    }

    #[test]
    fn equal_files_of_two_workers_are_held_once() {
        let mut present = ConnectedModels::default();
        join(&mut present, "t");
        join(&mut present, "t");
        let mut held = present.of("").unwrap().files_by_membership.values();
        assert!(Arc::ptr_eq(held.next().unwrap(), held.next().unwrap()));
    }

    #[test]
    fn a_digest_differs_for_any_two_files() {
        let absent = files_digest(&ModelFiles::default());
        assert_eq!(absent.len(), 16);
        assert_ne!(absent, files_digest(&files("")), "empty is not absent");
        assert_ne!(files_digest(&files("a")), files_digest(&files("b")));
    }
}
