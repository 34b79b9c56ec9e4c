//! The kernels' machine code: built in, compiled at run time, or read from the user's cache.
//!
//! Owns: the code that is built into this program. Where there is none, NVRTC compiles the kernels
//! for the GPU at hand at run time, and the result is kept in the user's cache under a name that
//! hashes everything it was made from.
//! Never: trusts a cached file by its age, or fails because the cache cannot be written.
//! Invariant: a cached file is whole: it is written under another name first, then renamed, and
//! begins with the checksum of the rest. A file whose checksum is wrong, or that the driver
//! refuses, is deleted and compiled again.

use crate::driver::{CudaDevice, CudaModule, LaunchShape};
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

/// Aligns bytes for the driver, which reads whole words; `include_bytes!` alone may begin at any
/// address.
#[repr(C, align(16))]
#[allow(dead_code)] // A build without nvcc embeds no code.
struct Aligned<T>(T);

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Whether this build has machine code of the kernels; without it NVRTC compiles them at the first
/// start.
pub fn has_built_kernels() -> bool {
    !IMAGES.is_empty()
}

/// The size of a cached file's checksum in bytes.
const CHECKSUM_BYTES: usize = blake3::OUT_LEN;

/// The most static shared memory of a kernel that also has dynamic shared memory, in bytes;
/// scripts/ci/check_kernels.py checks it.
const STATIC_SHARED_BYTES_MAX: u32 = 2048;

/// The number of files that the cache keeps; the oldest are deleted.
const CACHED_FILES_MAX: usize = 128;

/// The device's kernels by source file.
#[derive(Debug)]
pub(crate) struct KernelImages {
    modules: BTreeMap<&'static str, Arc<CudaModule>>,
}

impl KernelImages {
    /// Loads every file's code, and compiles the files that were not built in.
    ///
    /// # Errors
    /// [`CudaError::NoKernels`] says what is missing.
    pub(crate) fn load(device: &Arc<CudaDevice>) -> Result<Self, CudaError> {
        let mut modules = BTreeMap::new();
        let built: BTreeMap<_, _> = IMAGES.iter().copied().collect();
        for (file, source) in SOURCES {
            let module = match built.get(file) {
                Some(image) => CudaModule::load(device, image)?,
                None => cached_or_compiled(device, file, source)?,
            };
            modules.insert(*file, module);
        }
        Ok(Self { modules })
    }

    /// Returns whether there is a kernel of that name whose dynamic shared memory, together with
    /// its static shared memory, fits into `shared_bytes_max`.
    pub(crate) fn fits(&self, name: &str, shared_bytes_max: u32) -> bool {
        let listed = TABLE.iter().find(|listed| listed.name == name);
        listed
            .is_some_and(|listed| listed.shared_bytes + STATIC_SHARED_BYTES_MAX <= shared_bytes_max)
    }

    /// Returns a kernel by its name in the table.
    pub(crate) fn kernel<A: crate::driver::KernelArgs>(
        &self,
        name: &str,
    ) -> Result<crate::driver::CudaKernel<A>, CudaError> {
        let listed = TABLE.iter().find(|listed| listed.name == name);
        let listed = listed.expect("kernels/table.txt lists every kernel that is asked for");
        let shape = LaunchShape {
            threads: listed.threads,
            shared_bytes: listed.shared_bytes,
        };
        self.modules[listed.file].kernel(listed.name, shape)
    }
}

/// Loads a file's code onto the device, from the cache or the compiler.
fn cached_or_compiled(
    device: &Arc<CudaDevice>,
    file: &str,
    source: &str,
) -> Result<Arc<CudaModule>, CudaError> {
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
    let path = cache_folder().map(|folder| folder.join(format!("{}.cubin", key(source, &options))));
    if let Some(path) = &path
        && let Some(module) = cached(device, path)?
    {
        return Ok(module);
    }
    let name = &device.facts().name;
    tracing::info!(file, device = name.as_str(), "compiling kernels");
    let code = compile(file, source, &options)?;
    if let Some(path) = path {
        // Without the cached file the next start compiles again, so this is no error.
        if let Err(error) = write_cached(&path, &code) {
            tracing::debug!(path = %path.display(), %error, "cannot keep compiled kernels");
        }
    }
    CudaModule::load(device, &code)
}

/// The largest cached file that is read; compiled kernels take some megabytes.
const IMAGE_BYTES_MAX: u64 = 256 << 20;

/// The driver's errors for code that it cannot load.
const UNLOADABLE_CODE_ERRORS: [&str; 4] = [
    "CUDA_ERROR_INVALID_IMAGE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_SOURCE",
    "CUDA_ERROR_INVALID_PTX",
];

/// Loads code that an earlier start compiled. A file with a wrong checksum, or one that the driver
/// refuses, is deleted.
///
/// # Errors
/// If the device fails.
fn cached(device: &Arc<CudaDevice>, path: &Path) -> Result<Option<Arc<CudaModule>>, CudaError> {
    let Some(sealed) = read_cached(path) else {
        return Ok(None);
    };
    let problem = match verified_code(&sealed).map(|code| CudaModule::load(device, code)) {
        Some(Err(CudaError::Call { name, .. }))
            if UNLOADABLE_CODE_ERRORS.contains(&name.as_str()) =>
        {
            name
        }
        Some(loaded) => return loaded.map(Some),
        None => "its checksum is wrong".to_owned(),
    };
    let file = path.display();
    tracing::warn!(%file, problem, "compiled kernels in the cache cannot be used; they are compiled again");
    if let Err(error) = fs::remove_file(path) {
        tracing::debug!(%file, %error, "cannot delete the file");
    }
    Ok(None)
}

/// Reads a file of the cache; `None` if it does not exist or cannot be read.
fn read_cached(path: &Path) -> Option<Vec<u8>> {
    let read = cleave_files::read(path, IMAGE_BYTES_MAX);
    let missing = std::io::ErrorKind::NotFound;
    if let Some(error) = read.as_ref().err().filter(|error| error.kind() != missing) {
        let file = path.display();
        tracing::warn!(%file, %error, "compiled kernels in the cache cannot be read; they are compiled again");
    }
    read.ok()
}

/// Returns the contents of a cached file: the checksum, then the code.
fn with_checksum(code: &[u8]) -> Vec<u8> {
    [blake3::hash(code).as_bytes(), code].concat()
}

/// Returns the code in a cached file if its checksum is right.
fn verified_code(sealed: &[u8]) -> Option<&[u8]> {
    let (checksum, code) = sealed.split_at_checked(CHECKSUM_BYTES)?;
    (blake3::hash(code).as_bytes() == checksum).then_some(code)
}

/// Returns the compiler's options for this device. The chips with wgmma or tcgen05 have those
/// instructions only under a target of their own, which ends in `a`.
fn options(device: &CudaDevice) -> Vec<String> {
    let (major, minor) = device.facts().capability;
    let own = if major == 9 || major == 10 { "a" } else { "" };
    vec![
        format!("--gpu-architecture=sm_{major}{minor}{own}"),
        "--std=c++17".to_owned(),
    ]
}

/// Calls NVRTC, whose presence `compiled` checked; each caller states why its arguments are valid.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        let result = crate::dynamic::call_raw!(nvrtc::culib, nvrtc::$function($($argument),*));
        check(result, stringify!($function))
    }};
}

/// Returns a hash over everything that the code is made from: source, headers, options and the
/// compiler's version.
fn key(source: &str, options: &[String]) -> String {
    let (mut major, mut minor) = (0, 0);
    // The version stays 0.0 if the compiler does not report it.
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

/// Writes a file as a whole, and deletes the oldest ones beyond the limit.
fn write_cached(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().expect("a file in the cache's folder");
    fs::create_dir_all(folder)?;
    let unfinished = path.with_extension(format!("{}.new", std::process::id()));
    fs::write(&unfinished, with_checksum(code))?;
    fs::rename(&unfinished, path)?;
    let mut files: Vec<_> = fs::read_dir(folder)?
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    files.sort();
    let many = files.len().saturating_sub(CACHED_FILES_MAX);
    for (_, path) in files.into_iter().take(many) {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// A program of NVRTC; dropping it destroys it.
struct NvrtcProgram(nvrtc::nvrtcProgram);

impl Drop for NvrtcProgram {
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
    let mut program = NvrtcProgram(std::ptr::null_mut());
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

/// Returns the compiler's log.
fn log(program: &NvrtcProgram) -> Result<String, CudaError> {
    let mut bytes = 0;
    call!(nvrtcGetProgramLogSize(program.0, &raw mut bytes))?;
    let mut text = vec![0u8; bytes];
    call!(nvrtcGetProgramLog(program.0, text.as_mut_ptr().cast()))?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.trim_end_matches(['\0', '\n']).to_owned())
}

fn check(result: Option<c_int>, call: &'static str) -> Result<(), CudaError> {
    type DescribeNvrtcFn = unsafe extern "C" fn(c_int) -> *const c_char;
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
        let found = nvrtc::culib().get::<DescribeNvrtcFn>(b"nvrtcGetErrorString");
        found.map_or(std::ptr::null(), |describe| describe(code))
    };
    let text = if text.is_null() {
        String::new()
    } else {
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    };
    Err(CudaError::Call {
        call,
        name: format!("result {code}"),
        text,
        is_device_lost: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_code_is_aligned_to_16_bytes() {
        // The test wraps a file of odd length itself, twice, because a build without nvcc embeds no
        // code.
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
    fn a_changed_cache_file_fails_its_checksum() {
        let file = with_checksum(b"code");
        assert_eq!(verified_code(&file), Some(b"code".as_slice()));
        for at in 0..file.len() {
            let mut changed = file.clone();
            changed[at] ^= 1;
            assert_eq!(verified_code(&changed), None, "byte {at}");
        }
        for len in 0..file.len() {
            assert_eq!(verified_code(&file[..len]), None, "{len} bytes");
        }
    }

    /// The refused file must be gone even if the compiler fails afterwards; the next start would
    /// load it again.
    #[test]
    fn a_cache_file_that_does_not_load_is_deleted() {
        let Some(device) = crate::every_kernel::device() else {
            return;
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("code.cubin");
        for file in [b"damaged".to_vec(), with_checksum(b"no code of any driver")] {
            fs::write(&path, file).expect("a file can be written");
            assert!(cached(&device, &path).expect("a device").is_none());
            assert!(!path.exists());
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_fifo_in_the_kernel_cache_is_replaced() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (fifo, device) = (folder.path().join("fifo"), folder.path().join("device"));
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, &fifo, FileType::Fifo, mode, 0).expect("a FIFO");
        std::os::unix::fs::symlink("/dev/zero", &device).expect("a link");
        for path in [fifo, device] {
            assert_eq!(read_cached(&path), None);
            write_cached(&path, b"code").expect("the file is replaced");
            let file = read_cached(&path).expect("a file");
            assert_eq!(verified_code(&file), Some(b"code".as_slice()));
        }
    }

    #[test]
    fn the_sources_hash_has_12_hex_digits() {
        assert_eq!(SOURCES_HASH.len(), 12);
        assert!(SOURCES_HASH.bytes().all(|byte| byte.is_ascii_hexdigit()));
    }
}
