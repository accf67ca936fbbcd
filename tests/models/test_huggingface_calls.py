"""The attention function for transformers: packed sequences, user masks, caches, weights, dropout, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from architectures import NAMED, Architecture, build, drawn, of_today, regarded
from regard.errors import ArgumentError, MissingPackageError
from regard.models import huggingface
from regard.models.huggingface.attention import attention_forward
from regard.models.huggingface.lazy_mask import LazyMask
from regard.models.huggingface.mask_functions import MaskBuilder

WORDS = drawn(2, 11)
LEFT = torch.ones(2, 11, dtype=torch.int64)
LEFT[0, :4] = 0
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
LOWEST = torch.finfo(torch.float32).min


def both_ways(model: Any, run: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor, list[Any]]:
    """The result with regard, the eager result, and the masks that were passed."""
    expected = run(model)
    with regarded(model) as calls:
        found = run(model)
    assert calls
    return found, expected, [call.mask for call in calls]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def llama() -> Any:
    return build(NAMED["LlamaForCausalLM"])


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM", "GPTNeoXForCausalLM"])
def test_packed_sequences_see_only_themselves(name: str) -> None:
    model, lengths = build(NAMED[name]), [4, 5, 2]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad(), regarded(model) as calls:
        packed = model(WORDS[:1], position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(part).logits for part in WORDS[:1].split(lengths, 1)], 1)
    close(packed, apart)
    assert all("documents" in repr(call.mask.mask) and "tensor" not in vars(call.mask) for call in calls[:2])


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM", "BartForConditionalGeneration"]
)
def test_a_static_cache_generates_the_same(name: str) -> None:
    def write(model: Any) -> Tensor:
        return model.generate(WORDS, attention_mask=LEFT, cache_implementation="static", num_beams=1, **GREEDY)

    found, expected, masks = both_ways(build(NAMED[name]), write)
    assert torch.equal(found, expected)
    assert all(mask.shape[2] == 1 for mask in masks if isinstance(mask, Tensor))


def test_a_text_read_in_two_pieces_gives_the_same(llama: Any) -> None:
    def read(model: Any) -> Tensor:
        start = model(WORDS[:, :6], attention_mask=LEFT[:, :6], use_cache=True)
        return model(WORDS[:, 6:], attention_mask=LEFT, past_key_values=start.past_key_values).logits

    found, expected, masks = both_ways(llama, read)
    close(found, expected)
    assert {mask.shape[2:] for mask in masks} == {(6, 6), (5, 11)}


def test_beams_generate_the_same(llama: Any) -> None:
    found, expected, _ = both_ways(llama, lambda m: m.generate(WORDS, attention_mask=LEFT, num_beams=3, **GREEDY))
    assert torch.equal(found, expected)


def test_a_user_mask_tensor_selects_if_it_is_bool_and_adds_if_it_is_floating(llama: Any) -> None:
    allowed = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed |= torch.eye(11, dtype=torch.bool)
    added = torch.where(allowed, 0.0, LOWEST)
    expected = llama(WORDS, attention_mask=added).logits
    with regarded(llama) as calls:
        close(llama(WORDS, attention_mask=allowed).logits, expected)
        close(llama(WORDS, attention_mask=added).logits, expected)
    assert all(isinstance(call.mask, Tensor) for call in calls)


def test_image_tokens_see_each_other_both_ways() -> None:
    patches = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {**patches, "image_size": 8, "patch_size": 4, "model_type": "siglip_vision_model"}
    text = NAMED["Gemma3ForCausalLM"].settings
    tokens = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 4}
    settings = {"text_config": text, "vision_config": vision, **tokens}
    model = build(Architecture("Gemma3ForConditionalGeneration", "Gemma3Config", settings))
    words, pixels = drawn(2, 14).clamp(max=80), torch.randn(2, 3, 8, 8)
    words[:, 3:7] = 90
    kinds = (words == 90).long()

    def read(model: Any) -> Tensor:
        return model(words, pixel_values=pixels, token_type_ids=kinds, attention_mask=torch.ones_like(words)).logits

    found, expected, masks = both_ways(model, read)
    close(found, expected)
    blocks = [mask for mask in masks if mask is not None]
    assert all(isinstance(mask, LazyMask) and bool(mask.tensor[0, 0, 3, 4]) for mask in blocks)
    assert all("causal() | documents" in repr(mask.mask) for mask in blocks)


def test_weights_are_computed_only_if_requested(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = llama(WORDS, attention_mask=LEFT, output_attentions=True).attentions
    with regarded(llama):
        ours = llama(WORDS, attention_mask=LEFT, output_attentions=True).attentions
        monkeypatch.setattr(
            "regard.models.huggingface.attention.observe",
            lambda *args, **given: pytest.fail("weights that were not requested"),
        )
        assert not llama(WORDS, attention_mask=LEFT).attentions
    for found, expected in zip(ours, eager, strict=True):
        close(found[0, :, 4:], expected[0, :, 4:])
        close(found[1], expected[1])
        assert not found[0, :, :4].any()  # a row that sees nothing


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GptOssForCausalLM", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
def test_training_has_the_same_gradients(name: str, again: bool) -> None:
    model = build(NAMED[name])
    labels = WORDS.clone()
    labels[0, :5] = -100  # what fills up, and what only it would predict
    if again:
        model.gradient_checkpointing_enable()

    def grads(model: Any) -> Tensor:
        model.train().zero_grad()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
        model(input_ids=WORDS, attention_mask=LEFT, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    found, expected, _ = both_ways(model, grads)
    assert expected.abs().max() > 0.01
    close(found, expected)


def test_attention_drops_weights_only_in_training() -> None:
    settings = of_today(attention_dropout=0.5)
    model = build(Architecture("LlamaForCausalLM", "LlamaConfig", settings))
    with torch.no_grad(), regarded(model) as calls:
        settled = model(WORDS).logits
        assert torch.equal(model(WORDS).logits, settled)
        model.train()
        torch.manual_seed(0)
        once, twice = model(WORDS).logits, model(WORDS).logits
        torch.manual_seed(0)
        assert torch.equal(model(WORDS).logits, once)
    assert not torch.allclose(once, twice)
    assert [call.given["dropout"] for call in calls[2:6]] == [0.0, 0.0, 0.5, 0.5]


def test_a_model_compiles_in_one_graph(llama: Any) -> None:
    torch.compiler.reset()
    huggingface.register()
    expected = llama(WORDS, attention_mask=LEFT).logits[LEFT.bool()]
    llama.set_attn_implementation("regard")
    try:
        compiled = torch.compile(llama, backend="eager", fullgraph=True)
        close(compiled(WORDS, attention_mask=LEFT).logits[LEFT.bool()], expected)
        close(compiled(WORDS).logits, llama(WORDS).logits)
    finally:
        llama.set_attn_implementation("eager")
        torch.compiler.reset()


@pytest.mark.parametrize("name", ["Bloom", "Mpt", "XGLM"])
def test_a_model_that_computes_attention_itself_gets_an_additive_mask(name: str) -> None:
    huggingface.register()
    sizes = {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    if name == "XGLM":
        sizes = {"vocab_size": 96, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    if name == "Mpt":
        sizes = {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4}
    alone = Architecture(f"{name}ForCausalLM", f"{name}Config", sizes)
    expected, found = (build(alone, way)(WORDS, attention_mask=LEFT).logits for way in ("eager", "regard"))
    assert torch.equal(found[LEFT.bool()], expected[LEFT.bool()])


def test_registering_again_changes_nothing() -> None:
    transformers = import_module("transformers")
    huggingface.register()
    huggingface.register()
    assert transformers.AttentionInterface._global_mapping["regard"] is attention_forward
    assert isinstance(transformers.AttentionMaskInterface._global_mapping["regard"], MaskBuilder)
    model = build(NAMED["LlamaForCausalLM"], "regard")
    assert model.config._attn_implementation == "regard"
    assert model(WORDS).logits.isfinite().all()


@pytest.mark.parametrize("there", [None, ModuleType("transformers")], ids=["missing", "too old"])
def test_without_transformers_one_sentence_says_what_to_do(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", there)
    with pytest.raises(MissingPackageError, match=r"^register: .*pip install 'regard\[hf\]'\.$"):
        huggingface.register()


def attended(**given: Any) -> tuple[Tensor, Tensor | None]:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    mask = given.pop("attention_mask", None)
    return attention_forward(nn.Module(), q, k, v, mask, **given)


@pytest.mark.parametrize("name", ["cache", "block_indices"])
def test_unsupported_arguments_that_would_change_the_result_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"attn_implementation='regard': .*set_attn_implementation\('sdpa'\)"):
        attended(**{name: object()})


def test_the_output_has_tokens_before_heads_and_no_weights() -> None:
    output, weights = attended(sliding_window=4, cu_seq_lens_q=None)
    assert output.shape == (2, 5, 4, 6)
    assert output.is_contiguous()
    assert weights is None


def test_every_argument_reaches_attention() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    bias, more, sink = torch.randn(1, 4, 5, 9), torch.randn(2, 1, 5, 8), torch.randn(4)
    given = {"scaling": 0.3, "softcap": 2.0, "s_aux": sink, "position_bias": bias}
    found, weights = attention_forward(nn.Module(), q, k, v, more, output_attentions=True, **given)
    seen = regard.observe(q, k, v, bias=more[..., :7] + bias[..., :7], scale=0.3, softcap=2.0, sink=sink)
    torch.testing.assert_close(found, seen.output.transpose(1, 2))
    torch.testing.assert_close(weights, seen.weights())


def test_only_selected_keys_are_seen() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    chosen = torch.tensor([[0], [1], [2], [3], [4]]).expand(2, 5, 1)
    found, _ = attention_forward(nn.Module(), q, k, v, LazyMask(regard.causal(), 2, 5, 5, "cpu"), indices=chosen)
    torch.testing.assert_close(found, v.transpose(1, 2))


def test_only_the_keys_of_selected_blocks_are_seen() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    blocks = torch.randint(-1, 4, (2, 2, 5, 2))  # for each key head
    module = nn.Module()
    module.indexer = nn.Module()
    module.indexer.block_size = 2  # type: ignore[assignment]
    mask = LazyMask(regard.causal(), 2, 5, 7, "cpu")
    found, _ = attention_forward(module, q, k, v, mask, block_indices=blocks)
    keys = torch.arange(7) // 2
    written = (blocks[..., None] == keys).any(-2).repeat_interleave(2, 1) & regard.causal().dense(5, 7)
    torch.testing.assert_close(found, regard.attention(q, k, v, mask=written).transpose(1, 2))


def test_a_model_that_selects_blocks_of_keys_computes_what_it_does_eagerly() -> None:
    huggingface.register()
    sizes = {
        **dict.fromkeys(("head_dim", "intermediate_size", "shared_intermediate_size", "index_head_dim"), 16),
        "vocab_size": 96,
        "hidden_size": 32,
        "dense_intermediate_size": 24,
        "rotary_dim": 8,
        "eos_token_id": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 2,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 2,
        "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    }
    alone = Architecture("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig", sizes)
    if not hasattr(import_module("transformers"), alone.model):
        pytest.skip("this version of transformers does not have the model")
    expected, found = (build(alone, way)(WORDS).logits for way in ("eager", "regard"))
    close(found, expected)


def test_a_two_dimensional_mask_is_padding() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found, _ = attention_forward(nn.Module(), q, k, v, keep)
    torch.testing.assert_close(found, regard.attention(q, k, v, mask=regard.padding(keep)).transpose(1, 2))


def test_is_causal_without_a_mask_is_causal() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    found, _ = attention_forward(nn.Module(), q, k, v, None, is_causal=True)
    torch.testing.assert_close(found, regard.attention(q, k, v, mask=regard.causal()).transpose(1, 2))


def test_a_mask_for_more_keys_than_there_are_is_truncated() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    found, _ = attention_forward(nn.Module(), q, k, v, LazyMask(regard.causal(offset=0), 2, 5, 9, "cpu"))
    torch.testing.assert_close(found, regard.attention(q, k, v, mask=regard.causal()).transpose(1, 2))
