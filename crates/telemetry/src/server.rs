//! Series of a process's listeners.

use crate::series_table::{series_table, zeros};
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

series_table! {
    /// The listeners of this process, together.
    pub struct ServerSeries;

    pub open: Gauge, "cleave_connections",
        "Open connections of clients and workers";
    ended: Family<ConnectionEndLabels, Counter>
        = zeros(REASONS.map(|reason| ConnectionEndLabels { reason })),
        "cleave_connections_let_go",
        "Connections closed by the server, by reason: full (at the limit on connections), idle, no_peer (no \
         certificate of this fleet), slow_headers, stalled (the client read nothing)";
}

impl ServerSeries {
    /// The server closed a connection, for one of the reasons in the help.
    pub fn connection_ended(&self, reason: &'static str) {
        self.ended
            .get_or_create(&ConnectionEndLabels { reason })
            .inc();
    }
}
