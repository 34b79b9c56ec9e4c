//! Weights of all experts of a layer, which one tensor has, in MXFP4.
//!
//! Owns: the tensors that are written for them, as gpt-oss was published.
//! Never: changes the order of an expert's rows.

use super::quantize::{WrittenTensor, rounded};
use crate::quantization::EXPERT_ENDINGS;
use crate::rounding::{MX_GROUP, RoundedForm};
use crate::{QuantizedTensor, StoredTensor};
use cleave_models::{ExpertAxes, ModelTensor, TensorRole};

/// A tensor with the weights of all experts of a layer.
#[derive(Clone, Copy)]
pub(super) struct StackedExperts<'a> {
    name: &'a str,
    count: usize,
    axes: ExpertAxes,
    /// Rows and columns of an expert, `(out, in)`.
    rows: usize,
    columns: usize,
}

impl<'a> StackedExperts<'a> {
    /// `None` if this is another tensor.
    pub(super) fn of(tensor: &'a ModelTensor) -> Option<Self> {
        let (TensorRole::Experts { axes, .. }, &[count, a, b]) =
            (tensor.role, tensor.shape.as_slice())
        else {
            return None;
        };
        let (rows, columns) = match axes {
            ExpertAxes::OutIn => (a, b),
            ExpertAxes::InOut => (b, a),
        };
        Some(Self {
            name: &tensor.name,
            count,
            axes,
            rows,
            columns,
        })
    }

    pub(super) fn name(&self) -> &'a str {
        self.name
    }

    /// Whether whole groups divide the columns.
    pub(super) fn has_groups(&self) -> bool {
        self.columns.is_multiple_of(MX_GROUP)
    }

    /// Tensors that are written for the weights: codes and scales.
    pub(super) fn written_tensors(&self) -> Vec<WrittenTensor> {
        let scales = [self.count, self.rows, self.columns / MX_GROUP];
        let codes = [scales.as_slice(), &[MX_GROUP / 2]].concat();
        let shapes = [codes, scales.to_vec()];
        let named = EXPERT_ENDINGS.iter().zip(shapes);
        named
            .map(|(ending, shape)| WrittenTensor {
                name: format!("{}{ending}", self.name),
                dtype: "U8",
                shape,
            })
            .collect()
    }

    /// Bytes of those tensors, in the same order.
    pub(super) fn contents(&self, all: &StoredTensor) -> Vec<Vec<u8>> {
        let order: Vec<usize> = (0..self.rows).collect();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for expert in 0..self.count {
            let rows = all.rows() / self.count;
            let one = all.rows_named(self.name, expert * rows..(expert + 1) * rows);
            let matrix = match self.axes {
                ExpertAxes::OutIn => one,
                ExpertAxes::InOut => one.with_columns_as_rows(&order),
            };
            let (_, parts) = rounded(&matrix.into(), RoundedForm::Mxfp4);
            for (to, from) in [&mut codes, &mut scales].into_iter().zip(parts) {
                to.extend(from);
            }
        }
        vec![codes, scales]
    }

    /// Every element of quantised weights, `(experts × out, in)`, in the order of the dense tensor.
    pub(super) fn expanded(&self, quantized: &QuantizedTensor) -> Vec<f32> {
        let values = quantized.to_f32();
        let (rows, columns) = (self.rows, self.columns);
        match self.axes {
            ExpertAxes::OutIn => values,
            ExpertAxes::InOut => {
                let of_expert = |expert: &[f32]| -> Vec<f32> {
                    let places =
                        (0..columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
                    places
                        .map(|(row, column)| expert[row * columns + column])
                        .collect()
                };
                values.chunks(rows * columns).flat_map(of_expert).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{QuantizeOptions, QuantizedLayout, SynthError, quantize, synth};
    use crate::{Checkpoint, StoredMatrix};
    use cleave_models::{Projection, TensorPlace};
    use serde_json::{Value, json};
    use std::fs;
    use std::path::Path;

    fn written(shape: &str, layout: QuantizedLayout, group: usize) -> [tempfile::TempDir; 2] {
        let [dense, quantized] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        synth(shape, dense.path(), 5, &mut |_| {}).unwrap();
        let quantizing = QuantizeOptions { layout, group };
        quantize(dense.path(), quantized.path(), quantizing, &mut |_| {}).unwrap();
        [dense, quantized]
    }

    fn config(dir: &Path) -> Value {
        serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap()
    }

    fn values(stack: &[StoredMatrix]) -> Vec<f32> {
        stack.iter().flat_map(StoredMatrix::to_f32).collect()
    }

    /// The mean error of each expert's stacks, relative to their size.
    fn expert_error(dense: &Checkpoint, quantized: &Checkpoint, experts: usize) -> f32 {
        let mut most = 0.0_f32;
        for expert in 0..experts {
            for parts in [Projection::EXPERT_GATE_UP, Projection::EXPERT_DOWN] {
                let place = TensorPlace::Expert { layer: 1, expert };
                let expected = values(&dense.stack(parts, place));
                let found = values(&quantized.stack(parts, place));
                assert!(quantized.is_quantized(parts, place), "{parts:?}");
                let errors = expected.iter().zip(&found).map(|(x, y)| (x - y).abs());
                let size: f32 = expected.iter().map(|x| x.abs()).sum();
                most = most.max(errors.sum::<f32>() / size);
            }
        }
        most
    }

    /// The shapes of openai/gpt-oss-20b's tensors, for other sizes: `(experts, out, in/32, 16)` and
    /// `(experts, out, in/32)`, all U8; everything else in bf16.
    #[test]
    fn gpt_oss_is_written_in_mxfp4_as_published() {
        let [dense, quantized] = written("tiny-gpt-oss", QuantizedLayout::Mxfp4, 32);
        let about = &config(quantized.path())["quantization_config"];
        assert_eq!(about["quant_method"], json!("mxfp4"));
        let file = fs::read(quantized.path().join("model.safetensors")).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        let of_layer = |name: &str| {
            let info = header.info(&format!("model.layers.1.mlp.experts.{name}"));
            info.map(|info| (format!("{:?}", info.dtype), info.shape.clone()))
        };
        let bytes = |shape: &[usize]| Some(("U8".to_owned(), shape.to_vec()));
        assert_eq!(of_layer("gate_up_proj_blocks"), bytes(&[4, 192, 2, 16]));
        assert_eq!(of_layer("gate_up_proj_scales"), bytes(&[4, 192, 2]));
        assert_eq!(of_layer("down_proj_blocks"), bytes(&[4, 64, 3, 16]));
        assert_eq!(of_layer("down_proj_scales"), bytes(&[4, 64, 3]));
        let bias = of_layer("gate_up_proj_bias").unwrap();
        assert_eq!(bias, ("BF16".to_owned(), vec![4, 192]));
        assert_eq!(of_layer("gate_up_proj"), None);
        let open = |dir: &tempfile::TempDir| Checkpoint::open(dir.path()).unwrap();
        let (dense, quantized) = (open(&dense), open(&quantized));
        assert_eq!(quantized.quantization().as_deref(), Some("mxfp4 fp4"));
        let place = TensorPlace::Layer(1);
        let attention = |of: &Checkpoint| values(&of.stack(Projection::QKV, place));
        assert_eq!(attention(&quantized), attention(&dense));
        let error = expert_error(&dense, &quantized, 4);
        assert!((0.02..0.12).contains(&error), "{error}");
    }

    /// Formats that Qwen (FP8 in blocks, GPTQ), NVIDIA (NVFP4), and others (compressed-tensors
    /// FP8, AWQ) publish mixtures in, with a tensor for each expert.
    #[test]
    fn experts_are_written_in_the_formats_of_their_publishers() {
        for (layout, group, error_max) in [
            (QuantizedLayout::Fp8Block, 128, 0.03),
            (QuantizedLayout::Fp8, 1, 0.03),
            (QuantizedLayout::Gptq, 128, 0.1),
            (QuantizedLayout::Awq, 128, 0.1),
            (QuantizedLayout::ModelOptNvfp4, 16, 0.12),
            (QuantizedLayout::ModelOptFp8, 1, 0.03),
        ] {
            let folders = written("tiny-qwen3-moe-256", layout, group);
            let [dense, quantized] = folders.each_ref().map(|dir| Checkpoint::open(dir.path()));
            let error = expert_error(&dense.unwrap(), &quantized.unwrap(), 16);
            assert!(error < error_max && error > 0.0, "{layout:?}: {error}");
        }
    }

    #[test]
    fn experts_that_groups_do_not_divide_are_refused() {
        let [dense, out] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        synth("tiny-gpt-oss", dense.path(), 5, &mut |_| {}).unwrap();
        let mut odd = config(dense.path());
        odd["intermediate_size"] = json!(80);
        let file = dense.path().join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let mut end = 0;
        let entries = header.as_object_mut().unwrap();
        for (name, entry) in entries
            .iter_mut()
            .filter(|(name, _)| !name.starts_with("__"))
        {
            let mut shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
            for size in &mut shape {
                *size = match (*size, name.contains("experts")) {
                    (192, true) => 160,
                    (96, true) => 80,
                    (size, _) => size,
                };
            }
            let start = end;
            end += 2 * shape.iter().product::<usize>();
            *entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        }
        let header = header.to_string();
        let mut written = (header.len() as u64).to_le_bytes().to_vec();
        written.extend(header.as_bytes());
        written.resize(written.len() + end, 0);
        fs::write(&file, written).unwrap();
        fs::write(dense.path().join("config.json"), odd.to_string()).unwrap();
        let quantizing = QuantizeOptions {
            layout: QuantizedLayout::Mxfp4,
            group: 32,
        };
        let refused = quantize(dense.path(), out.path(), quantizing, &mut |_| {});
        let Err(SynthError::Source(error)) = refused else {
            panic!("not refused");
        };
        let error = error.to_string();
        assert!(
            error.contains("down_proj") && error.contains("groups of 32"),
            "{error}"
        );
    }
}
