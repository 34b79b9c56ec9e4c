//! The build that runs: version, commit, target, and the devices that it can use.
//!
//! Owns: the text of `cleave --version`. `cleave -V` prints the first line alone.

use std::sync::LazyLock;

/// The lines after the program's name.
pub(crate) static LONG: LazyLock<String> = LazyLock::new(|| {
    let version = env!("CARGO_PKG_VERSION");
    let commit = env!("BUILD_COMMIT");
    let target = env!("BUILD_TARGET");
    let gpus = gpus();
    format!("{version}\ncommit: {commit}\ntarget: {target}\nGPUs:   {gpus}")
});

/// Whether this build can use GPUs, and where its kernels come from.
fn gpus() -> &'static str {
    if cfg!(target_feature = "crt-static") {
        "none: a static binary cannot load NVIDIA's driver library"
    } else if cleave_cuda::has_built_kernels() {
        "NVIDIA, with built-in kernels"
    } else {
        "NVIDIA, with kernels that NVRTC compiles at the first start"
    }
}
