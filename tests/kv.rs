//! `cleave kv bench` as a user runs it.

use serde_json::Value;
use std::process::Command;

// Lesson: 18.
#[test]
fn every_transport_is_measured_beside_its_floor() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cleave"));
    command
        .args(["kv", "bench", "--json", "--rounds", "2"])
        .args(["--block-bytes", "300KiB", "--blocks", "1,9"]);
    let mut expected = vec!["local", "shm", "tcp"];
    if let Some(library) = std::env::var_os("CLEAVE_TEST_NIXL") {
        // UCX over TCP needs no network card.
        command.env("UCX_TLS", "tcp");
        command.arg("--nixl-library").arg(library);
        expected.insert(2, "nixl");
    }
    let output = command.output().unwrap();
    let (stdout, errors) = (output.stdout, String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{errors}");
    let table: Value = serde_json::from_slice(&stdout).unwrap();
    let transports = table["transports"].as_array().unwrap();
    let names: Vec<_> = transports.iter().map(|one| &one["transport"]).collect();
    assert_eq!(names, expected);
    for transport in transports {
        assert!(transport["link_bytes_per_second"].as_u64().unwrap() > 0);
        for (row, blocks) in transport["rows"].as_array().unwrap().iter().zip([1, 9]) {
            assert_eq!(row["blocks"], blocks);
            let number = |name: &str| row[name].as_f64().unwrap();
            let bytes = f64::from(blocks * 300 * 1024);
            for (rate, seconds) in [
                ("bytes_per_second", "seconds"),
                ("floor_bytes_per_second", "floor_seconds"),
            ] {
                let off = number(rate) * number(seconds) / bytes - 1.0;
                assert!(off.abs() < 0.01, "{rate}: {row}");
            }
            let ratio = number("bytes_per_second") / number("floor_bytes_per_second");
            assert!((number("ratio") / ratio - 1.0).abs() < 0.01, "{row}");
        }
    }
}

#[test]
fn a_block_size_out_of_range_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_cleave"))
        .args(["kv", "bench", "--block-bytes", "4GiB"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("at most 1GiB"), "{errors}");
}

#[test]
fn sizes_that_cannot_be_measured_are_refused() {
    for (block_bytes, blocks, expected) in [
        ("1", "1", "at least 4KiB"),
        ("1GiB", "65536", "at most 8 GiB"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_cleave"))
            .args(["kv", "bench", "--rounds", "1"])
            .args(["--block-bytes", block_bytes, "--blocks", blocks])
            .output()
            .unwrap();
        assert!(!output.status.success());
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains(expected), "{errors}");
    }
}
