//! Classes of models of images and text whose text part is a model of a family here. Images are not
//! read.
//!
//! Owns: the names of the classes, the spellings of their tensors, and what else their files have.
//! Never: describes a text model.

use super::{gemma3, ministral3, mistral};
use crate::spelling::NameSpelling;
use crate::wrapper::Wrapper;

/// The spellings of transformers up to 4 and from 5 on.
static SPELLINGS: [NameSpelling; 2] = [
    NameSpelling {
        beginnings: &[
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ],
        has_head: true,
    },
    NameSpelling {
        beginnings: &[("model.", "model.language_model.")],
        has_head: true,
    },
];

/// Beginnings of names of the tensors that turn images into rows of the stream.
const IMAGE_TENSORS: &[&str] = &[
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "multi_modal_projector.",
    "vision_tower.",
];

pub(crate) static GEMMA3: Wrapper = Wrapper {
    name: "gemma3",
    models: "Gemma 3 with images (4B, 12B, 27B), its text part",
    class: "Gemma3ForConditionalGeneration",
    families: &[&gemma3::FAMILY],
    spellings: &SPELLINGS,
    other_tensors: IMAGE_TENSORS,
    other_keys: &[
        "boi_token_index",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "tie_word_embeddings",
        "vision_config",
    ],
};

pub(crate) static MISTRAL3: Wrapper = Wrapper {
    name: "mistral3",
    models: "Mistral Small 3.1 and 3.2, Ministral 3 with images, their text part",
    class: "Mistral3ForConditionalGeneration",
    families: &[&ministral3::FAMILY, &mistral::FAMILY],
    spellings: &SPELLINGS,
    other_tensors: IMAGE_TENSORS,
    other_keys: &[
        "image_token_id",
        "image_token_index",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "tie_word_embeddings",
        "vision_config",
        "vision_feature_layer",
    ],
};
