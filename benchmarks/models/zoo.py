"""Tiny transformers models with seeded random weights, and what a model of the zoo is, for `benchmarks.zoo`.

Each architecture is one row of data: the model's class, its configuration and the function that makes its inputs.
``inputs(batch, size)`` returns keyword arguments; ``size`` counts tokens, and sets image sides and audio lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCAB = 96
CLASSES = 5
PAD, IGNORE = 1, -100


Inputs = Callable[[int, int], dict[str, Any]]
_NUMBER = ContextVar("number", default=0)


@contextmanager
def draw(number: int) -> Generator[None]:
    """While open, inputs are made from the draw of this number."""
    token = _NUMBER.set(number)
    try:
        yield
    finally:
        _NUMBER.reset(token)


def generator(batch: int, size: int) -> torch.Generator:
    """Return a generator for random inputs of these sizes: the same numbers each time, others in another draw."""
    return torch.Generator().manual_seed(1000 * batch + size + 1_000_003 * _NUMBER.get())


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: unique in the zoo.
        build: makes the model, its weights drawn from a fixed seed.
        inputs: keyword inputs for a batch and a size.
        refused: a regular expression that the error must match, if the model must be refused.
        refused_in: the modes in which it must be refused.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    refused: str = ""
    refused_in: tuple[str, ...] = ("train", "eval")


# ---- inputs: one function for each kind of model --------------------------------------------------------------------


def _tokens(batch: int, size: int) -> dict[str, Tensor]:
    """Token ids and the mask of a right-padded batch: each row is three tokens shorter than the one before."""
    ids = torch.randint(4, VOCAB, (batch, size), generator=generator(batch, size))
    lengths = torch.tensor([max(size - 3 * row, size // 2) for row in range(batch)])
    mask = (torch.arange(size) < lengths[:, None]).long()
    return {"input_ids": ids.where(mask.bool(), PAD), "attention_mask": mask}


def _labelled_tokens(batch: int, size: int) -> dict[str, Tensor]:
    """Tokens with a label for each that is not padding (masked and causal language models)."""
    tokens = _tokens(batch, size)
    labels = tokens["input_ids"].where(tokens["attention_mask"].bool(), IGNORE)
    return {**tokens, "labels": labels}


def _unmasked_tokens(batch: int, size: int) -> dict[str, Tensor]:
    """Labelled tokens for models whose forward takes no attention mask."""
    tokens = _labelled_tokens(batch, size)
    del tokens["attention_mask"]
    return tokens


def _classified_tokens(batch: int, size: int) -> dict[str, Tensor]:
    """Tokens with one class for each row."""
    return {**_tokens(batch, size), "labels": torch.arange(batch) % CLASSES}


def _spans(batch: int, size: int) -> dict[str, Tensor]:
    """Tokens with the start and end of an answer."""
    rows = torch.arange(batch)
    return {**_tokens(batch, size), "start_positions": rows + 1, "end_positions": rows + 3}


def _boxed_tokens(batch: int, size: int) -> dict[str, Tensor]:
    """Tokens with a bounding box each, and a class for each token (LayoutLM)."""
    corner = torch.randint(0, 16, (batch, size, 2), generator=generator(batch, size))
    tokens = _labelled_tokens(batch, size)
    tokens["labels"] = tokens["labels"].clamp(max=CLASSES - 1)
    return {**tokens, "bbox": torch.cat([corner, corner + 8], dim=-1)}


def _source_and_target(batch: int, size: int) -> dict[str, Tensor]:
    """Padded source tokens and the labels of a shorter target (encoder-decoder models)."""
    target = _labelled_tokens(batch, size - 4)
    return {**_tokens(batch, size), "labels": target["labels"]}


def _pixels(batch: int, size: int, scale: int = 2) -> dict[str, Tensor]:
    side = scale * size
    return {"pixel_values": torch.randn(batch, 3, side, side, generator=generator(batch, size))}


def _image(batch: int, size: int, scale: int = 2, labels: bool = True, **flags: bool) -> dict[str, Tensor]:
    """Images whose side grows with the size, each with a class; ``flags`` go to the model as they are."""
    classes = {"labels": torch.arange(batch) % CLASSES} if labels else {}
    return {**_pixels(batch, size, scale), **classes, **flags}  # type: ignore[dict-item]


def _fixed_image(batch: int, size: int, side: int = 32, labels: bool = True, **flags: bool) -> dict[str, Tensor]:
    """Images of one side, for models whose position table allows no other: only the batch grows."""
    return _image(batch, side, 1, labels, **flags)


def _image_crowd(batch: int, size: int, side: int = 0) -> dict[str, Tensor]:
    """Four images for each of the batch: BatchNorm over two values gives their sign, which no low precision keeps."""
    return _fixed_image(4 * batch, size, side or 3 * size)


def _segmented_image(batch: int, size: int) -> dict[str, Tensor]:
    """Images with a class for each pixel, some of them ignored (255)."""
    images = _pixels(batch, size, scale=4)
    classes = torch.randint(0, CLASSES, images["pixel_values"].shape[-2:], generator=generator(batch, size))
    labels = classes.repeat(batch, 1, 1)
    labels[:, :3] = 255
    return {**images, "labels": labels}


def _depth_image(batch: int, size: int) -> dict[str, Tensor]:
    """Images to estimate the depth of; the loss is left out, as these models compute none."""
    return _pixels(batch, size, scale=4)


def _masked_image(batch: int, size: int) -> dict[str, Tensor]:
    """Images with the pixels of a smaller one padded (DETR); its loss needs scipy's matching and is left out."""
    images = _pixels(batch, size, scale=4)
    side = images["pixel_values"].shape[-1]
    mask = torch.ones(batch, side, side, dtype=torch.long)
    mask[1:, :, -side // 4 :] = 0
    return {**images, "pixel_mask": mask}


def _image_and_text(batch: int, size: int) -> dict[str, Tensor]:
    """As many images as texts, for a contrastive loss (CLIP, SigLIP)."""
    return {**_tokens(batch, size), **_fixed_image(batch, size, labels=False), "return_loss": True}  # type: ignore[dict-item]


def _waveform(batch: int, size: int, labels: str = "ctc") -> dict[str, Tensor]:
    """Padded audio samples, labelled with a transcript (``ctc``) or a class."""
    samples = 100 * size
    lengths = torch.tensor([samples - 200 * row for row in range(batch)])
    mask = (torch.arange(samples) < lengths[:, None]).long()
    values = torch.randn(batch, samples, generator=generator(batch, size)) * mask
    transcript = _labelled_tokens(batch, size // 2)["labels"]
    return {
        "input_values": values,
        "attention_mask": mask,
        "labels": transcript if labels == "ctc" else torch.arange(batch) % CLASSES,
    }


def _mel_and_target(batch: int, size: int) -> dict[str, Tensor]:
    """Whisper's mel frames, of fixed length, and the labels of a target of any length."""
    mel = torch.randn(batch, 16, 64, generator=generator(batch, size))
    return {"input_features": mel, "labels": _labelled_tokens(batch, size)["labels"]}


def _fbank_and_target(batch: int, size: int) -> dict[str, Tensor]:
    """Padded filter-bank frames and the labels of a target (Speech2Text)."""
    frames = 4 * size
    mask = torch.ones(batch, frames, dtype=torch.long)
    mask[1:, -size:] = 0
    features = torch.randn(batch, frames, 16, generator=generator(batch, size))
    return {"input_features": features, "attention_mask": mask, "labels": _labelled_tokens(batch, size // 2)["labels"]}


def _spectrogram(batch: int, size: int) -> dict[str, Tensor]:
    """A spectrogram of fixed length with a class (audio spectrogram transformer)."""
    values = torch.randn(batch, 32, 16, generator=generator(batch, size))
    return {"input_values": values, "labels": torch.arange(batch) % CLASSES}


def _series(batch: int, size: int) -> dict[str, Tensor]:
    """A time series of fixed length and its continuation (PatchTST)."""
    values = torch.randn(batch, 40, 3, generator=generator(batch, size))
    return {"past_values": values[:, :32], "future_values": values[:, 32:]}


# ---- configurations: what groups of architectures share -------------------------------------------------------------

_BASE: dict[str, Any] = {"vocab_size": VOCAB, "initializer_range": 0.1, "pad_token_id": PAD, "bos_token_id": 2}
_BASE |= {"eos_token_id": 3, "num_labels": CLASSES}
_WIDTH: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_ENCODER = _BASE | _WIDTH | {"max_position_embeddings": 66}
_DECODER = _BASE | _WIDTH | {"max_position_embeddings": 64, "use_cache": False}
_GROUPED = _DECODER | {"num_key_value_heads": 2}
_HEADED = _GROUPED | {"head_dim": 8}
_EXPERTS = _GROUPED | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_N = _BASE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
_SEQ2SEQ = _BASE | {"d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2, "use_cache": False}
_SEQ2SEQ |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "init_std": 0.1, "forced_eos_token_id": None}
_T5 = _BASE | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
_T5 |= {"use_cache": False}
_VISION = _WIDTH | {"image_size": 32, "patch_size": 8, "num_labels": CLASSES, "initializer_range": 0.1}
_CONV = {"num_labels": CLASSES, "initializer_range": 0.2}
_AUDIO = _BASE | _WIDTH | {"conv_dim": (16, 16, 16), "conv_stride": (5, 4, 2), "conv_kernel": (10, 8, 4)}
_AUDIO |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "mask_time_prob": 0.0}
_AUDIO |= {"num_feat_extract_layers": 3, "classifier_proj_size": 32, "ctc_zero_infinity": True}
_SPEECH = _SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64}
_TEXT_TOWER = _ENCODER | {"projection_dim": 32, "projection_size": 32}
_TOWERS = {"text_config": _TEXT_TOWER, "vision_config": _VISION | {"projection_dim": 32}, "projection_dim": 32}

_EAGER = {"attn_implementation": "eager"}
_DEBERTA = _ENCODER | {"relative_attention": True, "pos_att_type": "p2c|c2p"}
_BUCKETS = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
_MODERN = _ENCODER | {"local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}
_NEO = _DECODER | {"num_layers": 2, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 1]]}
_SHARED_EXPERT = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_GEMMA2 = _HEADED | {"sliding_window": 8, "query_pre_attn_scalar": 8}
_OPT = _DECODER | {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.0}
_GRANITE = _GROUPED | {"attention_multiplier": 0.3, "logits_scaling": 2.0}
_MAMBA = _DECODER | {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4}
_MAMBA2 = _DECODER | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
_RWKV = _DECODER | {"attention_hidden_size": 32, "context_length": 64}
_XLNET = _BASE | {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "use_mems_eval": False}
_XLNET |= {"use_mems_train": False}
_DISTIL = _BASE | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
_FBANK = _SPEECH | {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 128}
_FBANK |= {"activation_function": "gelu"}  # one value of its relu is so near 0 that rounding flips it
_NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}

_STAGES = _CONV | {"hidden_sizes": [16, 32], "depths": [1, 1]}
_SWIN = _CONV | {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
_PYRAMID = _STAGES | {"num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2]}
_PYRAMID |= {"num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 32}
_EFFICIENT = _CONV | {"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320}
_MOBILE_VIT = _CONV | {"hidden_sizes": [16, 24, 32], "num_attention_heads": 2}
_MOBILE_VIT |= {"neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32]}
_POOLS = _CONV | {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_LEVIT = _CONV | {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1]}
_LEVIT |= {"key_dim": [8, 8, 8], "mlp_ratio": [2, 2, 2], "attention_ratio": [2, 2, 2]}
_CVT = _CONV | {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "mlp_ratio": [2.0, 2.0, 2.0]}
_DETR_BACKBONE = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
_DETR_BACKBONE |= {"out_features": ["stage2"]}
_MAE = _VISION | {"decoder_hidden_size": 32, "decoder_intermediate_size": 64}
_MAE |= {"decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 1}
_PATCHES = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32}
_PATCHES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "prediction_length": 8}

# ---- the models: a name, a class and a configuration, under the function that makes their inputs --------------------

_free_image = partial(_image, interpolate_pos_encoding=True)
_unlabelled_image = partial(_fixed_image, labels=False)
_fixed_image_crowd = partial(_image_crowd, side=64)
_classified_waveform = partial(_waveform, labels="class")

_MODELS: tuple[tuple[Inputs, tuple[tuple[str, str, Mapping[str, Any]], ...]], ...] = (
    (
        _labelled_tokens,
        (
            ("bert", "BertForMaskedLM", _ENCODER),
            ("bert-eager", "BertForMaskedLM", _ENCODER | _EAGER),
            ("roberta", "RobertaForMaskedLM", _ENCODER),
            ("distilbert", "DistilBertForMaskedLM", _DISTIL),
            ("albert", "AlbertForMaskedLM", _ENCODER | {"embedding_size": 16, "hidden_dropout_prob": 0.1}),
            ("electra", "ElectraForMaskedLM", _ENCODER | {"embedding_size": 16}),
            ("deberta", "DebertaForMaskedLM", _DEBERTA),
            ("deberta-v2", "DebertaV2ForMaskedLM", _DEBERTA | _BUCKETS),
            ("mpnet", "MPNetForMaskedLM", _ENCODER),
            ("xlm-roberta", "XLMRobertaForMaskedLM", _ENCODER),
            ("camembert", "CamembertForMaskedLM", _ENCODER),
            ("squeezebert", "SqueezeBertForMaskedLM", _ENCODER | {"embedding_size": 32}),
            ("mobilebert", "MobileBertForMaskedLM", _ENCODER | {"embedding_size": 32, "intra_bottleneck_size": 32}),
            ("modernbert", "ModernBertForMaskedLM", _MODERN),
            ("roformer", "RoFormerForMaskedLM", _ENCODER | {"embedding_size": 32}),
            ("megatron-bert", "MegatronBertForMaskedLM", _ENCODER),
            ("gpt2", "GPT2LMHeadModel", _N),
            ("gpt2-eager", "GPT2LMHeadModel", _N | _EAGER),
            ("gpt-neo", "GPTNeoForCausalLM", _NEO),
            ("gpt-neox", "GPTNeoXForCausalLM", _DECODER | {"rotary_pct": 1.0}),
            ("gptj", "GPTJForCausalLM", _N | {"rotary_dim": 8}),
            ("codegen", "CodeGenForCausalLM", _N | {"rotary_dim": 8}),
            ("gpt-bigcode", "GPTBigCodeForCausalLM", _N),
            ("llama", "LlamaForCausalLM", _GROUPED),
            ("llama-eager", "LlamaForCausalLM", _GROUPED | _EAGER),
            ("mistral", "MistralForCausalLM", _GROUPED | {"sliding_window": 8}),
            ("mixtral", "MixtralForCausalLM", _EXPERTS),
            ("qwen2", "Qwen2ForCausalLM", _GROUPED),
            ("qwen3", "Qwen3ForCausalLM", _HEADED),
            ("qwen2-moe", "Qwen2MoeForCausalLM", _EXPERTS | _SHARED_EXPERT),
            ("gemma", "GemmaForCausalLM", _HEADED),
            ("gemma2", "Gemma2ForCausalLM", _GEMMA2),
            ("gemma3", "Gemma3ForCausalLM", _GEMMA2),
            ("phi", "PhiForCausalLM", _DECODER | {"partial_rotary_factor": 0.5}),
            ("phi3", "Phi3ForCausalLM", _GROUPED),
            ("opt", "OPTForCausalLM", _OPT),
            ("bloom", "BloomForCausalLM", _N),
            ("falcon", "FalconForCausalLM", _DECODER | {"num_kv_heads": 1}),
            ("falcon-alibi", "FalconForCausalLM", _DECODER | {"alibi": True}),
            ("stablelm", "StableLmForCausalLM", _GROUPED | {"partial_rotary_factor": 1.0}),
            ("granite", "GraniteForCausalLM", _GRANITE),
            ("olmo", "OlmoForCausalLM", _GROUPED | {"clip_qkv": 8.0}),
            ("olmo2", "Olmo2ForCausalLM", _GROUPED),
            ("cohere", "CohereForCausalLM", _GROUPED),
            ("starcoder2", "Starcoder2ForCausalLM", _GROUPED),
            ("mamba", "MambaForCausalLM", _MAMBA),
            ("mamba2", "Mamba2ForCausalLM", _MAMBA2),
            ("rwkv", "RwkvForCausalLM", _RWKV),
            ("xlnet", "XLNetLMHeadModel", _XLNET),
        ),
    ),
    (_unmasked_tokens, (("fnet", "FNetForMaskedLM", _ENCODER),)),
    (
        _classified_tokens,
        (
            ("bert-classify", "BertForSequenceClassification", _ENCODER),
            ("llama-classify", "LlamaForSequenceClassification", _GROUPED),
        ),
    ),
    (_spans, (("bert-answer", "BertForQuestionAnswering", _ENCODER | {"num_labels": 2}),)),
    (_boxed_tokens, (("layoutlm", "LayoutLMForTokenClassification", _ENCODER | {"max_2d_position_embeddings": 64}),)),
    (
        _source_and_target,
        (
            ("t5", "T5ForConditionalGeneration", _T5),
            ("t5-gated", "T5ForConditionalGeneration", _T5 | {"feed_forward_proj": "gated-gelu"}),
            ("mt5", "MT5ForConditionalGeneration", _T5),
            ("bart", "BartForConditionalGeneration", _SEQ2SEQ),
            ("bart-eager", "BartForConditionalGeneration", _SEQ2SEQ | _EAGER),
            ("mbart", "MBartForConditionalGeneration", _SEQ2SEQ),
            ("pegasus", "PegasusForConditionalGeneration", _SEQ2SEQ),
            ("marian", "MarianMTModel", _SEQ2SEQ),
            ("blenderbot", "BlenderbotForConditionalGeneration", _SEQ2SEQ),
            ("m2m100", "M2M100ForConditionalGeneration", _SEQ2SEQ | _NO_LAYERDROP),
        ),
    ),
    (_mel_and_target, (("whisper", "WhisperForConditionalGeneration", _SPEECH),)),
    (_fbank_and_target, (("speech2text", "Speech2TextForConditionalGeneration", _FBANK),)),
    (
        _free_image,
        (
            ("vit", "ViTForImageClassification", _VISION | {"hidden_dropout_prob": 0.1}),
            ("deit", "DeiTForImageClassification", _VISION),
        ),
    ),
    (
        _fixed_image,
        (
            ("vit-eager", "ViTForImageClassification", _VISION | _EAGER),
            ("beit", "BeitForImageClassification", _VISION | {"use_relative_position_bias": True}),
        ),
    ),
    (_unlabelled_image, (("vit-mae", "ViTMAEForPreTraining", _MAE),)),
    (
        _image,
        (
            ("swin", "SwinForImageClassification", _SWIN | {"image_size": 32}),
            ("convnext", "ConvNextForImageClassification", _STAGES | {"num_stages": 2, "drop_path_rate": 0.1}),
            ("convnextv2", "ConvNextV2ForImageClassification", _STAGES | {"num_stages": 2}),
            ("resnet", "ResNetForImageClassification", _STAGES | {"embedding_size": 16, "layer_type": "basic"}),
            ("regnet", "RegNetForImageClassification", _STAGES | {"embedding_size": 16, "groups_width": 8}),
            ("poolformer", "PoolFormerForImageClassification", _POOLS),
            ("dinov2", "Dinov2ForImageClassification", _VISION),
            ("dinov2-swiglu", "Dinov2ForImageClassification", _VISION | {"use_swiglu_ffn": True}),
        ),
    ),
    (
        _image_crowd,
        (
            ("mobilenet-v2", "MobileNetV2ForImageClassification", _CONV | {"depth_multiplier": 0.35}),
            ("efficientnet", "EfficientNetForImageClassification", _EFFICIENT),
            ("mobilevit", "MobileViTForImageClassification", _MOBILE_VIT),
            ("cvt", "CvtForImageClassification", _CVT),
        ),
    ),
    (_fixed_image_crowd, (("levit", "LevitForImageClassification", _LEVIT),)),
    (_segmented_image, (("segformer", "SegformerForSemanticSegmentation", _PYRAMID),)),
    (_depth_image, (("glpn", "GLPNForDepthEstimation", _PYRAMID),)),
    (_masked_image, (("detr", "DetrForObjectDetection", _SEQ2SEQ | {"num_queries": 6}),)),
    (_image_and_text, (("clip", "CLIPModel", _TOWERS), ("siglip", "SiglipModel", _TOWERS))),
    (_waveform, (("wav2vec2", "Wav2Vec2ForCTC", _AUDIO), ("hubert", "HubertForCTC", _AUDIO))),
    (
        _classified_waveform,
        (
            ("wav2vec2-classify", "Wav2Vec2ForSequenceClassification", _AUDIO),
            ("hubert-classify", "HubertForSequenceClassification", _AUDIO),
            ("wavlm", "WavLMForSequenceClassification", _AUDIO),
        ),
    ),
    (_spectrogram, (("ast", "ASTForAudioClassification", _VISION | {"max_length": 32, "num_mel_bins": 16}),)),
    (_series, (("patchtst", "PatchTSTForPrediction", _PATCHES),)),
)


def build(class_name: str, config: Mapping[str, Any], inputs: Inputs) -> nn.Module:
    """The model of that class with that configuration, its weights drawn from a fixed seed."""
    model_class = getattr(transformers, class_name)
    kwargs = dict(config)
    attention = kwargs.pop("attn_implementation", None)
    if model_class is transformers.DetrForObjectDetection:
        kwargs |= {"backbone": None, "backbone_config": transformers.ResNetConfig(**_DETR_BACKBONE)}
    configuration = model_class.config_class(**kwargs)
    if attention is not None:
        configuration._attn_implementation = attention
    torch.manual_seed(0)
    model: nn.Module = model_class(configuration)
    return _settle(model, inputs)


def _settle(model: nn.Module, inputs: Inputs) -> nn.Module:
    """Fit BatchNorm's running statistics to one batch: with the initial ones, activations vanish in eval mode."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            model.train()(**inputs(4, 16))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model.eval()


# What a model must be refused for, and in which modes. RWKV divides its weights at the first call in evaluation mode.
_REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "rwkv": ("forward changes 'rwkv.layers_are_rescaled'", ("eval",)),
}

ZOO: tuple[ZooModel, ...] = tuple(
    ZooModel(name, partial(build, class_name, config, inputs), inputs, *_REFUSED.get(name, ()))
    for inputs, rows in _MODELS
    for name, class_name, config in rows
)
