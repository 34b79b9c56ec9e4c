//! `cleave metrics`: the page that documents every metric.

use anyhow::Context;
use std::io::Write;

pub(crate) fn print() -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(cleave_telemetry::metrics_page().as_bytes());
    written.context("cannot write the page")
}
