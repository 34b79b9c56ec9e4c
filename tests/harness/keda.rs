//! KEDA's side of its external scaler protocol.
//!
//! Owns: its messages, written a second time from KEDA's own `externalscaler.proto`, so that a
//! wrong field number in ours is found. Never: decides when to ask.

use std::collections::HashMap;
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, prost::Message)]
struct ScaledObjectRef {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(map = "string, string", tag = "3")]
    scaler_metadata: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct IsActiveResponse {
    #[prost(bool, tag = "1")]
    result: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct GetMetricsRequest {
    #[prost(message, optional, tag = "1")]
    scaled_object_ref: Option<ScaledObjectRef>,
    #[prost(string, tag = "2")]
    metric_name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct MetricValue {
    #[prost(string, tag = "1")]
    metric_name: String,
    #[prost(int64, tag = "2")]
    metric_value: i64,
    #[prost(double, tag = "3")]
    metric_value_float: f64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct GetMetricsResponse {
    #[prost(message, repeated, tag = "1")]
    metric_values: Vec<MetricValue>,
}

pub(crate) struct KedaClient {
    runtime: Runtime,
    grpc: Grpc<Channel>,
}

/// A router's answer about one pool: whether it is active, and its wanted workers.
pub(crate) type PoolAnswer = (bool, i64);

impl KedaClient {
    /// For a router at `address`, such as `127.0.0.1:8000`.
    pub(crate) fn new(address: &str) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let entered = runtime.enter();
        let grpc = Grpc::new(endpoint.connect_lazy());
        drop(entered);
        Self { runtime, grpc }
    }

    /// Asks about each pool.
    ///
    /// # Errors
    /// The router's status, such as one without a decision yet.
    pub(crate) fn pools(&mut self) -> Result<Vec<PoolAnswer>, Status> {
        let mut answers = Vec::new();
        for pool in ["prefill", "decode", "both"] {
            let object = ScaledObjectRef {
                name: format!("cleave-{pool}"),
                namespace: "models".to_owned(),
                scaler_metadata: [("pool".to_owned(), pool.to_owned())].into(),
            };
            let active: IsActiveResponse = self.call("IsActive", object.clone())?;
            let metric_name = format!("s0-cleave-workers-{pool}");
            let request = GetMetricsRequest {
                scaled_object_ref: Some(object),
                metric_name: metric_name.clone(),
            };
            let got: GetMetricsResponse = self.call("GetMetrics", request)?;
            let [value] = got.metric_values.as_slice() else {
                panic!("{got:?}");
            };
            assert_eq!(value.metric_name, metric_name);
            assert_eq!(value.metric_value as f64, value.metric_value_float);
            answers.push((active.result, value.metric_value));
        }
        Ok(answers)
    }

    fn call<Q, A>(&mut self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let path = format!("/externalscaler.ExternalScaler/{method}");
        let path = PathAndQuery::try_from(path).expect("a path");
        let grpc = &mut self.grpc;
        let called = async {
            let ready = grpc.ready().await;
            ready.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::default();
            grpc.unary(Request::new(request), path, codec).await
        };
        let answer = self.runtime.block_on(called)?;
        Ok(answer.into_inner())
    }
}
