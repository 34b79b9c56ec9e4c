//! Stored responses behind two routers that share a worker, in real processes.

use crate::harness::authority::TestAuthority;
use crate::harness::{CleaveProcess, HttpClient, wait_for};
use serde_json::{Value, json};

const RESPONSES: &str = "/v1/responses";

/// Two routers that know each other, and a worker of both, with these flags for all of them.
struct TwoRouters {
    routers: [CleaveProcess; 2],
    clients: [HttpClient; 2],
    _worker: CleaveProcess,
}

impl TwoRouters {
    /// Each router must know the other's address before it starts, so both have addresses that no
    /// other test has: `place` is unique in a process.
    fn start(place: u8, more: &[&str]) -> Self {
        let process = std::process::id();
        let address = |router: u8| {
            let (high, low) = (process >> 8 & 0xff, process & 0xff);
            format!("127.{}.{low}.{}:7070", 1 + high % 250, place * 2 + router)
        };
        let addresses = [address(1), address(2)];
        let both = addresses.join(",");
        let mut routers = addresses.clone().map(|listen| {
            let plain = ["router", "--listen", &listen, "--fellow-routers", &both];
            CleaveProcess::start(&[&plain[..], more].concat())
        });
        let plain = [
            "worker",
            "--leg",
            "both",
            "--threads",
            "1",
            "--kv-cache",
            "64MiB",
        ];
        let to = ["--router", &both];
        let worker = CleaveProcess::start(&[&plain[..], &to, more].concat());
        for router in &mut routers {
            router.address();
        }
        let clients = addresses.map(|address| HttpClient::new(&address));
        clients.iter().for_each(HttpClient::wait_ready);
        Self {
            routers,
            clients,
            _worker: worker,
        }
    }

    /// One turn of a conversation, at this router.
    fn turn(&self, router: usize, previous: &Value, input: &str) -> Value {
        let body = json!({
            "input": input, "previous_response_id": previous,
            "max_output_tokens": 4, "temperature": 0,
        });
        let (status, response) = self.clients[router].post(RESPONSES, &body);
        assert_eq!(status, 200, "{response}");
        response
    }
}

fn check_conversation(mut fleet: TwoRouters) {
    // The addresses of names are known a moment after the start.
    let first = fleet.turn(0, &Value::Null, "First?");
    let path = format!("{RESPONSES}/{}", first["id"].as_str().expect("an id"));
    let found = wait_for("the other router", || {
        let (status, found) = fleet.clients[1].get(&path);
        (status == 200).then_some(found)
    });
    assert_eq!(serde_json::from_str::<Value>(&found).expect("JSON"), first);
    let (status, items) = fleet.clients[1].get(&format!("{path}/input_items"));
    assert!(status == 200 && items.contains("First?"), "{items}");
    let mut previous = first["id"].clone();
    let mut tokens = first["usage"]["input_tokens"].as_u64().expect("a count");
    for turn in 1..4 {
        let response = fleet.turn(turn % 2, &previous, "And then?");
        previous = response["id"].clone();
        let more = response["usage"]["input_tokens"].as_u64().expect("a count");
        assert!(more > tokens, "every turn is in the prompt");
        tokens = more;
    }
    // Responses of a lost router are lost, and the other one says so; its own conversations go on.
    let [lost, _] = &mut fleet.routers;
    lost.signal("KILL");
    lost.wait();
    let (status, missing) = fleet.clients[1].get(&path);
    assert_eq!(status, 404);
    assert!(
        missing.contains("cannot be reached or was restarted"),
        "{missing}"
    );
    fleet.turn(1, &previous, "And at last?");
}

#[test]
fn a_conversation_changes_routers_with_each_turn() {
    check_conversation(TwoRouters::start(1, &[]));
}

#[test]
fn stored_responses_cross_routers_by_mutual_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    TestAuthority::new().sign(folder.path(), "cleave-peer");
    let folder = folder.path().to_str().expect("UTF-8");
    check_conversation(TwoRouters::start(2, &["--peer-tls", folder]));
}
