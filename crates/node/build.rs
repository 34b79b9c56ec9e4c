//! Compiles the protocols: between routers and workers, of a gateway's endpoint picker, and of
//! autoscalers; without a system protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    let own = "cleave/fleet/v1/fleet.proto";
    let foreign = [
        "envoy/service/ext_proc/v3/external_processor.proto",
        "externalscaler/externalscaler.proto",
    ];
    for file in [own].iter().chain(&foreign) {
        println!("cargo:rerun-if-changed={root}/{file}");
    }
    tonic_prost_build::configure()
        .build_transport(false)
        // A checksum closes every message.
        .codec_path("crate::wire::CheckedCodec")
        .compile_fds(protox::compile([own], [root])?)?;
    tonic_prost_build::configure()
        .build_transport(false)
        // Chunks of bodies go on as they came.
        .bytes(".envoy")
        .compile_fds(protox::compile(foreign, [root])?)?;
    Ok(())
}
