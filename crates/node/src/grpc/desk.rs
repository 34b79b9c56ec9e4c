//! The model that a router speaks for.
//!
//! Owns: which worker's text files (tokenizer, chat template, defaults) serve, and which worker is turned
//! away for its own. Never: reads a folder. Invariant: all workers that are welcome have one tokenizer
//! and one context. The files of the first worker serve for as long as a worker that brought the same is
//! connected; one that brings another template or other defaults is let in with a warning, and its
//! files serve once the last worker of those before has left. So a rolling upgrade switches once.

use cleave_api::{App, ModelFiles, ModelText};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Mutex;
use tracing::{info, warn};

/// Decides whose text files serve.
#[derive(Clone)]
pub(crate) struct ModelDesk {
    app: App,
    present: Arc<Mutex<Present>>,
}

/// One worker's stay; given back by [`ModelDesk::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl ModelDesk {
    pub(crate) fn new(app: App) -> Self {
        Self {
            app,
            present: Arc::default(),
        }
    }

    /// Lets a worker with these files in, and makes sure that the HTTP face speaks for a model that it
    /// has.
    ///
    /// # Errors
    /// The reason to turn the worker away.
    pub(crate) async fn accept(
        &self,
        worker: &str,
        files: &Arc<ModelFiles>,
    ) -> Result<Ticket, String> {
        let mut present = self.present.lock().await;
        if let Some(known) = &present.serving {
            let (known, other) = (&known.files.name, &files.name);
            if known != other {
                return Err(format!(
                    "this router serves model \"{known}\", and the worker has \"{other}\""
                ));
            }
        }
        if !present.knows(files) {
            let text = read(files).await?;
            let served = Served::of(files, &text);
            if let Some(known) = &present.serving {
                known.check(&served).map_err(|difference| {
                    let name = &known.files.name;
                    format!(
                        "this router serves another model of the name \"{name}\": {difference}; \
                         give all its workers the same, or start other routers for this one"
                    )
                })?;
            }
            if present.is_empty() {
                self.app.serve_model(text);
                present.serving = Some(served);
            } else if let Some(known) = &present.serving {
                let (serving, brought) = (digest(&known.files), digest(files));
                warn!(
                    worker,
                    serving,
                    brought,
                    "this worker has another chat template or other defaults than the workers before it: theirs serve until the last of them has left"
                );
            }
        }
        Ok(present.join(files))
    }

    /// The worker's stream is over.
    pub(crate) async fn leave(&self, ticket: Ticket) {
        let mut present = self.present.lock().await;
        let Some(files) = present.leave(ticket) else {
            return;
        };
        match read(&files).await {
            Ok(text) => {
                let digest = digest(&files);
                info!(
                    digest,
                    "the workers with the chat template and defaults of before have left: those of the others serve"
                );
                present.serving = Some(Served::of(&files, &text));
                self.app.serve_model(text);
            }
            // They were read when they came.
            Err(reason) => warn!(reason, "a model's text files cannot be read a second time"),
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

/// Tells two models' text files apart, for people.
fn digest(files: &ModelFiles) -> String {
    let ModelFiles {
        name,
        config,
        tokenizer,
        tokenizer_config,
        special_tokens_map,
        generation_config,
        chat_template,
        chat_templates_named,
        context_tokens_max,
    } = files;
    let mut sums = Vec::new();
    let mut add = |text: Option<&str>| {
        // One that is absent is not one that is empty.
        sums.push(u8::from(text.is_some()));
        let sum = cleave_transfer::checksum(text.unwrap_or_default().as_bytes());
        sums.extend(sum.to_le_bytes());
    };
    add(Some(name));
    add(Some(config));
    add(Some(tokenizer));
    add(tokenizer_config.as_deref());
    add(special_tokens_map.as_deref());
    add(generation_config.as_deref());
    add(chat_template.as_deref());
    for (name, template) in chat_templates_named {
        add(Some(name));
        add(Some(template));
    }
    sums.extend(context_tokens_max.unwrap_or_default().to_le_bytes());
    format!("{:016x}", cleave_transfer::checksum(&sums))
}

/// The workers that are connected, by the files that they brought.
#[derive(Default)]
struct Present {
    serving: Option<Served>,
    /// In the order in which they came.
    here: BTreeMap<Ticket, Arc<ModelFiles>>,
    tickets: u64,
}

impl Present {
    fn is_empty(&self) -> bool {
        self.here.is_empty()
    }

    /// Whether these files serve, or were read when another worker brought them.
    fn knows(&self, files: &ModelFiles) -> bool {
        let serving = self.serving.iter().map(|served| &served.files);
        serving
            .chain(self.here.values())
            .any(|known| **known == *files)
    }

    fn join(&mut self, files: &Arc<ModelFiles>) -> Ticket {
        // Equal files are kept once: a tokenizer may have tens of megabytes.
        let known = self.serving.iter().map(|served| &served.files);
        let known = known
            .chain(self.here.values())
            .find(|known| *known == files);
        let files = Arc::clone(known.unwrap_or(files));
        let ticket = Ticket(self.tickets);
        self.tickets += 1;
        self.here.insert(ticket, files);
        ticket
    }

    /// The files that serve from now on, if they change.
    fn leave(&mut self, ticket: Ticket) -> Option<Arc<ModelFiles>> {
        self.here.remove(&ticket);
        let serving = &self.serving.as_ref()?.files;
        if self.here.values().any(|files| files == serving) {
            return None;
        }
        self.here.values().next().cloned()
    }
}

/// The model that the HTTP face speaks for, and of it what all workers of a router must share: requests
/// become tokens before a worker is chosen. With another tokenizer the rest of the fleet would answer
/// nonsense, and a shorter context would cut everyone's requests.
struct Served {
    files: Arc<ModelFiles>,
    vocabulary_count: u32,
    context_tokens_max: u32,
}

impl Served {
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
            |what, known, other| Err(format!("its {what} is {known}, the worker's {other}"));
        if self.vocabulary_count != other.vocabulary_count {
            return differ("vocabulary", self.vocabulary_count, other.vocabulary_count);
        }
        if self.files.tokenizer != other.files.tokenizer {
            return Err(format!(
                "its tokenizer.json (files {}) differs from the worker's (files {})",
                digest(&self.files),
                digest(&other.files)
            ));
        }
        if self.context_tokens_max != other.context_tokens_max {
            return differ("context", self.context_tokens_max, other.context_tokens_max);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_of_the_same_name_changed_everyones_tokens() {
        let with = |tokenizer: &str, vocabulary_count, context_tokens_max| Served {
            files: Arc::new(ModelFiles {
                tokenizer: tokenizer.into(),
                ..ModelFiles::default()
            }),
            vocabulary_count,
            context_tokens_max,
        };
        let known = with("{}", 400, 1024);
        assert_eq!(known.check(&with("{}", 400, 1024)), Ok(()));
        assert_eq!(
            known.check(&with("{}", 400, 64)),
            Err("its context is 1024, the worker's 64".into())
        );
        let other = known.check(&with("{} ", 400, 64));
        assert!(other.unwrap_err().contains("tokenizer.json"));
        let other = known.check(&with("{} ", 500, 64));
        assert!(other.unwrap_err().contains("400"));
    }

    fn files(template: &str) -> Arc<ModelFiles> {
        Arc::new(ModelFiles {
            chat_template: Some(template.into()),
            ..ModelFiles::default()
        })
    }

    /// As `accept` leaves it, with files that were read.
    fn join(present: &mut Present, template: &str) -> Ticket {
        let files = files(template);
        if present.is_empty() && !present.knows(&files) {
            present.serving = Some(Served {
                files: Arc::clone(&files),
                vocabulary_count: 1,
                context_tokens_max: 1,
            });
        }
        present.join(&files)
    }

    #[test]
    fn the_first_workers_files_serve_until_the_last_has_left() {
        let mut present = Present::default();
        let old = [join(&mut present, "old"), join(&mut present, "old")];
        let new = join(&mut present, "new");
        assert_eq!(present.leave(old[0]), None);
        let newer = join(&mut present, "newer");
        let again = join(&mut present, "old");
        assert_eq!(present.leave(old[1]), None, "one of the old came back");
        let next = present.leave(again).unwrap();
        assert_eq!(*next, *files("new"), "the one that came first");
        present.serving.as_mut().unwrap().files = next;
        assert_eq!(present.leave(newer), None);
        // Nobody is left: what serves stays, until somebody comes.
        assert_eq!(present.leave(new), None);
        assert_eq!(present.serving.as_ref().unwrap().files, files("new"));
        join(&mut present, "newest");
        assert_eq!(present.serving.as_ref().unwrap().files, files("newest"));
    }

    #[test]
    fn equal_files_of_two_workers_are_kept_once() {
        let mut present = Present::default();
        join(&mut present, "t");
        join(&mut present, "t");
        let mut kept = present.here.values();
        assert!(Arc::ptr_eq(kept.next().unwrap(), kept.next().unwrap()));
    }

    #[test]
    fn a_digest_tells_any_two_files_apart() {
        let absent = digest(&ModelFiles::default());
        assert_eq!(absent.len(), 16);
        assert_ne!(absent, digest(&files("")), "empty is not absent");
        assert_ne!(digest(&files("a")), digest(&files("b")));
    }
}
