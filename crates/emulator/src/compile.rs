//! Compiles C++ with the machine's g++, keeping what has not changed.
//!
//! Owns: flags, the list of what is compiled, the file written for each kernel's source, and the folder that
//! objects and libraries are kept in.
//! Never: compiles for another machine than this one.
//! Invariant: a name holds a hash of everything that went into the file, so a file that is there is right, and
//! a library that a process has mapped is never written to.

use crate::table::{self, Kernel};
use std::collections::btree_map::Entry;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// How kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Variant {
    /// Optimised.
    Plain,
    /// With the address and undefined-behaviour sanitizers.
    Address,
    /// With the thread sanitizer: each of a block's threads is one.
    Thread,
}

/// What programs load besides the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Beside {
    /// Matrix products.
    CublasLt,
    /// The compiler at run time.
    Nvrtc,
}

impl Beside {
    /// Its source, and the name that it is loaded by.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Beside::CublasLt => ("cublaslt.cpp", "libcublasLt.so.13"),
            Beside::Nvrtc => ("nvrtc.cpp", "libnvrtc.so.13"),
        }
    }
}

/// Why there is no library.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CompileError {
    /// A file could not be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, io::Error),
    /// The kernels' table has a mistake.
    #[error("{0}")]
    Table(String),
    /// The compiler refused; its words.
    #[error("{0}")]
    Refused(String),
}

/// Where the sources are.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    /// The emulator's and the driver's.
    pub(crate) cpp: PathBuf,
    /// What kernels include.
    pub(crate) include: PathBuf,
}

impl Sources {
    /// Of the crate in `manifest`.
    pub(crate) fn of(manifest: &Path) -> Sources {
        Sources {
            cpp: manifest.join("src/cpp"),
            include: manifest.join("../../kernels/include"),
        }
    }
}

/// A g++ and the folder that it writes to.
#[derive(Debug)]
pub(crate) struct Compiler {
    out: PathBuf,
    /// What `--version` says: another compiler makes other objects.
    version: String,
    warnings: Mutex<Vec<String>>,
}

/// One source to be compiled, and all that makes a difference to its object.
struct Unit {
    source: PathBuf,
    flags: Vec<String>,
    object: PathBuf,
}

const COMPILER: &str = "g++";
/// Products are never fused with sums, and words may be read as floats, as on the device.
const FLAGS: [&str; 14] = [
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
    "-Werror=return-type",
];

/// The switch between stacks pushes where compilers may keep things otherwise.
const OWN_FLAGS: [&str; 3] = ["-O3", "-g1", "-mno-red-zone"];

impl Variant {
    /// What `CLEAVE_STANDIN_VARIANT` names (`plain`, `address`, `thread`), for test programs that are started with a
    /// sanitizer's runtime as a whole; plain if it is not set.
    ///
    /// # Panics
    /// If it is something else.
    pub fn of_environment() -> Variant {
        let all = [Variant::Plain, Variant::Address, Variant::Thread];
        let Ok(name) = std::env::var("CLEAVE_STANDIN_VARIANT") else {
            return Variant::Plain;
        };
        let named = all.into_iter().find(|variant| variant.name() == name);
        named.unwrap_or_else(|| {
            panic!("CLEAVE_STANDIN_VARIANT={name} is none of plain, address, thread")
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Variant::Plain => "plain",
            Variant::Address => "address",
            Variant::Thread => "thread",
        }
    }

    fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            Variant::Plain => &["-O2", "-g1", "-fno-exceptions"],
            Variant::Address => &[
                "-O1",
                "-g",
                "-fno-exceptions",
                "-fno-omit-frame-pointer",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
            ],
            Variant::Thread => &[
                "-O1",
                "-g",
                "-fno-exceptions",
                "-fno-omit-frame-pointer",
                "-fsanitize=thread",
            ],
        }
    }

    /// What a source of ours is told if it asks: the few that do speak with the sanitizer, and none is sanitized.
    fn define(self) -> Option<&'static str> {
        match self {
            Variant::Plain => None,
            Variant::Address => Some("EMULATOR_ADDRESS"),
            Variant::Thread => Some("EMULATOR_THREAD"),
        }
    }

    fn link_flags(self) -> &'static [&'static str] {
        match self {
            Variant::Plain => &[],
            Variant::Address => &["-fsanitize=address,undefined"],
            Variant::Thread => &["-fsanitize=thread"],
        }
    }

    /// The sanitizer's library that must be loaded before a program's own.
    pub(crate) fn runtime(self) -> Option<&'static str> {
        match self {
            Variant::Plain => None,
            Variant::Address => Some("libasan.so"),
            Variant::Thread => Some("libtsan.so"),
        }
    }
}

impl Compiler {
    /// The machine's, if it has one.
    pub(crate) fn find(out: &Path) -> Option<Compiler> {
        let said = compiler().arg("--version").output().ok()?;
        said.status.success().then(|| Compiler {
            out: out.to_path_buf(),
            version: String::from_utf8_lossy(&said.stdout).into_owned(),
            warnings: Mutex::new(Vec::new()),
        })
    }

    /// Lines that the compiler had to say about what it compiled nonetheless, told once.
    pub(crate) fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut *self.warnings.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The full name of one of the compiler's own libraries.
    pub(crate) fn library(&self, name: &str) -> Option<PathBuf> {
        let said = compiler()
            .arg(format!("-print-file-name={name}"))
            .output()
            .ok()?;
        let path = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
        path.is_absolute().then_some(path)
    }

    /// `libcuda.so.1` with the kernels of a folder, which its `table.txt` lists.
    pub(crate) fn stand_in(
        &self,
        sources: &Sources,
        kernels: &Path,
        variant: Variant,
    ) -> Result<PathBuf, CompileError> {
        let _alone = self.lock()?;
        let mut units = self.own_units(sources, variant)?;
        units.extend(self.kernel_units(sources, kernels, variant)?);
        self.compile(&units)?;
        self.link(&units, variant, "libcuda.so.1")
    }

    /// A library beside the driver's, which serves every variant of it.
    pub(crate) fn beside(
        &self,
        sources: &Sources,
        library: Beside,
    ) -> Result<PathBuf, CompileError> {
        let _alone = self.lock()?;
        let (source, soname) = library.names();
        let source = sources.cpp.join("beside").join(source);
        let included = included(&source, &read(&source)?, &[])?;
        let units = [self.unit(source, flags(&OWN_FLAGS), &included)?];
        self.compile(&units)?;
        self.link(&units, Variant::Plain, soname)
    }

    /// One process at a time: tests run in parallel, and begin together.
    fn lock(&self) -> Result<File, CompileError> {
        let path = self.out.join("lock");
        let wrong = |error| CompileError::File(path.clone(), error);
        let file = File::create(&path).map_err(wrong)?;
        file.lock().map_err(wrong)?;
        Ok(file)
    }

    fn own_units(&self, sources: &Sources, variant: Variant) -> Result<Vec<Unit>, CompileError> {
        let mut units = Vec::new();
        for folder in [sources.cpp.clone(), sources.cpp.join("driver")] {
            for source in files_of(&folder)? {
                let text = read(&source)?;
                let included = included(&source, &text, &[])?;
                // Where it makes no difference the variants share an object.
                let asks = |name: &str| {
                    included
                        .values()
                        .chain([&text])
                        .any(|text| text.contains(name))
                };
                let flags = match variant.define() {
                    Some(name) if asks(name) => {
                        flags(&[&OWN_FLAGS[..], &[&format!("-D{name}")]].concat())
                    }
                    _ => flags(&OWN_FLAGS),
                };
                units.push(self.unit(source, flags, &included)?);
            }
        }
        Ok(units)
    }

    /// Each kernel's file is compiled within a file of ours, which lists what is in it.
    fn kernel_units(
        &self,
        sources: &Sources,
        folder: &Path,
        variant: Variant,
    ) -> Result<Vec<Unit>, CompileError> {
        let table = folder.join("table.txt");
        let kernels = table::parse(&read(&table)?).map_err(CompileError::Table)?;
        let mut by_file: BTreeMap<&str, Vec<&Kernel>> = BTreeMap::new();
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
            let text = listing(&source, &listed);
            let written = self.out.join(format!("{}.cpp", name_of(file, &text)));
            write(&written, text.as_bytes())?;
            let included = included(&written, &text, &[&sources.include, &sources.cpp])?;
            units.push(self.unit(written, flags.clone(), &included)?);
        }
        Ok(units)
    }

    fn unit(
        &self,
        source: PathBuf,
        flags: Vec<String>,
        included: &BTreeMap<PathBuf, String>,
    ) -> Result<Unit, CompileError> {
        let text = read(&source)?;
        let stem = source
            .file_stem()
            .and_then(|stem| stem.to_str())
            .unwrap_or("unit");
        let object = self.out.join(format!(
            "{}.o",
            name_of(stem, &(text, &flags, included, &self.version))
        ));
        Ok(Unit {
            source,
            flags,
            object,
        })
    }

    /// Compiles what is not there yet, on as many threads as cargo or the machine allows.
    fn compile(&self, units: &[Unit]) -> Result<(), CompileError> {
        let missing: VecDeque<&Unit> = units.iter().filter(|unit| !unit.object.exists()).collect();
        let jobs = std::env::var("NUM_JOBS")
            .ok()
            .and_then(|jobs| jobs.parse().ok());
        let jobs = jobs.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
        let queue = Mutex::new(missing);
        let work = || -> Result<(), CompileError> {
            loop {
                let next = queue
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .pop_front();
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
        units: &[Unit],
        variant: Variant,
        soname: &str,
    ) -> Result<PathBuf, CompileError> {
        let objects: Vec<&PathBuf> = units.iter().map(|unit| &unit.object).collect();
        let folder = self
            .out
            .join(name_of(variant.name(), &(&objects, soname, variant)));
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

    /// Runs the compiler into a file that takes its name when it is whole.
    fn run(&self, mut command: Command, to: &Path) -> Result<(), CompileError> {
        let part = to.with_extension(format!("part{}", std::process::id()));
        command.arg("-o").arg(&part);
        let said = command
            .output()
            .map_err(|error| CompileError::File(PathBuf::from(COMPILER), error))?;
        let words = String::from_utf8_lossy(&said.stderr).into_owned();
        if !said.status.success() {
            return Err(CompileError::Refused(words));
        }
        let warned = words
            .lines()
            .filter(|line| line.contains("warning:"))
            .map(str::to_owned);
        self.warnings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(warned);
        fs::rename(&part, to).map_err(|error| CompileError::File(to.to_path_buf(), error))
    }
}

/// A sanitizer that was put in front of this program is not meant for the compiler.
fn compiler() -> Command {
    let mut command = Command::new(COMPILER);
    command.env_remove("LD_PRELOAD");
    command
}

/// The flags of every unit, those given, and this machine's instructions: kernels are run where they are built.
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

/// A source that includes a kernel's file, in a name space of its own (two files may have functions of one name),
/// and lists its kernels.
fn listing(source: &Path, kernels: &[&Kernel]) -> String {
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    let space = format!("kernels_{:016x}", hasher.finish());
    let mut text = format!(
        "#include \"prims.cuh\"\n#include \"registry.h\"\nnamespace {space} {{\n#include \"{}\"\n}}\n",
        source.display()
    );
    for Kernel {
        name,
        threads,
        registers_max,
        shared_bytes,
        ..
    } in kernels
    {
        text += &format!(
            "static emulator::Listed listed_{name}({{\"{name}\", emulator::Entry<{space}::{name}>::run, \
             emulator::Entry<{space}::{name}>::ARGS_BYTES, {threads}, {registers_max}, {shared_bytes}, nullptr}});\n"
        );
    }
    text
}

fn name_of(stem: &str, what: &impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    let stem: String = stem
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    format!("{stem}-{:016x}", hasher.finish())
}

fn read(path: &Path) -> Result<String, CompileError> {
    fs::read_to_string(path).map_err(|error| CompileError::File(path.to_path_buf(), error))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), CompileError> {
    fs::write(path, bytes).map_err(|error| CompileError::File(path.to_path_buf(), error))
}

/// The C++ sources in one folder.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>, CompileError> {
    let wrong = |error| CompileError::File(folder.to_path_buf(), error);
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(wrong)? {
        let path = entry.map_err(wrong)?.path();
        if path.extension().is_some_and(|is| is == "cpp") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Everything that a source includes by a name in quotes, and what that includes in turn.
fn included(
    source: &Path,
    text: &str,
    folders: &[&Path],
) -> Result<BTreeMap<PathBuf, String>, CompileError> {
    let mut found = BTreeMap::new();
    let mut left = vec![(source.to_path_buf(), text.to_owned())];
    while let Some((from, text)) = left.pop() {
        for line in text.lines() {
            let Some(name) = line
                .trim()
                .strip_prefix("#include \"")
                .and_then(|rest| rest.strip_suffix('"'))
            else {
                continue;
            };
            let beside = from.parent().into_iter().chain(folders.iter().copied());
            // One that is nowhere is the compiler's to complain about.
            let Some(path) = beside
                .map(|folder| folder.join(name))
                .find(|path| path.exists())
            else {
                continue;
            };
            let path = path
                .canonicalize()
                .map_err(|error| CompileError::File(path.clone(), error))?;
            if let Entry::Vacant(place) = found.entry(path) {
                let text = read(place.key())?;
                left.push((place.key().clone(), text.clone()));
                place.insert(text);
            }
        }
    }
    Ok(found)
}
