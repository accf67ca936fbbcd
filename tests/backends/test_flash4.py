"""FlashAttention-4: refused for a reason, or the same meaning; here by a stand-in of its interface in plain torch."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard.backends import KNOWN, Flash4, flash4
from regard.core.validation import pose
from regard.errors import BackendError

Function = Callable[..., Any]


class Standin(torch.autograd.Function):
    """The numbers of its kernels, and like them no derivative but the first, nor a rule that says so."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, fixed: bool
    ) -> tuple[Tensor, Tensor | None]:
        needed = q.requires_grad or k.requires_grad or v.requires_grad
        output, lse = plain(q.detach(), k.detach(), v.detach(), scale, causal)
        lse = lse.detach() if needed else None
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.scale, ctx.causal = scale, causal
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        SEEN["grad"] = grad
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            output, _ = plain(*leaves, ctx.scale, ctx.causal)
        return *torch.autograd.grad(output, leaves, grad), None, None, None


SEEN: dict[str, Any] = {}


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention over (batch, length, heads, dim), and lse (batch, heads, length), computed in float64."""
    n, m, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * scale
    if causal:
        logits = logits.masked_fill(~torch.ones(n, m, dtype=torch.bool).tril(m - n), -torch.inf)
    output = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v.double())
    return output.to(q.dtype), logits.logsumexp(-1).float()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The interface of the releases; what is checked is what they check."""
    assert qv is None
    assert softmax_scale is not None
    batch, rows, heads, dim = q.shape
    assert k.shape == (batch, k.shape[1], k.shape[2], dim)
    assert v.shape[:3] == k.shape[:3]
    assert heads % k.shape[2] == 0
    assert q.dtype == k.dtype == v.dtype
    for x in (q, k, v):
        assert x.stride(-1) == 1
        assert all(stride % 8 == 0 and stride > 0 for stride in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0
    SEEN.update(q=q, k=k, v=v, causal=causal, deterministic=deterministic, rows=rows)
    found: tuple[Tensor, Tensor | None] = Standin.apply(q, k, v, softmax_scale, causal, deterministic)
    return found


def forget() -> None:
    for known in (flash4._installed, flash4._function, flash4._missing, flash4._capability):
        known.cache_clear()
    SEEN.clear()


def install(monkeypatch: pytest.MonkeyPatch, function: Function | None = flash_attn_func) -> None:
    """Put a module with that function where `flash_attn.cute` would be."""
    module, parent = ModuleType("flash_attn.cute"), ModuleType("flash_attn")
    parent.__spec__, parent.__path__ = ModuleSpec("flash_attn", None, is_package=True), []
    if function is not None:
        module.flash_attn_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", parent)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(flash4, "version", lambda name: "4.0.0")


def on_chip(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    monkeypatch.setattr(flash4, "_capability", lambda device: major)


@pytest.fixture
def bare() -> Iterator[None]:
    """The machine as it is, with nothing remembered."""
    forget()
    yield
    forget()


@pytest.fixture
def there(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 installed, and a Hopper GPU: all that is missing here is played."""
    install(monkeypatch)
    on_chip(monkeypatch, 9)


def made(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, grad: bool = True, seed: int = 4
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def shaped(n: int = 20, m: int = 33, kv_heads: int = 4, dim: int = 64, **more: Any) -> list[Tensor]:
    return made((2, 4, n, dim), (2, kv_heads, m, dim), (2, kv_heads, m, dim), **more)


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {  # shapes, arguments, what it hears of causal
    "plain": ({}, {}, False),
    "everything": ({}, {"mask": regard.everything()}, False),
    "causal square": ({"n": 33}, {"mask": regard.causal()}, True),
    "causal, more keys": ({}, {"mask": regard.causal()}, True),
    "causal, aligned by a number": ({}, {"mask": regard.causal(offset=13)}, True),
    "causal from the top, square": ({"n": 33}, {"mask": regard.causal(offset=0)}, True),
    "one row": ({"n": 1}, {"mask": regard.causal()}, True),
    "one row and one key": ({"n": 1, "m": 1}, {"mask": regard.causal()}, True),
    "more rows than keys": ({"n": 40}, {}, False),
    "grouped": ({"kv_heads": 2}, {"mask": regard.causal()}, True),
    "one key head": ({"kv_heads": 1}, {}, False),
    "scale": ({}, {"scale": 0.9}, False),
    "dim 96": ({"dim": 96}, {}, False),
    "dim 128": ({"dim": 128}, {"mask": regard.causal()}, True),
    "float16": ({"dtype": torch.float16}, {"mask": regard.causal()}, True),
}


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("watched", [False, True])
def test_what_it_accepts_equals_the_reference_with_gradients(name: str, watched: bool) -> None:
    shape, arguments, causal = ACCEPTED[name]
    tensors = shaped(**shape, grad=watched)
    twin = doubled(tensors)
    found = regard.attention(*tensors, backend="flash4", **arguments)
    expected = regard.attention(*twin, backend="reference", **arguments)
    assert found.dtype == tensors[0].dtype
    assert SEEN["causal"] is causal
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    if not watched:
        return
    upstream = torch.randn_like(found)
    got = torch.autograd.grad(found, tensors, upstream)
    wanted = torch.autograd.grad(expected, twin, upstream.double())
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("shape", [(30, 64), (2, 30, 64), (2, 3, 4, 30, 64)])
def test_every_rank_comes_back_as_it_came(shape: tuple[int, ...]) -> None:
    tensors = made(shape, shape, shape, grad=False)
    found = regard.attention(*tensors, backend="flash4")
    assert found.shape == shape
    expected = regard.attention(*doubled(tensors), backend="reference")
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


# derivatives


def twice(tensors: list[Tensor], **arguments: Any) -> tuple[Tensor, ...]:
    output = regard.attention(*tensors, **arguments)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output.dtype)
    first = torch.autograd.grad(output, tensors, upstream, create_graph=True)
    return torch.autograd.grad(sum((x * x).sum() for x in first), tensors)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", [None, regard.causal()])
def test_second_derivatives_are_those_of_the_formula(mask: regard.Mask | None, kv_heads: int) -> None:
    tensors = shaped(n=9, m=12, kv_heads=kv_heads, dtype=torch.float16)
    found = twice(tensors, mask=mask, backend="flash4")
    expected = twice(doubled(tensors), mask=mask, backend="reference")
    for x, y in zip(found, expected, strict=True):
        assert y.abs().max() > 1
        assert (x.double() - y).abs().max() < 1e-2 * y.abs().max()


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True), (False, False, True)])
def test_only_what_asks_for_a_gradient_gets_one(wanted: tuple[bool, ...]) -> None:
    tensors = [x.detach().requires_grad_(w) for x, w in zip(shaped(), wanted, strict=True)]
    regard.attention(*tensors, backend="flash4").sum().backward()
    assert [x.grad is not None for x in tensors] == list(wanted)


@pytest.mark.usefixtures("there")
def test_a_second_backward_needs_the_graph_to_be_kept() -> None:
    tensors = shaped()
    loss = regard.attention(*tensors, backend="flash4").float().square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, tensors)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("changed", ["input", "output"])
def test_a_tensor_changed_before_the_backward_is_noticed(changed: str) -> None:
    tensors = shaped()
    output = regard.attention(*tensors, backend="flash4")
    with torch.no_grad():
        (tensors[1] if changed == "input" else output).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def alive(tensors: list[Tensor]) -> Callable[[], list[bool]]:
    storages = [weakref.ref(x.untyped_storage()) for x in tensors]

    def asked() -> list[bool]:
        gc.collect()
        return [storage() is not None for storage in storages]

    return asked


@pytest.mark.usefixtures("there")
def test_the_backward_frees_what_the_forward_kept() -> None:
    tensors = [x * 1 for x in shaped()]
    output = regard.attention(*tensors, backend="flash4")
    still = alive([*tensors, output])
    loss = (output * 1).sum()
    del tensors, output
    assert still() == [True] * 4
    loss.backward()
    SEEN.clear()
    assert still() == [False] * 4


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_keeps_nothing_and_gives_the_same_gradient(reentrant: bool) -> None:
    inner: list[Callable[[], list[bool]]] = []

    def block(x: Tensor) -> Tensor:
        tensors = [x * factor for factor in (1.0, 2.0, 3.0)]
        output = regard.attention(*tensors, backend="flash4", mask=regard.causal())
        inner.append(alive([*tensors, output]))
        return output * 2

    (x,) = made((1, 2, 20, 64))
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    SEEN.clear()
    result = checkpoint(block, x, use_reentrant=reentrant)
    SEEN.clear()
    assert inner[1]() == [False] * 4
    result.sum().backward()
    assert torch.equal(x.grad, expected)


# tensors as its kernels can read them


@pytest.mark.usefixtures("there")
def test_sound_strides_cost_no_copy() -> None:
    query, key, value = shaped(grad=False)
    regard.attention(query, key, value, backend="flash4")
    for name, x in (("q", query), ("k", key), ("v", value)):
        assert SEEN[name].data_ptr() == x.data_ptr()
        assert SEEN[name].shape == (x.shape[0], x.shape[2], x.shape[1], x.shape[3])
    packed = torch.randn(2, 20, 3, 4, 64).bfloat16()
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    regard.attention(query, key, value, backend="flash4")
    assert SEEN["v"].data_ptr() == value.data_ptr()


UNSOUND: dict[str, Callable[[], Tensor]] = {
    "dims apart": lambda: torch.randn(2, 4, 64, 20).bfloat16().mT,
    "an odd stride": lambda: torch.randn(2, 4, 20, 65).bfloat16()[..., :64],
    "an odd beginning": lambda: torch.randn(2, 4, 20, 72).bfloat16()[..., 1:65],
    "expanded": lambda: torch.randn(1, 4, 20, 64).bfloat16().expand(2, 4, 20, 64),
    "one head for all": lambda: torch.randn(2, 1, 20, 64).bfloat16().expand(2, 4, 20, 64),
}


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_strides_are_copied_and_get_their_gradients(name: str) -> None:
    x = UNSOUND[name]().requires_grad_()
    twin = x.detach().double().requires_grad_()
    regard.attention(x, x, x, backend="flash4").square().sum().backward()
    regard.attention(twin, twin, twin, backend="reference").square().sum().backward()
    torch.testing.assert_close(x.grad.double(), twin.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.usefixtures("there")
def test_its_backward_gets_a_gradient_with_sound_strides() -> None:
    output = regard.attention(*shaped(), backend="flash4")
    output.backward(torch.ones((), dtype=output.dtype).expand(output.shape))
    assert all(stride > 0 and stride % 8 == 0 for stride in SEEN["grad"].stride()[:-1])
    assert SEEN["grad"].stride(-1) == 1


def test_an_offset_beyond_32_bits_is_unsound() -> None:
    far = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided((2, 4, 2, 64), (2**31, 64, 256, 1))
    assert flash4._readable(far).is_contiguous()


# refusals


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "softcap": ({}, {"softcap": 2.0}, "gradient of a softcap"),
    "sink": ({}, {"sink": torch.zeros(4)}, "gradient of a sink"),
    "dropout": ({}, {"dropout": 0.1}, "no dropout"),
    "bias": ({}, {"bias": torch.zeros(20, 33)}, "no bias"),
    "alibi": ({}, {"bias": regard.biases.alibi(torch.ones(4))}, "no bias"),
    "score": ({}, {"score": regard.scores.Balanced()}, "no score Balanced"),
    "scale a head": ({}, {"scale": torch.ones(4)}, "not as a tensor"),
    "scale below 0": ({}, {"scale": -0.5}, "scales above 0; this one is -0.5"),
    "window": ({}, {"mask": regard.window(3)}, "only mask that it takes is causal"),
    "padding": ({}, {"mask": regard.padding([5, 9])}, "only mask that it takes is causal"),
    "tensor": ({}, {"mask": torch.ones(20, 33, dtype=torch.bool)}, "only mask that it takes is causal"),
    "composed": ({}, {"mask": regard.causal() & regard.blocks(4)}, "only mask that it takes is causal"),
    "causal from the top": ({}, {"mask": regard.causal(offset=0)}, "aligns the last row with the last key"),
    "causal by a tensor": ({}, {"mask": regard.causal(offset=torch.tensor([13, 13]))}, "aligns the last row"),
    "empty rows": ({"n": 40}, {"mask": regard.causal()}, "7 of the rows have no visible key"),
    "float32": ({"dtype": torch.float32}, {}, "float16 and bfloat16, and not float32"),
    "float64": ({"dtype": torch.float64}, {}, "float16 and bfloat16, and not float64"),
    "no rows": ({"n": 0}, {}, "nothing is there"),
    "no keys": ({"m": 0}, {}, "nothing is there"),
    "dim 59": ({"dim": 59}, {}, "64, 96 and 128, the same for key and value; these are 59 and 59"),
    "dim 256": ({"dim": 256}, {}, "these are 256 and 256"),
}


def reasons(*tensors: Tensor, **arguments: Any) -> list[str]:
    return Flash4().refuses(pose(*tensors, **arguments))


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_do_is_refused_for_one_reason(name: str) -> None:
    shape, arguments, reason = REFUSED[name]
    tensors = shaped(**shape)
    found = reasons(*tensors, **arguments)
    assert len(found) == 1
    assert reason in found[0]
    with pytest.raises(BackendError, match="'flash4' refuses"):
        regard.attention(*tensors, backend="flash4", **arguments)


@pytest.mark.usefixtures("there")
def test_all_reasons_are_told() -> None:
    found = reasons(*shaped(), softcap=2.0, sink=torch.zeros(4), mask=regard.window(3), dropout=0.1)
    assert len(found) == 4


@pytest.mark.usefixtures("there")
def test_values_of_another_dim_are_refused() -> None:
    tensors = made((2, 4, 20, 128), (2, 4, 33, 128), (2, 4, 33, 64))
    assert "these are 128 and 64" in reasons(*tensors)[0]


@pytest.mark.usefixtures("there")
def test_it_gives_no_statistics() -> None:
    with pytest.raises(BackendError, match="no statistics"):
        regard.observe(*shaped(), backend="flash4")


@pytest.mark.usefixtures("there")
def test_tensors_of_too_many_elements_are_refused() -> None:
    query, key, value = (torch.empty(1, 1, 2**25, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    assert "32-bit" in reasons(query, key, value)[0]
    assert not reasons(query[:, :, 1:], key[:, :, 1:], value[:, :, 1:])


@pytest.mark.usefixtures("there")
def test_a_tensor_of_another_class_is_refused_and_a_parameter_is_not() -> None:
    class Mine(Tensor):
        pass

    query, key, value = shaped(grad=False)
    assert reasons(query.as_subclass(Mine), key, value) == ["it takes plain tensors, and not Mine"]
    assert not reasons(torch.nn.Parameter(query), key, value)


@pytest.mark.usefixtures("there")
def test_torch_func_and_forward_mode_are_refused() -> None:
    query, key, value = shaped(grad=False)
    told = []

    def ask(q: Tensor) -> Tensor:
        told.append(reasons(q, key, value))
        return q.sum()

    torch.func.vmap(ask)(torch.stack([query, query]))
    torch.func.grad(ask)(query)
    with torch.autograd.forward_ad.dual_level():
        ask(torch.autograd.forward_ad.make_dual(query, query))
    assert told == [["it has no rules for forward mode and torch.func"]] * 3


@pytest.mark.usefixtures("there")
def test_torch_compile_is_refused_while_it_traces() -> None:
    tensors = shaped(grad=False)
    told: list[list[str]] = []

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        told.append(Flash4().refuses(pose(q, k, v)))
        return q + 1

    torch.compiler.reset()
    torch.compile(ask, backend="eager", fullgraph=True)(*tensors)
    torch.compiler.reset()
    assert told == [["it cannot be traced by torch.compile"]]
    assert not reasons(*tensors)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(("major", "accepts"), [(7, False), (8, False), (9, True), (10, True), (11, True), (12, False)])
def test_it_runs_on_the_chips_that_it_was_made_for(major: int, accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_chip(monkeypatch, major)
    said = f"the GPU has compute capability {major}; it is made for 9 to 11"
    assert reasons(*shaped()) == ([] if accepts else [said])


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(("major", "accepts"), [(9, False), (10, True), (11, True)])
def test_deterministic_algorithms_are_asked_of_it_where_it_has_them(
    major: int, accepts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_chip(monkeypatch, major)
    tensors = shaped()
    regard.attention(*tensors, backend="flash4")
    assert SEEN["deterministic"] is False
    torch.use_deterministic_algorithms(True)
    try:
        assert any("same bits" in reason for reason in reasons(*tensors)) is not accepts
        if accepts:
            regard.attention(*tensors, backend="flash4")
            assert SEEN["deterministic"] is True
    finally:
        torch.use_deterministic_algorithms(False)


# whether it is there


@pytest.mark.usefixtures("bare")
def test_where_it_is_not_installed_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise flash4.PackageNotFoundError(name)

    monkeypatch.setattr(flash4, "version", missing)
    assert reasons(*shaped()) == ["it is not installed: pip install flash-attn-4"]
    plan = regard.why(*shaped(), backend="flash4")
    assert plan.backend is None
    assert "pip install flash-attn-4" in str(plan)


@pytest.mark.usefixtures("bare")
def test_nothing_is_imported_before_everything_else_speaks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> ModuleType:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr(flash4, "version", lambda name: "4.0.0")
    monkeypatch.setattr(flash4, "import_module", never)
    assert reasons(*shaped()) == ["the tensors are on cpu; it needs an NVIDIA GPU"]
    on_chip(monkeypatch, 9)
    assert len(reasons(*shaped(), softcap=2.0)) == 1


@pytest.mark.usefixtures("bare")
def test_an_installation_that_is_broken_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    on_chip(monkeypatch, 9)
    (said,) = reasons(*shaped())
    assert said.startswith("flash-attn-4 is installed and cannot be imported: ")
    assert "flash_attn_func" in said


@pytest.mark.usefixtures("bare")
def test_a_module_of_that_name_from_an_older_flashattention_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
        return q

    install(monkeypatch, older)
    on_chip(monkeypatch, 9)
    assert reasons(*shaped()) == ["flash_attn.cute is not that of flash-attn-4: reinstall flash-attn-4"]


@pytest.mark.usefixtures("bare")
def test_a_release_that_gives_the_output_alone_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool) -> Tensor:
        return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, deterministic=deterministic)[0]

    install(monkeypatch, alone)
    on_chip(monkeypatch, 9)
    tensors = shaped(grad=False)
    expected = regard.attention(*doubled(tensors), backend="reference")
    found = regard.attention(*tensors, backend="flash4")
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cuda", [None, "13.0"])
@pytest.mark.usefixtures("bare")
def test_only_a_gpu_of_nvidia_has_a_capability(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert flash4._capability(torch.device("cpu")) == 0
    assert flash4._capability(torch.device("cuda", 0)) == (0 if cuda is None else 9)


def test_it_is_known_by_its_name() -> None:
    assert isinstance(KNOWN["flash4"], Flash4)
    assert KNOWN["flash4"].about == "FlashAttention-4"


@pytest.mark.usefixtures("there")
def test_why_shows_it_and_runs_nothing() -> None:
    plan = regard.why(*shaped(), backend="flash4")
    assert "→ flash4" in str(plan)
    assert "FlashAttention-4" in str(plan)
    assert not SEEN


@pytest.mark.usefixtures("there")
def test_autocast_gives_it_half_precision() -> None:
    tensors = shaped(dtype=torch.float32, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = regard.attention(*tensors, backend="flash4")
    assert found.dtype == SEEN["q"].dtype == torch.bfloat16
