"""KernelClassifier: the shares of the classes, scikit-learn's conventions, and the bandwidth search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from regard.memory.classifier import KernelClassifier
from regard.scores import Cosine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are small
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def iris() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_iris(return_X_y=True)
    return x, np.array(["setosa", "versicolor", "virginica"])[y]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")  # array libraries other than NumPy
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
def test_scikit_learn_finds_no_fault_with_it() -> None:
    assert {check["status"] for check in check_estimator(KernelClassifier())} <= {"passed", "skipped"}


def test_a_share_is_the_weight_of_a_class(iris: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = iris
    model = KernelClassifier(0.4).fit(x, y)
    kernel = np.exp(-0.5 * (((x[::7, None] - x) / 0.4) ** 2).sum(-1))
    shares = np.stack([kernel[:, y == name].sum(1) for name in model.classes_], 1) / kernel.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(x[::7]), shares, atol=1e-12)
    np.testing.assert_array_equal(model.predict(x[::7]), model.classes_[shares.argmax(1)])


def test_the_search_finds_the_least_leave_one_out_log_loss(iris: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = iris
    x, y = x[::2], y[::2]
    model = KernelClassifier().fit(x, y)

    def leave_one_out(h: float) -> float:
        predicted = []
        for i in range(len(x)):
            rest = np.arange(len(x)) != i
            predicted.append(KernelClassifier(h).fit(x[rest], y[rest]).predict_proba(x[i : i + 1])[0])
        return log_loss(y, np.array(predicted))

    assert len(np.unique(np.c_[x, y == "virginica"], axis=0)) == len(
        x
    )  # no duplicates, so the loop leaves out what we do
    assert model.loo_loss_ == pytest.approx(leave_one_out(model.bandwidth_), rel=1e-6)
    assert model.loo_loss_ < min(leave_one_out(model.bandwidth_ * 1.1), leave_one_out(model.bandwidth_ / 1.1))
    assert KernelClassifier("cv-per-feature").fit(x, y).loo_loss_ < model.loo_loss_


def test_it_works_in_pipelines_and_grid_searches(iris: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = iris
    search = GridSearchCV(
        make_pipeline(StandardScaler(), KernelClassifier()), {"kernelclassifier__bandwidth": ["cv", 100.0]}, cv=3
    ).fit(x, y)
    assert search.best_params_ == {"kernelclassifier__bandwidth": "cv"}
    assert search.best_score_ > 0.93


def test_explain_gives_the_points_and_their_classes(iris: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = iris
    found = KernelClassifier(0.1).fit(x, y).explain(x[:3], k=2)
    np.testing.assert_array_equal(found.indices[:, 0], [0, 1, 2])
    assert set(found.targets.ravel()) == {"setosa"}
    assert (found.weights[:, 0] >= found.weights[:, 1]).all()


def test_a_whole_weight_counts_copies(iris: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = iris[0][::5], iris[1][::5]
    weight = np.arange(len(x)) % 3
    for bandwidth in ("cv", 0.3):
        weighted = KernelClassifier(bandwidth).fit(x, y, sample_weight=weight)
        repeated = KernelClassifier(bandwidth).fit(x.repeat(weight, 0), y.repeat(weight))
        np.testing.assert_allclose(weighted.predict_proba(x), repeated.predict_proba(x), rtol=1e-9, atol=1e-12)


def test_a_score_serves_as_a_kernel(iris: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = iris[0][::3], iris[1][::3]
    assert KernelClassifier(kernel=Cosine()).fit(x, y).score(x, y) > 0.9


def test_one_class_is_certain_and_far_points_are_told_apart() -> None:
    x = np.array([[0.0], [1.0], [1e6]])
    assert KernelClassifier().fit(x, [1, 1, 1]).predict_proba(x).tolist() == [[1.0]] * 3
    model = KernelClassifier().fit(np.repeat(x, 2, 0) + [[0], [0.1]] * 3, [0, 0, 0, 0, 1, 1])
    shares = model.predict_proba([[-1e9], [1e9]])
    np.testing.assert_allclose(shares, [[1, 0], [0, 1]])
