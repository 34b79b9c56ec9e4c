//! Where the kernels' machine code comes from.
//!
//! Owns: the code built into this program, and compiling it at run time where there is none: by NVRTC, for
//! the GPU at hand, kept in the user's cache under a name that holds everything it was made from.
//! Never: trusts a cached file by its age, or fails because the cache cannot be written.
//! Invariant: a cached file is whole: it is written under another name first, then renamed, and begins with the checksum of
//! what follows. One that is not what was written, or that the driver does not take, is deleted, and compiled again.

use crate::driver::{Device, Module, Shape};
use crate::error::CudaError;
use cudarc::nvrtc::sys as nvrtc;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A line of kernels/table.txt.
#[derive(Debug)]
pub(crate) struct Listed {
    file: &'static str,
    pub(crate) name: &'static str,
    threads: u32,
    pub(crate) shared_bytes: u32,
}

/// Places bytes where the driver reads whole words of them; `include_bytes!` may begin anywhere.
#[repr(C, align(16))]
#[allow(dead_code)] // A build without nvcc embeds no code.
struct Aligned<T>(T);

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Bytes of a cached file's checksum.
const CHECKSUM_BYTES: usize = blake3::OUT_LEN;

/// Shared memory that kernels with dynamic shared memory have of their own, at most; scripts/cuda/check_kernels.py checks it.
const STATIC_SHARED_BYTES_MAX: u32 = 2048;

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
                None => compiled(device, file, source)?,
            };
            modules.insert(*file, module);
        }
        Ok(Self { modules })
    }

    /// Whether there is a kernel of that name whose block asks for no more dynamic shared memory than this, in bytes,
    /// beside what the kernel has of its own.
    pub(crate) fn fits(&self, name: &str, shared_bytes_max: u32) -> bool {
        let listed = TABLE.iter().find(|listed| listed.name == name);
        listed
            .is_some_and(|listed| listed.shared_bytes + STATIC_SHARED_BYTES_MAX <= shared_bytes_max)
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

/// A file's code on the device, from the cache or the compiler.
fn compiled(device: &Arc<Device>, file: &str, source: &str) -> Result<Arc<Module>, CudaError> {
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
    if let Some(place) = &place
        && let Some(module) = cached(device, place)?
    {
        return Ok(module);
    }
    tracing::info!("compiling {file} for {}", device.facts().name);
    let code = compile(file, source, &options)?;
    if let Some(place) = place {
        // Without a cache the next start compiles again, that is all.
        if let Err(error) = keep(&place, &code) {
            tracing::debug!("cannot keep {}: {error}", place.display());
        }
    }
    Module::load(device, &code)
}

/// Compiled kernels take some megabytes.
const IMAGE_BYTES_MAX: u64 = 256 << 20;

/// The driver's error for code that it cannot take.
const REFUSALS: [&str; 4] = [
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_INVALID_PTX",
];

/// Code that an earlier start compiled. A file that is not what was written, or that the driver does not take, is deleted.
///
/// # Errors
/// If the device fails.
fn cached(device: &Arc<Device>, place: &Path) -> Result<Option<Arc<Module>>, CudaError> {
    let sealed = match cleave_files::read(place, IMAGE_BYTES_MAX) {
        Ok(sealed) => sealed,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let file = place.display();
            tracing::warn!(%file, %error, "compiled kernels in the cache cannot be read; they are compiled again");
            return Ok(None);
        }
    };
    let problem = match opened(&sealed).map(|code| Module::load(device, code)) {
        Some(Err(CudaError::Call { name, .. })) if REFUSALS.contains(&name.as_str()) => name,
        Some(loaded) => return loaded.map(Some),
        None => "its checksum is wrong".to_owned(),
    };
    let file = place.display();
    tracing::warn!(%file, problem, "compiled kernels in the cache cannot be used; they are compiled again");
    if let Err(error) = fs::remove_file(place) {
        tracing::debug!(%file, %error, "cannot delete the file");
    }
    Ok(None)
}

/// Code as the cache has it: its checksum first.
fn sealed(code: &[u8]) -> Vec<u8> {
    [blake3::hash(code).as_bytes(), code].concat()
}

/// The code in a cached file, if it is what was written.
fn opened(sealed: &[u8]) -> Option<&[u8]> {
    let (checksum, code) = sealed.split_at_checked(CHECKSUM_BYTES)?;
    (blake3::hash(code).as_bytes() == checksum).then_some(code)
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

/// Calls NVRTC, which is there, since `compiled` looked; callers say what arguments promise.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        let result = crate::dynamic::call_raw!(nvrtc::culib, nvrtc::$function($($argument),*));
        check(result, stringify!($function))
    }};
}

/// Names everything that the code is made from.
fn key(source: &str, options: &[String]) -> String {
    let (mut major, mut minor) = (0, 0);
    // A compiler that does not say its version is 0.0.
    let _ = call!(nvrtcVersion(&raw mut major, &raw mut minor));
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
    fs::write(&unfinished, sealed(code))?;
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
        // Made by `compile`, and dropped once.
        let _ = call!(nvrtcDestroyProgram(&raw mut self.0));
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
    // Strings that end with zeros, and arrays as long as said, alive through the call.
    call!(nvrtcCreateProgram(
        &raw mut program.0,
        source.as_ptr(),
        name.as_ptr(),
        headers.len() as i32,
        header_texts.as_ptr(),
        header_names.as_ptr(),
    ))?;
    let options: Vec<CString> = options.iter().map(|option| text(option)).collect();
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let compiled = call!(nvrtcCompileProgram(
        program.0,
        options.len() as i32,
        options.as_ptr(),
    ));
    if compiled.is_err() {
        let log = log(&program)?;
        return Err(CudaError::NoKernels(format!(
            "NVRTC cannot compile {file}: {log}"
        )));
    }
    let mut bytes = 0;
    // The program is alive; the buffer is as long as the library said.
    call!(nvrtcGetCUBINSize(program.0, &raw mut bytes))?;
    let mut code = vec![0u8; bytes];
    call!(nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()))?;
    Ok(code)
}

/// What the compiler said.
fn log(program: &Program) -> Result<String, CudaError> {
    let mut bytes = 0;
    call!(nvrtcGetProgramLogSize(program.0, &raw mut bytes))?;
    let mut text = vec![0u8; bytes];
    call!(nvrtcGetProgramLog(program.0, text.as_mut_ptr().cast()))?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.trim_end_matches(['\0', '\n']).to_owned())
}

fn check(result: Option<c_int>, call: &'static str) -> Result<(), CudaError> {
    type Describe = unsafe extern "C" fn(c_int) -> *const c_char;
    let Some(code) = result else {
        return Err(CudaError::NoKernels(format!(
            "the installed NVRTC lacks {call}: install CUDA 13's"
        )));
    };
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the function is of that type, and gives a static string for every number.
    let text = unsafe {
        let found = nvrtc::culib().get::<Describe>(b"nvrtcGetErrorString");
        found.map_or(std::ptr::null(), |describe| describe(code))
    };
    let text = match text.is_null() {
        true => String::new(),
        // SAFETY: as above.
        false => unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned(),
    };
    Err(CudaError::Call {
        call,
        name: format!("result {code}"),
        text,
        is_for_good: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_code_begins_where_whole_words_are_read() {
        // The same wrapper over a file of odd length, twice: a build without nvcc embeds no code.
        let odd: [&[u8]; 2] = [
            &Aligned(*include_bytes!("images.rs")).0,
            &Aligned(*b"odd").0,
        ];
        let images = IMAGES.iter().map(|(_, image)| *image);
        for image in images.chain(odd) {
            assert_eq!(image.as_ptr().addr() % 16, 0, "{} bytes", image.len());
        }
    }

    #[test]
    fn a_cached_file_that_changed_is_not_code() {
        let file = sealed(b"code");
        assert_eq!(opened(&file), Some(b"code".as_slice()));
        for at in 0..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert_eq!(opened(&changed), None, "byte {at}");
        }
        for len in 0..file.len() {
            assert_eq!(opened(&file[..len]), None, "{len} bytes");
        }
    }

    /// A compiler that fails afterwards must not leave it for the next start.
    #[test]
    fn a_file_that_is_no_code_is_deleted() {
        let Some(device) = crate::every_kernel::device() else {
            return;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let place = folder.path().join("code.cubin");
        for file in [b"damaged".to_vec(), sealed(b"no code of any driver")] {
            fs::write(&place, file).expect("a file can be written");
            assert!(cached(&device, &place).expect("a device").is_none());
            assert!(!place.exists());
        }
    }

    #[test]
    fn the_sources_have_a_name() {
        assert_eq!(SOURCES_HASH.len(), 12);
        assert!(SOURCES_HASH.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}
