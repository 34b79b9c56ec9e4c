//! Compiles the protocols between routers and workers, and between autoscalers and routers, without a system
//! protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    let files = [
        "cleave/fleet/v1/fleet.proto",
        "externalscaler/externalscaler.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={root}/{file}");
    }
    let descriptors = protox::compile(files, [root])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
