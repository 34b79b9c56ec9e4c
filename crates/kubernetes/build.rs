//! Compiles the protocols of a gateway's endpoint picker and of autoscalers, without a system
//! protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    let files = [
        "envoy/service/ext_proc/v3/external_processor.proto",
        "externalscaler/externalscaler.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={root}/{file}");
    }
    tonic_prost_build::configure()
        .build_transport(false)
        // Chunks of bodies go on as they came.
        .bytes(".envoy")
        .compile_fds(protox::compile(files, [root])?)?;
    Ok(())
}
