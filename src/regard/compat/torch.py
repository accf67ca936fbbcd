"""Every private or version-dependent symbol of torch that the package uses, behind one small function each.

`tests/compat/test_torch.py` holds each of them: if a release of torch drops one, its test says so.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

__all__ = [
    "any_autocast_enabled",
    "autocast_enabled",
    "cached_signature",
    "call_function",
    "call_modes",
    "causal_bias",
    "check_when_run",
    "cpu_flash_attention",
    "cpu_flash_attention_backward",
    "cpu_multiplies_bfloat16",
    "cuda_allocator",
    "dynamo_is_loaded",
    "forward_mode_is_active",
    "fused_sdpa_kernel",
    "import_for_backward",
    "in_backward",
    "innermost_transform_is_jvp",
    "is_batched",
    "is_capturing",
    "is_capturing_cuda",
    "is_current_device",
    "is_exporting",
    "is_legacy_batched",
    "is_readable",
    "is_recording",
    "is_traced",
    "is_wrapped",
    "lacks_values",
    "leave_graph",
    "legacy_batch",
    "legacy_unbatch",
    "likeness",
    "may_need_grad",
    "no_autocast",
    "node_in_backward",
    "not_compiled",
    "not_traced",
    "operations_are_plain",
    "outside_transforms",
    "raw_stream",
    "samples",
    "saved_tensors_are_packed",
    "shared_with_backward",
    "tensor_indices_in_vmap",
    "transforms_are_active",
    "unwrap",
    "unwrap_largest",
    "versions_of",
    "without_autocast",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=torch.autograd.Function)

_VERSION = attrgetter("_version")
_REFERENCES = 2  # what sys.getrefcount counts for an object with one name


def any_autocast_enabled() -> bool:
    """Whether autocast is on for some device: one fast call, where the public function asks about one device."""
    return torch._C._is_any_autocast_enabled()


def autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is on for a device; the public function raises for the meta device."""
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def no_autocast(device: torch.device | None = None) -> AbstractContextManager[object]:
    """A context without autocast on any device. A compiler cannot trace torch's own context, and needs the device."""
    if device is not None and torch.compiler.is_compiling():
        return torch.autocast(device.type, enabled=False)
    return torch._C._DisableAutocast()


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast: a backward pass may be called from inside autocast too."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_autocast(getattr(args[0], "device", None) if args else None):
            return function(*args, **kwargs)

    return wrapped


def dynamo_is_loaded() -> bool:
    """Whether torch.compile was used in this process: importing its module takes seconds, so we only look."""
    return "torch._dynamo" in sys.modules


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function that launches kernels: after a graph break it would trace the launcher."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not dynamo_is_loaded() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch._dynamo.disable(function))
        return disabled[0](*args, **kwargs)

    return wrapped


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """A function that torch.compile calls and does not trace. The first call imports the compiler."""
    disabled: Callable[P, R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]
    return disabled


def leave_graph(why: str) -> None:
    """End the graph that torch.compile traces here; with fullgraph=True that is an error, which says why."""
    torch._dynamo.graph_break(msg=why)


def is_exporting() -> bool:
    """Whether torch.export is at work; torch.compiler.is_exporting() is True under torch.compile up to torch 2.12."""
    return torch.compiler._is_exporting_flag


def is_recording() -> bool:
    """Whether operations are recorded, as by `torch.func.linearize`: then no value can be read."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # while this is not imported, nothing is recorded
    return tracer is not None and tracer.get_proxy_mode() is not None


def is_traced() -> bool:
    """Whether a program is made for later, by torch.export or make_fx: no value can be read, and none is known."""
    return is_exporting() or (not torch.compiler.is_compiling() and is_recording())


def lacks_values(*tensors: Tensor) -> bool:
    """Whether there are shapes alone: a tensor is on the meta device or fake, or a FakeTensorMode is at work."""
    if any(x.is_meta for x in tensors):
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # while this is not imported, nothing is fake
    if fake is None or torch.compiler.is_compiling():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    return any(isinstance(unwrap(x), fake.FakeTensor) for x in tensors)


def check_when_run(condition: Tensor, message: str) -> None:
    """Raise `message` when a compiled or captured call runs, unless the condition holds: no value is read before."""
    torch._assert_async(condition, message)


def import_for_backward() -> None:
    """Import what torch imports in the first backward pass that is given a gradient: sympy, half a second of it."""
    with suppress(ImportError):  # the backward pass raises it, if it needs the module
        import_module("torch.fx.experimental.symbolic_shapes")


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured; without a GPU the public function raises."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_capturing_cuda() -> bool:
    """The same where CUDA is known to be in use."""
    return torch._C._cuda_isCurrentStreamCapturing()


def raw_stream(device: torch.device) -> int:
    """The current stream of a CUDA device as a number; the public function takes microseconds to make an object."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def cuda_allocator(size: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """A function that makes contiguous tensors on the current CUDA device, in a third of the time of the public one."""
    guards: Any = torch._C._dynamo.guards
    make, strides = guards._empty_strided_cuda, torch.empty(size, device="meta").stride()
    return partial(make, tuple(size), strides, dtype)  # it takes no torch.Size


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells whether other tensors are like these in all but their values.

    It compares types, dtypes, devices, sizes, strides, `requires_grad` and modes that dispatch. It keeps
    no tensor; none may be given twice.
    """
    guards: Any = torch._C._dynamo.guards
    made = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return made.check  # type: ignore[no-any-return]


def is_current_device(device: torch.device) -> bool:
    """Whether a CUDA device is the current one; the public function first asks whether CUDA is initialised."""
    return torch._C._cuda_getDevice() == device.index


def operations_are_plain() -> bool:
    """Whether an operation does what it says and no more: no autocast, torch.func, tangents or mode that dispatches."""
    c = torch._C
    special = c._is_any_autocast_enabled() or c._are_functorch_transforms_active() or c._len_torch_dispatch_stack()
    return not special and forward_ad._current_level < 0


def call_modes(by_torch: bool) -> tuple[object, ...] | None:
    """The modes of torch that decide about a call, or None in forward mode.

    They are whether a graph is recorded and whether the bits must be the same every time. `by_torch` adds the switches
    by which torch chooses a kernel of its attention function.
    """
    if forward_ad._current_level >= 0:
        return None
    c = torch._C
    if not by_torch:
        return torch.is_grad_enabled(), c._get_deterministic_algorithms()
    return (
        torch.is_grad_enabled(),
        c._get_deterministic_algorithms(),
        c._get_flash_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(),
        c._get_cudnn_sdp_enabled(),
        c._get_overrideable_sdp_enabled(),
        *c._get_sdp_priority_order(),
    )


def in_backward() -> bool:
    """Whether the autograd engine is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def shared_with_backward(name: str, make: Callable[[], T]) -> T:
    """An object of this thread, made on first use; autograd's own threads get it for this thread's backward passes."""
    found: T
    try:
        found = torch._C._get_obj_in_tls(name)
    except RuntimeError:  # asking first would take longer
        found = make()
        torch._C._stash_obj_in_tls(name, found)
        if sys.getrefcount(found) < _REFERENCES + 1:  # torch 2.11 takes a reference that it was not given
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))
    return found


def forward_mode_is_active() -> bool:
    """Whether tangents may be attached to tensors: inside torch.func.jvp or a dual level."""
    return forward_ad._current_level >= 0


def transforms_are_active() -> bool:
    """Whether a transform of torch.func (grad, jvp, vmap, …) is at work."""
    return torch._C._are_functorch_transforms_active()


def innermost_transform_is_jvp() -> bool:
    """Whether jvp is the innermost transform of torch.func, or none is at work."""
    innermost = _functorch.peek_interpreter_stack()
    return innermost is None or innermost.key() == _functorch.TransformType.Jvp


def outside_transforms() -> AbstractContextManager[object]:
    """A context outside of torch.func's transforms, for tensors that none of them has touched."""
    return torch._C._DisableFuncTorch()


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor is a wrapper of a torch.func transform."""
    return _functorch.is_functorch_wrapped_tensor(x)


def unwrap(x: Tensor) -> Tensor:
    """The plain tensor under the wrappers of torch.func."""
    while is_wrapped(x):
        x = _functorch.get_unwrapped(x)
    return x


def unwrap_largest(x: Tensor) -> Tensor:
    """The plain tensor under the wrappers, and its largest value over each dimension that vmap added."""
    while is_wrapped(x):
        dim = _functorch.maybe_get_bdim(x) if _functorch.is_batchedtensor(x) else -1
        x = _functorch.get_unwrapped(x)
        x = x.amax(dim) if dim >= 0 else x
    return x


def samples(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The plain tensors of each sample that vmap runs over, at all levels together; one tuple if it runs over none."""
    plain = [_unwrap_to_front(x) for x in tensors]
    sizes = {level: size for _, batches in plain for level, size in batches.items()}
    levels = sorted(sizes)
    wide = []
    for x, batches in plain:
        own = x.shape[len(batches) :]
        x = x.reshape(*(batches.get(level, 1) for level in levels), *own)
        wide.append(x.expand(*(sizes[level] for level in levels), *own).reshape(-1, *own))
    return list(zip(*wide, strict=True))


def _unwrap_to_front(x: Tensor) -> tuple[Tensor, dict[int, int]]:
    """The plain tensor, the dimensions of vmap in front, and their sizes by level, the outermost level first."""
    if not is_wrapped(x):
        return x, {}
    level, dim = _functorch.maybe_get_level(x), _functorch.maybe_get_bdim(x) if _functorch.is_batchedtensor(x) else -1
    plain, batches = _unwrap_to_front(_functorch.get_unwrapped(x))
    if dim < 0:
        return plain, batches
    at = len(batches)
    plain = plain.movedim(dim + at, at)
    return plain, {**batches, level: plain.shape[at]}


def is_batched(x: Tensor) -> bool:
    """Whether vmap runs over a tensor, at any level."""
    while is_wrapped(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def is_legacy_batched(x: Tensor) -> bool:
    """Whether `torch.autograd.grad(…, is_grads_batched=True)` batched a tensor: it uses a vmap of its own."""
    return _functorch.is_legacy_batchedtensor(x)


def _legacy_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def legacy_unbatch(x: Tensor) -> Tensor:
    """Such a tensor with its batch as dimension 0."""
    return torch._remove_batch_dim(x, _legacy_level(), 1, 0)


def legacy_batch(x: Tensor, dim: int) -> Tensor:
    """The inverse: hide dimension `dim` as the batch."""
    return torch._add_batch_dim(x, dim, _legacy_level())


def tensor_indices_in_vmap() -> AbstractContextManager[object]:
    """A context in which vmap can index by tensors that it maps over, as mask functions of Hugging Face do."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    context: AbstractContextManager[object] = TransformGetItemToIndex()
    return context


def may_need_grad(*tensors: Tensor | None) -> bool:
    """Whether a derivative may be asked for, in any mode, or a transform of torch.func is at work."""
    if forward_mode_is_active() or transforms_are_active():
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class CausalSizes(NamedTuple):
    """What a `CausalBias` of torch says: for how many rows and keys it is, and which ends it aligns."""

    rows: int
    keys: int
    aligns_ends: bool  # the last row with the last key; otherwise the first with the first


def causal_bias(x: Tensor) -> CausalSizes | None:
    """Read torch's `CausalBias`, a prototype whose storage holds nothing; None for a part of one, or another tensor."""
    module = sys.modules.get("torch.nn.attention.bias")  # while this is not imported, there is no such tensor
    if module is None or not isinstance(x, module.CausalBias) or not hasattr(x, "variant"):
        return None
    return CausalSizes(x.seq_len_q, x.seq_len_kv, x.variant == module.CausalVariant.LOWER_RIGHT)


_TRANSPARENT = {
    "torch._subclasses.fake_tensor": "FakeTensor",
    "torch._subclasses.functional_tensor": "FunctionalTensor",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
}


def is_readable(x: Tensor) -> bool:
    """Whether operations on a tensor compute with its values: a subclass may give them another meaning."""
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter:
        return True
    plain, own = (getattr(c.__torch_function__, "__func__", None) for c in (Tensor, kind))
    if own is plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return True
    known = (getattr(sys.modules.get(module), name, None) for module, name in _TRANSPARENT.items())
    return any(found is not None and isinstance(x, found) for found in known)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor was changed in place; -1 for tensors of inference mode, which are not counted."""
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:  # asking first would take longer
        return [-1 if x.is_inference() else x._version for x in tensors]


def cached_signature(function: type[F]) -> type[F]:
    """Store the signature of an autograd function's forward: torch inspects it at every call."""
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def call_function(function: Any, *args: Any) -> Any:
    """Apply an autograd function; torch leaves `apply` without a type."""
    return function.apply(*args)


def fused_sdpa_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, grouped: bool
) -> int:
    """The kernel that torch's attention would choose, by its own rules and switches; 0 is the matrix path."""
    try:
        return int(torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped))
    except RuntimeError:  # every kernel is switched off
        return 0


def cpu_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and lse of torch's CPU kernel; the public function returns the output alone."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = op(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return output, lse


def cpu_flash_attention_backward(
    grad: Tensor, saved: tuple[Tensor, ...], mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value by torch's CPU kernel; `saved` is (query, key, value, output, lse)."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = op(grad, *saved, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


def node_in_backward() -> Any:
    """The node of the graph whose backward, or whose hook, runs in this thread."""
    return torch._C._current_autograd_node()


def saved_tensors_are_packed() -> bool:
    """Whether hooks pack the tensors that are saved for a backward pass, as those of activation checkpointing do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def cpu_multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware; torch has no public question for it."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
