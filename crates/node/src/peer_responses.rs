//! Asks the fleet's other routers for responses that they stored.
//!
//! Owns: whom to ask, and that the first router which has a response answers for all. Never: reads
//! an answer. Invariant: every router whose name resolves is asked, and none is waited for longer
//! than the client's limit.

use axum::http::{HeaderMap, Method, StatusCode};
use cleave_api::{PeerReply, ResponsePeers};
use cleave_server::PeerRouterClient;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use tokio::sync::watch;

/// The routers of `--fellow-routers`. This one may be among them: it has no answer either.
pub(crate) struct PeerResponses {
    pub(crate) client: PeerRouterClient,
    pub(crate) addresses: watch::Receiver<BTreeSet<SocketAddr>>,
}

impl ResponsePeers for PeerResponses {
    fn ask(
        &self,
        method: Method,
        path: String,
        headers: HeaderMap,
        bytes_max: usize,
    ) -> BoxFuture<'static, Vec<PeerReply>> {
        let (client, addresses) = (self.client.clone(), self.addresses.borrow().clone());
        Box::pin(async move {
            let ask = |address| client.ask(address, &method, &path, &headers, bytes_max);
            let mut asked: FuturesUnordered<_> = addresses.into_iter().map(ask).collect();
            let mut replies = Vec::new();
            while let Some(answer) = asked.next().await {
                match answer {
                    Ok((StatusCode::OK, body)) => {
                        return vec![PeerReply::Answered(StatusCode::OK, body)];
                    }
                    Ok((status, body)) => replies.push(PeerReply::Answered(status, body)),
                    Err(reason) => replies.push(PeerReply::Silent(reason)),
                }
            }
            replies
        })
    }
}
