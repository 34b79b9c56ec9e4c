//! KEDA's external scaler.
//!
//! Owns: its five methods. Never keeps state of a caller. Invariant: every method answers from the
//! brain's last decision, which is the same at every router that shares workers with another.

use axum::Router;
use cleave_domain::Role;
use cleave_fleet::{POOLS, ScalingStatusReader, ScalingUnavailable};
use futures::Stream;
use futures::stream::{self, StreamExt};
use std::pin::Pin;
use tonic::{Request, Response, Status};

#[allow(clippy::all, missing_docs, unreachable_pub)]
pub(super) mod proto {
    tonic::include_proto!("externalscaler");
}

use proto::external_scaler_server::{ExternalScaler, ExternalScalerServer};
use proto::{
    GetMetricSpecResponse, GetMetricsRequest, GetMetricsResponse, IsActiveResponse, MetricSpec,
    MetricValue, ScaledObjectRef,
};

/// The gRPC service, to be served at this path.
pub fn scaler_routes(path: &str, answers: ScalingStatusReader) -> Router {
    let service = ExternalScalerServer::new(ScalerService::new(answers));
    Router::new().route_service(path, service)
}

#[derive(Clone, Debug)]
pub(crate) struct ScalerService {
    answers: ScalingStatusReader,
}

type ScalerResult<T> = Result<Response<T>, Status>;
type ScalerStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn unavailable_status(unknown: ScalingUnavailable) -> Status {
    match unknown {
        ScalingUnavailable::Starting => Status::unavailable(unknown.to_string()),
        ScalingUnavailable::Off | ScalingUnavailable::AdviseOnly => {
            Status::failed_precondition(unknown.to_string())
        }
        ScalingUnavailable::ModelNotNamed => {
            Status::invalid_argument(format!("the trigger's metadata needs `model`: {unknown}"))
        }
        ScalingUnavailable::UnknownModel => Status::not_found(unknown.to_string()),
    }
}

/// The pool that the trigger's metadata names.
pub(super) fn pool(object: &ScaledObjectRef) -> Result<(&'static str, Role), Status> {
    let named = object.scaler_metadata.get("pool");
    let found = POOLS
        .into_iter()
        .find(|(name, _)| named.is_some_and(|n| n == name));
    found.ok_or_else(|| {
        let got = named.map_or("nothing", String::as_str);
        Status::invalid_argument(format!(
            "the trigger's metadata needs `pool`: prefill, decode or both, not {got}"
        ))
    })
}

/// The model that the trigger's metadata names; a router of one model needs none.
fn model(object: &ScaledObjectRef) -> Option<&str> {
    object.scaler_metadata.get("model").map(String::as_str)
}

fn metric(pool: &str) -> String {
    format!("cleave-workers-{pool}")
}

fn spec(pool: &str) -> GetMetricSpecResponse {
    GetMetricSpecResponse {
        metric_specs: vec![MetricSpec {
            metric_name: metric(pool),
            target_size: 1,
            target_size_float: 1.0,
        }],
    }
}

impl ScalerService {
    pub(super) fn new(answers: ScalingStatusReader) -> Self {
        Self { answers }
    }

    /// Workers wanted of the pool that the trigger's metadata names.
    fn target_workers(&self, object: &ScaledObjectRef) -> Result<u32, Status> {
        let (_, role) = pool(object)?;
        let workers = self.answers.target_workers(model(object));
        Ok(workers.map_err(unavailable_status)?.for_role(role))
    }
}

#[tonic::async_trait]
impl ExternalScaler for ScalerService {
    type StreamIsActiveStream = ScalerStream<IsActiveResponse>;
    type StreamMetricSpecStream = ScalerStream<GetMetricSpecResponse>;

    async fn is_active(&self, request: Request<ScaledObjectRef>) -> ScalerResult<IsActiveResponse> {
        let object = request.get_ref();
        let (_, role) = pool(object)?;
        let wanted = self.answers.is_pool_wanted(model(object), role);
        let result = wanted.map_err(unavailable_status)?;
        Ok(Response::new(IsActiveResponse { result }))
    }

    async fn stream_is_active(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> ScalerResult<Self::StreamIsActiveStream> {
        let object = request.into_inner();
        let (_, role) = pool(&object)?;
        let begin = (self.answers.clone(), object, None);
        let activity = stream::unfold(begin, move |(mut answers, object, before)| async move {
            loop {
                let now = answers.is_pool_wanted(model(&object), role).ok();
                if let Some(result) = now.filter(|_| now != before) {
                    let response = IsActiveResponse { result };
                    return Some((Ok(response), (answers, object, now)));
                }
                if !answers.changed().await {
                    return None;
                }
            }
        });
        Ok(Response::new(activity.boxed()))
    }

    async fn get_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> ScalerResult<GetMetricSpecResponse> {
        let (pool, _) = pool(request.get_ref())?;
        Ok(Response::new(spec(pool)))
    }

    async fn get_metrics(
        &self,
        request: Request<GetMetricsRequest>,
    ) -> ScalerResult<GetMetricsResponse> {
        let GetMetricsRequest {
            scaled_object_ref,
            metric_name,
        } = request.into_inner();
        let object = scaled_object_ref.unwrap_or_default();
        let (pool, _) = pool(&object)?;
        let own_metric = metric(pool);
        // KEDA's own metrics are called `s<trigger>-<name>`.
        if !metric_name.is_empty() && !metric_name.ends_with(&own_metric) {
            return Err(Status::invalid_argument(format!(
                "there is no metric `{metric_name}` of this pool; there is `{own_metric}`"
            )));
        }
        let target_workers = self.target_workers(&object)?;
        let value = MetricValue {
            metric_name,
            metric_value: target_workers.into(),
            metric_value_float: target_workers.into(),
        };
        Ok(Response::new(GetMetricsResponse {
            metric_values: vec![value],
        }))
    }

    /// A spec never changes; the stream stays open for as long as the router answers.
    async fn stream_metric_spec(
        &self,
        request: Request<ScaledObjectRef>,
    ) -> ScalerResult<Self::StreamMetricSpecStream> {
        let (pool, _) = pool(request.get_ref())?;
        let mut answers = self.answers.clone();
        let first = stream::iter([Ok(spec(pool))]);
        let rest = stream::once(async move { while answers.changed().await {} });
        let specs = first.chain(rest.filter_map(|()| async { None }));
        Ok(Response::new(specs.boxed()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use cleave_domain::{FleetTarget, PoolCounts, ScalingMode};
    use cleave_fleet::ScalingStatus;
    use cleave_planner::scaling::ScalerDecision;
    use tokio::sync::watch;

    fn object(pool: &str) -> ScaledObjectRef {
        ScaledObjectRef {
            scaler_metadata: [("pool".to_owned(), pool.to_owned())].into(),
            ..ScaledObjectRef::default()
        }
    }

    pub(crate) fn decided(mode: ScalingMode, decode: u32) -> ScalingStatus {
        let workers = PoolCounts {
            decode,
            ..PoolCounts::default()
        };
        let target = FleetTarget {
            workers,
            ..FleetTarget::default()
        };
        let decision = ScalerDecision {
            wanted: target,
            ..ScalerDecision::default()
        };
        ScalingStatus::Decided(mode, decision)
    }

    // Invariant: I43.
    #[tokio::test]
    async fn no_number_is_answered_when_unknown_or_advisory() {
        let (status_sender, status) = watch::channel(ScalingStatus::Off.into());
        let service = ScalerService::new(ScalingStatusReader::new(status));
        let ask = || service.is_active(Request::new(object("decode")));
        assert_eq!(
            ask().await.unwrap_err().code(),
            tonic::Code::FailedPrecondition
        );
        status_sender.send_replace(ScalingStatus::Starting(ScalingMode::Act).into());
        assert_eq!(ask().await.unwrap_err().code(), tonic::Code::Unavailable);
        status_sender.send_replace(decided(ScalingMode::Advise, 3).into());
        assert_eq!(
            ask().await.unwrap_err().code(),
            tonic::Code::FailedPrecondition
        );
        status_sender.send_replace(decided(ScalingMode::Act, 3).into());
        assert!(ask().await.unwrap().into_inner().result);
        let other = service.is_active(Request::new(object("queue"))).await;
        assert!(
            other
                .unwrap_err()
                .message()
                .contains("prefill, decode or both")
        );
    }

    #[tokio::test]
    async fn all_scaler_methods_answer_from_one_decision() {
        let (status_sender, status) = watch::channel(decided(ScalingMode::Act, 0).into());
        let service = ScalerService::new(ScalingStatusReader::new(status));
        let streamed = service
            .stream_is_active(Request::new(object("decode")))
            .await;
        let mut active = streamed.unwrap().into_inner();
        assert!(!active.next().await.unwrap().unwrap().result, "at once");
        status_sender.send_replace(decided(ScalingMode::Act, 2).into());
        assert!(active.next().await.unwrap().unwrap().result);
        let spec = service
            .get_metric_spec(Request::new(object("decode")))
            .await;
        let spec = spec.unwrap().into_inner();
        assert_eq!(spec.metric_specs[0].metric_name, "cleave-workers-decode");
        let streamed = service
            .stream_metric_spec(Request::new(object("decode")))
            .await;
        let mut specs = streamed.unwrap().into_inner();
        assert_eq!(specs.next().await.unwrap().unwrap(), spec);
        let ask = |name: &str| {
            let request = GetMetricsRequest {
                scaled_object_ref: Some(object("decode")),
                metric_name: name.to_owned(),
            };
            service.get_metrics(Request::new(request))
        };
        let got = ask("cleave-workers-decode").await.unwrap().into_inner();
        let value = &got.metric_values[0];
        assert_eq!((value.metric_value, value.metric_value_float), (2, 2.0));
        assert!(ask("s0-cleave-workers-decode").await.is_ok());
        assert!(ask("requests").await.is_err());
        drop(status_sender);
        assert!(specs.next().await.is_none() && active.next().await.is_none());
    }
}
