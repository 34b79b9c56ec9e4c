//! Markdown pages: their links, anchors, code blocks and code spans.
//!
//! Owns: as much of Markdown as the pages use. Never: reads another page than its own.

use crate::root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// A page of the repository.
pub(crate) struct MarkdownPage {
    pub(crate) path: PathBuf,
    text: String,
}

/// The file that a link leads to, and its heading.
pub(crate) struct LinkTarget {
    pub(crate) path: PathBuf,
    pub(crate) anchor: Option<String>,
}

/// A line of a page, with the language of its code block, if any.
struct MarkdownLine<'a> {
    text: &'a str,
    block: Option<&'a str>,
}

/// Every Markdown page of the repository, by path.
pub(crate) fn pages() -> Vec<MarkdownPage> {
    let mut paths = Vec::new();
    collect(&root(), &mut paths);
    paths.sort();
    let read = |path: PathBuf| MarkdownPage {
        text: fs::read_to_string(&path).expect("readable page"),
        path,
    };
    paths.into_iter().map(read).collect()
}

fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).expect("readable folder");
    for path in entries.map(|entry| entry.expect("readable folder").path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let skipped = name.starts_with('.') || matches!(&*name, "target" | "node_modules");
        if path.is_dir() && !skipped {
            collect(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            paths.push(path);
        }
    }
}

/// A path from the root of the repository.
pub(crate) fn relative(path: &Path) -> String {
    let inside = path.strip_prefix(root()).unwrap_or(path);
    inside.display().to_string()
}

impl MarkdownPage {
    pub(crate) fn name(&self) -> String {
        relative(&self.path)
    }

    fn lines(&self) -> impl Iterator<Item = MarkdownLine<'_>> {
        let mut block = None;
        self.text.lines().filter_map(move |text| {
            let fence = text.trim_start().strip_prefix("```");
            match (fence, block) {
                (Some(language), None) => {
                    block = Some(language);
                    None
                }
                (Some(_), Some(_)) => {
                    block = None;
                    None
                }
                (None, _) => Some(MarkdownLine { text, block }),
            }
        })
    }

    fn prose(&self) -> impl Iterator<Item = &str> {
        self.lines()
            .filter(|line| line.block.is_none())
            .map(|line| line.text)
    }

    /// Links to files of the repository, as they are written.
    pub(crate) fn links(&self) -> Vec<String> {
        let mut links = Vec::new();
        for line in self.prose() {
            let line = without_code(line);
            for (start, end) in [
                ("](", ')'),
                ("src=\"", '"'),
                ("srcset=\"", '"'),
                ("href=\"", '"'),
            ] {
                let ends = line.split(start).skip(1);
                links.extend(ends.filter_map(|rest| rest.split(end).next().map(str::to_owned)));
            }
        }
        links.retain(|link| !link.contains("://") && !link.starts_with("mailto:"));
        links
    }

    pub(crate) fn target(&self, link: &str) -> LinkTarget {
        let (path, anchor) = match link.split_once('#') {
            Some((path, anchor)) => (path, Some(anchor.to_owned())),
            None => (link, None),
        };
        let folder = self.path.parent().expect("a page is in a folder");
        let path = if path.is_empty() {
            self.path.clone()
        } else {
            plain(&folder.join(path))
        };
        LinkTarget { path, anchor }
    }

    /// Pages that a link of this one opens; a folder opens its README.
    pub(crate) fn pages(&self) -> Vec<PathBuf> {
        let open = |link: String| {
            let path = self.target(&link).path;
            if path.is_dir() {
                path.join("README.md")
            } else {
                path
            }
        };
        self.links().into_iter().map(open).collect()
    }

    /// The anchors of its headings, as GitHub makes them.
    pub(crate) fn anchors(&self) -> BTreeSet<String> {
        let mut counts = BTreeMap::<String, usize>::new();
        let mut anchors = BTreeSet::new();
        for line in self.prose() {
            let Some(heading) = line.strip_prefix('#') else {
                continue;
            };
            let heading = heading.trim_start_matches('#');
            if !heading.starts_with(' ') {
                continue;
            }
            let slug = slug(heading.trim());
            let count = counts.entry(slug.clone()).or_default();
            anchors.insert(if *count == 0 {
                slug
            } else {
                format!("{slug}-{count}")
            });
            *count += 1;
        }
        anchors
    }

    /// Texts in code font outside blocks. A span may continue on the next line.
    pub(crate) fn code_spans(&self) -> Vec<String> {
        let mut paragraphs = vec![String::new()];
        for line in self.prose() {
            let ends = line.trim().is_empty() || line.starts_with(['#', '|']);
            match paragraphs.last_mut() {
                Some(last) if !ends => {
                    last.push(' ');
                    last.push_str(line.trim());
                }
                _ => paragraphs.extend([line.to_owned(), String::new()]),
            }
        }
        let spans = |text: &String| -> Vec<String> {
            let parts = text.split('`').skip(1).step_by(2);
            parts.map(str::to_owned).collect()
        };
        paragraphs.iter().flat_map(spans).collect()
    }

    /// Lines of `sh` blocks, with continuations joined, and code spans that call `cleave`.
    pub(crate) fn command_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        let mut open = String::new();
        for line in self.lines().filter(|line| line.block == Some("sh")) {
            if let Some(begun) = line.text.strip_suffix('\\') {
                open.push_str(begun);
            } else {
                lines.push(std::mem::take(&mut open) + line.text);
            }
        }
        let spans = self.code_spans().into_iter();
        lines.extend(spans.filter(|span| span.starts_with("cleave ")));
        lines
    }
}

fn without_code(line: &str) -> String {
    let parts = line.split('`').step_by(2);
    parts.collect::<Vec<_>>().join(" ")
}

/// Resolves `.` and `..` in a path.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

fn slug(heading: &str) -> String {
    let letters = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    let dashed = letters.map(|c| if c == ' ' { '-' } else { c });
    dashed.flat_map(char::to_lowercase).collect()
}
