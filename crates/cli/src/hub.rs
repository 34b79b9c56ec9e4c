//! `cleave pull`, `cleave list` and `cleave rm`: models of a hub, in the cache of this machine.

use crate::args::{ListArgs, PullArgs, RmArgs};
use crate::model_location::PullScreen;
use cleave_hub::{CachedSnapshot, CutDownload, Hub, HubCache, HubSettings};
use serde_json::{Value, json};
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// Digits of a commit that a person reads.
const COMMIT_DIGITS: usize = 12;

/// Downloads a model, and prints the folder of its snapshot.
pub(crate) fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let hub = Hub::new(HubSettings::of_process());
    if args.if_absent
        && let Some(folder) = hub.cache().find(&args.model)
    {
        eprintln!("{}: in the cache", args.model);
        writeln!(std::io::stdout(), "{}", folder.display())?;
        return Ok(());
    }
    let mut screen = PullScreen::new(&args.model);
    let pulled = hub.pull(&args.model, &mut screen)?;
    drop(screen);
    let size = size_text(pulled.bytes);
    eprintln!("{}: commit {}, {size}", args.model, pulled.commit);
    writeln!(std::io::stdout(), "{}", pulled.folder.display())?;
    Ok(())
}

/// Lists the snapshots of the cache, and the downloads that ended early.
pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    let snapshots = cache().list()?;
    let cut = cache().cut_downloads()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let snapshots = snapshots.iter().map(snapshot_json);
        let entries: Vec<Value> = snapshots.chain(cut.iter().map(cut_json)).collect();
        writeln!(out, "{:#}", Value::from(entries))?;
    } else {
        write!(out, "{}", table_text(&snapshots, &cut, SystemTime::now()))?;
    }
    Ok(())
}

/// Removes a model or a revision, and prints how much space that freed.
pub(crate) fn rm(args: &RmArgs) -> anyhow::Result<()> {
    let freed = cache().remove(&args.model)?;
    let size = size_text(freed.bytes);
    let count = freed.snapshots_count;
    writeln!(
        std::io::stdout(),
        "{}: {size} freed (snapshots: {count})",
        args.model
    )?;
    Ok(())
}

fn cache() -> HubCache {
    HubCache::new(HubSettings::of_process().cache)
}

fn snapshot_json(snapshot: &CachedSnapshot) -> Value {
    json!({
        "name": snapshot.name.to_string(),
        "revisions": snapshot.revisions,
        "commit": snapshot.commit,
        "bytes": snapshot.bytes,
        "used_unix_seconds": unix_seconds(snapshot.used),
        "complete": snapshot.is_complete,
        "folder": snapshot.folder,
    })
}

fn cut_json(cut: &CutDownload) -> Value {
    json!({
        "name": cut.name.to_string(),
        "revisions": [],
        "commit": null,
        "bytes": cut.bytes,
        "used_unix_seconds": unix_seconds(cut.written),
        "complete": false,
        "folder": cut.folder,
    })
}

fn unix_seconds(time: Option<SystemTime>) -> Option<u64> {
    let since = time?.duration_since(UNIX_EPOCH).ok()?;
    Some(since.as_secs())
}

fn table_text(snapshots: &[CachedSnapshot], cut: &[CutDownload], now: SystemTime) -> String {
    let names = snapshots.iter().map(|snapshot| &snapshot.name);
    let names = names.chain(cut.iter().map(|cut| &cut.name));
    let names = names.map(|name| name.to_string().len());
    let name_width = names.max().unwrap_or(0).max("NAME".len());
    let mut text = format!(
        "{:<name_width$}  {:<16}  {:<COMMIT_DIGITS$}  {:>10}  LAST USE\n",
        "NAME", "REVISION", "COMMIT", "SIZE"
    );
    for snapshot in snapshots {
        let revisions = match snapshot.revisions.as_slice() {
            [] => "-".to_owned(),
            some => some.join(","),
        };
        let commit: String = snapshot.commit.chars().take(COMMIT_DIGITS).collect();
        text.push_str(&format!(
            "{:<name_width$}  {revisions:<16}  {commit}  {:>10}  {}{}\n",
            snapshot.name.to_string(),
            size_text(snapshot.bytes),
            age_text(snapshot.used, now),
            if snapshot.is_complete {
                ""
            } else {
                ", incomplete"
            },
        ));
    }
    for cut in cut {
        text.push_str(&format!(
            "{:<name_width$}  {:<16}  {:<COMMIT_DIGITS$}  {:>10}  {}, part of a download: \
             `cleave pull` goes on with it\n",
            cut.name.to_string(),
            "-",
            "-",
            size_text(cut.bytes),
            age_text(cut.written, now),
        ));
    }
    text
}

/// A size with a unit of 1024.
fn size_text(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", units[unit])
}

/// The time since then; `-` if it is not known.
fn age_text(then: Option<SystemTime>, now: SystemTime) -> String {
    let Some(age) = then.and_then(|then| now.duration_since(then).ok()) else {
        return "-".to_owned();
    };
    let minutes = age.as_secs() / 60;
    match minutes {
        0 => "now".to_owned(),
        1..=119 => format!("{minutes} min ago"),
        120..=2879 => format!("{} h ago", minutes / 60),
        _ => format!("{} days ago", minutes / 60 / 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn sizes_and_ages_have_one_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1536, "1.5 KiB"),
            (16_384 << 20, "16.0 GiB"),
            (5_000 << 40, "5000.0 TiB"),
        ] {
            assert_eq!(size_text(bytes), text);
        }
        for (seconds, text) in [
            (59, "now"),
            (60, "1 min ago"),
            (7200, "2 h ago"),
            (864_000, "10 days ago"),
        ] {
            let now = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(age_text(Some(UNIX_EPOCH), now), text);
        }
    }

    #[test]
    fn the_table_has_a_line_for_each_snapshot_and_cut_download() {
        let snapshot = CachedSnapshot {
            name: "org/a-long-name".parse().unwrap(),
            commit: "0123456789abcdef0123456789abcdef01234567".to_owned(),
            revisions: vec!["main".to_owned(), "v1".to_owned()],
            folder: "/c".into(),
            bytes: 3 << 20,
            used: Some(UNIX_EPOCH),
            is_complete: false,
        };
        let now = UNIX_EPOCH + Duration::from_secs(600);
        let cut = CutDownload {
            name: "org/cut".parse().unwrap(),
            folder: "/c".into(),
            bytes: 512,
            written: None,
        };
        let text = table_text(&[snapshot], &[cut], now);
        assert_eq!(
            text,
            "NAME             REVISION          COMMIT              SIZE  LAST USE\n\
             org/a-long-name  main,v1           0123456789ab     3.0 MiB  10 min ago, incomplete\n\
             org/cut          -                 -                  512 B  -, part of a download: \
             `cleave pull` goes on with it\n"
        );
    }
}
