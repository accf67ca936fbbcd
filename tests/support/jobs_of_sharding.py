"""Jobs about sharding: parts, groups, bytes sent, DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import regard
from jobs_of_errors import error_of
from jobs_of_values import far_from
from regard import distributed as d


def parts(layout: str) -> dict[str, bool]:
    """`shard`, `gather` and `positions`, there and back."""
    count = dist.get_world_size()
    found = {}
    for length in (0, 1, count, 5 * count - 1, 8 * count):
        x = torch.randn(3, length, 2, dtype=torch.float64)
        mine = d.shard(x, layout=layout).clone().requires_grad_()
        positions = d.positions(length, layout=layout)
        found[f"shard {length}"] = torch.equal(mine, x[:, positions])
        whole = d.gather(mine, layout=layout)
        found[f"gather {length}"] = torch.equal(whole, x)
        (whole.sin() * (dist.get_rank() + 1)).sum().backward()
        found[f"gradient {length}"] = torch.allclose(mine.grad, mine.cos() * sum(range(1, count + 1)))
        found[f"dim {length}"] = torch.equal(d.gather(d.shard(x.mT, layout=layout, dim=2), layout=layout, dim=2), x.mT)
    return found


def within(layout: str) -> dict[str, Any]:
    """Inside `over`, plain calls take parts of a sequence."""
    tensors = [torch.randn(2, 4, 13, 8, dtype=torch.float64) for _ in range(3)]
    whole = regard.observe(*tensors, mask=regard.causal())
    positions = d.positions(13, layout=layout)
    parts = [x[:, :, positions] for x in tensors]
    with d.over(layout=layout):
        output = regard.attention(*parts, mask=regard.causal())
        seen = regard.observe(*parts, mask=regard.causal())
        inside = regard.core.contexts.token_positions(len(positions), output.device)
        refused = error_of(lambda: regard.scaled_dot_product_attention(*parts))
    after = regard.core.contexts.token_positions(3, output.device)
    return {
        "output": torch.allclose(output, whole.output[:, :, positions]),
        "entropy": torch.allclose(seen.entropy, whole.entropy[:, :, positions]),
        "positions": torch.equal(inside, positions),
        "refused": "over" in refused,
        "after": after is None and torch.equal(regard.attention(*tensors), regard.attention(*tensors)),
    }


def groups() -> dict[str, bool]:
    """Two groups of two ranks, each with its own sequence; and one rank alone."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(rank % 2)
    x = torch.randn(2, 2, 9, 4)
    mine = d.shard(x, pairs[rank % 2])
    output = d.attention(mine, mine, mine, mask=regard.causal(), group=pairs[rank % 2])
    found = {
        "pairs": torch.allclose(
            d.gather(output, pairs[rank % 2]), regard.attention(x, x, x, mask=regard.causal()), atol=1e-6
        )
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    torch.manual_seed(rank // 2)
    x = torch.randn(2, 2, 9, 4)
    mine = d.shard(x, mesh["sequence"])
    output = d.attention(mine, mine, mine, mask=regard.causal(), mesh=mesh["sequence"])
    true = d.shard(regard.attention(x, x, x, mask=regard.causal()), mesh["sequence"])
    found["mesh"] = torch.allclose(output, true, atol=1e-6)
    alone = [dist.new_group([r]) for r in range(4)][rank]
    found["alone"] = torch.allclose(d.attention(x, x, x, group=alone), regard.attention(x, x, x), atol=1e-6)
    outside = error_of(lambda: d.attention(x, x, x, group=pairs[1 - rank % 2]))
    found["outside"] = "not in the group" in outside
    return found


@contextmanager
def count_bytes() -> Iterator[list[int]]:
    """Count the bytes that this rank sends to others through torch.distributed."""
    sent = [0]
    send_receive, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def counted_send_receive(operations: list[Any]) -> Any:
        sent[0] += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return send_receive(operations)

    def counted_all_to_all(into: Tensor, x: Tensor, receives: list[int], sends: list[int], group: Any = None) -> Any:
        sent[0] += (sum(sends) - sends[dist.get_rank(group)]) * x.element_size() * (x[0].numel() if x.dim() > 1 else 1)
        return all_to_all(into, x, receives, sends, group=group)

    dist.batch_isend_irecv, dist.all_to_all_single = counted_send_receive, counted_all_to_all
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = send_receive, all_to_all


def sends(
    length: int, keys: int, mask: Any, layout: str, strategy: str, dtype: torch.dtype
) -> dict[str, tuple[int, int]]:
    """The bytes sent, and those of the formula, forward and backward."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = {"batch": 2, "heads": 2 * ranks, "kv_heads": ranks, "dim": 4, "value_dim": 6, "dtype": dtype, "mask": mask}
    shapes = (2, 2 * ranks, length, 4), (2, ranks, keys, 4), (2, ranks, keys, 6)
    parts = [d.shard(torch.randn(shape).to(dtype), layout=layout).clone().requires_grad_() for shape in shapes]
    how = {"layout": layout, "strategy": strategy}
    with count_bytes() as forward:
        output = d.attention(*parts, mask=mask, **how)
    with count_bytes() as backward:
        output.sum().backward()
    with count_bytes() as observed:
        d.observe(*parts, mask=mask, **how)
    return {
        "forward": (forward[0], d.traffic(length, ranks, keys=keys, **sizes, **how)[rank]),
        "backward": (backward[0], d.traffic(length, ranks, keys=keys, **sizes, **how, backward=True)[rank]),
        "observed": (observed[0], d.traffic(length, ranks, keys=keys, **sizes, **how, observed=True)[rank]),
    }


def dtensors(kind: str, names: list[str]) -> dict[str, float]:
    """DTensors over a mesh of all ranks: results, statistics and gradients against plain tensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    count = dist.get_world_size()
    meshes = {"one": ((count,), [Shard(2)]), "replicated": ((count,), [Replicate()])}
    pair = {"batch": Shard(0), "heads": Shard(1), "rows": Shard(2), "replicated": Replicate()}
    sizes, placements = meshes.get(kind) or ((2, count // 2), [pair[word] for word in kind.split()])
    mesh = init_device_mesh("cpu", sizes)
    far: dict[str, float] = {}
    b, h = 2, 4
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"mask": regard.causal()},
        "padding": {"mask": regard.padding([13, 6]) & regard.causal()},
        "dense": {"mask": torch.rand(b, h, 13, 13) > 0.3},
        "predicate": {"mask": regard.predicate(lambda b, h, i, j: (i + j + b + h) % 3 > 0)},
        "bias": {"bias": torch.randn(h, 13, 13, dtype=torch.float64)},
        "alibi": {"bias": regard.biases.alibi(torch.rand(h, dtype=torch.float64)), "softcap": 2.0},
        "relative": {"bias": regard.biases.relative(torch.rand(9, dtype=torch.float64))},
        "sink": {"sink": torch.randn(h, dtype=torch.float64), "scale": torch.rand(h, dtype=torch.float64)},
        "dropout": {"dropout": 0.3, "backend": "chunked"},
    }
    for name, given in ((name, cases[name]) for name in names or cases):
        torch.manual_seed(3)
        tensors = [torch.randn(b, heads, 13, 4, dtype=torch.float64, requires_grad=True) for heads in (h, 2, 2)]
        torch.manual_seed(3)
        whole = regard.observe(*tensors, **given)
        sharded = [distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in tensors]
        torch.manual_seed(3 + dist.get_rank())
        seen = regard.observe(*sharded, **given)
        for member in ("output", "lse", "entropy", "max_logit", "visible", "gradient_health", "received"):
            found = getattr(seen, member)
            far[f"{name} {member}"] = far_from(found.full_tensor(), getattr(whole, member))
        far[f"{name} map"] = far_from(seen.map(3, 4).full_tensor(), whole.map(3, 4))
        far[f"{name} top"] = far_from(seen.top(2)[1].full_tensor(), whole.top(2)[1])
        slope = torch.linspace(-1, 1, whole.output.numel(), dtype=torch.float64).view(whole.output.shape)
        sharded_slope = distribute_tensor(slope, mesh, placements)
        torch.manual_seed(3 + dist.get_rank())
        output = regard.attention(*sharded, **given)
        far[f"{name} placements"] = 0.0 if list(output.placements) == placements else 1.0
        (output * sharded_slope).sum().full_tensor().backward()
        true = torch.autograd.grad((whole.output * slope).sum(), tensors)
        for what, x, y in zip(("query", "key", "value"), sharded, true, strict=True):
            far[f"{name} gradient of {what}"] = far_from(x.grad.full_tensor(), y)
    torch.manual_seed(4)
    shared = torch.rand(h, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(h, 1, 13, dtype=torch.float64, requires_grad=True)
    x = torch.randn(b, h, 13, 4, dtype=torch.float64)
    true = torch.autograd.grad(regard.attention(x, x, x, sink=shared, bias=bias).square().sum(), (shared, bias))
    replicated = [
        distribute_tensor(t.detach(), mesh, [Replicate()] * len(sizes)).requires_grad_() for t in (shared, bias)
    ]
    sharded_x = distribute_tensor(x, mesh, placements)
    output = regard.attention(sharded_x, sharded_x, sharded_x, sink=replicated[0], bias=replicated[1])
    far["is one"] = 0.0 if isinstance(output, DTensor) else 1.0
    output.square().sum().full_tensor().backward()
    for what, t, y in zip(("sink", "bias"), replicated, true, strict=True):
        far[f"gradient of {what}"] = far_from(t.grad.full_tensor(), y)
    return far


def odd_dtensors() -> dict[str, str]:
    """The errors for DTensors with placements that attention cannot use."""
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, 4, 8, 4)
    rows, heads, dim = (distribute_tensor(x, mesh, [Shard(at)]) for at in (2, 1, 3))
    one = distribute_tensor(x[:, :1], mesh, [Shard(1)])
    part = DTensor.from_local(x, mesh, [Partial()])
    return {
        "mixed": error_of(lambda: regard.attention(rows, x, rows)),
        "different placements": error_of(lambda: regard.attention(rows, heads, heads)),
        "dim": error_of(lambda: regard.attention(dim, dim, dim)),
        "partial": error_of(lambda: regard.observe(part, part, part)),
        "heads": error_of(lambda: regard.attention(heads, one, one)),
    }
