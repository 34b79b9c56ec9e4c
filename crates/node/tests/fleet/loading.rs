//! Before a model is there: ports are bound, and say so.

use crate::fleet::hash_chain::{HashChainEngine, StepGate};
use crate::fleet::{TEST_WAIT_MAX, files, http};
use cleave_domain::Role;
use cleave_engine::Engine;
use cleave_node::{FleetModel, FleetNode, FleetPorts, NodeError, RouterOptions, WorkerPorts};
use cleave_server::ServerError;
use cleave_worker::WorkerOptions;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

#[tokio::test]
async fn a_bound_port_answers_503_until_the_model_is_there() {
    let options = RouterOptions::default();
    let ports = FleetPorts::open("127.0.0.1:0", &options).await.unwrap();
    let address = ports.address().unwrap().to_string();
    for path in ["/health", "/ready", "/v1/models", "/anything"] {
        let answer = http(&address, path).await;
        assert!(answer.starts_with("HTTP/1.1 503"), "{path}: {answer}");
        assert!(answer.contains("being loaded"), "{answer}");
    }
    let message = http(&address, "/v1/messages").await;
    assert!(message.contains(r#""type":"error""#), "{message}");
    // Nobody else has it meanwhile.
    let second = FleetPorts::open(&address, &options).await;
    assert!(
        matches!(second, Err(NodeError::Server(ServerError::Bind(named, _))) if named == address)
    );
    let engine: Box<dyn Engine> = Box::new(HashChainEngine::new(&StepGate::new()));
    let serve = FleetNode {
        listen: address.clone(),
        router: options,
        models: vec![FleetModel {
            workers: vec![(WorkerOptions::new("b0", Role::Both), engine)],
            files: files(),
        }],
    };
    let running = serve.start_at(ports).await.unwrap();
    assert_eq!(running.address().to_string(), address);
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    let answer = http(&address, "/ready").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn an_unavailable_worker_port_is_named() {
    let options = WorkerOptions::new("b0", Role::Both);
    let traces = Default::default();
    let open = async |data: &str, metrics: &str| {
        WorkerPorts::open(data, Some(metrics), &options, &traces).await
    };
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let used = free.local_addr().unwrap().to_string();
    drop(free);
    let first = open("127.0.0.1:0", &used).await.unwrap();
    let answer = http(&used, "/ready").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    for (data, metrics) in [
        ("127.0.0.1:0", used.as_str()),
        (used.as_str(), "127.0.0.1:0"),
    ] {
        let second = open(data, metrics).await;
        assert!(
            matches!(second, Err(NodeError::Server(ServerError::Bind(named, _))) if named == used)
        );
    }
    drop(first);
}

#[tokio::test]
async fn no_bound_port_keeps_a_connection_while_loading() {
    let options = RouterOptions {
        external_metrics_listen: Some("127.0.0.1:0".into()),
        ..RouterOptions::default()
    };
    let ports = FleetPorts::open("127.0.0.1:0", &options).await.unwrap();
    let external = ports.external_metrics_address().unwrap().unwrap();
    let answer = http(&external.to_string(), "/apis").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    let options = WorkerOptions::new("b0", Role::Both);
    let traces = Default::default();
    let worker = WorkerPorts::open("127.0.0.1:0", None, &options, &traces);
    let worker = worker.await.unwrap();
    let mut early = TcpStream::connect(worker.data_address()).await.unwrap();
    let read = timeout(TEST_WAIT_MAX, early.read(&mut [0])).await.unwrap();
    // Closed, or reset.
    assert!(!matches!(read, Ok(1..)), "{read:?}");
}
