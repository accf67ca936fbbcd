"""Small models of many architectures, with random weights large enough that attention matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.models import huggingface

__all__ = [
    "DECODERS",
    "ENCODERS",
    "LISTENERS",
    "NAMED",
    "SEQ2SEQ",
    "VIEWERS",
    "VOCABULARY",
    "Architecture",
    "Call",
    "build",
    "drawn",
    "of_today",
    "regarded",
]

VOCABULARY = 96


class Call(NamedTuple):
    """What our attention function was called with."""

    mask: Any
    given: dict[str, Any]


@contextmanager
def regarded(model: Any) -> Iterator[list[Call]]:
    """Run a model with regard, and record the calls of our function."""
    huggingface.register()
    functions = import_module("transformers").AttentionInterface._global_mapping
    ours, calls = functions["regard"], []

    def attend(*args: Any, **given: Any) -> Any:
        calls.append(Call(args[4] if len(args) > 4 else given["attention_mask"], given))
        return ours(*args, **given)

    before = model.config._attn_implementation
    model.set_attn_implementation("regard")
    functions["regard"] = attend
    try:
        yield calls
    finally:
        functions["regard"] = ours
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class Architecture:
    """A transformers model, its small config, and its peculiarities."""

    model: str
    config: str
    settings: dict[str, Any]
    calls: int = 2  # of attention in one forward pass
    tensors: str = ""  # why a mask of it becomes a tensor, if one does

    def __str__(self) -> str:
        return self.model


def build(architecture: Architecture, attention: str = "eager") -> Any:
    """Build the model, with weights that depend only on its shapes."""
    transformers = import_module("transformers")
    config = getattr(transformers, architecture.config)(**architecture.settings)
    model = getattr(transformers, architecture.model)._from_config(config, attn_implementation=attention).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    if hasattr(model, "generation_config"):
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
    return model


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def of_today(**more: Any) -> dict[str, Any]:
    """Two layers, four query heads over two key heads."""
    return {**of_yesterday(num_key_value_heads=2), **more}


def of_yesterday(**more: Any) -> dict[str, Any]:
    """Two layers, four heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
    return {**sizes, **words, "eos_token_id": None, **more}


def with_experts(**more: Any) -> dict[str, Any]:
    return of_today(head_dim=8, num_local_experts=2, num_experts_per_tok=1, **more)


def in_gpt_words(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return {**sizes, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, **more}


def latent(**more: Any) -> dict[str, Any]:
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    return of_today(
        num_key_value_heads=4, moe_intermediate_size=16, first_k_dense_replace=1, **heads, **experts, **more
    )


BOTH_LAYERS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"]}

DECODERS = [
    Architecture("LlamaForCausalLM", "LlamaConfig", of_today()),
    Architecture("MistralForCausalLM", "MistralConfig", of_today(sliding_window=4)),
    Architecture(
        "Qwen2ForCausalLM", "Qwen2Config", of_today(use_sliding_window=True, max_window_layers=1, **BOTH_LAYERS)
    ),
    Architecture("Qwen3ForCausalLM", "Qwen3Config", of_today(head_dim=8)),
    Architecture("GemmaForCausalLM", "GemmaConfig", of_today(head_dim=8)),
    Architecture("Gemma2ForCausalLM", "Gemma2Config", of_today(head_dim=8, attn_logit_softcapping=2.0, **BOTH_LAYERS)),
    Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", of_today(head_dim=8, **BOTH_LAYERS)),
    Architecture("GPT2LMHeadModel", "GPT2Config", in_gpt_words()),
    Architecture("GPTBigCodeForCausalLM", "GPTBigCodeConfig", in_gpt_words()),
    Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", of_yesterday()),
    Architecture("OPTForCausalLM", "OPTConfig", of_yesterday(word_embed_proj_dim=32, ffn_dim=48)),
    Architecture("PhiForCausalLM", "PhiConfig", of_today()),
    Architecture("Phi3ForCausalLM", "Phi3Config", of_today(sliding_window=4)),
    Architecture("Starcoder2ForCausalLM", "Starcoder2Config", of_today(sliding_window=4)),
    Architecture("Cohere2ForCausalLM", "Cohere2Config", of_today(logit_scale=1.0, **BOTH_LAYERS)),
    Architecture("Olmo2ForCausalLM", "Olmo2Config", of_today()),
    Architecture("StableLmForCausalLM", "StableLmConfig", of_today()),
    Architecture("GptOssForCausalLM", "GptOssConfig", with_experts(**BOTH_LAYERS)),
    Architecture("MixtralForCausalLM", "MixtralConfig", with_experts()),
    Architecture("GraniteForCausalLM", "GraniteConfig", of_today()),
    Architecture("Glm4ForCausalLM", "Glm4Config", of_today(head_dim=8)),
    Architecture("NemotronForCausalLM", "NemotronConfig", of_today()),
    Architecture("BioGptForCausalLM", "BioGptConfig", of_yesterday()),
    Architecture("BertLMHeadModel", "BertConfig", of_yesterday(is_decoder=True)),
    Architecture("DiffLlamaForCausalLM", "DiffLlamaConfig", of_today(), calls=4),
    Architecture("Llama4ForCausalLM", "Llama4TextConfig", with_experts(intermediate_size_mlp=48, **CHUNKS)),
    Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config", latent()),
    Architecture(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        latent(index_topk=4, index_n_heads=2, index_head_dim=8),
        tensors="its indexer scores every pair and reads the mask for it",
    ),
    Architecture("DogeForCausalLM", "DogeConfig", of_today(), tensors="it joins the mask with one that it computes"),
]

ENCODERS = [
    Architecture("BertForMaskedLM", "BertConfig", of_yesterday()),
    Architecture("RobertaForMaskedLM", "RobertaConfig", of_yesterday(type_vocab_size=1)),
    Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    Architecture(
        "ModernBertForMaskedLM", "ModernBertConfig", of_yesterday(local_attention=6, global_attn_every_n_layers=2)
    ),
    Architecture("ElectraForMaskedLM", "ElectraConfig", of_yesterday(embedding_size=32)),
    Architecture("AlbertForMaskedLM", "AlbertConfig", of_yesterday(embedding_size=16)),
    Architecture("EsmForMaskedLM", "EsmConfig", of_yesterday(position_embedding_type="rotary")),
    Architecture("EuroBertForMaskedLM", "EuroBertConfig", of_today()),
]

T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {f"{side}_{what}": 4 for side in ("encoder", "decoder") for what in ("attention_heads", "ffn_dim")}
BART |= {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "encoder_layers": 2}
BART |= {"decoder_layers": 2, "decoder_start_token_id": 1, "pad_token_id": 0, "forced_eos_token_id": None}
GEMMA2 = of_today(head_dim=8, attn_logit_softcapping=2.0, **BOTH_LAYERS)

SEQ2SEQ = [
    Architecture("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}, calls=6),
    Architecture("UMT5ForConditionalGeneration", "UMT5Config", {**T5, "decoder_start_token_id": 0}, calls=6),
    Architecture("BartForConditionalGeneration", "BartConfig", BART, calls=6),
    Architecture("MarianMTModel", "MarianConfig", BART, calls=6),
    Architecture("M2M100ForConditionalGeneration", "M2M100Config", BART, calls=6),
    Architecture(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        {"encoder": GEMMA2, "decoder": GEMMA2, "vocab_size": VOCABULARY},
        calls=6,
    ),
]

LISTENERS = [
    Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64},
        calls=6,
    ),
    Architecture(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        {**BART, "input_feat_per_channel": 8, "max_source_positions": 32, "max_target_positions": 64},
        calls=6,
    ),
]

PATCHES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHES |= {"image_size": 16, "patch_size": 4}

VIEWERS = [
    Architecture("ViTModel", "ViTConfig", PATCHES),
    Architecture("DeiTModel", "DeiTConfig", PATCHES),
    Architecture(
        "BeitModel",
        "BeitConfig",
        {**PATCHES, "use_relative_position_bias": True},
        tensors="its relative positions are the mask that it gives, to be added",
    ),
    Architecture("Dinov2Model", "Dinov2Config", PATCHES),
    Architecture("DINOv3ViTModel", "DINOv3ViTConfig", PATCHES),
    Architecture("SiglipVisionModel", "SiglipVisionConfig", PATCHES),
    Architecture("CLIPVisionModel", "CLIPVisionConfig", PATCHES),
    Architecture(
        "SwinModel",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        tensors="it adds its windows and relative positions up to one tensor",
    ),
]

NAMED = {each.model: each for each in (*DECODERS, *ENCODERS, *SEQ2SEQ, *LISTENERS, *VIEWERS)}
