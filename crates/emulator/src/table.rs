//! `kernels/table.txt`: every kernel, and the limits of its machine code.
//!
//! Owns: the format and its checks. The emulator, the build of the fatbins, and CI's check of the
//! machine code read the table with this module. Never: reads a kernel's file.
//!
//! A line is `file kernel threads registers shared required…`, separated by blanks; a line that
//! begins with `#` is a comment.
//! - `file`: below `kernels/`; compiled alone, with `kernels/include` to include from.
//! - `kernel`: its C name, unique in the table.
//! - `threads`: in a block, as in its `KERNEL(threads, blocks)`; a multiple of 32.
//! - `registers`: the most that a thread may take, for any target.
//! - `shared`: the bytes of dynamic shared memory that a launch asks for.
//! - `required`: instructions that the machine code must hold, as `target:instruction`
//!   (`sm_80:HMMA`), or must not hold, as `target:!instruction`; none or several.

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelTableRow {
    /// Path of its source, relative to the table's folder.
    pub file: String,
    pub name: String,
    /// Threads of a block.
    pub threads: u32,
    /// Most registers of a thread.
    pub registers_max: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Instructions that must occur, as `target:instruction`.
    pub required: Vec<String>,
}

/// Limits of a block on every device that the kernels are built for.
const THREADS_MAX: u32 = 1024;
const REGISTERS_OF_THREAD_MAX: u32 = 255;
const REGISTERS_OF_BLOCK_MAX: u32 = 65_536;
const SHARED_BYTES_MAX: u32 = 227 * 1024;

/// Parses the kernels of a table, in its order.
///
/// # Errors
/// The first bad line, with its number and the mistake.
pub fn parse(text: &str) -> Result<Vec<KernelTableRow>, String> {
    let mut kernels: Vec<KernelTableRow> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |problem: String| format!("kernel table, line {}: {problem}", index + 1);
        let kernel = parse_line(&words).map_err(wrong)?;
        if kernels.iter().any(|other| other.name == kernel.name) {
            return Err(wrong(format!("{} is listed twice", kernel.name)));
        }
        kernels.push(kernel);
    }
    Ok(kernels)
}

fn parse_line(words: &[&str]) -> Result<KernelTableRow, String> {
    let [file, name, threads, registers, shared, required @ ..] = words else {
        return Err("a line is `file kernel threads registers shared required…`".to_owned());
    };
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !file.ends_with(".cu") || file.starts_with('/') || file.contains("..") {
        return Err(format!("{file} is not a .cu file below the table"));
    }
    if name.is_empty() || !name.chars().all(is_word) {
        return Err(format!("{name} is not a C name"));
    }
    if let Some(word) = required.iter().find(|word| !word.contains(':')) {
        return Err(format!("{word} is not `target:instruction`"));
    }
    let number = |field: &str, text: &str, max: u32| match text.parse::<u32>() {
        Ok(number) if number <= max => Ok(number),
        _ => Err(format!("{field} {text} is not a number up to {max}")),
    };
    let kernel = KernelTableRow {
        file: (*file).to_owned(),
        name: (*name).to_owned(),
        threads: number("threads", threads, THREADS_MAX)?,
        registers_max: number("registers", registers, REGISTERS_OF_THREAD_MAX)?,
        shared_bytes: number("shared", shared, SHARED_BYTES_MAX)?,
        required: required.iter().map(|&word| word.to_owned()).collect(),
    };
    if kernel.threads == 0 || !kernel.threads.is_multiple_of(32) {
        return Err(format!("{threads} threads are not a whole number of warps"));
    }
    if kernel.registers_max == 0 || kernel.threads * kernel.registers_max > REGISTERS_OF_BLOCK_MAX {
        return Err(format!(
            "{registers} registers for each of {threads} threads do not fit"
        ));
    }
    Ok(kernel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_table_lines_are_parsed() {
        let kernels = parse(
            "# names\n\nnorm/norm.cu norm_bf16 256 64 0\nmatmul/small.cu small 128 168 49152 sm_80:HMMA sm_90a:LDGSTS\n",
        );
        let kernels = kernels.expect("a table");
        assert_eq!(kernels.len(), 2);
        assert_eq!(kernels[0].required, Vec::<String>::new());
        assert_eq!(kernels[1].name, "small");
        assert_eq!(kernels[1].shared_bytes, 49152);
        assert_eq!(kernels[1].required, ["sm_80:HMMA", "sm_90a:LDGSTS"]);
    }

    #[test]
    fn kernel_table_lines_beyond_device_limits_are_refused() {
        for (line, complaint) in [
            ("norm/norm.cu norm 256 64", "a line is"),
            ("norm/norm.cpp norm 256 64 0", "not a .cu file"),
            ("../norm.cu norm 256 64 0", "not a .cu file"),
            ("norm/norm.cu no-rm 256 64 0", "not a C name"),
            ("norm/norm.cu norm 128 64 0 HMMA", "target:instruction"),
            ("norm/norm.cu norm 100 64 0", "whole number of warps"),
            ("norm/norm.cu norm 1024 65 0", "do not fit"),
            ("norm/norm.cu norm 256 64 300000", "not a number up to"),
            ("a.cu twice 32 8 0\na.cu twice 32 8 0", "twice"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(complaint), "{line}: {error}");
        }
    }
}
