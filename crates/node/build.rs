//! Compiles the protocols: between routers and workers, of a gateway's endpoint picker, and of autoscalers; without
//! a system protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    let files = [
        "cleave/fleet/v1/fleet.proto",
        "envoy/service/ext_proc/v3/external_processor.proto",
        "externalscaler/externalscaler.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={root}/{file}");
    }
    let descriptors = protox::compile(files, [root])?;
    tonic_prost_build::configure()
        .build_transport(false)
        // Chunks of bodies go on as they came.
        .bytes(".envoy")
        .compile_fds(descriptors)?;
    Ok(())
}
