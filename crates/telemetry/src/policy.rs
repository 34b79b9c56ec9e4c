//! Series of the policy in force, and of its reloads.
//!
//! Owns: these series. Never: reads a file. Invariant: one policy is shown at a time.

use crate::series_table::series_table;
use cleave_policy::{PolicyFile, PolicyReload};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadOutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PolicyDigestLabels {
    digest: String,
}

series_table! {
    pub struct PolicySeries;

    reloads: Family<ReloadOutcomeLabels, Counter>, "cleave_policy_reloads",
        "Reloads of the policy file: changed (the new policy is in force), same (the policy is \
         unchanged), rejected (it has mistakes), unreadable; after the last two the previous \
         policy stays in force";
    info: Family<PolicyDigestLabels, Gauge>, "cleave_policy_info",
        "1 for the policy file in force, with the digest of its content; no series without --policy";
}

impl PolicySeries {
    /// The policy that the router starts with.
    pub fn begin_with(&self, file: &PolicyFile) {
        for outcome in ["changed", "same", "rejected", "unreadable"] {
            drop(self.reloads.get_or_create(&ReloadOutcomeLabels { outcome }));
        }
        self.show(file.digest());
    }

    pub fn count(&self, reload: &PolicyReload) {
        let outcome = match reload {
            PolicyReload::Changed(_, digest) => {
                self.show(digest.clone());
                "changed"
            }
            PolicyReload::Same(digest) => {
                self.show(digest.clone());
                "same"
            }
            PolicyReload::Rejected(_) => "rejected",
            PolicyReload::Unreadable(_) => "unreadable",
        };
        self.reloads
            .get_or_create(&ReloadOutcomeLabels { outcome })
            .inc();
    }

    fn show(&self, digest: String) {
        self.info.clear();
        self.info
            .get_or_create(&PolicyDigestLabels { digest })
            .set(1);
    }
}
