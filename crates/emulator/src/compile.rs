//! Compiles C++ with the machine's g++, reusing unchanged objects.
//!
//! Owns: flags, the list of compiled sources, the file written for each kernel's source, and the
//! folder of objects and libraries. Never: compiles for another machine than this one. Invariant: a
//! name holds a hash of everything that went into the file, so an existing file is up to date, and
//! a library that a process has mapped is never written to.

use crate::sources::{EmulatorSources, files_of, included_files, read, registration_source, write};
use crate::table::{self, KernelTableRow};
use crate::variant::SanitizerVariant;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// A library that programs load besides the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CompanionLibrary {
    CublasLt,
    /// Stands for NVIDIA's run-time compiler.
    Nvrtc,
}

impl CompanionLibrary {
    /// Its source file, and its library name.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            CompanionLibrary::CublasLt => ("cublaslt.cpp", "libcublasLt.so.13"),
            CompanionLibrary::Nvrtc => ("nvrtc.cpp", "libnvrtc.so.13"),
        }
    }
}

/// Why a library could not be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    /// A file could not be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    /// The kernels' table has a mistake.
    #[error("{0}")]
    Table(String),
    /// The compiler failed; its messages.
    #[error("{0}")]
    Refused(String),
}

/// A g++, and the folder of its output.
#[derive(Debug)]
pub(crate) struct Compiler {
    out: PathBuf,
    /// Output of `--version`: another compiler makes other objects.
    version: String,
    warnings: Mutex<Vec<String>>,
}

/// A source to compile, with everything that changes its object.
struct CompileUnit {
    source: PathBuf,
    flags: Vec<String>,
    object: PathBuf,
}

const COMPILER: &str = "g++";
/// Products are never fused with sums, and words may be read as floats, as on the device.
const FLAGS: [&str; 15] = [
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    // GCC notes that it once passed arguments as aligned as tensor maps otherwise.
    "-Wno-psabi",
    "-Werror=return-type",
];

/// The fiber switch pushes onto the stack, below which compilers may otherwise keep data (the red
/// zone).
const EMULATOR_FLAGS: [&str; 3] = ["-O3", "-g1", "-mno-red-zone"];

impl Compiler {
    /// The machine's g++, if it has one.
    pub(crate) fn find(out: &Path) -> Option<Compiler> {
        let output = compiler().arg("--version").output().ok()?;
        output.status.success().then(|| Compiler {
            out: out.to_path_buf(),
            version: String::from_utf8_lossy(&output.stdout).into_owned(),
            warnings: Mutex::new(Vec::new()),
        })
    }

    /// Warnings of successful compilations since the last call.
    pub(crate) fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut *self.warnings.lock())
    }

    /// The full path of one of the compiler's own libraries.
    pub(crate) fn library(&self, name: &str) -> Option<PathBuf> {
        let output = compiler()
            .arg(format!("-print-file-name={name}"))
            .output()
            .ok()?;
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        path.is_absolute().then_some(path)
    }

    /// Builds `libcuda.so.1` with the kernels that the folder's `table.txt` lists.
    pub(crate) fn build_driver(
        &self,
        sources: &EmulatorSources,
        kernels: &Path,
        variant: SanitizerVariant,
    ) -> Result<PathBuf, CompileError> {
        let _alone = self.lock()?;
        let mut units = self.emulator_units(sources, variant)?;
        units.extend(self.kernel_units(sources, kernels, variant)?);
        self.compile(&units)?;
        self.link(&units, variant, "libcuda.so.1")
    }

    /// Builds a companion library, which works with every variant of the driver's.
    pub(crate) fn build_companion(
        &self,
        sources: &EmulatorSources,
        library: CompanionLibrary,
    ) -> Result<PathBuf, CompileError> {
        let _alone = self.lock()?;
        let (source, soname) = library.names();
        let source = sources.cpp.join("beside").join(source);
        let included = included_files(&source, &read(&source)?, &[])?;
        let units = [self.unit(source, flags(&EMULATOR_FLAGS), &included)?];
        self.compile(&units)?;
        self.link(&units, SanitizerVariant::Plain, soname)
    }

    /// Lets one process compile at a time: tests run in parallel, and begin together.
    fn lock(&self) -> Result<File, CompileError> {
        let path = self.out.join("lock");
        let wrong = |error| CompileError::File(path.clone(), error);
        let file = File::create(&path).map_err(wrong)?;
        file.lock().map_err(wrong)?;
        Ok(file)
    }

    fn emulator_units(
        &self,
        sources: &EmulatorSources,
        variant: SanitizerVariant,
    ) -> Result<Vec<CompileUnit>, CompileError> {
        let mut units = Vec::new();
        for folder in [sources.cpp.clone(), sources.cpp.join("driver")] {
            for source in files_of(&folder)? {
                let text = read(&source)?;
                let included = included_files(&source, &text, &[])?;
                // A source that does not name the variant shares one object among all variants.
                let asks = |name: &str| {
                    included
                        .values()
                        .chain([&text])
                        .any(|text| text.contains(name))
                };
                let flags = match variant.define() {
                    Some(name) if asks(name) => {
                        flags(&[&EMULATOR_FLAGS[..], &[&format!("-D{name}")]].concat())
                    }
                    _ => flags(&EMULATOR_FLAGS),
                };
                units.push(self.unit(source, flags, &included)?);
            }
        }
        Ok(units)
    }

    /// Each kernel file is included by a generated source, which registers its kernels.
    fn kernel_units(
        &self,
        sources: &EmulatorSources,
        folder: &Path,
        variant: SanitizerVariant,
    ) -> Result<Vec<CompileUnit>, CompileError> {
        let table = folder.join("table.txt");
        let kernels = table::parse(&read(&table)?).map_err(CompileError::Table)?;
        let mut by_file: BTreeMap<&str, Vec<&KernelTableRow>> = BTreeMap::new();
        for kernel in &kernels {
            by_file.entry(&kernel.file).or_default().push(kernel);
        }
        let mut flags = flags(variant.kernel_flags());
        for folder in [&sources.include, &sources.cpp] {
            flags.push(format!("-I{}", folder.display()));
        }
        let mut units = Vec::new();
        for (file, listed) in by_file {
            let source = folder.join(file);
            let text = registration_source(&source, &listed);
            let written = self.out.join(format!("{}.cpp", hashed_name(file, &text)));
            write(&written, text.as_bytes())?;
            let included = included_files(&written, &text, &[&sources.include, &sources.cpp])?;
            units.push(self.unit(written, flags.clone(), &included)?);
        }
        Ok(units)
    }

    fn unit(
        &self,
        source: PathBuf,
        flags: Vec<String>,
        included: &BTreeMap<PathBuf, String>,
    ) -> Result<CompileUnit, CompileError> {
        let text = read(&source)?;
        let stem = source
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or("unit");
        let object = self.out.join(format!(
            "{}.o",
            hashed_name(stem, &(text, &flags, included, &self.version))
        ));
        Ok(CompileUnit {
            source,
            flags,
            object,
        })
    }

    /// Compiles missing objects, on as many threads as cargo or the machine allows.
    fn compile(&self, units: &[CompileUnit]) -> Result<(), CompileError> {
        let missing: VecDeque<&CompileUnit> =
            units.iter().filter(|unit| !unit.object.exists()).collect();
        let jobs = std::env::var("NUM_JOBS")
            .ok()
            .and_then(|jobs| jobs.parse().ok());
        let jobs = jobs.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let queue = Mutex::new(missing);
        let work = || -> Result<(), CompileError> {
            loop {
                let next = queue.lock().pop_front();
                let Some(unit) = next else { return Ok(()) };
                let mut command = compiler();
                command.args(&unit.flags).arg("-c").arg(&unit.source);
                self.run(command, &unit.object)?;
            }
        };
        thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().expect("a worker does not panic"))
        })
    }

    fn link(
        &self,
        units: &[CompileUnit],
        variant: SanitizerVariant,
        soname: &str,
    ) -> Result<PathBuf, CompileError> {
        let objects: Vec<&PathBuf> = units.iter().map(|unit| &unit.object).collect();
        let folder = self
            .out
            .join(hashed_name(variant.name(), &(&objects, soname, variant)));
        let library = folder.join(soname);
        if library.exists() {
            return Ok(library);
        }
        fs::create_dir_all(&folder).map_err(|error| CompileError::File(folder.clone(), error))?;
        let mut command = compiler();
        command.args([
            "-shared",
            "-pthread",
            "-Wl,-Bsymbolic",
            &format!("-Wl,-soname,{soname}"),
        ]);
        command.args(variant.link_flags()).args(objects).arg("-ldl");
        self.run(command, &library)?;
        Ok(library)
    }

    /// Runs the compiler into a temporary file that gets its name when it is complete, so that no
    /// process sees half a file.
    fn run(&self, mut command: Command, to: &Path) -> Result<(), CompileError> {
        let part = to.with_extension(format!("part{}", std::process::id()));
        command.arg("-o").arg(&part);
        let output = command
            .output()
            .map_err(|error| CompileError::File(PathBuf::from(COMPILER), error))?;
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(CompileError::Refused(words));
        }
        let warned = words
            .lines()
            .filter(|line| line.contains("warning:"))
            .map(str::to_owned);
        self.warnings.lock().extend(warned);
        fs::rename(&part, to).map_err(|error| CompileError::File(to.to_path_buf(), error))
    }
}

/// A sanitizer preloaded into this program must not be loaded into the compiler.
fn compiler() -> Command {
    let mut command = Command::new(COMPILER);
    command.env_remove("LD_PRELOAD");
    command
}

/// The common flags, those given, and this machine's instruction sets: kernels run where they are
/// built.
fn flags(more: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = FLAGS
        .iter()
        .chain(more)
        .map(|&flag| flag.to_owned())
        .collect();
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
        all.extend(["-mavx2".to_owned(), "-mfma".to_owned()]);
    }
    all
}

fn hashed_name(stem: &str, key: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    let stem: String = stem
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    format!("{stem}-{:016x}", hasher.finish())
}
