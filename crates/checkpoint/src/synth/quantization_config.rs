//! The `quantization_config` of a converted checkpoint.

use super::quantize::{QuantizeOptions, QuantizedLayout};
use crate::rounding::{MX_GROUP, NV_GROUP};
use serde_json::{Value, json};

impl QuantizeOptions {
    /// Value of `quantization_config` in config.json.
    pub(super) fn config(self) -> Value {
        let group = self.group;
        let compressed = |format: &str, weights: Value, activations: Value| {
            json!({
                "quant_method": "compressed-tensors",
                "format": format,
                "quantization_status": "compressed",
                "config_groups": {"group_0": {
                    "targets": ["Linear"], "weights": weights, "input_activations": activations,
                }},
                "ignore": ["lm_head"],
            })
        };
        // Activations of eight bits with a dynamic scale per token.
        let tokens = |kind: &str| {
            json!({
                "num_bits": 8, "type": kind, "strategy": "token", "group_size": null,
                "symmetric": true, "dynamic": true,
            })
        };
        let weights = |bits: u32, kind: &str, strategy: &str, group: Option<usize>| {
            json!({
                "num_bits": bits, "type": kind, "strategy": strategy, "group_size": group,
                "symmetric": true, "dynamic": false,
            })
        };
        let modelopt = |algorithm: &str| {
            json!({
                "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
                "producer": {"name": "modelopt"},
            })
        };
        match self.layout {
            QuantizedLayout::F16 | QuantizedLayout::F32 => Value::Null,
            QuantizedLayout::Fp8 => {
                let weights = weights(8, "float", "channel", None);
                compressed("float-quantized", weights, tokens("float"))
            }
            QuantizedLayout::Int8 => {
                let weights = weights(8, "int", "channel", None);
                compressed("int-quantized", weights, tokens("int"))
            }
            QuantizedLayout::Int4 => {
                let weights = weights(4, "int", "group", Some(group));
                compressed("pack-quantized", weights, Value::Null)
            }
            QuantizedLayout::Mxfp8 => {
                let mut weights = weights(8, "float", "group", Some(MX_GROUP));
                weights["scale_dtype"] = "torch.uint8".into();
                compressed("mxfp8-quantized", weights, Value::Null)
            }
            QuantizedLayout::Mxfp4 => {
                let mut weights = weights(4, "float", "group", Some(MX_GROUP));
                weights["scale_dtype"] = "torch.uint8".into();
                compressed("mxfp4-pack-quantized", weights, Value::Null)
            }
            QuantizedLayout::Mxfp4Experts => json!({
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router",
                    "model.embed_tokens", "lm_head",
                ],
            }),
            QuantizedLayout::Nvfp4 => {
                let mut weights = weights(4, "float", "tensor_group", Some(NV_GROUP));
                weights["scale_dtype"] = "torch.float8_e4m3fn".into();
                compressed("nvfp4-pack-quantized", weights, Value::Null)
            }
            QuantizedLayout::ModelOptNvfp4 => modelopt("NVFP4"),
            QuantizedLayout::ModelOptFp8 => modelopt("FP8"),
            QuantizedLayout::Fp8Block => json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [group, group],
            }),
            QuantizedLayout::Awq => json!({
                "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": true,
                "version": "gemm",
            }),
            QuantizedLayout::Gptq | QuantizedLayout::Gptq8 => json!({
                "quant_method": "gptq", "bits": self.bits(), "group_size": group, "desc_act": false,
                "sym": false,
            }),
        }
    }
}
