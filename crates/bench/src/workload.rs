//! What is asked for: a trace, or a mixture of synthetic classes.
//!
//! Owns: the text of a workload and its classes. Never: knows times (see `schedule`).
//! Invariant: a workload has at least one class, and each request belongs to one.

use crate::lengths::Lengths;
use crate::number::{non_negative, pair, positive, whole};
use crate::trace::{self, Row, ServeGen, Trace};
use anyhow::{Context, bail, ensure};
use std::path::Path;
use std::str::FromStr;

/// The class of a workload that has one, unless it is given a name. It is told to no server.
pub(crate) const ONE_CLASS: &str = "default";
const CLASSES_MAX: usize = 64;

/// What is asked of a server, without times.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Names of the classes.
    pub(crate) classes: Vec<String>,
    pub(crate) source: Source,
}

/// Where requests come from.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Drawn, class by class.
    Classes(Vec<Class>),
    /// One after the other, with their own times.
    Timed(Vec<Row>),
    /// Drawn with their times.
    ServeGen(ServeGen),
}

/// A synthetic class.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Class {
    /// Of all requests; shares need not sum to 1.
    pub(crate) share: f64,
    pub(crate) lengths: Lengths,
    /// Beginning that its prompts share, if any.
    pub(crate) prefix: Option<SharedPrefix>,
}

/// A beginning that several prompts of a class have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SharedPrefix {
    /// Of each prompt, before what is its own.
    pub(crate) tokens: u32,
    /// Different ones, each as likely.
    pub(crate) count: u32,
}

/// The four quadrants: (name, mean prompt, mean answer), in tokens.
const QUADRANTS: [(&str, f64, f64); 4] = [
    ("short-short", 128.0, 32.0),
    ("short-long", 128.0, 256.0),
    ("long-short", 2048.0, 32.0),
    ("long-long", 2048.0, 256.0),
];
/// Lengths of a quadrant vary this much unless told otherwise.
const CV: f64 = 0.5;

impl Workload {
    /// Reads a trace of any known format: Mooncake, Azure, ServeGen, LLMServingSim, pairs or
    /// histograms of lengths. `dataset` chooses one in a file of several.
    ///
    /// # Errors
    /// The file, the line and what is wrong there.
    pub fn from_trace(path: &Path, dataset: Option<&str>) -> anyhow::Result<Self> {
        let source = match trace::read(path, dataset)? {
            Trace::Timed(rows) => Source::Timed(rows),
            Trace::ServeGen(clients) => Source::ServeGen(clients),
            Trace::Lengths(lengths) => Source::Classes(vec![Class {
                share: 1.0,
                lengths,
                prefix: None,
            }]),
        };
        Ok(Self {
            classes: vec![ONE_CLASS.to_owned()],
            source,
        })
    }

    /// Gives its one class a name; a mixture's classes have theirs already.
    ///
    /// # Errors
    /// There are several classes, or it is no name.
    pub fn named(mut self, name: &str) -> anyhow::Result<Self> {
        ensure!(
            self.classes.len() == 1,
            "a mixture's classes have their names: {}",
            self.classes.join(", ")
        );
        check_name(name)?;
        name.clone_into(&mut self.classes[0]);
        Ok(self)
    }

    /// The classes' names; `default` where there is one without a name.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Requests in the trace, where it has its own.
    pub fn rows_count(&self) -> Option<usize> {
        match &self.source {
            Source::Timed(rows) => Some(rows.len()),
            Source::Classes(_) | Source::ServeGen(_) => None,
        }
    }
}

/// `short-long`, `short-long:input=128,output=512,cv=1.5`, or several with names and shares:
/// `chat=0.7*short-long,batch=0.3*long-short:input=4096`. Line breaks count as blanks.
impl FromStr for Workload {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut groups: Vec<Vec<&str>> = Vec::new();
        for item in text.split(',').map(str::trim) {
            match groups.last_mut() {
                Some(group) if !item.contains('*') => group.push(item),
                _ => groups.push(vec![item]),
            }
        }
        ensure!(groups.len() <= CLASSES_MAX, "at most {CLASSES_MAX} classes");
        let (mut classes, mut sources) = (Vec::new(), Vec::new());
        for group in groups {
            let named = class(&group).with_context(|| format!("workload `{}`", group.join(",")))?;
            let (name, class) = named;
            ensure!(!classes.contains(&name), "class `{name}` is there twice");
            classes.push(name);
            sources.push(class);
        }
        let source = Source::Classes(sources);
        Ok(Self { classes, source })
    }
}

/// Name and class of `name=share*quadrant:key=value`, `key=value` …
fn class(items: &[&str]) -> anyhow::Result<(String, Class)> {
    let head = items.first().copied().unwrap_or_default();
    let (name, share, rest) = match head.split_once('*') {
        None => (ONE_CLASS, 1.0, head),
        Some((head, rest)) => {
            let (name, share) = pair(head).context("before `*`")?;
            (name, positive(share).context("share")?, rest.trim())
        }
    };
    check_name(name)?;
    let (quadrant, first) = rest.split_once(':').unwrap_or((rest, ""));
    let known = QUADRANTS.iter().find(|known| known.0 == quadrant.trim());
    let Some(&(_, mut input, mut output)) = known else {
        let names = QUADRANTS.map(|known| known.0).join(", ");
        bail!("unknown workload `{}`; there are {names}", quadrant.trim());
    };
    let (mut cv, mut tokens, mut count) = (CV, None, 1);
    let given = std::iter::once(&first).chain(&items[1..]);
    for item in given.filter(|item| !item.is_empty()) {
        let (key, value) = pair(item)?;
        let place = || format!("`{key}`");
        match key {
            "input" => input = f64::from(whole::<u32>(value).with_context(place)?),
            "output" => output = f64::from(whole::<u32>(value).with_context(place)?),
            "cv" => cv = non_negative(value).with_context(place)?,
            "prefix" => tokens = Some(whole::<u32>(value).with_context(place)?),
            "prefixes" => count = whole::<u32>(value).with_context(place)?,
            other => bail!(
                "unknown `{other}`; there are input, output (tokens), cv, prefix (tokens), prefixes"
            ),
        }
    }
    ensure!(cv <= 10.0, "`cv` above 10 is none that anybody measured");
    let class = Class {
        share,
        lengths: Lengths::LogNormal { input, output, cv },
        prefix: tokens.map(|tokens| SharedPrefix { tokens, count }),
    };
    Ok((name.to_owned(), class))
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    ensure!(
        !name.is_empty() && name.len() <= 64 && name.bytes().all(sound),
        "a class is named by 1 to 64 letters, digits, `-`, `_` or `.`, not `{name}`"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(text: &str) -> Vec<(String, Class)> {
        let workload: Workload = text.parse().unwrap();
        let Source::Classes(classes) = workload.source else {
            panic!("synthetic");
        };
        workload.classes.into_iter().zip(classes).collect()
    }

    fn log_normal(input: f64, output: f64, cv: f64) -> Lengths {
        Lengths::LogNormal { input, output, cv }
    }

    #[test]
    fn a_workload_is_what_it_says() {
        let [(name, one)] = &classes("short-long:input=128,output=512,cv=1.5")[..] else {
            panic!("one class");
        };
        assert_eq!(name, "default");
        assert_eq!(one.lengths, log_normal(128.0, 512.0, 1.5));
        let two =
            classes("chat=0.7*short-long:prefix=64,prefixes=10,\n  batch=0.3*long-short:cv=0");
        assert_eq!((two[0].0.as_str(), two[0].1.share), ("chat", 0.7));
        let prefix = SharedPrefix {
            tokens: 64,
            count: 10,
        };
        assert_eq!(two[0].1.prefix, Some(prefix));
        assert_eq!((two[1].0.as_str(), two[1].1.share), ("batch", 0.3));
        assert_eq!(two[1].1.lengths, log_normal(2048.0, 32.0, 0.0));
    }

    #[test]
    fn what_is_not_a_workload_is_said_to_be_none() {
        for (bad, says) in [
            ("", "unknown workload"),
            ("short", "short-short"),
            ("short-long:inputs=3", "unknown `inputs`"),
            ("short-long:input=0", "input"),
            ("short-long:cv=-1", "cv"),
            ("a=1*short-long,a=1*long-short", "twice"),
            ("a=0*short-long", "share"),
            ("a b=1*short-long", "named"),
        ] {
            let said = format!("{:#}", bad.parse::<Workload>().unwrap_err());
            assert!(said.contains(says), "{bad}: {said}");
        }
        let one: Workload = "short-long".parse().unwrap();
        assert_eq!(one.named("chat").unwrap().classes(), ["chat"]);
        let two: Workload = "a=1*short-long,b=1*long-short".parse().unwrap();
        assert!(two.named("chat").is_err());
    }
}
