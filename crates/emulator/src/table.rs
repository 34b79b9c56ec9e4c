//! `kernels/table.txt`: each kernel that there is, and what its machine code must be like.
//!
//! Owns: the format and its checks. Whoever builds kernels reads the table with this: the emulator, the build of
//! the fatbins, CI's look at the machine code.
//! Never: looks into a kernel's file.
//!
//! A line is `file kernel threads registers shared required…`, separated by blanks; one that begins with `#` is a
//! comment.
//! - `file`: below `kernels/`; compiled alone, with `kernels/include` to include from.
//! - `kernel`: its C name, unique in the table.
//! - `threads`: in a block, as in its `KERNEL(threads, blocks)`; a multiple of 32.
//! - `registers`: the most that a thread may take, for any target.
//! - `shared`: the bytes of dynamic shared memory that a launch asks for.
//! - `required`: what the machine code must hold, as `target:instruction` (`sm_80:HMMA`), or must not, as
//!   `target:!instruction`; none or several.

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its source, relative to the table's folder.
    pub file: String,
    /// Its C name.
    pub name: String,
    /// Threads in a block.
    pub threads: u32,
    /// Registers of a thread at most.
    pub registers_max: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Instructions that must occur, as `target:instruction`.
    pub required: Vec<String>,
}

/// What a block can have on every device that the kernels are built for.
const THREADS_MAX: u32 = 1024;
const REGISTERS_OF_THREAD_MAX: u32 = 255;
const REGISTERS_OF_BLOCK_MAX: u32 = 65_536;
const SHARED_BYTES_MAX: u32 = 227 * 1024;

/// The kernels of a table, in its order.
///
/// # Errors
/// The first line that is none, with its number and what is wrong with it.
pub fn parse(text: &str) -> Result<Vec<Kernel>, String> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |what: String| format!("kernel table, line {}: {what}", index + 1);
        let kernel = parse_line(&words).map_err(wrong)?;
        if kernels.iter().any(|other| other.name == kernel.name) {
            return Err(wrong(format!("{} is there twice", kernel.name)));
        }
        kernels.push(kernel);
    }
    Ok(kernels)
}

fn parse_line(words: &[&str]) -> Result<Kernel, String> {
    let [file, name, threads, registers, shared, required @ ..] = words else {
        return Err("a line is `file kernel threads registers shared required…`".to_owned());
    };
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !file.ends_with(".cu") || file.starts_with('/') || file.contains("..") {
        return Err(format!("{file} is no .cu file below the table"));
    }
    if name.is_empty() || !name.chars().all(is_word) {
        return Err(format!("{name} is no C name"));
    }
    if let Some(word) = required.iter().find(|word| !word.contains(':')) {
        return Err(format!("{word} is no `target:instruction`"));
    }
    let number = |what: &str, text: &str, max: u32| match text.parse::<u32>() {
        Ok(number) if number <= max => Ok(number),
        _ => Err(format!("{what} {text} is no number up to {max}")),
    };
    let kernel = Kernel {
        file: (*file).to_owned(),
        name: (*name).to_owned(),
        threads: number("threads", threads, THREADS_MAX)?,
        registers_max: number("registers", registers, REGISTERS_OF_THREAD_MAX)?,
        shared_bytes: number("shared", shared, SHARED_BYTES_MAX)?,
        required: required.iter().map(|&word| word.to_owned()).collect(),
    };
    if kernel.threads == 0 || !kernel.threads.is_multiple_of(32) {
        return Err(format!("{threads} threads are no whole number of warps"));
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
    fn a_line_says_everything_about_a_kernel() {
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
    fn a_line_that_no_device_could_satisfy_was_taken() {
        for (line, complaint) in [
            ("norm/norm.cu norm 256 64", "a line is"),
            ("norm/norm.cpp norm 256 64 0", "no .cu file"),
            ("../norm.cu norm 256 64 0", "no .cu file"),
            ("norm/norm.cu no-rm 256 64 0", "no C name"),
            ("norm/norm.cu norm 128 64 0 HMMA", "target:instruction"),
            ("norm/norm.cu norm 100 64 0", "whole number of warps"),
            ("norm/norm.cu norm 1024 65 0", "do not fit"),
            ("norm/norm.cu norm 256 64 300000", "no number up to"),
            ("a.cu twice 32 8 0\na.cu twice 32 8 0", "twice"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(complaint), "{line}: {error}");
        }
    }
}
