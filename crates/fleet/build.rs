//! Compiles the protocol between routers and workers, without a system protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let root = "../../proto";
    let file = "cleave/fleet/v1/fleet.proto";
    println!("cargo:rerun-if-changed={root}/{file}");
    tonic_prost_build::configure()
        .build_transport(false)
        // A checksum closes every message.
        .codec_path("crate::wire::CheckedCodec")
        .compile_fds(protox::compile([file], [root])?)?;
    Ok(())
}
