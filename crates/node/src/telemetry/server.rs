//! Series of a process's listeners.

use cleave_api::Book;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// Why a connection was let go before its client left it.
const REASONS: [&str; 5] = ["full", "idle", "no_peer", "slow_headers", "stalled"];

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LetGo {
    reason: &'static str,
}

/// The listeners of this process, together.
#[derive(Clone, Debug)]
pub(crate) struct ServerSeries {
    pub(crate) open: Gauge,
    let_go: Family<LetGo, Counter>,
}

impl ServerSeries {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            open: Gauge::default(),
            let_go: Family::default(),
        };
        book.register(
            "cleave_connections",
            "Connections of clients and workers that stand",
            series.open.clone(),
        );
        book.register(
            "cleave_connections_let_go",
            "Connections that the server ended, by reason: full (as many as may be), idle, no_peer (no \
             certificate of the fleet), slow_headers, stalled (the client took nothing)",
            series.let_go.clone(),
        );
        for reason in REASONS {
            drop(series.let_go.get_or_create(&LetGo { reason }));
        }
        series
    }

    /// A connection was ended for this reason, one of those that the help names.
    pub(crate) fn let_go(&self, reason: &'static str) {
        self.let_go.get_or_create(&LetGo { reason }).inc();
    }
}
