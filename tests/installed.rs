//! Messages of an installed Cleave to others: to service managers, and to people who report its
//! version.

use crate::harness::{self, CleaveProcess};
use std::os::unix::net::UnixDatagram;

/// The protocol of sd_notify(3), from the side of a service manager.
#[test]
fn a_service_manager_is_notified_of_start_and_drain() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let manager = UnixDatagram::bind(&path).expect("a socket");
    manager
        .set_read_timeout(Some(harness::LIMIT))
        .expect("a time limit");
    let received = || {
        let mut message = [0; 512];
        let length = manager.recv(&mut message).expect("a message");
        String::from_utf8(message[..length].to_vec()).expect("UTF-8")
    };
    let mut command = harness::cleave(&["serve", "--port", "0"]);
    command.env("NOTIFY_SOCKET", &path);
    let mut process = CleaveProcess::spawn(command);
    assert_eq!(received().trim(), "READY=1\nSTATUS=serves; not ready yet");
    assert_eq!(received().trim(), "STATUS=ready");
    process.signal("TERM");
    assert_eq!(received().trim(), "STOPPING=1\nSTATUS=drains");
    assert!(process.wait().success());
}

#[test]
fn the_version_names_commit_target_and_gpus() {
    let (status, text, _) = harness::run(&["--version"]);
    assert!(status.success());
    let lines: Vec<&str> = text.lines().collect();
    let [version, commit, target, gpus] = lines[..] else {
        panic!("{text}");
    };
    assert_eq!(version, concat!("cleave ", env!("CARGO_PKG_VERSION")));
    assert!(
        commit
            .strip_prefix("commit: ")
            .is_some_and(|commit| !commit.is_empty())
    );
    assert!(target.starts_with("target: ") && target.contains(std::env::consts::ARCH));
    assert!(gpus.starts_with("GPUs:   "));
    let (_, short, _) = harness::run(&["-V"]);
    assert_eq!(short.trim(), version);
}
