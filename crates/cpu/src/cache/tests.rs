//! Files of packed weights: intact, damaged, truncated, of other checkpoints, and in folders that
//! are not writable.
#![allow(clippy::unwrap_used)] // Tests.

use super::layout::{PAGE, PackedHeader};
use super::{PackedLocation, checksum};
use crate::options::CpuOptions;
use crate::pack::{CpuMatrix, CpuWeightLoader, LAYOUT};
use cleave_checkpoint::rounding::RoundedForm;
use cleave_checkpoint::{
    ByteCodes, CheckpointStamp, QuantizedTensor, QuantizedType, StoredMatrix, StoredTensor,
};
use cleave_cpu_kernels::memory::{WeightWords, bytes_of};
use cleave_engine::ops::{InnerSlices, Precision, Quantize, WeightLoader};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

/// Format of a checkpoint's weights, and of the packed ones.
#[derive(Clone, Copy, Debug, PartialEq)]
enum WeightKind {
    F32,
    Bf16,
    ToInt8,
    ToInt4,
    Int8,
    Int4,
    Int4Odd,
    Int8Groups,
    Int8Odd,
    F16,
    ToMxfp4,
    ToNvfp4,
    Mxfp4,
    Nvfp4,
    Int4Halves,
}

const KINDS: [WeightKind; 15] = [
    WeightKind::F32,
    WeightKind::Bf16,
    WeightKind::ToInt8,
    WeightKind::ToInt4,
    WeightKind::Int8,
    WeightKind::Int4,
    WeightKind::Int4Odd,
    WeightKind::Int8Groups,
    WeightKind::Int8Odd,
    WeightKind::F16,
    WeightKind::ToMxfp4,
    WeightKind::ToNvfp4,
    WeightKind::Mxfp4,
    WeightKind::Nvfp4,
    WeightKind::Int4Halves,
];

const WIDTH: usize = 64;

/// Numbers in −1..1, the same for the same seed.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

fn dense(kind: WeightKind, name: &str, rows: usize) -> StoredTensor {
    let values = numbers(name.len() as u64, rows * WIDTH);
    match kind {
        WeightKind::F32 => StoredTensor::from_f32(name, rows, WIDTH, &values),
        WeightKind::F16 => {
            let values: Vec<_> = values.iter().map(|x| half::f16::from_f32(*x)).collect();
            StoredTensor::from_f16(name, rows, WIDTH, &values)
        }
        _ => {
            let values: Vec<_> = values.iter().map(|x| half::bf16::from_f32(*x)).collect();
            StoredTensor::from_bf16(name, rows, WIDTH, &values)
        }
    }
}

fn rounded(name: &str, rows: usize, form: RoundedForm) -> StoredMatrix {
    let dense = StoredMatrix::from(dense(WeightKind::Bf16, name, rows));
    dense.rounded(form, 2).into()
}

fn stored(kind: WeightKind, name: &str, rows: usize) -> StoredMatrix {
    let (element, group) = match kind {
        WeightKind::Int8 => (QuantizedType::Int8, WIDTH),
        WeightKind::Int8Groups | WeightKind::Int8Odd => (QuantizedType::Int8, 32),
        WeightKind::Int4 | WeightKind::Int4Odd | WeightKind::Int4Halves => {
            (QuantizedType::Int4, 32)
        }
        WeightKind::Mxfp4 => return rounded(name, rows, RoundedForm::Mxfp4),
        WeightKind::Nvfp4 => return rounded(name, rows, RoundedForm::Nvfp4),
        _ => return dense(kind, name, rows).into(),
    };
    let seed = name.len() as u64;
    let groups = rows * WIDTH.div_ceil(group);
    let codes: Vec<u8> = numbers(seed, rows * WIDTH)
        .iter()
        .map(|x| ((x + 1.0) * 8.0) as u8 & 15)
        .collect();
    let scales: Vec<f32> = match kind {
        WeightKind::Int4 | WeightKind::Int8Groups => vec![0.5; groups],
        // Exact in f16, and not in bf16.
        WeightKind::Int4Halves => vec![1.0 + 1.0 / 1024.0; groups],
        _ => numbers(seed + 1, groups),
    };
    let zero = match kind {
        WeightKind::Int8 | WeightKind::Int8Groups => 0,
        WeightKind::Int4 => 8,
        _ => 5,
    };
    let coded = ByteCodes {
        element,
        codes: &codes,
        group,
        scales: &scales,
        zeros: &vec![zero; groups],
    };
    QuantizedTensor::from_codes(name, rows, WIDTH, &coded).into()
}

fn options(kind: WeightKind) -> CpuOptions {
    CpuOptions {
        threads: 2,
        keeps_f16: kind == WeightKind::F16,
        quantize: match kind {
            WeightKind::ToInt8 => Some(Quantize::Int8),
            WeightKind::ToInt4 => Some(Quantize::Int4),
            WeightKind::ToMxfp4 => Some(Quantize::Mxfp4),
            WeightKind::ToNvfp4 => Some(Quantize::Nvfp4),
            _ => None,
        },
        ..CpuOptions::new(match kind {
            WeightKind::F32 => Precision::F32,
            _ => Precision::Bf16,
        })
    }
}

/// A cache folder, and a checkpoint that may change.
struct CacheStage {
    folder: PathBuf,
    origin: &'static str,
    stamp: CheckpointStamp,
    kind: WeightKind,
}

impl CacheStage {
    fn new(folder: &Path, kind: WeightKind) -> Self {
        Self {
            folder: folder.to_owned(),
            origin: "/a",
            stamp: CheckpointStamp([1; 32]),
            kind,
        }
    }

    fn place(&self) -> PackedLocation {
        let form = format!("{:?}", self.kind).to_lowercase();
        PackedLocation::new(&self.folder, Path::new(self.origin), self.stamp, form)
    }

    fn pack(&self) -> CpuWeightLoader {
        CpuWeightLoader::new(&options(self.kind)).with_cache_at(self.place())
    }

    fn load(&self) -> Vec<CpuMatrix> {
        load(&self.pack(), self.kind)
    }

    fn plain(&self) -> Vec<CpuMatrix> {
        load(&CpuWeightLoader::new(&options(self.kind)), self.kind)
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(&self.folder).unwrap();
        let mut names: Vec<String> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Checks that one load packs anew, and that the next one maps.
    #[track_caller]
    fn check_packed_anew(&self, expected: &[CpuMatrix], label: &str) {
        let loaded = self.load();
        assert!(!loaded.iter().all(is_mapped), "{label}: all was mapped");
        assert_same(&loaded, expected, label);
        drop(loaded);
        self.check_mapped(expected, label);
    }

    #[track_caller]
    fn check_mapped(&self, expected: &[CpuMatrix], label: &str) {
        let loaded = self.load();
        assert!(loaded.iter().all(is_mapped), "{label}: not mapped");
        assert_same(&loaded, expected, label);
    }
}

/// Loads a checkpoint of four matrices, one of them with padding columns, and one with slices.
fn load(pack: &CpuWeightLoader, kind: WeightKind) -> Vec<CpuMatrix> {
    let qkv = [stored(kind, "q", 40), stored(kind, "kk", 7)];
    let gate_up = [stored(kind, "gate", 36), stored(kind, "upper", 36)];
    let bias = numbers(9, 47);
    let matrices = vec![
        pack.matrix(&qkv, Some(&bias)).unwrap(),
        pack.gate_up(&gate_up, None).unwrap(),
        pack.sliced_matrix(
            &[stored(kind, "downwards", 40)],
            None,
            &InnerSlices::halved(WIDTH, 32, 2),
        )
        .unwrap(),
        pack.head(&dense(kind, "vocabulary", 70)).unwrap(),
    ];
    pack.finish().unwrap();
    matrices
}

fn is_mapped(matrix: &CpuMatrix) -> bool {
    matches!(matrix.words, WeightWords::Mapped(_))
}

/// All contents of a matrix, as bits.
fn bits(matrix: &CpuMatrix) -> (String, Vec<u32>, Vec<u32>) {
    let CpuMatrix {
        form,
        column_scales,
        columns,
        is_gated,
        width,
        slices,
        words,
        bias,
    } = matrix;
    let mut beside: Vec<u32> = bias.iter().flatten().map(|x| x.to_bits()).collect();
    beside.extend(column_scales.iter().flatten().map(|x| x.to_bits()));
    let shape = format!("{form:?} {columns} {is_gated} {width} {slices:?}");
    (shape, words.to_vec(), beside)
}

#[track_caller]
fn assert_same(found: &[CpuMatrix], expected: &[CpuMatrix], label: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(bits(found) == bits(expected), "{label}: other bits");
    }
}

#[test]
fn mapped_weights_equal_packed_weights() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let stage = CacheStage::new(folder.path(), kind);
        let label = format!("{kind:?}");
        stage.check_packed_anew(&stage.plain(), &label);
        assert_eq!(stage.files().len(), 1, "{label}");
    }
}

#[cfg(unix)]
#[test]
fn a_fifo_or_device_in_the_cache_is_replaced_unread() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::F32);
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, stage.place().file(), FileType::Fifo, mode, 0).unwrap();
    let problem = super::reader::PackedReader::open(&stage.place()).unwrap_err();
    assert!(problem.contains("a FIFO"), "{problem}");
    stage.check_packed_anew(&stage.plain(), "a FIFO");
    fs::remove_file(stage.place().file()).unwrap();
    std::os::unix::fs::symlink("/dev/zero", stage.place().file()).unwrap();
    let problem = super::reader::PackedReader::open(&stage.place()).unwrap_err();
    assert!(problem.contains("a device"), "{problem}");
    stage.check_packed_anew(&stage.plain(), "a device");
}

#[cfg(unix)]
#[test]
fn a_fifo_in_place_of_a_temporary_file_is_no_writer() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::F32);
    let part = stage.place().part_file();
    let abandoned = part.with_file_name(format!("other-{}", part.file_name().unwrap().display()));
    assert!(PackedLocation::is_part(
        abandoned.file_name().unwrap().to_str().unwrap()
    ));
    for path in [&part, &abandoned] {
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }
    let problem = super::writer::PackedWriter::begin(&stage.place(), 1).unwrap_err();
    assert!(problem.to_string().contains("a FIFO"), "{problem}");
    fs::remove_file(&part).unwrap();
    stage.check_packed_anew(&stage.plain(), "a FIFO beside the cache");
    assert!(abandoned.exists(), "not written here");
}

/// The packed words must not change without their version: raise [`LAYOUT`] together with these
/// sums.
#[test]
fn packed_words_change_only_with_the_layout_version() {
    let sums = KINDS.map(|kind| {
        let matrices = load(&CpuWeightLoader::new(&options(kind)), kind);
        let all: Vec<u32> = matrices
            .iter()
            .flat_map(|matrix| {
                let (_, words, beside) = bits(matrix);
                [words, beside].concat()
            })
            .collect();
        checksum(bytes_of(&all), 1)
    });
    if cfg!(target_endian = "little") {
        assert_eq!((LAYOUT, sums), (4, SUMS), "{sums:#x?}");
    }
}

const SUMS: [u64; 15] = [
    0x2a7a_b753_d972_cc34,
    0xd45c_c811_212e_6877,
    0xbed6_e806_0da8_646e,
    0x2c42_85cc_2f97_4e1f,
    0xe11a_5049_b5f2_a7f6,
    0xd3fb_b228_9229_2391,
    0x23c3_155d_ff68_79bd,
    0xbea3_52bd_0cd6_a0fe,
    0xf33e_b74b_8774_2fff,
    0xf427_0f5e_ea17_c309,
    0xcc9c_574a_ef3a_e0e1,
    0x974f_93ae_80db_29ad,
    0xc62c_0045_e646_2052,
    0x3229_cce8_3ec9_a19b,
    0xf3ea_f8fb_7653_a70c,
];

#[test]
fn a_file_with_a_changed_byte_is_packed_anew() {
    for kind in [WeightKind::Bf16, WeightKind::ToInt8] {
        let folder = tempfile::tempdir().unwrap();
        let stage = CacheStage::new(folder.path(), kind);
        let expected = stage.load();
        let file = stage.place().file();
        let length = fs::metadata(&file).unwrap().len() as usize;
        // All used bytes of the header, then samples of everything: weights, scales, zeros, index.
        let places = (0..140).step_by(3).chain((0..length).step_by(997));
        for at in places.chain([PAGE - 1, PAGE, length - 1]) {
            let mut bytes = fs::read(&file).unwrap();
            bytes[at] ^= 1 << (at % 8);
            // A new file of the same name: a mapped file must not be changed in place.
            fs::remove_file(&file).unwrap();
            fs::write(&file, &bytes).unwrap();
            stage.check_packed_anew(&expected, &format!("{kind:?}, byte {at}"));
        }
    }
}

#[test]
fn a_file_of_the_wrong_length_is_packed_anew() {
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::Bf16);
    let expected = stage.load();
    let file = stage.place().file();
    let whole = fs::read(&file).unwrap();
    for length in [
        0,
        7,
        PAGE - 1,
        PAGE,
        PAGE + 100,
        whole.len() - 1,
        whole.len() + 1,
    ] {
        let mut bytes = whole.clone();
        bytes.resize(length, 0);
        fs::remove_file(&file).unwrap();
        fs::write(&file, &bytes).unwrap();
        stage.check_packed_anew(&expected, &format!("{length} bytes"));
    }
}

#[test]
fn a_file_of_another_layout_or_checkpoint_is_packed_anew() {
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::Bf16);
    let expected = stage.load();
    let file = stage.place().file();
    let whole = fs::read(&file).unwrap();
    let head = PackedHeader::read(whole.first_chunk().unwrap()).unwrap();
    let others = [
        PackedHeader {
            layout: LAYOUT + 1,
            ..head.clone()
        },
        PackedHeader {
            stamp: [2; 32],
            ..head.clone()
        },
        PackedHeader {
            form: PackedHeader::form("f32"),
            ..head.clone()
        },
        PackedHeader {
            bytes: head.bytes + 1,
            ..head.clone()
        },
        PackedHeader {
            index_at: 0,
            ..head.clone()
        },
        PackedHeader {
            index_at: u64::MAX,
            ..head.clone()
        },
    ];
    for other in others {
        let mut bytes = whole.clone();
        bytes[..PAGE].copy_from_slice(&other.write());
        fs::remove_file(&file).unwrap();
        fs::write(&file, &bytes).unwrap();
        stage.check_packed_anew(&expected, &format!("{other:?}"));
    }
}

#[test]
fn a_cached_matrix_of_another_name_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::Bf16);
    stage.load();
    let pack = stage.pack();
    let first = pack
        .matrix(&[stored(stage.kind, "other", 47)], None)
        .unwrap();
    assert!(!is_mapped(&first));
}

#[test]
fn a_new_cache_file_replaces_only_those_it_supersedes() {
    let folder = tempfile::tempdir().unwrap();
    let stage = |origin, stamp, kind| CacheStage {
        origin,
        stamp: CheckpointStamp([stamp; 32]),
        ..CacheStage::new(folder.path(), kind)
    };
    let (before, other_form) = (
        stage("/a", 1, WeightKind::Bf16),
        stage("/a", 1, WeightKind::ToInt4),
    );
    let other_model = stage("/b", 7, WeightKind::Bf16);
    for stage in [&before, &other_form, &other_model] {
        stage.load();
    }
    fs::write(folder.path().join("a file of somebody's"), "").unwrap();
    assert_eq!(before.files().len(), 4, "forms and models side by side");
    let after = stage("/a", 2, WeightKind::Bf16);
    after.check_packed_anew(&after.plain(), "a checkpoint that changed");
    assert!(!before.place().file().exists() && !other_form.place().file().exists());
    assert!(other_model.place().file().exists());
    assert_eq!(after.files().len(), 3);
    // A file of another layout version.
    let old = after
        .place()
        .file()
        .to_str()
        .unwrap()
        .replace(&format!("-{LAYOUT}"), "-0");
    fs::rename(after.place().file(), &old).unwrap();
    after.check_packed_anew(&after.plain(), "a layout that changed");
    assert!(!Path::new(&old).exists());
}

#[test]
fn concurrent_cache_writers_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::ToInt8);
    let expected = stage.plain();
    let (first, second) = (stage.pack(), stage.pack());
    assert_same(&load(&second, stage.kind), &expected, "the second");
    assert_same(&load(&first, stage.kind), &expected, "the first");
    drop((first, second));
    stage.check_mapped(&expected, "afterwards");
}

#[test]
fn only_part_files_of_dead_writers_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let stage = CacheStage::new(folder.path(), WeightKind::Bf16);
    let dead_part = folder.path().join("1-1-bf16-1le.packed-part");
    let live_part = folder.path().join("2-2-bf16-1le.packed-part");
    let own_part = stage.place().part_file();
    for part in [&dead_part, &live_part, &own_part] {
        fs::write(part, vec![7; 100_000]).unwrap();
    }
    let held = OpenOptions::new().write(true).open(&live_part).unwrap();
    held.lock().unwrap();
    stage.check_packed_anew(&stage.plain(), "beside what was left");
    assert!(!dead_part.exists() && !own_part.exists() && live_part.exists());
}

#[test]
fn a_load_succeeds_when_the_cache_is_not_writable() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for folder in [file.clone(), file.join("below"), "/proc/self/packed".into()] {
        let stage = CacheStage::new(&folder, WeightKind::Bf16);
        assert_same(&stage.load(), &stage.plain(), "nowhere");
    }
}

/// Runs itself in a child process with a limit on file sizes, in place of a full disk.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_stops_no_load_and_leaves_no_part_file() {
    const FOLDER: &str = "CLEAVE_TEST_PACKED_FOLDER";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let stage = CacheStage::new(Path::new(&folder), WeightKind::F32);
        let loaded = stage.load();
        assert_same(&loaded, &stage.plain(), "on a full disk");
        assert!(stage.files().is_empty(), "{:?}", stage.files());
        assert!(!stage.load().iter().any(is_mapped));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let limited = "trap '' XFSZ; ulimit -f 32; exec \"$0\" \"$@\"";
    let done = std::process::Command::new("sh")
        .args(["-c", limited])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "cache::tests::a_full_disk_stops_no_load_and_leaves_no_part_file",
        ])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success() && stdout.contains("1 passed"),
        "{stdout}"
    );
}

/// A GPU takes matrices that were rounded before; a processor rounds them while it packs.
#[test]
fn rounding_at_load_gives_the_words_of_rounded_matrices() {
    let slices = InnerSlices::halved(WIDTH, 32, 2);
    for quantize in Quantize::ALL {
        if quantize == Quantize::Fp8 {
            continue;
        }
        let of = |quantize| {
            CpuWeightLoader::new(&CpuOptions {
                threads: 2,
                quantize,
                ..CpuOptions::new(Precision::Bf16)
            })
        };
        let (dense, coded): (Vec<StoredMatrix>, Vec<StoredMatrix>) = [("a", 40), ("bb", 7)]
            .map(|(name, rows)| {
                let dense = StoredMatrix::from(dense(WeightKind::Bf16, name, rows));
                let coded = dense.rounded(quantize.form(&slices), 3);
                (dense, coded.into())
            })
            .into_iter()
            .unzip();
        let at_load = of(Some(quantize)).sliced_matrix(&dense, None, &slices);
        let before = of(None).sliced_matrix(&coded, None, &slices);
        assert_same(&[at_load.unwrap()], &[before.unwrap()], quantize.name());
    }
}
