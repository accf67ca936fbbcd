"""Monitor: which steps are observed, what is logged of them and where, and that nothing is left behind."""

from __future__ import annotations

import copy
import logging
import math
import os
import subprocess
import sys
import types
from collections import UserList
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.errors import ArgumentError, DtypeError, MissingPackageError
from regard.models.callbacks import lightning_callback, trainer_callback
from regard.models.graph_interceptor import GraphInterceptor
from regard.models.loggers import reporter
from regard.models.monitor import Monitor
from regard.models.qk_clip import qk_clip_
from regard.observation import Observation

E, H, N = 16, 2, 6


class Attention(nn.Module):
    """Self-attention with torch's function."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, E) for _ in range(3))
        self.num_heads, self.broken = H, broken

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.broken:
            raise RuntimeError("broken")
        return x + y.transpose(1, 2).flatten(-2)


class Model(nn.Module):
    """Two blocks, checkpointed if asked, under dotted names."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": Attention()}) for _ in range(2))
        self.recompute = recompute
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block["attn"], x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block["attn"](x)
        return x


class Notes(UserList[tuple[str, float, int]]):
    """A log: a function of (name, value, step)."""

    def __call__(self, name: str, value: float, step: int) -> None:
        self.append((name, value, step))

    @property
    def steps(self) -> list[int]:
        return sorted({step for *_, step in self})


NAMES = [
    f"attention/blocks.{block}.attn/head{head}/{what}"
    for block in range(2)
    for head in range(H)
    for what in ("entropy", "max_logit")
]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, N, E, generator=torch.Generator().manual_seed(1))


def statistics(module: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy (batch, heads, rows) and the largest logit per row, from the full matrix."""
    q, k = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    S = (q @ k.mT / math.sqrt(E // H)).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    P = S.softmax(-1)
    return -(P * P.clamp(min=1e-30).log()).sum(-1), S.amax(-1)


def expected(model: Model, *inputs: Tensor) -> dict[str, float]:
    """What a step with these inputs, one call each, must log."""
    scalars, streams = {}, list(inputs)
    with torch.no_grad():
        for index, block in enumerate(model.blocks):
            found = [statistics(block["attn"], x) for x in streams]
            for head in range(H):
                name = f"attention/blocks.{index}.attn/head{head}"
                scalars[f"{name}/entropy"] = float(torch.cat([e[:, head].flatten() for e, _ in found]).mean())
                scalars[f"{name}/max_logit"] = float(torch.cat([m[:, head].flatten() for _, m in found]).max())
            streams = [block["attn"](x) for x in streams]
    return scalars


def untouched(model: nn.Module) -> bool:
    """Whether no hook and no replaced function remains."""
    plain = F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    return plain and not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_every_so_many_calls_in_training_are_logged_with_their_step(x: Tensor) -> None:
    model, notes = Model(), Notes()
    with Monitor(model, every=3, log=notes) as monitor:
        for _ in range(7):
            model(x)
            model.eval()(x)
            model.train()
    assert [name for name, _, step in notes if step == 0] == NAMES
    assert notes.steps == [0, 3, 6]
    wanted = expected(model, x)
    assert {name: value for name, value, step in notes if step == 3} == pytest.approx(wanted, rel=1e-4)
    assert monitor.last == pytest.approx(wanted, rel=1e-4)
    assert untouched(model)


def test_the_output_and_the_gradients_are_those_without_it(x: Tensor) -> None:
    plain, watched = Model(), Model()
    plain(x).square().sum().backward()
    with Monitor(watched, every=1):
        output = watched(x)
        output.square().sum().backward()
    assert torch.equal(output, plain(x))
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_gradient_accumulation_combines_the_calls_of_a_step(x: Tensor) -> None:
    model, notes = Model(), Notes()
    with Monitor(model, every=2, log=notes) as monitor:
        for n in range(5):
            monitor.step(n)
            for part in (x, x * 2, x[:1] * 3):
                model(part)
                monitor.step(n)
            assert notes.steps == list(range(0, n, 2))
    assert notes.steps == [0, 2, 4]
    found = {name: value for name, value, step in notes if step == 4}
    assert found == pytest.approx(expected(model, x, x * 2, x[:1] * 3), rel=1e-4)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_activation_checkpointing_counts_each_call_once(kind: str, x: Tensor) -> None:
    model, notes = Model(kind), Notes()
    x = x.clone().requires_grad_()
    with Monitor(model, every=2, log=notes):
        for _ in range(3):
            model(x).sum().backward()
    assert notes.steps == [0, 2]
    assert len(notes) == 2 * len(NAMES)
    assert {name: value for name, value, _ in notes} == pytest.approx(expected(model, x), rel=1e-4)


def test_a_model_that_is_checkpointed_whole_counts_each_call_once(x: Tensor) -> None:
    model, notes = Model(), Notes()
    x = x.clone().requires_grad_()
    with Monitor(model, every=1, log=notes):
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False).sum().backward()
    assert notes.steps == [0, 1]
    assert len(notes) == 2 * len(NAMES)


def test_an_error_in_the_model_leaves_nothing_behind_and_does_not_count(x: Tensor) -> None:
    model, notes = Model(), Notes()
    with Monitor(model, every=1, log=notes):
        model.blocks[1]["attn"].broken = True
        with pytest.raises(RuntimeError, match="broken"):
            model(x)
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        assert notes == []
        model.blocks[1]["attn"].broken = False
        try:
            raise KeyError
        except KeyError:  # a call while an error is handled is a call like any other
            model(x)
    assert notes.steps == [1]
    assert untouched(model)


def test_after_an_error_outside_the_model_nothing_more_is_logged(x: Tensor) -> None:
    model, notes = Model(), Notes()

    def train() -> None:
        with Monitor(model, every=1, log=notes) as monitor:
            for n in range(2):
                monitor.step(n)
                model(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert notes.steps == [0]
    assert untouched(model)


def test_an_interrupt_within_the_model_leaves_nothing_behind(x: Tensor) -> None:
    model, notes = Model(), Notes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1]["attn"].v_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), Monitor(model, every=1, log=notes):
        model(x)
    hook.remove()
    assert untouched(model)
    assert notes == []


def test_a_model_that_calls_itself_is_one_call(x: Tensor) -> None:
    class Twice(Model):
        depth = 0

        def forward(self, x: Tensor) -> Tensor:
            if not self.depth:
                self.depth = 1
                x = self(x)
                self.depth = 0
            return super().forward(x)

    model, notes = Twice(), Notes()
    with Monitor(model, every=2, log=notes):
        for _ in range(3):
            model(x)
    assert notes.steps == [0, 2]
    assert len(notes) == 2 * len(NAMES)


def test_rows_that_see_no_key_do_not_count_and_nan_shows() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, mask)

    model, notes = Masked(), Notes()
    x = torch.zeros(1, 3, 4, 2)
    mask = torch.ones(1, 3, 4, 4, dtype=torch.bool)
    mask[0, 0, 2:], mask[0, 1] = False, False
    with Monitor(model, every=1, log=notes) as monitor:
        model(x, mask)
        assert monitor.last == pytest.approx(
            {
                f"attention/head{h}/{what}": value
                for h in (0, 2)
                for what, value in (("entropy", math.log(4)), ("max_logit", 0.0))
            }
        )
        x[0, 0, 0] = torch.nan
        model(x, mask)
    assert math.isnan(monitor.last["attention/head0/entropy"])
    assert math.isnan(monitor.last["attention/head0/max_logit"])


class Several(nn.Module):
    """Attention with torch's module, with and without weights, with ours, and with both functions; all with dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.torchs = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
        self.fused = nn.TransformerEncoderLayer(E, H, E, dropout=0.5, batch_first=True)
        self.ours = regard.nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.torchs(x, x, x)[0]
        x = self.fused(x)
        x = x + self.ours(x, x, x, need_weights=False)[0] + self.ours(x, x, x)[0]
        x = (
            x
            + F.scaled_dot_product_attention(x, x, x, None, 0.5)
            + F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        )
        return x + regard.attention(x, x, x, dropout=0.5)


@pytest.mark.parametrize("recompute", [False, True])
def test_random_numbers_and_gradients_are_those_without_it(recompute: bool, x: Tensor) -> None:
    results = []
    for monitored in (False, True):
        model = Several()
        torch.manual_seed(5)
        with Monitor(model, every=1 if monitored else 1 << 40) as monitor:
            monitor.step(0 if monitored else 1)
            inner = x.clone().requires_grad_()
            y = checkpoint(model, inner, use_reentrant=False) if recompute else model(inner)
            y.square().sum().backward()
        results.append([y.detach(), inner.grad, *(p.grad for p in model.parameters()), torch.rand(3)])
    assert all(map(torch.equal, *results))
    assert list(monitor.max_logits) == ["torchs", "fused.self_attn", "ours", ""]
    assert list(monitor.last)[-1] == "attention/head0/max_logit"


def test_a_model_without_observable_calls_gives_one_warning(x: Tensor) -> None:
    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    model, notes = ByHand(), Notes()
    with Monitor(model, every=1, log=notes):
        with pytest.warns(
            UserWarning, match=r"^Monitor: in step 0 it did not see any attention\. A model that computes"
        ):
            model(x)
        model(x)
    assert notes == []


def test_a_call_that_cannot_be_observed_runs_and_gives_a_warning(x: Tensor) -> None:
    class Mapped(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return torch.func.vmap(lambda y: F.scaled_dot_product_attention(y, y, y))(x)

    model, notes = Mapped(), Notes()
    with (
        Monitor(model, every=1, log=notes),
        pytest.warns(
            UserWarning, match=r"^Monitor: in step 0 it did not see all attention\. the model itself: it is in"
        ),
    ):
        output = model(x)
    assert [name for name, *_ in notes] == NAMES
    assert torch.equal(output, model(x))


def test_max_logits_can_be_passed_to_qk_clip(x: Tensor) -> None:
    model = Model()
    with torch.no_grad():
        model.blocks[1]["attn"].q_proj.weight[: E // 2] *= 100.0
    with Monitor(model, every=1) as monitor:
        model(x)
        before = monitor.max_logits
        for name, largest in before.items():
            qk_clip_(model.get_submodule(name), largest, threshold=4.0)
        model(x)
    assert list(before) == ["blocks.0.attn", "blocks.1.attn"]
    assert before["blocks.1.attn"][0] > 10.0
    for name, largest in monitor.max_logits.items():
        torch.testing.assert_close(largest, before[name].clamp(max=4.0), rtol=1e-4, atol=1e-4)


class Backend:
    """A backend of torch.compile that counts the graphs it compiles and how often they run."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


def compiled_by(backend: Any, model: nn.Module, how: str) -> nn.Module:
    """A model that is compiled as a whole, in place, or layer by layer."""
    if how == "wrapped":
        return torch.compile(model, backend=backend)
    for module in [model] if how == "in place" else [block["attn"] for block in model.blocks]:
        module.compile(backend=backend)
    return model


@pytest.mark.parametrize("how", ["wrapped", "in place", "by layer"])
def test_a_compiled_model_is_seen_and_stays_compiled(x: Tensor, how: str) -> None:
    torch.compiler.reset()
    eager, notes, backend = Model(), Notes(), Backend()
    model = compiled_by(backend, copy.deepcopy(eager), how)
    parts = 2 if how == "by layer" else 1  # graphs that a step runs
    with Monitor(model, every=5, log=notes) as monitor:
        for step in range(40):
            model(x * (1 + step)).sum().backward()
        seen = monitor.last
    assert notes.steps == list(range(0, 40, 5))
    assert [name for name, *_ in notes[: len(NAMES)]] == NAMES
    graphs = 1 if how != "by layer" else backend.compiled  # layers may share one graph
    assert (backend.compiled, backend.runs) == (graphs, 39 * parts)  # all but the first, which shows the names
    assert graphs <= parts
    with Monitor(eager, every=1) as alone:
        eager(x * 36)
    assert seen == pytest.approx(alone.last, rel=1e-5)
    model(x)  # nothing remains
    assert (backend.compiled, len(notes.steps)) == (graphs, 8)


def test_a_graph_that_hides_its_attention_is_observed_eagerly_from_then_on(x: Tensor) -> None:
    class ByHand(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return (q @ q.mT).softmax(-1) @ q
            return F.scaled_dot_product_attention(q, q, q)

    torch.compiler.reset()
    notes, q = Notes(), torch.randn(1, 2, 6, 4)
    model = torch.compile(ByHand(), backend="eager")
    with Monitor(model, every=1, log=notes):
        model(q)
        with pytest.warns(UserWarning, match="its compiled graph made 0 calls .* makes 1; from now on"):
            model(q)
        model(q)
    assert notes.steps == [0, 2]


def test_operators_of_a_graph_with_a_mask_and_grouped_heads_are_observed() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
    mask = torch.zeros(6, 9).masked_fill(torch.rand(6, 9) > 0.7, torch.finfo(torch.float32).min)
    found: list[Observation] = []
    with GraphInterceptor(found.append):
        F.scaled_dot_product_attention(q, k, k, mask, scale=0.3, enable_gqa=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    wanted = (
        regard.observe(q, k, k, mask=regard.dense(mask == 0), scale=0.3),
        regard.observe(q, q, q, mask=regard.causal()),
    )
    for seen, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(seen.entropy, true.entropy)
        torch.testing.assert_close(seen.max_logit, true.max_logit)


def test_it_can_be_started_and_stopped_without_a_context(x: Tensor) -> None:
    model, notes = Model(), Notes()
    monitor = Monitor(model, every=1, log=notes).start().start()
    monitor.step(5)
    model(x)
    monitor.stop()
    model(x)
    assert notes.steps == [5]
    assert len(notes) == len(NAMES)
    assert untouched(model)


@pytest.mark.parametrize("every", [0, -1])
def test_every_must_be_at_least_one(every: int) -> None:
    with pytest.raises(ArgumentError, match=r"^Monitor: every must be at least 1; got"):
        Monitor(Model(), every)


def test_a_wrong_model_step_or_log_is_refused() -> None:
    with pytest.raises(DtypeError, match=r"^Monitor: model must be a torch\.nn\.Module\. Got str"):
        Monitor("model")  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"^Monitor: step must be a whole number\. Got 1\.5"):
        Monitor(Model()).step(1.5)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"^Monitor: log must take scalars, and a logging\.Logger takes messages"):
        Monitor(Model(), log=logging.getLogger("test"))
    with pytest.raises(DtypeError, match=r"^Monitor: log must be a SummaryWriter, .* Got int\."):
        Monitor(Model(), log=3)


class Writer:
    """The signature of TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int | None]] = []

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        self.calls.append((tag, scalar_value, global_step))


class Run:
    """The signature of a Weights & Biases run."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.calls.append((data, step))


class Metrics:
    """The signature of a Lightning logger."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))


def test_loggers_are_recognised_by_their_methods(x: Tensor) -> None:
    model, writer, run, metrics, notes = Model(), Writer(), Run(), Metrics(), Notes()
    with Monitor(model, every=2, log=[writer, run, metrics, notes]):
        for _ in range(3):
            model(x)
    assert [call[0] for call in writer.calls[: len(NAMES)]] == NAMES
    assert {call[2] for call in writer.calls} == {0, 2}
    assert [(list(scalars), step) for scalars, step in run.calls] == [(NAMES, 0), (NAMES, 2)]
    assert metrics.calls == run.calls
    assert writer.calls == notes
    reporter(None)({"loss": 0.0}, 0)


def test_a_transformers_trainer_is_monitored_step_by_step(x: Tensor) -> None:
    from transformers import TrainerCallback, TrainerControl, TrainerState

    class Trainer:
        """What Trainer.log does, in its signature, and where it keeps the step."""

        callback_handler = None

        def __init__(self) -> None:
            self.state, self.logged = TrainerState(), []  # type: ignore[var-annotated]

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self.logged.append((list(logs), self.state.global_step))

    trainer, notes, control = Trainer(), Notes(), TrainerControl()
    model, state = Model(), trainer.state
    callback = trainer_callback(every=2, log=(trainer, notes))
    assert isinstance(callback, TrainerCallback)
    callback.on_train_begin(None, state, control, model=model)
    model.blocks[0]["attn"].broken = True
    with pytest.raises(RuntimeError, match="broken"):  # this training fails; the next starts fresh
        model(x)
    model.blocks[0]["attn"].broken = False
    callback.on_train_begin(None, state, control, model=model)
    for _ in range(5):
        callback.on_step_begin(None, state, control)
        for _ in range(2):  # gradient accumulation
            model(x)
            callback.on_substep_end(None, state, control)
        state.global_step += 1
        callback.on_step_end(None, state, control)
    model.eval()(x)
    callback.on_train_end(None, state, control)
    assert trainer.logged == [(NAMES, 2), (NAMES, 4)]
    assert notes.steps == [2, 4]
    assert untouched(model)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> type:
    """A package lightning with the one class that is needed."""

    class Callback:
        pass

    package, module = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
    module.Callback = package.pytorch = Callback  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    return Callback


def test_a_lightning_trainer_is_monitored_batch_by_batch(lightning: type, x: Tensor) -> None:
    class Module(Model):
        def training_step(self, x: Tensor) -> Tensor:
            for block in self.blocks:  # Lightning calls this method, and not the module
                x = block["attn"](x)
            return x.sum()

    model, metrics = Module(), [Metrics(), Metrics()]
    trainer = types.SimpleNamespace(global_step=0, loggers=metrics)
    callback = lightning_callback(every=2)
    assert isinstance(callback, lightning)
    callback.on_train_start(trainer, model)
    for batch in range(10):
        callback.on_train_batch_start(trainer, model, x, batch)
        loss = model.training_step(x)
        callback.on_before_backward(trainer, model, loss)
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        loss.backward()
        trainer.global_step += batch % 2  # two batches a step
        callback.on_train_batch_end(trainer, model, None, x, batch)
    callback.on_train_end(trainer, model)
    for one in metrics:
        assert [(list(scalars), step) for scalars, step in one.calls] == [(NAMES, 0), (NAMES, 2), (NAMES, 4)]
    assert metrics[0].calls[0][0] == pytest.approx(expected(model, x), rel=1e-4)
    assert untouched(model)


def test_lightning_that_fails_leaves_nothing_behind(lightning: type, x: Tensor) -> None:
    model, notes = Model(), Notes()
    trainer = types.SimpleNamespace(global_step=0, loggers=[])
    callback = lightning_callback(every=1, log=notes)
    callback.on_train_start(trainer, model)
    callback.on_train_batch_start(trainer, model, x, 0)
    model(x)
    callback.on_exception(trainer, model, RuntimeError("broken"))
    assert untouched(model)
    assert notes == []


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match=r"^lightning_callback: it needs the package lightning\. Install it"):
        lightning_callback()
    with pytest.raises(MissingPackageError, match=r"^trainer_callback: it needs the package transformers\. Install it"):
        trainer_callback()


def as_rank(rank: int, meeting: str) -> None:
    """Train as one of two ranks on a part of the batch, and check what is logged."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        x = torch.randn(2, 3, N, E, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 3.0]).view(
            2, 1, 1, 1
        )
        model, notes = Model(), Notes()
        with Monitor(model, every=2, log=notes) as monitor:
            for _ in range(3):
                model(x[rank])
        assert monitor.last == pytest.approx(expected(model, *x), rel=1e-4)
        assert notes.steps == ([0, 2] if rank == 0 else [])
        notes.clear()
        part = model.blocks[0]["attn"] if rank else model
        differ = pytest.warns(
            UserWarning, match=r"^Monitor: the ranks attend in different layers, so each logs only what it"
        )
        with differ, Monitor(part, every=1, log=notes):
            part(x[0])
        assert len(notes) == (2 * H if rank else len(NAMES))
    finally:
        dist.destroy_process_group()


def test_data_parallel_ranks_are_combined(tmp_path: Path) -> None:
    meeting, here = str(tmp_path / "meeting"), Path(__file__)
    paths = [str(here.parent), str(Path(regard.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    script = f"from {here.stem} import as_rank; as_rank(1, {meeting!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        as_rank(0, meeting)
    finally:
        _, said = other.communicate(timeout=60)
    assert other.returncode == 0, said
