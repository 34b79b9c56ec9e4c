//! Files of packed weights: whole, damaged, cut, of others, and where they cannot be written.
#![allow(clippy::unwrap_used)] // Tests.

use super::layout::{Head, PAGE};
use super::{Place, sum};
use crate::memory::{Words, bytes_of};
use crate::options::{CpuOptions, Quantize};
use crate::pack::{CpuMatrix, CpuPack, Form, LAYOUT};
use cleave_engine::checkpoint::{
    ByteCodes, NarrowTensor, NarrowType, Stamp, StoredMatrix, StoredTensor,
};
use cleave_engine::ops::{Pack, Precision};
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

/// What a checkpoint has, and what it is packed to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
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
}

const KINDS: [Kind; 10] = [
    Kind::F32,
    Kind::Bf16,
    Kind::ToInt8,
    Kind::ToInt4,
    Kind::Int8,
    Kind::Int4,
    Kind::Int4Odd,
    Kind::Int8Groups,
    Kind::Int8Odd,
    Kind::F16,
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

fn dense(kind: Kind, name: &str, rows: usize) -> StoredTensor {
    let values = numbers(name.len() as u64, rows * WIDTH);
    match kind {
        Kind::F32 => StoredTensor::from_f32(name, (rows, WIDTH), &values),
        Kind::F16 => {
            let values: Vec<_> = values.iter().map(|x| half::f16::from_f32(*x)).collect();
            StoredTensor::from_f16(name, (rows, WIDTH), &values)
        }
        _ => {
            let values: Vec<_> = values.iter().map(|x| half::bf16::from_f32(*x)).collect();
            StoredTensor::from_bf16(name, (rows, WIDTH), &values)
        }
    }
}

fn stored(kind: Kind, name: &str, rows: usize) -> StoredMatrix {
    let (element, group) = match kind {
        Kind::Int8 => (NarrowType::Int8, WIDTH),
        Kind::Int8Groups | Kind::Int8Odd => (NarrowType::Int8, 32),
        Kind::Int4 | Kind::Int4Odd => (NarrowType::Int4, 32),
        _ => return dense(kind, name, rows).into(),
    };
    let seed = name.len() as u64;
    let groups = rows * WIDTH.div_ceil(group);
    let codes: Vec<u8> = numbers(seed, rows * WIDTH)
        .iter()
        .map(|x| ((x + 1.0) * 8.0) as u8 & 15)
        .collect();
    let scales: Vec<f32> = match kind {
        Kind::Int4 | Kind::Int8Groups => vec![0.5; groups],
        _ => numbers(seed + 1, groups),
    };
    let zero = match kind {
        Kind::Int8 | Kind::Int8Groups => 0,
        Kind::Int4 => 8,
        _ => 5,
    };
    let coded = ByteCodes {
        element,
        codes: &codes,
        group,
        scales: &scales,
        zeros: &vec![zero; groups],
    };
    NarrowTensor::from_codes(name, (rows, WIDTH), &coded).into()
}

fn options(kind: Kind) -> CpuOptions {
    CpuOptions {
        threads: 2,
        keeps_f16: kind == Kind::F16,
        quantize: match kind {
            Kind::ToInt8 => Some(Quantize::Int8),
            Kind::ToInt4 => Some(Quantize::Int4),
            _ => None,
        },
        ..CpuOptions::new(match kind {
            Kind::F32 => Precision::F32,
            _ => Precision::Bf16,
        })
    }
}

/// One folder, and one checkpoint that may change.
struct Stage {
    folder: PathBuf,
    origin: &'static str,
    stamp: Stamp,
    kind: Kind,
}

impl Stage {
    fn new(folder: &Path, kind: Kind) -> Self {
        Self {
            folder: folder.to_owned(),
            origin: "/a",
            stamp: Stamp([1; 32]),
            kind,
        }
    }

    fn place(&self) -> Place {
        let form = format!("{:?}", self.kind).to_lowercase();
        Place::new(&self.folder, (Path::new(self.origin), self.stamp), form)
    }

    fn pack(&self) -> CpuPack {
        CpuPack::new(&options(self.kind)).kept_at(self.place())
    }

    fn load(&self) -> Vec<CpuMatrix> {
        load(&self.pack(), self.kind)
    }

    /// Without a cache.
    fn plain(&self) -> Vec<CpuMatrix> {
        load(&CpuPack::new(&options(self.kind)), self.kind)
    }

    fn files(&self) -> Vec<String> {
        let names = fs::read_dir(&self.folder).unwrap();
        let mut names: Vec<String> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// One load that packs, whatever there was, and one that maps.
    #[track_caller]
    fn check_packed_anew(&self, expected: &[CpuMatrix], what: &str) {
        let loaded = self.load();
        assert!(!loaded.iter().all(is_mapped), "{what}: all was mapped");
        assert_same(&loaded, expected, what);
        drop(loaded);
        self.check_mapped(expected, what);
    }

    #[track_caller]
    fn check_mapped(&self, expected: &[CpuMatrix], what: &str) {
        let loaded = self.load();
        assert!(loaded.iter().all(is_mapped), "{what}: not mapped");
        assert_same(&loaded, expected, what);
    }
}

/// A checkpoint of three matrices, one of them with columns that nobody looks at.
fn load(pack: &CpuPack, kind: Kind) -> Vec<CpuMatrix> {
    let qkv = [stored(kind, "q", 40), stored(kind, "kk", 7)];
    let gate_up = [stored(kind, "gate", 36), stored(kind, "upper", 36)];
    let bias = numbers(9, 47);
    let matrices = vec![
        pack.matrix(&qkv, Some(&bias)).unwrap(),
        pack.gate_up(&gate_up, None).unwrap(),
        pack.head(&dense(kind, "vocabulary", 70)).unwrap(),
    ];
    pack.finish().unwrap();
    matrices
}

fn is_mapped(matrix: &CpuMatrix) -> bool {
    matches!(matrix.words, Words::Mapped(_))
}

/// Everything of a matrix, to the bit.
fn bits(matrix: &CpuMatrix) -> (String, Vec<u32>, Vec<u32>) {
    let CpuMatrix {
        form,
        columns,
        is_gated,
        width,
        steps,
        words,
        bias,
    } = matrix;
    let mut beside: Vec<u32> = bias.iter().flatten().map(|x| x.to_bits()).collect();
    let form = match form {
        Form::Int8(of_columns) => {
            beside.extend(of_columns.scales.iter().map(|x| x.to_bits()));
            beside.extend(&of_columns.starts);
            "int8".to_owned()
        }
        form => format!("{form:?}"),
    };
    let shape = format!("{form} {columns} {is_gated} {width} {steps}");
    (shape, words.to_vec(), beside)
}

#[track_caller]
fn assert_same(found: &[CpuMatrix], expected: &[CpuMatrix], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(bits(found) == bits(expected), "{what}: other bits");
    }
}

#[test]
fn what_is_mapped_is_what_was_packed() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let stage = Stage::new(folder.path(), kind);
        let what = format!("{kind:?}");
        stage.check_packed_anew(&stage.plain(), &what);
        assert_eq!(stage.files().len(), 1, "{what}");
    }
}

/// Which words are made must not change without the version that names them: raise [`LAYOUT`] with these sums.
#[test]
fn words_changed_and_their_version_did_not() {
    let sums = KINDS.map(|kind| {
        let matrices = load(&CpuPack::new(&options(kind)), kind);
        let all: Vec<u32> = matrices
            .iter()
            .flat_map(|matrix| {
                let (_, words, beside) = bits(matrix);
                [words, beside].concat()
            })
            .collect();
        sum(bytes_of(&all), 1)
    });
    if cfg!(target_endian = "little") {
        assert_eq!((LAYOUT, sums), (1, SUMS), "{sums:#x?}");
    }
}

const SUMS: [u64; 10] = [
    0x26c1_71b9_8933_bd7e,
    0xad66_3fd3_5794_6fd0,
    0x0bb8_5b59_dd34_e165,
    0x35e7_40f4_cbc4_67fe,
    0x2c2f_bee7_8ab1_4c1a,
    0x5cd7_d07c_8fda_5b20,
    0xd19d_8cd8_ffa4_7514,
    0x3f93_df60_222e_5b39,
    0x1182_4853_d78f_081a,
    0x0818_b660_6f76_bf3f,
];

#[test]
fn a_byte_that_changed_was_used() {
    for kind in [Kind::Bf16, Kind::ToInt8] {
        let folder = tempfile::tempdir().unwrap();
        let stage = Stage::new(folder.path(), kind);
        let expected = stage.load();
        let file = stage.place().file();
        let length = fs::metadata(&file).unwrap().len() as usize;
        // All that has a meaning of its own in the head, then everywhere: weights, scales, zeros, index.
        let places = (0..140).step_by(3).chain((0..length).step_by(997));
        for at in places.chain([PAGE - 1, PAGE, length - 1]) {
            let mut bytes = fs::read(&file).unwrap();
            bytes[at] ^= 1 << (at % 8);
            // In place nobody may write who maps it: another file of the same name.
            fs::remove_file(&file).unwrap();
            fs::write(&file, &bytes).unwrap();
            stage.check_packed_anew(&expected, &format!("{kind:?}, byte {at}"));
        }
    }
}

#[test]
fn a_file_that_was_cut_or_grew_was_used() {
    let folder = tempfile::tempdir().unwrap();
    let stage = Stage::new(folder.path(), Kind::Bf16);
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
fn a_file_of_another_layout_checkpoint_or_form_was_used() {
    let folder = tempfile::tempdir().unwrap();
    let stage = Stage::new(folder.path(), Kind::Bf16);
    let expected = stage.load();
    let file = stage.place().file();
    let whole = fs::read(&file).unwrap();
    let head = Head::read(whole.first_chunk().unwrap()).unwrap();
    let others = [
        Head {
            layout: LAYOUT + 1,
            ..head.clone()
        },
        Head {
            stamp: [2; 32],
            ..head.clone()
        },
        Head {
            form: Head::form("f32"),
            ..head.clone()
        },
        Head {
            bytes: head.bytes + 1,
            ..head.clone()
        },
        Head {
            index_at: 0,
            ..head.clone()
        },
        Head {
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
fn matrices_of_other_names_were_used() {
    let folder = tempfile::tempdir().unwrap();
    let stage = Stage::new(folder.path(), Kind::Bf16);
    stage.load();
    let pack = stage.pack();
    let first = pack
        .matrix(&[stored(stage.kind, "other", 47)], None)
        .unwrap();
    assert!(!is_mapped(&first));
}

#[test]
fn files_of_a_checkpoint_that_changed_stayed_or_took_others_along() {
    let folder = tempfile::tempdir().unwrap();
    let stage = |origin, stamp, kind| Stage {
        origin,
        stamp: Stamp([stamp; 32]),
        ..Stage::new(folder.path(), kind)
    };
    let (before, other_form) = (stage("/a", 1, Kind::Bf16), stage("/a", 1, Kind::ToInt4));
    let other_model = stage("/b", 7, Kind::Bf16);
    for stage in [&before, &other_form, &other_model] {
        stage.load();
    }
    fs::write(folder.path().join("a file of somebody's"), "").unwrap();
    assert_eq!(before.files().len(), 4, "forms and models side by side");
    let after = stage("/a", 2, Kind::Bf16);
    after.check_packed_anew(&after.plain(), "a checkpoint that changed");
    assert!(!before.place().file().exists() && !other_form.place().file().exists());
    assert!(other_model.place().file().exists());
    assert_eq!(after.files().len(), 3);
    // A layout of another version.
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
fn two_that_write_at_once_harmed_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let stage = Stage::new(folder.path(), Kind::ToInt8);
    let expected = stage.plain();
    let (first, second) = (stage.pack(), stage.pack());
    assert_same(&load(&second, stage.kind), &expected, "the second");
    assert_same(&load(&first, stage.kind), &expected, "the first");
    drop((first, second));
    stage.check_mapped(&expected, "afterwards");
}

#[test]
fn what_a_killed_writer_left_stayed_or_what_a_living_one_has_went() {
    let folder = tempfile::tempdir().unwrap();
    let stage = Stage::new(folder.path(), Kind::Bf16);
    let dead = folder.path().join("1-1-bf16-1le.packed-part");
    let alive = folder.path().join("2-2-bf16-1le.packed-part");
    let mine = stage.place().part();
    for part in [&dead, &alive, &mine] {
        fs::write(part, vec![7; 100_000]).unwrap();
    }
    let held = OpenOptions::new().write(true).open(&alive).unwrap();
    held.lock().unwrap();
    stage.check_packed_anew(&stage.plain(), "beside what was left");
    assert!(!dead.exists() && !mine.exists() && alive.exists());
}

#[test]
fn a_folder_that_cannot_be_written_stopped_a_load() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for folder in [file.clone(), file.join("below"), "/proc/self/packed".into()] {
        let stage = Stage::new(&folder, Kind::Bf16);
        assert_same(&stage.load(), &stage.plain(), "nowhere");
    }
}

/// Runs itself once more, with a limit on the size of files where a disk would be full.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_stopped_a_load_or_left_half_a_file() {
    const FOLDER: &str = "CLEAVE_TEST_PACKED_FOLDER";
    if let Some(folder) = std::env::var_os(FOLDER) {
        let stage = Stage::new(Path::new(&folder), Kind::F32);
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
            "cache::tests::a_full_disk_stopped_a_load_or_left_half_a_file",
        ])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}
