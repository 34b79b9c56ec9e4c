//! A model or an adapter as a user names it: a folder here, or a model of a hub.
//!
//! Owns: the choice between the two, and the progress of a download. Never: asks the hub for a
//! model that the cache has whole.

use crate::args::ModelArgs;
use crate::demo;
use anyhow::{Context, anyhow};
use cleave_hub::{Hub, HubModel, HubSettings, PullCounts, PullObserver};
use indicatif::ProgressBar;
use std::fmt;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tracing::info;

/// Time between two lines of progress where no terminal shows a bar.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The name of a model, and its folder once that was needed.
#[derive(Clone, Debug)]
pub(crate) struct ModelLocation {
    given: String,
    /// The folder, found once: a download takes minutes, and a branch of a hub may move meanwhile.
    folder: OnceLock<PathBuf>,
}

/// A name with the kind of thing that it names.
#[derive(Debug, PartialEq, Eq)]
enum ModelReference {
    Folder(PathBuf),
    /// The checkpoint in the binary.
    Bundled,
    Hub(HubModel),
    /// Neither a path that exists, nor a hub's name: the reason of the latter.
    Nothing(String),
}

impl ModelReference {
    /// Decides by whether the name is a path that exists.
    fn of(given: &str, exists: bool) -> Self {
        match given.parse() {
            _ if exists => Self::Folder(given.into()),
            _ if given == demo::NAME => Self::Bundled,
            Ok(model) => Self::Hub(model),
            Err(reason) => Self::Nothing(reason),
        }
    }
}

impl ModelLocation {
    fn named(&self) -> ModelReference {
        ModelReference::of(&self.given, Path::new(&self.given).exists())
    }

    /// Returns the folder; downloads the model first if it is a hub's and not in the cache.
    ///
    /// # Errors
    /// One that says why it is neither a folder nor a model of the hub.
    pub(crate) fn folder(&self) -> anyhow::Result<&Path> {
        if let Some(folder) = self.folder.get() {
            return Ok(folder);
        }
        let given = &self.given;
        let found = match self.named() {
            ModelReference::Folder(folder) => folder,
            ModelReference::Bundled => demo::folder().context(given.clone())?,
            ModelReference::Hub(model) => {
                let hub = Hub::new(HubSettings::of_process());
                let folder = hub.folder(&model, &mut PullScreen::new(&model));
                let folder = folder.with_context(|| {
                    format!("{given}: no folder of this path, so that it was looked for on the hub")
                })?;
                info!(model = %model, folder = %folder.display(), "the model is in the cache");
                folder
            }
            ModelReference::Nothing(reason) => {
                return Err(anyhow!(
                    "{given}: no such folder, and no model of a hub: {reason}"
                ));
            }
        };
        Ok(self.folder.get_or_init(|| found))
    }

    /// Returns the name under which a hub's model is served, as in vLLM; a folder has its own.
    pub(crate) fn hub_name(&self) -> Option<String> {
        match self.named() {
            ModelReference::Hub(model) => Some(model.name.to_string()),
            ModelReference::Folder(_) | ModelReference::Bundled | ModelReference::Nothing(_) => {
                None
            }
        }
    }
}

impl ModelArgs {
    /// Returns the folder of the model, which may be downloaded first; the bundled one has none.
    ///
    /// # Errors
    /// If it is neither a folder nor a model of the hub.
    pub(crate) fn folder(&self) -> anyhow::Result<Option<&Path>> {
        let given = self.name.model.as_ref();
        let given = given.filter(|location| location.named() != ModelReference::Bundled);
        given.map(ModelLocation::folder).transpose()
    }

    /// Returns the name under which the model is served, unless its folder has it.
    pub(crate) fn given_name(&self) -> Option<String> {
        let first = self.name.served_model_name.first().cloned();
        first.or_else(|| self.name.model.as_ref()?.hub_name())
    }
}

impl FromStr for ModelLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("an empty name is neither a folder nor a hub's model".to_owned());
        }
        Ok(Self {
            given: text.to_owned(),
            folder: OnceLock::new(),
        })
    }
}

impl fmt::Display for ModelLocation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.given)
    }
}

/// The progress of a download: a bar on a terminal, and otherwise a line every few seconds.
pub(crate) struct PullScreen {
    model: String,
    /// Absent until the first byte, so that a download of nothing shows nothing.
    bar: Option<ProgressBar>,
    line_due: Option<Instant>,
}

impl PullScreen {
    pub(crate) fn new(model: &HubModel) -> Self {
        Self {
            model: model.to_string(),
            bar: None,
            line_due: None,
        }
    }
}

impl PullObserver for PullScreen {
    fn show(&mut self, counts: PullCounts) {
        let PullCounts {
            bytes_done,
            bytes_total,
            retries,
            files_awaited,
        } = counts;
        if bytes_total == 0 {
            return;
        }
        let note = match (files_awaited, retries) {
            (0, 0) => String::new(),
            (0, retries) => format!(", {retries} connections tried again"),
            (files, _) => format!(", {files} files awaited from another process"),
        };
        if std::io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(crate::model::loading_bar);
            bar.set_message(format!("{}{note}", self.model));
            bar.set_length(bytes_total);
            bar.set_position(bytes_done);
            return;
        }
        let now = Instant::now();
        let due = *self.line_due.get_or_insert(now + LINE_EVERY);
        if now >= due {
            self.line_due = Some(now + LINE_EVERY);
            let (done_mib, total_mib) = (bytes_done >> 20, bytes_total >> 20);
            let note = note.trim_start_matches(", ");
            info!(model = %self.model, done_mib, total_mib, note, "downloading a model");
        }
    }
}

impl Drop for PullScreen {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_exists_is_the_path() {
        let hub = ModelReference::Hub("org/name".parse().unwrap());
        assert_eq!(ModelReference::of("org/name", false), hub);
        let folder = |path: &str| ModelReference::Folder(path.into());
        assert_eq!(ModelReference::of("org/name", true), folder("org/name"));
        assert_eq!(ModelReference::of("/models/m", true), folder("/models/m"));
        let bundled = ModelReference::of("cleave-demo", false);
        assert_eq!(bundled, ModelReference::Bundled);
        for nothing in ["/models/m", "./m", "m", "a/b/c", "../a"] {
            let named = ModelReference::of(nothing, false);
            assert!(matches!(named, ModelReference::Nothing(_)), "{nothing}");
        }
    }

    #[test]
    fn an_error_names_both_kinds_of_name() {
        let location: ModelLocation = "/no/such/folder".parse().unwrap();
        let error = location.folder().unwrap_err().to_string();
        assert!(error.contains("no such folder"), "{error}");
        assert!(error.contains("org/name"), "{error}");
    }
}
