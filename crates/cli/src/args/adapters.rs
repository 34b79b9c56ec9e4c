//! The flags of LoRA adapters.
//!
//! Owns: these flags. Never: opens an adapter.

use crate::model_location::ModelLocation;
use crate::values::parse_model_name;
use clap::Args;
use cleave_domain::Role;
use cleave_worker::WorkerOptions;
use std::path::PathBuf;

fn loras_default() -> usize {
    WorkerOptions::new("w", Role::Both).max_loras
}

/// Flags of LoRA adapters.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Adapters")]
pub(crate) struct AdapterArgs {
    /// LoRA adapters to serve, each a folder as PEFT writes it, or an adapter of a hub; requests
    /// name one as their model.
    #[arg(long, value_name = "NAME=DIR|NAME=ORG/NAME[@REVISION]", num_args = 1.., value_parser = parse_lora_module)]
    pub(crate) lora_modules: Vec<LoraModule>,
    /// LoRA adapters that each worker has loaded at once, at most, for its steps to apply; the
    /// least recently used one makes room for another.
    #[arg(long, value_name = "N", default_value_t = loras_default(), value_parser = parse_loras_max)]
    pub(crate) max_loras: usize,
    /// LoRA adapters that each worker has in host memory at once, at most, those of `--max-loras`
    /// included; others are read from their folders again. As many as `--max-loras` if absent: an
    /// adapter that makes room is in no memory then.
    #[arg(long, value_name = "N", value_parser = parse_loras_max)]
    pub(crate) max_cpu_loras: Option<usize>,
    /// Folder below which adapters may be loaded at run time, by /v1/load_lora_adapter at a router;
    /// none may if absent.
    #[arg(long, value_name = "DIR")]
    pub(crate) lora_root: Option<PathBuf>,
}

impl AdapterArgs {
    /// Adapters that each worker may have loaded at once: none if none can be named.
    pub(crate) fn loras_max(&self) -> usize {
        let is_used = !self.lora_modules.is_empty() || self.lora_root.is_some();
        if is_used { self.max_loras } else { 0 }
    }
}

/// Adapters that a worker has in host memory at once, at most: those that are loaded count too.
///
/// # Errors
/// If they have no room.
pub(crate) fn host_loras_max(
    max_cpu_loras: Option<usize>,
    max_loras: usize,
) -> Result<usize, String> {
    let max_cpu_loras = max_cpu_loras.unwrap_or(max_loras);
    if max_cpu_loras >= max_loras {
        return Ok(max_cpu_loras);
    }
    Err(format!(
        "--max-cpu-loras {max_cpu_loras}: fewer than the {max_loras} of --max-loras, which count among them; raise it, \
         or leave it out"
    ))
}

/// An adapter with its name.
#[derive(Clone, Debug)]
pub(crate) struct LoraModule {
    pub(crate) name: String,
    pub(crate) location: ModelLocation,
}

fn parse_lora_module(text: &str) -> Result<LoraModule, String> {
    let parts = text
        .split_once('=')
        .filter(|(_, folder)| !folder.is_empty());
    let (name, location) = parts.ok_or("not NAME=DIR, such as sql=/adapters/sql")?;
    Ok(LoraModule {
        name: parse_model_name(name)?,
        location: location.parse()?,
    })
}

fn parse_loras_max(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=4096) => Ok(count),
        _ => Err("not a whole number from 1 to 4096".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_has_room_for_loaded_adapters() {
        assert_eq!(host_loras_max(None, 8), Ok(8));
        assert_eq!(host_loras_max(Some(8), 8), Ok(8));
        let error = host_loras_max(Some(3), 8).unwrap_err();
        assert!(
            error.contains("--max-cpu-loras 3: fewer than the 8 of --max-loras"),
            "{error}"
        );
    }

    #[test]
    fn a_lora_module_is_a_name_and_a_folder() {
        let module = parse_lora_module("sql=/a=b").unwrap();
        let location = module.location.to_string();
        assert_eq!((module.name.as_str(), location.as_str()), ("sql", "/a=b"));
        for wrong in ["sql", "sql=", "=/a", "/a"] {
            assert!(parse_lora_module(wrong).is_err(), "{wrong}");
        }
    }
}
