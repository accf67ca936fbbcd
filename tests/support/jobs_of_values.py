"""Jobs that compare a rank's results with those of one process that has the whole sequence."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard
from contract_cases import BY_NAME, as_double, leaves, zero_if_none
from mask_cases import CASES as MASKS
from regard import distributed as d
from regard.errors import ChangedError

ROWS = ("output", "lse", "entropy", "max_logit", "visible", "perplexity", "gradient_health", "distance")


def _mine(x: Any, positions: Tensor) -> Any:
    """This rank's rows, and all keys, of a mask or bias that is a tensor."""
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-2] == 1:
        return x
    return x.index_select(-2, positions)


def _loss(seen: Any, positions: Tensor | None, shape: Any) -> Tensor:
    """A loss of all differentiable results, in which a row's weight depends on its position in the whole sequence."""
    w = torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).view(shape)
    w = w if positions is None else w.index_select(-2, positions)
    lse = torch.where(seen.lse > -torch.inf, seen.lse, 0.0)
    return (seen.output.double() * w).sum() + lse.double().sin().sum() + seen.entropy.double().square().sum()


def far_from(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the size of the true value; infinities must agree."""
    if tuple(a.shape) != tuple(b.shape):
        return float("inf")
    a, b = a.detach().double(), b.detach().double()
    gap = torch.where(a == b, 0.0, (a - b).abs())
    size = max(1.0, float(b.nan_to_num(0, 0, 0).abs().max())) if b.numel() else 1.0
    return float(gap.nan_to_num(torch.inf).max()) / size if gap.numel() else 0.0


def compared(
    tensors: list[Tensor], given: dict[str, Any], how: dict[str, Any], passes: bool = True
) -> dict[str, float]:
    """The error of every result and gradient of this rank, against one process."""
    layout = how.get("layout", "contiguous")
    whole = regard.observe(*tensors, **given, backend="reference")
    shared = leaves(tensors, given)
    true = torch.autograd.grad(_loss(whole, None, whole.output.shape), shared, allow_unused=True)
    rows, keys = (d.positions(x.shape[-2], layout=layout) for x in tensors[:2])
    parts = [
        x.detach().index_select(-2, at).requires_grad_() for x, at in zip(tensors, (rows, keys, keys), strict=True)
    ]
    mine = {k: _mine(v, rows) if k in ("mask", "bias") else v for k, v in given.items()}
    seen = d.observe(*parts, **mine, **how)
    found = torch.autograd.grad(_loss(seen, rows, whole.output.shape), [*parts, *shared[3:]], allow_unused=True)
    far = {
        name: far_from(getattr(seen, name), _rows(getattr(whole, name), rows, name))
        for name in ROWS[: 8 if passes else 4]
    }
    for name, at, a, b in zip(("query", "key", "value"), (rows, keys, keys), found, true, strict=False):
        far[f"gradient of {name}"] = far_from(zero_if_none(a), zero_if_none(b if b is None else b.index_select(-2, at)))
    for x, a, b in zip(shared[3:], found[3:], true[3:], strict=True):
        if x is given.get("bias"):  # each rank has its own rows
            a = zero_if_none(a).expand(x.shape).clone()
            dist.all_reduce(a)
        far[f"gradient of {tuple(x.shape)}"] = far_from(zero_if_none(a), zero_if_none(b))
    if passes:
        far |= _late(seen, whole, rows, keys)
    return far


def _rows(x: Tensor, positions: Tensor, name: str) -> Tensor:
    return x.index_select(-2 if name == "output" else -1, positions)


def _late(seen: Any, whole: Any, rows: Tensor, keys: Tensor) -> dict[str, float]:
    far = {"received": far_from(seen.received, whole.received.index_select(-1, keys))}
    n, m = whole.shape[-2:]
    if n and m:
        size = min(3, n), min(4, m)
        far["map"] = far_from(seen.map(*size), whole.map(*size))
    values, positions = seen.top(2)
    true_values, true_positions = (x.index_select(-2, rows) for x in whole.top(2))
    far["top"] = far_from(values, true_values)
    far["top's positions"] = float((positions != true_positions).sum())
    return far


def contract(names: list[str], how: dict[str, Any], passes: list[str]) -> dict[str, dict[str, float]]:
    """Cases of the contract, some of them with the later passes of an observation."""
    return {name: compared(*BY_NAME[name].inputs(torch.float64), how, name in passes) for name in names}


def on_device(names: list[str], device: str, dtype: torch.dtype, how: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Cases of the contract with tensors on a device, against one process in float64 on the CPU."""
    found = {}
    for name in names:
        tensors, given = BY_NAME[name].inputs(dtype)
        found[name] = _on_device(tensors, given, torch.device(device), how)
    return found


def _on_device(
    tensors: list[Tensor], given: dict[str, Any], device: torch.device, how: dict[str, Any]
) -> dict[str, float]:
    doubles, true_given = as_double(tensors, given)
    whole = regard.observe(*doubles, **true_given, backend="reference")
    slope = torch.linspace(-1, 1, whole.output.numel(), dtype=torch.float64).view(whole.output.shape)
    true = torch.autograd.grad((whole.output * slope).sum() + whole.entropy.sum(), doubles)
    layout = how.get("layout", "contiguous")
    rows, keys = (d.positions(x.shape[-2], layout=layout) for x in tensors[:2])
    parts = [
        x.detach().index_select(-2, at).to(device).requires_grad_()
        for x, at in zip(tensors, (rows, keys, keys), strict=True)
    ]
    mine = {k: _moved(_mine(v, rows) if k in ("mask", "bias") else v, device) for k, v in given.items()}
    seen = d.observe(*parts, **mine, **how)
    loss = (seen.output.double() * slope.index_select(-2, rows).to(device)).sum() + seen.entropy.double().sum()
    grads = torch.autograd.grad(loss, parts)
    far = {name: far_from(getattr(seen, name).cpu(), _rows(getattr(whole, name), rows, name)) for name in ROWS[:4]}
    for name, at, a, b in zip(("query", "key", "value"), (rows, keys, keys), grads, true, strict=True):
        far[f"gradient of {name}"] = far_from(a.cpu(), b.index_select(-2, at))
    far["received"] = far_from(seen.received.cpu(), whole.received.index_select(-1, keys))
    far["map"] = far_from(seen.map(3, 4).cpu(), whole.map(3, 4))
    return far


def _moved(x: Any, device: torch.device) -> Any:
    if isinstance(x, torch.nn.Module | regard.biases.Bias | Tensor):
        return x.detach().to(device) if isinstance(x, Tensor) else x.to(device)
    return x


def masks(layout: str, strategy: str, shortest: int) -> dict[str, dict[str, float]]:
    """Every mask, with as many batch items and heads as it distinguishes."""
    found = {}
    for at, (mask, n, m) in enumerate(MASKS):
        items, heads = mask.lead
        items = 2 if items == 1 else items
        heads = dist.get_world_size() if strategy == "heads" else heads
        if mask.lead[1] not in (1, heads) or 0 in mask.lead or min(n, m) < shortest:
            continue
        torch.manual_seed(at)
        shapes = (items, heads, n, 4), (items, heads if at % 2 else 1, m, 4), (items, heads if at % 2 else 1, m, 3)
        if strategy == "heads":
            shapes = tuple((items, heads, *shape[2:]) for shape in shapes)
        tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        how = {"layout": layout, "strategy": strategy}
        found[f"{mask!r} {n} {m}"] = compared(tensors, {"mask": mask}, how, passes=False)
    return found


def sizes(rows: list[int], keys: list[int], mask: str) -> dict[str, float]:
    """Contiguous shards of any size."""
    torch.manual_seed(0)
    rank, n, m = dist.get_rank(), sum(rows), sum(keys)
    tensors = [torch.randn(2, 2, size, 4, dtype=torch.float64, requires_grad=True) for size in (n, m, m)]
    given = {"mask": getattr(regard, mask)()}
    whole = regard.observe(*tensors, **given)
    starts = sum(rows[:rank]), sum(keys[:rank]), sum(keys[:rank])
    counts = rows[rank], keys[rank], keys[rank]
    parts = [
        x.detach().narrow(-2, start, count).requires_grad_()
        for x, start, count in zip(tensors, starts, counts, strict=True)
    ]
    seen = d.observe(*parts, **given)
    positions = torch.arange(starts[0], starts[0] + counts[0])
    _loss(whole, None, whole.output.shape).backward()
    _loss(seen, positions, whole.output.shape).backward()
    far = {"output": far_from(seen.output, whole.output[..., positions, :])}
    for name, part, x, start in zip(("query", "key", "value"), parts, tensors, starts, strict=True):
        far[name] = far_from(zero_if_none(part.grad), x.grad.narrow(-2, start, part.shape[-2]))
    far["received"] = far_from(seen.received, whole.received.narrow(-1, starts[1], counts[1]))
    return far


def shapes(layout: str) -> dict[str, float]:
    """Queries without heads, without a batch, with many leading dimensions, and keys that broadcast."""
    far = {}
    kinds = {
        "(N, D)": ((9, 4), (11, 4), (11, 3)),
        "(B, N, D)": ((2, 9, 4), (2, 11, 4), (2, 11, 3)),
        "(A, B, H, N, D)": ((2, 3, 4, 9, 4), (2, 3, 2, 11, 4), (2, 3, 2, 11, 3)),
        "broadcast": ((3, 4, 9, 4), (1, 2, 11, 4), (1, 2, 11, 3)),
    }
    for name, kind in kinds.items():
        tensors = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in kind]
        for mask in ({}, {"mask": regard.causal()}, {"bias": torch.randn(9, 11, dtype=torch.float64)}):
            found = compared(tensors, mask, {"layout": layout})
            far |= {f"{name} {list(mask)} {what}": value for what, value in found.items()}
    tensors = [torch.randn(2, 2, 9, dim, dtype=torch.float64).requires_grad_() for dim in (4, 6, 3)]
    given = {"score": regard.scores.Bilinear(4, 6).double(), "bias": torch.randn(9, 9, dtype=torch.float64)}
    return far | {f"two dims {what}": value for what, value in compared(tensors, given, {"layout": layout}).items()}


def precision(dtype: torch.dtype, layout: str) -> dict[str, tuple[float, float]]:
    """The error of each output in a narrow dtype, and that of one process in it."""
    far = {}
    for name in ("causal", "all together", "Cosine", "Additive", "relative"):
        tensors, given = BY_NAME[name].inputs(dtype)
        true = regard.attention(*contract_double(tensors), **contract_double(given), backend="reference")
        plain = regard.attention(*tensors, **given, backend="chunked")
        rows, keys = (d.positions(x.shape[-2], layout=layout) for x in tensors[:2])
        parts = [x.detach().index_select(-2, at) for x, at in zip(tensors, (rows, keys, keys), strict=True)]
        mine = {k: _mine(v, rows) if k in ("mask", "bias") else v for k, v in given.items()}
        output = d.attention(*parts, **mine, layout=layout)
        true, plain = true.index_select(-2, rows), plain.index_select(-2, rows)
        far[name] = (far_from(output, true), far_from(plain, true)) if output.dtype == dtype else (float("inf"), 0.0)
    return far


def contract_double(x: Any) -> Any:
    return as_double(x, {})[0] if isinstance(x, list) else as_double([], x)[1]


def dropped(layout: str, strategy: str) -> dict[str, float]:
    """Dropout equals that of one process with the seed of rank 0; the other ranks have other seeds."""
    far = {}
    for name in ("causal", "bias", "Additive", "sink"):
        tensors, given = BY_NAME[name].inputs(torch.float64)
        torch.manual_seed(5)
        whole = regard.attention(*tensors, **given, dropout=0.4, backend="chunked")
        true = torch.autograd.grad(whole.sin().sum(), tensors)
        rows, keys = (d.positions(x.shape[-2], layout=layout) for x in tensors[:2])
        parts = [
            x.detach().index_select(-2, at).requires_grad_() for x, at in zip(tensors, (rows, keys, keys), strict=True)
        ]
        mine = {k: _mine(v, rows) if k in ("mask", "bias") else v for k, v in given.items()}
        torch.manual_seed(5 + dist.get_rank())
        output = d.attention(*parts, **mine, dropout=0.4, layout=layout, strategy=strategy)
        grads = torch.autograd.grad(output.sin().sum(), parts)
        far[name] = far_from(output, whole.index_select(-2, rows))
        for what, at, a, b in zip(("query", "key", "value"), (rows, keys, keys), grads, true, strict=True):
            far[f"{name}: {what}"] = far_from(a, b.index_select(-2, at))
    return far


def repeats(layout: str, strategy: str, device: str = "cpu") -> int:
    """How many of four runs differ in any bit, while ranks are delayed at random."""
    tensors, given = BY_NAME["all together"].inputs(torch.float32)
    del given["bias"]
    given = {k: _moved(v, torch.device(device)) for k, v in given.items()}
    given |= {k: given[k].requires_grad_() for k in ("scale", "sink")}
    rows, keys = (d.positions(x.shape[-2], layout=layout) for x in tensors[:2])
    first, different = None, 0
    for _ in range(4):
        parts = [
            x.detach().index_select(-2, at).to(device).requires_grad_()
            for x, at in zip(tensors, (rows, keys, keys), strict=True)
        ]
        time.sleep(random.random() / 50)
        seen = d.observe(*parts, **given, layout=layout, strategy=strategy)
        grads = torch.autograd.grad(
            seen.output.square().sum() + seen.entropy.sum(), [*parts, given["scale"], given["sink"]]
        )
        bits = [
            t.detach().clone() for t in (seen.output, seen.lse, seen.entropy, *grads, seen.received, seen.map(3, 3))
        ]
        first = first or bits
        different += not all(torch.equal(a, b) for a, b in zip(first, bits, strict=True))
    return different


def unseen(tensor: bool) -> dict[str, bool]:
    """Keys and values that no row of any rank may see, and queries that see nothing, are NaN or inf."""
    n = 12
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    allowed[:, [2, 7]] = False
    allowed[5] = False
    tensors = [torch.randn(1, 2, n, 4, dtype=torch.float64) for _ in range(3)]
    true = [x.clone().requires_grad_() for x in tensors]
    regard.attention(*true, mask=allowed, score=regard.scores.Cosine()).sum().backward()
    tensors[0][..., 5, :] = torch.nan
    tensors[1][..., 2, :] = torch.inf
    tensors[2][..., 7, :] = torch.nan
    positions = d.positions(n)
    parts = [x.index_select(-2, positions).requires_grad_() for x in tensors]
    mask = allowed[positions] if tensor else regard.dense(allowed)
    output = d.attention(*parts, mask=mask, score=regard.scores.Cosine())
    output.sum().backward()
    same = [torch.allclose(x.grad, y.grad.index_select(-2, positions)) for x, y in zip(parts, true, strict=True)]
    return {"output": bool(output.isfinite().all()), "gradients": all(same)}


def tensor_masks(strategy: str) -> dict[str, bool]:
    """Masks given as integers and as torch's CausalBias, and a mask that changes before the backward pass."""
    n, allowed = 12, torch.ones(12, 12, dtype=torch.bool).tril()
    tensors = [torch.randn(1, 2, n, 4, dtype=torch.float64) for _ in range(3)]
    true = [x.clone().requires_grad_() for x in tensors]
    whole = regard.attention(*true, mask=allowed)
    whole.sin().sum().backward()
    positions = d.positions(n)
    found = {}
    for name, given in {
        "integers": {"mask": 2 * allowed[positions].to(torch.uint8)},
        "CausalBias": {"mask": causal_upper_left(n, n)},
        "CausalBias as a bias": {"bias": causal_lower_right(n, n), "mask": regard.window(n)},
    }.items():
        parts = [x.index_select(-2, positions).requires_grad_() for x in tensors]
        output = d.attention(*parts, **given, strategy=strategy)
        output.sin().sum().backward()
        same = [torch.allclose(x.grad, y.grad.index_select(-2, positions)) for x, y in zip(parts, true, strict=True)]
        found[name] = torch.allclose(output, whole.index_select(-2, positions)) and all(same)
    ids = torch.arange(n) // 4
    expected = torch.autograd.grad(regard.attention(*true, mask=regard.documents(ids.clone())).sin().sum(), true)
    output = d.attention(*parts, mask=regard.documents(ids), strategy=strategy)
    ids.zero_()
    try:
        moved = torch.autograd.grad(output.sin().sum(), parts)
        found["changed"] = all(
            torch.allclose(x, y.index_select(-2, positions)) for x, y in zip(moved, expected, strict=True)
        )
    except ChangedError:
        found["changed"] = True
    return found


def steps(layout: str) -> dict[str, Any]:
    """The order of events in a ring, one letter each: post a transfer, compute a block, wait for a transfer."""
    from regard.chunked.engine import ChunkedEngine
    from regard.distributed.ranks import Transfer

    events: list[str] = []
    post, attend, wait = dist.batch_isend_irecv, ChunkedEngine.forward, Transfer.wait

    def record(letter: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(letter)
            return real(*args)

        return call

    x = torch.randn(1, 1, 24, 4)
    mine = d.shard(x, layout=layout)
    dist.batch_isend_irecv, ChunkedEngine.forward, Transfer.wait = (
        record("p", post),
        record("c", attend),
        record("w", wait),
    )
    try:
        d.attention(mine, mine, mine, layout=layout, strategy="ring")
        full = "".join(events)
        events.clear()
        d.attention(mine, mine, mine, layout=layout, strategy="ring", mask=regard.causal())
    finally:
        dist.batch_isend_irecv, ChunkedEngine.forward, Transfer.wait = post, attend, wait
    return {"full": full, "causal": events.count("c")}


def unlike(strategy: str) -> dict[str, float]:
    """Each rank's loss uses another result, and one rank asks only for the gradient of its queries."""
    tensors = [torch.randn(2, 4, 12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    whole = regard.observe(*tensors, mask=regard.causal())
    rank, count = dist.get_rank(), dist.get_world_size()
    names = ("output", "entropy", "lse")
    total = torch.zeros((), dtype=torch.float64)
    for other in range(count):
        positions = torch.arange(12).chunk(count)[other]
        total = total + _rows(getattr(whole, names[other]), positions, names[other]).sin().sum()
    true = torch.autograd.grad(total, tensors)
    parts = [d.shard(x.detach()).clone().requires_grad_() for x in tensors]
    seen = d.observe(*parts, mask=regard.causal(), strategy=strategy)
    wanted = parts[:1] if rank == 1 else parts
    found = torch.autograd.grad(getattr(seen, names[rank]).sin().sum(), wanted)
    return {str(at): far_from(a, d.shard(b)) for at, (a, b) in enumerate(zip(found, true, strict=False))}


def ties(layout: str) -> dict[str, bool]:
    """All weights of a row are equal, so that its top keys are the first that it sees."""
    n = 11
    x = torch.zeros(1, 2, n, 4)
    whole = regard.observe(x, x, x, mask=regard.causal() | regard.prefix(2))
    positions = d.positions(n, layout=layout)
    mine = x[:, :, positions]
    found = d.observe(mine, mine, mine, mask=regard.causal() | regard.prefix(2), layout=layout).top(4)
    true = whole.top(4)
    return {
        "positions": torch.equal(found[1], true[1][:, :, positions]),
        "weights": torch.equal(found[0], true[0][:, :, positions]),
    }


def around() -> dict[str, bool]:
    """What users wrap around a call: autocast, checkpointing, inference mode, torch.compile."""
    tensors = [torch.randn(2, 4, 13, 8) for _ in range(3)]
    positions = d.positions(13)
    parts = [x[:, :, positions].requires_grad_() for x in tensors]

    def call(*given: Tensor) -> Tensor:
        return d.attention(*given, mask=regard.causal(), dropout=0.3)

    found = {}
    with torch.autocast("cpu", torch.bfloat16):
        output = d.attention(*parts, mask=regard.causal())
        whole = regard.attention(*tensors, mask=regard.causal())
    found["autocast"] = output.dtype == torch.bfloat16 and torch.allclose(output, whole[:, :, positions], atol=0.02)
    torch.manual_seed(1)
    plain = torch.autograd.grad(call(*parts).sin().sum(), parts)
    torch.manual_seed(1)
    again = torch.utils.checkpoint.checkpoint(call, *parts, use_reentrant=False)
    found["checkpoint"] = all(map(torch.equal, plain, torch.autograd.grad(again.sin().sum(), parts)))
    with torch.inference_mode():
        seen = d.observe(*(x[:, :, positions] for x in tensors), mask=regard.causal())
        found["inference"] = torch.allclose(seen.output, d.attention(*parts, mask=regard.causal()), atol=1e-5)
        found["inference, later"] = seen.received.shape == seen.lse.shape
    compiled = torch.compile(lambda *given: d.attention(*given, mask=regard.causal()) * 2, backend="eager")
    found["compile"] = torch.equal(compiled(*parts), d.attention(*parts, mask=regard.causal()) * 2)
    return found
