//! Which policy holds, and how its reloads went.
//!
//! Owns: these series. Never: reads a file. Invariant: one policy is shown at a time.

use crate::policy::{PolicyFile, Reload};
use cleave_api::Book;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Digest {
    digest: String,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct PolicySeries {
    reloads: Family<Outcome, Counter>,
    info: Family<Digest, Gauge>,
}

impl PolicySeries {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            reloads: Family::default(),
            info: Family::default(),
        };
        book.register(
            "cleave_policy_reloads",
            "Times that the policy's file was found changed: changed (it holds now), same (it says \
             what held before), rejected (it has mistakes), unreadable; after the last two the one \
             before stays",
            series.reloads.clone(),
        );
        book.register(
            "cleave_policy_info",
            "1 for the file's content that holds, by its digest; none without --policy",
            series.info.clone(),
        );
        series
    }

    /// The router begins with this one.
    pub(crate) fn holds(&self, file: &PolicyFile) {
        for outcome in ["changed", "same", "rejected", "unreadable"] {
            drop(self.reloads.get_or_create(&Outcome { outcome }));
        }
        self.show(file.digest());
    }

    pub(crate) fn count(&self, reload: &Reload) {
        let outcome = match reload {
            Reload::Changed(_, digest) => {
                self.show(digest.clone());
                "changed"
            }
            Reload::Same(digest) => {
                self.show(digest.clone());
                "same"
            }
            Reload::Rejected(_) => "rejected",
            Reload::Unreadable(_) => "unreadable",
        };
        self.reloads.get_or_create(&Outcome { outcome }).inc();
    }

    fn show(&self, digest: String) {
        self.info.clear();
        self.info.get_or_create(&Digest { digest }).set(1);
    }
}
