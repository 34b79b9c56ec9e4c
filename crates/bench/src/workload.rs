//! Workloads: a trace, or a mixture of synthetic classes.
//!
//! Owns: the text of a workload and its classes. Never: knows times (see `schedule`). Invariant: a
//! workload has at least one class, and each request belongs to one.

use crate::lengths::LengthDistribution;
use crate::number::{parse_count, parse_non_negative, parse_positive, split_key_value};
use crate::trace::{self, ServeGenClients, TraceContent, TraceRow};
use anyhow::{Context, bail, ensure};
use std::path::Path;
use std::str::FromStr;

/// The name of a workload's only class, unless it is given another. It is sent to no server.
pub(crate) const ONE_CLASS: &str = "default";
const CLASSES_MAX: usize = 64;

/// The requests of a measurement, without times.
#[derive(Clone, Debug)]
pub struct BenchWorkload {
    /// Names of the classes.
    pub(crate) classes: Vec<String>,
    pub(crate) source: RequestSource,
}

/// The source of requests.
#[derive(Clone, Debug)]
pub(crate) enum RequestSource {
    /// Requests drawn from classes.
    Classes(Vec<WorkloadClass>),
    /// Requests of a trace with their own times.
    Timed(Vec<TraceRow>),
    /// Requests drawn from clients, with their times.
    ServeGen(ServeGenClients),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkloadClass {
    /// Share of all requests; shares need not sum to 1.
    pub(crate) share: f64,
    pub(crate) lengths: LengthDistribution,
    /// The prefix that its prompts share, if any.
    pub(crate) prefix: Option<SharedPrefix>,
}

/// A prefix that several prompts of a class share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SharedPrefix {
    /// Tokens of the prefix, before each prompt's own.
    pub(crate) tokens: u32,
    /// Number of different prefixes, drawn evenly.
    pub(crate) count: u32,
}

/// The four quadrants: (name, mean prompt, mean answer), in tokens.
const QUADRANTS: [(&str, f64, f64); 4] = [
    ("short-short", 128.0, 32.0),
    ("short-long", 128.0, 256.0),
    ("long-short", 2048.0, 32.0),
    ("long-long", 2048.0, 256.0),
];
/// Default coefficient of variation of a quadrant's lengths.
const CV_DEFAULT: f64 = 0.5;

impl BenchWorkload {
    /// Reads a trace of any known format: Mooncake, Azure, ServeGen, LLMServingSim, pairs or
    /// histograms of lengths. `dataset` chooses one of several in a file.
    ///
    /// # Errors
    /// The file, the line and the mistake there.
    pub fn from_trace(path: &Path, dataset: Option<&str>) -> anyhow::Result<Self> {
        let source = match trace::read(path, dataset)? {
            TraceContent::Timed(rows) => RequestSource::Timed(rows),
            TraceContent::ServeGen(clients) => RequestSource::ServeGen(clients),
            TraceContent::Lengths(lengths) => RequestSource::Classes(vec![WorkloadClass {
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

    /// Names the only class; the classes of a mixture have names already.
    ///
    /// # Errors
    /// There are several classes, or the name is invalid.
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

    /// The classes' names; `default` for a single class without a name.
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// Number of requests of a trace with times.
    pub fn rows_count(&self) -> Option<usize> {
        match &self.source {
            RequestSource::Timed(rows) => Some(rows.len()),
            RequestSource::Classes(_) | RequestSource::ServeGen(_) => None,
        }
    }
}

/// Such as `short-long`, `short-long:input=128,output=512,cv=1.5`, or several with names and
/// shares: `chat=0.7*short-long,batch=0.3*long-short:input=4096`. Line breaks count as blanks.
impl FromStr for BenchWorkload {
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
            let named =
                parse_class(&group).with_context(|| format!("workload `{}`", group.join(",")))?;
            let (name, class) = named;
            ensure!(!classes.contains(&name), "class `{name}` is given twice");
            classes.push(name);
            sources.push(class);
        }
        let source = RequestSource::Classes(sources);
        Ok(Self { classes, source })
    }
}

/// Parses the name and class of `name=share*quadrant:key=value`, `key=value` …
fn parse_class(items: &[&str]) -> anyhow::Result<(String, WorkloadClass)> {
    let head = items.first().copied().unwrap_or_default();
    let (name, share, rest) = match head.split_once('*') {
        None => (ONE_CLASS, 1.0, head),
        Some((head, rest)) => {
            let (name, share) = split_key_value(head).context("before `*`")?;
            (name, parse_positive(share).context("share")?, rest.trim())
        }
    };
    check_name(name)?;
    let (quadrant, first) = rest.split_once(':').unwrap_or((rest, ""));
    let entry = QUADRANTS.iter().find(|entry| entry.0 == quadrant.trim());
    let Some(&(_, mut input, mut output)) = entry else {
        let names = QUADRANTS.map(|entry| entry.0).join(", ");
        bail!("unknown workload `{}`; there are {names}", quadrant.trim());
    };
    let (mut cv, mut tokens, mut count) = (CV_DEFAULT, None, 1);
    let given = std::iter::once(&first).chain(&items[1..]);
    for item in given.filter(|item| !item.is_empty()) {
        let (key, value) = split_key_value(item)?;
        let context = || format!("`{key}`");
        match key {
            "input" => input = f64::from(parse_count(value).with_context(context)?),
            "output" => output = f64::from(parse_count(value).with_context(context)?),
            "cv" => cv = parse_non_negative(value).with_context(context)?,
            "prefix" => tokens = Some(parse_count(value).with_context(context)?),
            "prefixes" => count = parse_count(value).with_context(context)?,
            other => bail!(
                "unknown `{other}`; there are input, output (tokens), cv, prefix (tokens), prefixes"
            ),
        }
    }
    ensure!(
        cv <= 10.0,
        "`cv` is above 10; no measured lengths vary that much"
    );
    let class = WorkloadClass {
        share,
        lengths: LengthDistribution::LogNormal { input, output, cv },
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

    fn classes(text: &str) -> Vec<(String, WorkloadClass)> {
        let workload: BenchWorkload = text.parse().unwrap();
        let RequestSource::Classes(classes) = workload.source else {
            panic!("synthetic");
        };
        workload.classes.into_iter().zip(classes).collect()
    }

    fn log_normal(input: f64, output: f64, cv: f64) -> LengthDistribution {
        LengthDistribution::LogNormal { input, output, cv }
    }

    #[test]
    fn workload_specs_are_parsed() {
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
    fn bad_workload_specs_name_the_mistake() {
        for (bad, expected) in [
            ("", "unknown workload"),
            ("short", "short-short"),
            ("short-long:inputs=3", "unknown `inputs`"),
            ("short-long:input=0", "input"),
            ("short-long:cv=-1", "cv"),
            ("a=1*short-long,a=1*long-short", "twice"),
            ("a=0*short-long", "share"),
            ("a b=1*short-long", "named"),
        ] {
            let message = format!("{:#}", bad.parse::<BenchWorkload>().unwrap_err());
            assert!(message.contains(expected), "{bad}: {message}");
        }
        let one: BenchWorkload = "short-long".parse().unwrap();
        assert_eq!(one.named("chat").unwrap().classes(), ["chat"]);
        let two: BenchWorkload = "a=1*short-long,b=1*long-short".parse().unwrap();
        assert!(two.named("chat").is_err());
    }
}
