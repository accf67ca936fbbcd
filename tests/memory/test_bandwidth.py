"""Bandwidth selection: leave-one-out against a loop, its gradient against finite differences, and the minimum found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.memory.bandwidth import bandwidth_range, sample_indices, select_bandwidth
from regard.memory.leave_one_out import Points, log_loss, merge_duplicates, squared_loss
from regard.scores import Additive, Cosine, Score

CPU = torch.device("cpu")
Loss = Callable[[Points, "str | Score", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are small
    yield
    torch.set_num_threads(threads)


def data(n: int = 20, features: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, features))
    y = np.stack((np.sin(2 * x[:, 0]), 10 * x[:, 1] + rng.normal(size=n)), 1)
    return x, y, (y[:, 0] > 0).astype(int) + (y[:, 1] > 5)


def weights_of(kernel: str | Score, x: np.ndarray, others: np.ndarray, h: np.ndarray) -> np.ndarray:
    """The kernel between one point and others, by its definition."""
    if isinstance(kernel, Score):
        logits = kernel(torch.tensor(x[None]), torch.tensor(others))[0].detach().numpy() / h**2
        return np.exp(logits)
    if kernel == "dot":
        return np.exp(((x / h) * (others / h)).sum(1))
    return np.exp(-0.5 * (((x - others) / h) ** 2).sum(1))


def leave_one_out_loop(kernel: str | Score, x: np.ndarray, y: np.ndarray, w: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Leave each point out in turn, and predict its y from the others: (n, outputs)."""
    predicted = []
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        k = weights_of(kernel, x[i], x[rest], h) * w[rest]
        predicted.append(k @ y[rest] / k.sum())
    return np.array(predicted)


H = {"one": np.array([0.7]), "each": np.array([0.4, 0.9, 3.0])}
KERNELS: dict[str, tuple[str | Score, np.ndarray]] = {
    "gaussian": ("gaussian", H["one"]),
    "gaussian, one per feature": ("gaussian", H["each"]),
    "dot": ("dot", H["one"]),
    "dot, one per feature": ("dot", H["each"]),
    "cosine": (Cosine(), H["one"]),
    "additive": (Additive(3, 3, 4).double(), H["one"]),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_leave_one_out_is_the_loop_over_the_points(name: str, weighted: bool) -> None:
    kernel, h = KERNELS[name]
    x, y, classes = data()
    w = np.random.default_rng(1).uniform(0.5, 2, len(x)) if weighted else np.ones(len(x))
    log_h = torch.tensor(h).log()

    found = squared_loss(merge_duplicates(x, y, w, CPU), kernel, log_h)
    error, variance = (y - leave_one_out_loop(kernel, x, y, w, h)) ** 2, (y - w @ y / w.sum()) ** 2
    assert found.item() == pytest.approx((w @ error / (w @ variance)).mean(), rel=1e-10)

    found = log_loss(merge_duplicates(x, classes, w, CPU), kernel, log_h)
    shares = leave_one_out_loop(kernel, x, np.eye(3)[classes], w, h)[np.arange(len(x)), classes]
    assert found.item() == pytest.approx(-(w @ np.log(shares)) / w.sum(), rel=1e-10)


@pytest.mark.parametrize("loss", [squared_loss, log_loss])
def test_copies_of_a_point_stay_when_one_of_them_is_left_out(loss: Loss) -> None:
    x, y, classes = data(8)
    target = y if loss is squared_loss else classes
    counts = np.array([1, 3, 1, 2, 1, 1, 4, 1])
    many = merge_duplicates(x.repeat(counts, 0), target.repeat(counts, 0), None, CPU)
    assert len(many.x) == 8
    bare = Points(
        torch.tensor(x.repeat(counts, 0)),
        torch.tensor(target.repeat(counts, 0)),
        torch.ones(counts.sum(), dtype=torch.float64),
        torch.zeros(counts.sum(), dtype=torch.float64),
    )
    for kernel, h in KERNELS.values():
        log_h = torch.tensor(h).log()
        plain = loss(bare, kernel, log_h)
        torch.testing.assert_close(loss(many, kernel, log_h), plain, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            loss(merge_duplicates(x, target, counts, CPU), kernel, log_h), plain, rtol=1e-10, atol=1e-12
        )


def test_repeating_every_point_changes_nothing() -> None:
    x, y, _ = data(9)
    once = merge_duplicates(x, y, None, CPU)
    for weight, copies in ((np.full(9, 2.0), 1), (None, 3), (np.full(27, 5.0), 3)):
        again = merge_duplicates(np.tile(x, (copies, 1)), np.tile(y, (copies, 1)), weight, CPU)
        assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("loss", [squared_loss, log_loss])
@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_of_the_bandwidth_agrees_with_differences(name: str, loss: Loss) -> None:
    kernel, h = KERNELS[name]
    x, y, classes = data(12)
    counts = np.array([1, 1, 2, 1, 3, 1, 1, 1, 1, 1, 2, 1])
    points = merge_duplicates(x, y if loss is squared_loss else classes, counts, CPU)
    start = torch.tensor(h).log().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(points, kernel, start), start)
    for at in range(len(h)):
        step = torch.zeros(len(h), dtype=torch.float64)
        step[at] = 1e-5
        with torch.no_grad():
            difference = (loss(points, kernel, start + step) - loss(points, kernel, start - step)) / 2e-5
        assert gradient[at].item() == pytest.approx(difference.item(), rel=1e-6, abs=1e-9)


def test_the_chunked_gradient_is_that_of_the_small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, classes = data(40)
    for loss, target in ((squared_loss, y), (log_loss, classes)):
        found = []
        for few in (0, 512):
            monkeypatch.setattr("regard.memory.leave_one_out._REFERENCE_POINTS", few)
            at = torch.tensor(H["each"]).log().requires_grad_()
            value = loss(merge_duplicates(x, target, None, CPU), "gaussian", at)
            found += [value.detach(), *torch.autograd.grad(value, at)]
        torch.testing.assert_close(found[:2], found[2:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("h", [1e-8, 1e-3, 1e3, 1e8])
@pytest.mark.parametrize("loss", [squared_loss, log_loss])
def test_a_point_far_from_all_others_leaves_the_loss_finite(loss: Loss, h: float) -> None:
    x, y, classes = data(12)
    x[3] += 1e6
    at = torch.tensor([h], dtype=torch.float64).log().requires_grad_()
    value = loss(merge_duplicates(x, y if loss is squared_loss else classes, None, CPU), "gaussian", at)
    (gradient,) = torch.autograd.grad(value, at)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_a_class_of_one_point_is_ignored() -> None:
    x, _, _ = data(6)
    lone = log_loss(merge_duplicates(x, np.array([0, 0, 0, 1, 1, 2]), None, CPU), "gaussian", torch.zeros(1).double())
    assert lone.isfinite()
    assert lone > 0
    alone = log_loss(merge_duplicates(x, np.arange(6), None, CPU), "gaussian", torch.zeros(1).double())
    assert alone == 0


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("loss", [squared_loss, log_loss])
def test_the_search_ends_in_a_minimum_that_no_grid_beats(loss: Loss, per_feature: bool) -> None:
    x, y, classes = data(40, 2)
    points = merge_duplicates(x, y if loss is squared_loss else classes, None, CPU)
    found = select_bandwidth(points, "gaussian", loss, per_feature)
    assert found.bandwidth.shape == ((2,) if per_feature else (1,))
    with torch.no_grad():
        ends = np.log(bandwidth_range(points, "gaussian"))
        tried = min(loss(points, "gaussian", torch.tensor([h])).item() for h in np.linspace(*ends, 60))
        assert loss(points, "gaussian", torch.tensor(found.bandwidth).log()).item() == pytest.approx(found.loss)
    assert found.loss <= tried + 1e-7


def test_an_irrelevant_feature_gets_a_wide_bandwidth() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (150, 2)) * [1.0, 1000.0]
    points = merge_duplicates(x, np.sin(3 * x[:, :1]) + 0.1 * rng.normal(size=(150, 1)), None, CPU)
    useful, useless = select_bandwidth(points, "gaussian", squared_loss, per_feature=True).bandwidth
    assert useful < 0.3
    assert useless > 2000


@pytest.mark.parametrize("x", [np.zeros((5, 2)), np.ones((1, 2)), np.array([[0.0, 0.0], [1.0, 1.0]])])
def test_points_for_which_every_bandwidth_is_the_same_get_a_finite_one(x: np.ndarray) -> None:
    points = merge_duplicates(x, np.arange(len(x), dtype=float)[:, None], None, CPU)
    for per_feature in (False, True):
        assert (select_bandwidth(points, "gaussian", squared_loss, per_feature).bandwidth > 0).all()


def test_the_bandwidth_does_not_depend_on_the_order_or_the_units() -> None:
    x, y, _ = data(30)
    h = select_bandwidth(merge_duplicates(x, y, None, CPU), "gaussian", squared_loss, False).bandwidth
    turned = select_bandwidth(merge_duplicates(x[::-1], y[::-1], None, CPU), "gaussian", squared_loss, False).bandwidth
    scaled = select_bandwidth(merge_duplicates(x * 1e-6, y * 1e6, None, CPU), "gaussian", squared_loss, False).bandwidth
    np.testing.assert_array_equal(h, turned)
    np.testing.assert_allclose(h * 1e-6, scaled, rtol=1e-4)


def test_the_sample_is_the_same_every_time() -> None:
    some = sample_indices(10_000, 100)
    np.testing.assert_array_equal(some, sample_indices(10_000, 100))
    assert len(set(some.tolist())) == 100
    assert 3000 < some.mean() < 7000


def test_leave_one_out_never_holds_all_pairs() -> None:
    x, y, _ = data(600)
    points = merge_duplicates(x, y, None, CPU)
    seen = []
    real = regard.backends.Chunked._run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regard.backends.Chunked, "_run", lambda self, p: (seen.append(p.rows), real(self, p))[1])
        squared_loss(points, "gaussian", torch.zeros(1).double())
    assert seen == [600]
