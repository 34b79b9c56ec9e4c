//! Series of a process's listeners.

use cleave_api::MetricRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

/// The reasons for which the server closes a connection.
const REASONS: [&str; 5] = ["full", "idle", "no_peer", "slow_headers", "stalled"];

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectionEndLabels {
    reason: &'static str,
}

/// The listeners of this process, together.
#[derive(Clone, Debug)]
pub struct ServerSeries {
    pub open: Gauge,
    ended: Family<ConnectionEndLabels, Counter>,
}

impl ServerSeries {
    pub(super) fn register(registry: &mut MetricRegistry) -> Self {
        let series = Self {
            open: Gauge::default(),
            ended: Family::default(),
        };
        registry.register(
            "cleave_connections",
            "Open connections of clients and workers",
            series.open.clone(),
        );
        registry.register(
            "cleave_connections_let_go",
            "Connections closed by the server, by reason: full (at the limit on connections), idle, no_peer (no \
             certificate of this fleet), slow_headers, stalled (the client read nothing)",
            series.ended.clone(),
        );
        for reason in REASONS {
            drop(series.ended.get_or_create(&ConnectionEndLabels { reason }));
        }
        series
    }

    /// The server closed a connection, for one of the reasons in the help.
    pub fn connection_ended(&self, reason: &'static str) {
        self.ended
            .get_or_create(&ConnectionEndLabels { reason })
            .inc();
    }
}
