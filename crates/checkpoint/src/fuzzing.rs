//! Fuzz target: arbitrary bytes as a checkpoint, for tests and libFuzzer.

use crate::Checkpoint;
use std::fs;

/// Opens a checkpoint made of `bytes`: two bytes of config.json's length, config.json,
/// model.safetensors. Returns whether it was accepted.
///
/// # Panics
/// If a tensor of an accepted checkpoint cannot be read.
pub fn checkpoint(bytes: &[u8]) -> bool {
    let Some((len, rest)) = bytes.split_first_chunk::<2>() else {
        return false;
    };
    let len = usize::from(u16::from_le_bytes(*len));
    let (config, tensors) = rest.split_at(len.min(rest.len()));
    let folder = std::env::temp_dir().join(format!("cleave-checkpoint-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a writable folder for temporary files");
    let written = fs::write(folder.join("config.json"), config)
        .and_then(|()| fs::write(folder.join("model.safetensors"), tensors));
    written.expect("a writable folder for temporary files");
    let opened = Checkpoint::open(&folder);
    if let Ok(checkpoint) = &opened {
        for tensor in checkpoint.tensors() {
            let mut row = vec![0.0; tensor.columns()];
            tensor.read_row(tensor.rows() - 1, &mut row);
        }
        assert!(checkpoint.parameters_count() > 0);
    }
    drop(fs::remove_dir_all(&folder));
    opened.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CheckpointError;
    use cleave_models::{ConfigFields, read_model};
    use safetensors::tensor::{Dtype, TensorView, serialize};
    use std::path::Path;

    const CONFIG: &str = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":16,"hidden_size":8,
        "intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":4,
        "hidden_act":"silu","rms_norm_eps":1e-5,"rope_theta":10000.0,"max_position_embeddings":64,
        "tie_word_embeddings":false,"bos_token_id":1,"eos_token_id":2,"torch_dtype":"float32"}"#;

    fn sample() -> Vec<u8> {
        let object = serde_json::from_str(CONFIG).unwrap();
        let fields = ConfigFields::new(Path::new("config.json"), object);
        let read = read_model(&fields, |_| Ok::<_, CheckpointError>(()));
        let (model, ()) = read.unwrap();
        let zeros = vec![0u8; 4096];
        let all = model.spec.tensors(model.family.tensors, false);
        let views = all.iter().map(|tensor| {
            let bytes = tensor.shape.iter().product::<usize>() * 4;
            let view = TensorView::new(Dtype::F32, tensor.shape.clone(), &zeros[..bytes]).unwrap();
            (tensor.name.clone(), view)
        });
        let tensors = serialize(views, None).unwrap();
        let len = (CONFIG.len() as u16).to_le_bytes();
        [&len[..], CONFIG.as_bytes(), &tensors].concat()
    }

    #[test]
    fn a_damaged_checkpoint_is_refused_or_readable() {
        assert!(checkpoint(&sample()));
        cleave_fuzz::check_samples("checkpoint", &[sample()], 3_000, |bytes| {
            checkpoint(bytes);
        });
    }
}
