//! Where the kernels' machine code comes from.
//!
//! Owns: the code built into this program, and compiling it at run time where there is none: by NVRTC, for
//! the GPU at hand, kept in the user's cache under a name that holds everything it was made from.
//! Never: trusts a cached file by its age, or fails because the cache cannot be written.
//! Invariant: a cached file is whole: it is written under another name first, then renamed.

use crate::driver::{Device, Module, Shape};
use crate::error::CudaError;
use cudarc::nvrtc::sys as nvrtc;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A line of kernels/table.txt.
#[derive(Debug)]
pub(crate) struct Listed {
    file: &'static str,
    pub(crate) name: &'static str,
    threads: u32,
    shared_bytes: u32,
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The cache keeps the youngest so many files.
const CACHED_MAX: usize = 128;

/// The device's kernels, by file.
#[derive(Debug)]
pub(crate) struct Images {
    modules: BTreeMap<&'static str, Arc<Module>>,
}

impl Images {
    /// Loads every file's code, compiling what was not built in.
    ///
    /// # Errors
    /// [`CudaError::NoKernels`] says what is missing.
    pub(crate) fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
        let mut modules = BTreeMap::new();
        let built: BTreeMap<_, _> = IMAGES.iter().copied().collect();
        for (file, source) in SOURCES {
            let module = match built.get(file) {
                Some(image) => Module::load(device, image)?,
                None => Module::load(device, &compiled(device, file, source)?)?,
            };
            modules.insert(*file, module);
        }
        Ok(Self { modules })
    }

    /// A kernel by its name in the table.
    pub(crate) fn kernel<A: crate::driver::KernelArgs>(
        &self,
        name: &str,
    ) -> Result<crate::driver::Kernel<A>, CudaError> {
        let listed = TABLE.iter().find(|listed| listed.name == name);
        let listed = listed.expect("kernels/table.txt lists every kernel that is asked for");
        let shape = Shape {
            threads: listed.threads,
            shared_bytes: listed.shared_bytes,
        };
        self.modules[listed.file].kernel(listed.name, shape)
    }
}

/// Code for the device, from the cache or the compiler.
fn compiled(device: &Device, file: &str, source: &str) -> Result<Vec<u8>, CudaError> {
    // SAFETY: looks for the library, and calls nothing of it.
    if !unsafe { nvrtc::is_culib_present() } {
        return Err(CudaError::NoKernels(
            "this program was built without GPU kernels, and NVRTC (libnvrtc.so.13), which could compile them \
             now, is not installed: build with nvcc 13.0 on the PATH or in CLEAVE_NVCC, or put NVRTC's folder \
             into LD_LIBRARY_PATH"
                .to_owned(),
        ));
    }
    let options = options(device);
    let place =
        cache_folder().map(|folder| folder.join(format!("{}.cubin", key(source, &options))));
    if let Some(code) = place.as_ref().and_then(|place| fs::read(place).ok()) {
        return Ok(code);
    }
    tracing::info!("compiling {file} for {}", device.facts().name);
    let code = compile(file, source, &options)?;
    if let Some(place) = place {
        // Without a cache the next start compiles again, that is all.
        if let Err(error) = keep(&place, &code) {
            tracing::debug!("cannot keep {}: {error}", place.display());
        }
    }
    Ok(code)
}

/// The compiler's options for this device. Whoever has wgmma or tcgen05 has them under a name of its own.
fn options(device: &Device) -> Vec<String> {
    let (major, minor) = device.facts().capability;
    let own = if major == 9 || major == 10 { "a" } else { "" };
    vec![
        format!("--gpu-architecture=sm_{major}{minor}{own}"),
        "--std=c++17".to_owned(),
    ]
}

/// Names everything that the code is made from.
fn key(source: &str, options: &[String]) -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there.
    unsafe { nvrtc::nvrtcVersion(&raw mut major, &raw mut minor) };
    let mut hasher = blake3::Hasher::new();
    let version = format!("{major}.{minor}");
    let parts = options.iter().map(String::as_str);
    for part in parts.chain([version.as_str(), source]) {
        hasher.update(part.as_bytes());
        hasher.update(&[0]);
    }
    for (name, text) in HEADERS {
        hasher.update(name.as_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| {
        let path = std::env::var_os(name).map(PathBuf::from);
        path.filter(|path| path.is_absolute())
    };
    let cache = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("cleave").join("kernels"))
}

/// Writes a file whole, and lets the oldest go if there are too many.
fn keep(place: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = place.parent().expect("a file in the cache's folder");
    fs::create_dir_all(folder)?;
    let unfinished = place.with_extension(format!("{}.new", std::process::id()));
    fs::write(&unfinished, code)?;
    fs::rename(&unfinished, place)?;
    let mut files: Vec<_> = fs::read_dir(folder)?
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort();
    let many = files.len().saturating_sub(CACHED_MAX);
    for (_, path) in files.into_iter().take(many) {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// A program of NVRTC, given back when dropped.
struct Program(nvrtc::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `compile`, and dropped once.
        unsafe { nvrtc::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn compile(file: &str, source: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    let text = |text: &str| CString::new(text).expect("sources have no zero in them");
    let headers: Vec<(CString, CString)> = HEADERS
        .iter()
        .map(|(name, header)| (text(name), text(header)))
        .collect();
    let header_texts: Vec<*const c_char> = headers.iter().map(|(_, t)| t.as_ptr()).collect();
    let header_names: Vec<*const c_char> = headers.iter().map(|(n, _)| n.as_ptr()).collect();
    let (source, name) = (text(source), text(file));
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: strings that end with zeros, and arrays as long as said, alive through the call.
    let made = unsafe {
        nvrtc::nvrtcCreateProgram(
            &raw mut program.0,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            header_texts.as_ptr(),
            header_names.as_ptr(),
        )
    };
    check(made, "nvrtcCreateProgram")?;
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: as above.
    let compiled =
        unsafe { nvrtc::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
    if compiled != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        let log = log(&program)?;
        return Err(CudaError::NoKernels(format!(
            "NVRTC cannot compile {file}: {log}"
        )));
    }
    let mut bytes = 0;
    // SAFETY: the program is alive; the buffer is as long as the library said.
    unsafe {
        check(
            nvrtc::nvrtcGetCUBINSize(program.0, &raw mut bytes),
            "nvrtcGetCUBINSize",
        )?;
        let mut code = vec![0u8; bytes];
        check(
            nvrtc::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()),
            "nvrtcGetCUBIN",
        )?;
        Ok(code)
    }
}

/// What the compiler said.
fn log(program: &Program) -> Result<String, CudaError> {
    let mut bytes = 0;
    // SAFETY: as in `compile`.
    unsafe {
        check(
            nvrtc::nvrtcGetProgramLogSize(program.0, &raw mut bytes),
            "nvrtcGetProgramLogSize",
        )?;
        let mut text = vec![0u8; bytes];
        check(
            nvrtc::nvrtcGetProgramLog(program.0, text.as_mut_ptr().cast()),
            "nvrtcGetProgramLog",
        )?;
        let text = String::from_utf8_lossy(&text);
        Ok(text.trim_end_matches(['\0', '\n']).to_owned())
    }
}

fn check(result: nvrtc::nvrtcResult, call: &'static str) -> Result<(), CudaError> {
    if result == nvrtc::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: returns a static string for every number.
    let text = unsafe { CStr::from_ptr(nvrtc::nvrtcGetErrorString(result)) };
    Err(CudaError::Call {
        call,
        name: format!("{result:?}"),
        text: text.to_string_lossy().into_owned(),
    })
}
