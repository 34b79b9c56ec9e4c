//! Prices of a worker's work, and times of a request's stages, on the wire.
//!
//! Owns: these conversions. Never accepts prices that would make a router panic when it searches or
//! interpolates them: rows and links must be in strictly ascending order, and not too many.

use super::{FleetWireError, nanos, proto, required};
use cleave_domain::{DecodeTiming, LinkPrice, PrefillTiming, Prices, RowPrice, WorkerId};
use std::time::Duration;

/// Far more than any worker measures.
const ROWS_MAX: usize = 1024;
/// Far more than a worker has peers.
const LINKS_MAX: usize = 1 << 16;

impl From<Prices> for proto::Prices {
    fn from(prices: Prices) -> Self {
        let Prices {
            rows,
            pair_picos,
            context_picos,
            draw_nanos,
            link,
            links,
            error_permille,
        } = prices;
        let row = |RowPrice { rows, nanos }| proto::RowPrice { rows, nanos };
        let to = |(WorkerId(worker), price): (WorkerId, LinkPrice)| proto::LinkTo {
            worker,
            price: Some(price.into()),
        };
        Self {
            rows: rows.into_iter().map(row).collect(),
            pair_picos,
            context_picos,
            draw_nanos,
            link: Some(link.into()),
            links: links.into_iter().map(to).collect(),
            error_permille,
        }
    }
}

impl TryFrom<proto::Prices> for Prices {
    type Error = FleetWireError;

    fn try_from(prices: proto::Prices) -> Result<Self, FleetWireError> {
        let proto::Prices {
            rows,
            pair_picos,
            context_picos,
            draw_nanos,
            link,
            links,
            error_permille,
        } = prices;
        let problem = |field, problem| Err(FleetWireError::List { field, problem });
        if rows.len() > ROWS_MAX {
            return problem("prices.rows", "has more than 1024 entries");
        }
        if !rows.is_sorted_by(|one, next| one.rows < next.rows) {
            return problem("prices.rows", "is not in ascending order");
        }
        if links.len() > LINKS_MAX {
            return problem("prices.links", "has more than 65536 entries");
        }
        if !links.is_sorted_by(|one, next| one.worker < next.worker) {
            return problem("prices.links", "is not in ascending order");
        }
        let row = |proto::RowPrice { rows, nanos }| RowPrice { rows, nanos };
        let to = |proto::LinkTo { worker, price }| {
            let price = required(price, "prices.links.price")?;
            Ok::<_, FleetWireError>((WorkerId(worker), price.into()))
        };
        Ok(Self {
            rows: rows.into_iter().map(row).collect(),
            pair_picos,
            context_picos,
            draw_nanos,
            link: required(link, "prices.link")?.into(),
            links: links.into_iter().map(to).collect::<Result<_, _>>()?,
            error_permille,
        })
    }
}

impl From<LinkPrice> for proto::LinkPrice {
    fn from(price: LinkPrice) -> Self {
        let LinkPrice {
            latency_nanos,
            byte_picos,
        } = price;
        Self {
            latency_nanos,
            byte_picos,
        }
    }
}

impl From<proto::LinkPrice> for LinkPrice {
    fn from(price: proto::LinkPrice) -> Self {
        let proto::LinkPrice {
            latency_nanos,
            byte_picos,
        } = price;
        Self {
            latency_nanos,
            byte_picos,
        }
    }
}

impl From<PrefillTiming> for proto::PrefillTiming {
    fn from(timing: PrefillTiming) -> Self {
        let PrefillTiming { wait, run } = timing;
        Self {
            wait_nanos: nanos(wait),
            run_nanos: nanos(run),
        }
    }
}

impl From<proto::PrefillTiming> for PrefillTiming {
    fn from(timing: proto::PrefillTiming) -> Self {
        let proto::PrefillTiming {
            wait_nanos,
            run_nanos,
        } = timing;
        Self {
            wait: Duration::from_nanos(wait_nanos),
            run: Duration::from_nanos(run_nanos),
        }
    }
}

impl From<DecodeTiming> for proto::DecodeTiming {
    fn from(timing: DecodeTiming) -> Self {
        let DecodeTiming { wait, first } = timing;
        Self {
            wait_nanos: nanos(wait),
            first_nanos: nanos(first),
        }
    }
}

impl From<proto::DecodeTiming> for DecodeTiming {
    fn from(timing: proto::DecodeTiming) -> Self {
        let proto::DecodeTiming {
            wait_nanos,
            first_nanos,
        } = timing;
        Self {
            wait: Duration::from_nanos(wait_nanos),
            first: Duration::from_nanos(first_nanos),
        }
    }
}
