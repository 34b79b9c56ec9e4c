//! Networks and hubs that fail: cut, slow, damaged, busy, redirecting, and two processes at once.

use super::{LastCounts, Pair, WEIGHTS, WEIGHTS_BYTES, model, model_files};
use cleave_hub::HubError;
use cleave_test_hub::{HubFault, MODEL, TestHub, checksum};
use std::time::Duration;

#[test]
fn a_cut_download_goes_on_where_it_ended() {
    let pair = Pair::new();
    pair.hub.fault(WEIGHTS, HubFault::Cut(1_000_000));
    pair.hub.fault(WEIGHTS, HubFault::Cut(500_000));
    pair.pull_whole();
    let ranges = pair.weight_ranges();
    let asked = |from: u32| Some(format!("bytes={from}-"));
    assert_eq!(ranges, [None, asked(1_000_000), asked(1_500_000)]);
}

#[test]
fn a_later_process_goes_on_where_one_ended() {
    let mut pair = Pair::new();
    pair.settings.retry.failures_max = 1;
    pair.hub.fault(WEIGHTS, HubFault::Cut(1_000_000));
    let error = pair.pull(MODEL).unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    assert_eq!(pair.incomplete().len(), 1);
    assert!(
        !pair
            .settings
            .cache
            .join("models--org--tiny/refs/main")
            .exists()
    );
    let cut = pair.client().cache().cut_downloads().unwrap();
    assert_eq!(cut[0].name, model(MODEL).name);
    assert!(cut[0].bytes >= 1_000_000, "{cut:?}");
    assert!(cut[0].written.is_some());
    pair.pull_whole();
    assert_eq!(pair.client().cache().cut_downloads().unwrap(), []);
    assert_eq!(
        pair.weight_ranges().last(),
        Some(&Some("bytes=1000000-".to_owned()))
    );
}

#[test]
fn a_silent_connection_counts_as_cut() {
    let mut pair = Pair::new();
    pair.settings.retry.silence_max = Duration::from_millis(300);
    pair.hub.fault(WEIGHTS, HubFault::Stall(1_000_000));
    pair.pull_whole();
    assert_eq!(pair.weight_ranges().len(), 2);
}

#[test]
fn a_damaged_file_is_downloaded_anew_once() {
    let pair = Pair::new();
    pair.hub.fault(WEIGHTS, HubFault::Damage);
    pair.pull_whole();
    assert_eq!(
        pair.weight_ranges(),
        [None, None],
        "not a part of the damaged one"
    );
}

#[test]
fn a_file_damaged_twice_never_gets_its_name() {
    for name in [WEIGHTS, "tokenizer.json"] {
        let pair = Pair::new();
        pair.hub.fault(name, HubFault::Damage);
        pair.hub.fault(name, HubFault::Damage);
        let error = pair.pull(MODEL).unwrap_err();
        assert!(
            matches!(&error, HubError::Damaged { file, .. } if file == name),
            "{error}"
        );
        // Parts of other files may be left: their downloads ended with this one's.
        let blob = pair.blobs().join(checksum(&model_files()[name]));
        assert!(!blob.exists() && !blob.with_extension("incomplete").exists());
        assert_eq!(pair.client().cache().find(&model(MODEL)), None);
    }
}

#[test]
fn a_damaged_part_of_an_earlier_process_is_found() {
    let pair = Pair::new();
    let checksum = checksum(&model_files()[WEIGHTS]);
    std::fs::create_dir_all(pair.blobs()).unwrap();
    let part = pair.blobs().join(format!("{checksum}.incomplete"));
    std::fs::write(&part, vec![7; 1000]).unwrap();
    pair.pull_whole();
    assert_eq!(pair.weight_ranges(), [Some("bytes=1000-".to_owned()), None]);
}

#[test]
fn a_busy_hub_is_asked_again() {
    let pair = Pair::new();
    pair.hub.fault("blobs=true", HubFault::Status(503, ""));
    pair.hub
        .fault(WEIGHTS, HubFault::Status(429, "retry-after: 0\r\n"));
    pair.hub.fault(WEIGHTS, HubFault::Status(500, ""));
    let mut counts = LastCounts::default();
    pair.client().pull(&model(MODEL), &mut counts).unwrap();
    assert_eq!(counts.0.retries, 2);
    assert_eq!(counts.0.bytes_done, counts.0.bytes_total);
    assert!(counts.0.bytes_total > WEIGHTS_BYTES as u64);
}

#[test]
fn a_hub_that_stays_busy_is_given_up() {
    let pair = Pair::new();
    for _ in 0..4 {
        pair.hub.fault("blobs=true", HubFault::Status(503, ""));
    }
    let error = pair.pull(MODEL).unwrap_err().to_string();
    assert!(
        error.contains("503") && error.contains("tried 4 times"),
        "{error}"
    );
    assert_eq!(pair.hub.requests("blobs=true").len(), 4);
}

#[test]
fn another_host_never_gets_the_token() {
    let pair = Pair::new();
    let other = TestHub::start(model_files());
    pair.hub
        .fault(WEIGHTS, HubFault::Redirect(other.endpoint()));
    // This one leads back, and the hub's own host gets no token on this way either.
    pair.hub
        .fault("tokenizer.json", HubFault::Redirect(other.endpoint()));
    other.fault("tokenizer.json", HubFault::Redirect(pair.hub.endpoint()));
    pair.pull_whole();
    let token = |hub: &TestHub, path: &str| -> Vec<_> {
        let requests = hub.requests(path).into_iter();
        requests.map(|request| request.authorization).collect()
    };
    let bearer = Some("Bearer secret".to_owned());
    assert_eq!(token(&pair.hub, WEIGHTS), std::slice::from_ref(&bearer));
    assert_eq!(token(&other, WEIGHTS), [None]);
    assert_eq!(token(&other, "tokenizer.json"), [None]);
    assert_eq!(token(&pair.hub, "tokenizer.json"), [bearer, None]);
}

#[test]
fn a_redirect_keeps_the_range() {
    let pair = Pair::new();
    let other = TestHub::start(model_files());
    pair.hub.fault(WEIGHTS, HubFault::Cut(1_000_000));
    pair.hub
        .fault(WEIGHTS, HubFault::Redirect(other.endpoint()));
    pair.pull_whole();
    assert_eq!(
        other.requests(WEIGHTS)[0].range.as_deref(),
        Some("bytes=1000000-")
    );
}

#[test]
fn endless_redirects_end() {
    let pair = Pair::new();
    for _ in 0..9 {
        pair.hub
            .fault("blobs=true", HubFault::Redirect(pair.hub.endpoint()));
    }
    let error = pair.pull(MODEL).unwrap_err().to_string();
    assert!(error.contains("too many redirects"), "{error}");
}

#[test]
fn two_clients_at_once_download_once() {
    let pair = Pair::new();
    pair.hub.fault(WEIGHTS, HubFault::Gate);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pair.pull(MODEL).unwrap());
        pair.hub.wait_for_request(WEIGHTS);
        let (sender, receiver) = std::sync::mpsc::channel();
        let hub = pair.client();
        let second = scope.spawn(move || hub.pull(&model(MODEL), &mut WaitReport(sender)).unwrap());
        receiver.recv().unwrap();
        pair.hub.open_gate();
        assert_eq!(first.join().unwrap(), second.join().unwrap());
    });
    assert_eq!(pair.weight_ranges(), [None]);
    pair.pull_whole();
}

/// Reports that the client waits for the other one's download.
struct WaitReport(std::sync::mpsc::Sender<()>);

impl cleave_hub::PullObserver for WaitReport {
    fn show(&mut self, counts: cleave_hub::PullCounts) {
        if counts.files_awaited > 0 {
            // Only the first report is read.
            let _ = self.0.send(());
        }
    }
}
