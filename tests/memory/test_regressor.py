"""KernelRegressor: the formula, statsmodels' numbers, scikit-learn's conventions, and explanations."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from regard.errors import ArgumentError, DtypeError, MissingPackageError
from regard.memory.regressor import KernelRegressor
from regard.scores import Additive, Cosine, Gaussian, Temperature

# Computed once by statsmodels 0.15.0: KernelReg(Y, X, "cc", reg_type="lc", bw=h).fit(QUERIES)[0], and its cv_loo.
X = np.array(
    [
        *([0.5, 1.589], [1.103, -1.099], [-0.799, 1.494], [-1.979, 1.285], [1.188, -0.128], [-0.788, -0.886]),
        *([-0.981, -0.22], [0.018, 0.214], [1.982, 1.171], [0.489, 1.956], [-1.139, -1.359], [0.45, -1.824]),
        *([-1.857, 0.06], [-0.135, 1.669], [0.517, 0.056], [-0.013, -1.01], [-1.953, -1.23], [0.768, -1.198]),
        *([-0.522, -1.985], [1.32, -1.382], [-0.93, 1.521], [0.039, 1.389], [0.559, 0.967], [-1.634, 0.165]),
    ]
)
Y = np.array(
    [
        *(3.016, 2.036, 1.715, 0.81, 0.824, 0.084, -0.725, 0.045, 2.356, 4.289, 1.005, 3.906),
        *(-1.023, 2.671, 0.451, 1.02, 0.466, 2.072, 3.422, 2.969, 1.626, 1.836, 1.386, -0.906),
    ]
)
QUERIES = np.array([[1.496, 0.649], [-1.474, 1.38], [1.78, 1.616], [0.279, -1.418], [-1.23, 1.712], [0.209, -1.278]])
STATSMODELS = {
    (0.4, 0.4): (
        0.532887806098,
        [
            1.707533188855648,
            1.2812863600896982,
            2.3740114981925298,
            2.4401651532751822,
            1.6164574024886949,
            1.9972608247647994,
        ],
    ),
    (0.3, 0.8): (
        1.562394832245,
        [
            1.5156458822995975,
            0.26941549651377894,
            2.327026351949162,
            2.304701546924358,
            1.3635539508999477,
            1.9617881524958711,
        ],
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are small
    yield
    torch.set_num_threads(threads)


def weights_at(queries: np.ndarray, points: np.ndarray, h: float | np.ndarray) -> np.ndarray:
    logits = -0.5 * (((queries[:, None] - points) / h) ** 2).sum(-1)
    kernel = np.exp(logits - logits.max(1, keepdims=True))
    return kernel / kernel.sum(1, keepdims=True)


@pytest.mark.parametrize("bandwidth", STATSMODELS)
def test_it_agrees_with_the_numbers_of_statsmodels(bandwidth: tuple[float, float]) -> None:
    _, expected = STATSMODELS[bandwidth]
    model = KernelRegressor(bandwidth=bandwidth).fit(X, Y)
    np.testing.assert_allclose(model.predict(QUERIES), expected, rtol=0, atol=1e-10)
    if len(set(bandwidth)) == 1:
        np.testing.assert_allclose(
            KernelRegressor(bandwidth[0]).fit(X, Y).predict(QUERIES), expected, rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("bandwidth", STATSMODELS)
def test_leave_one_out_agrees_with_the_number_of_statsmodels(bandwidth: tuple[float, float]) -> None:
    from regard.memory.leave_one_out import merge_duplicates, squared_loss

    points = merge_duplicates(X, Y[:, None], None, torch.device("cpu"))
    found = squared_loss(points, "gaussian", torch.tensor(bandwidth, dtype=torch.float64).log()).item() * Y.var()
    assert found == pytest.approx(STATSMODELS[bandwidth][0], abs=1e-10)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_numbers_of_statsmodels_are_its_own_where_it_is_installed() -> None:
    regression = pytest.importorskip("statsmodels.nonparametric.kernel_regression")
    for bandwidth, (_, expected) in STATSMODELS.items():
        model = regression.KernelReg(Y, X, "cc", reg_type="lc", bw=np.array(bandwidth))
        np.testing.assert_allclose(model.fit(QUERIES)[0], expected, rtol=1e-9)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")  # array libraries other than NumPy
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
def test_scikit_learn_finds_no_fault_with_it() -> None:
    assert {check["status"] for check in check_estimator(KernelRegressor())} <= {"passed", "skipped"}
    check_estimator(KernelRegressor(bandwidth=0.5, kernel="dot"))


def test_it_works_in_pipelines_and_grid_searches() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 6, (60, 2)) * [1.0, 1000.0]
    y = np.sin(x[:, 0])
    line = make_pipeline(StandardScaler(), KernelRegressor())
    search = GridSearchCV(line, {"kernelregressor__bandwidth": [0.01, 0.2, 5.0]}, cv=3).fit(x, y)
    assert search.best_params_ == {"kernelregressor__bandwidth": 0.2}
    found = clone(search.best_estimator_).set_params(kernelregressor__bandwidth="cv-per-feature").fit(x, y)
    assert found.score(x, y) > 0.98
    assert found[-1].loo_loss_ < 0.05


def test_the_search_beats_every_bandwidth_of_a_grid_on_held_out_points() -> None:
    x, y = load_diabetes(return_X_y=True)
    train, test = np.arange(len(x)) % 2 == 0, np.arange(len(x)) % 2 == 1
    found = KernelRegressor().fit(x[train], y[train])
    tried = [KernelRegressor(h).fit(x[train], y[train]).score(x[test], y[test]) for h in np.geomspace(0.005, 0.5, 15)]
    assert found.score(x[test], y[test]) > max(tried) - 0.03
    assert found.loo_loss_ == pytest.approx(1 - found.score(x[test], y[test]), abs=0.15)


def test_the_deviation_is_that_of_the_targets_under_the_weights() -> None:
    y = np.stack((Y, 1e3 + 5 * Y**2), 1)
    model = KernelRegressor(0.5).fit(X, y)
    mean, deviation = model.predict(QUERIES, return_std=True)
    weights = weights_at(QUERIES, X, 0.5)
    np.testing.assert_allclose(mean, weights @ y)
    np.testing.assert_allclose(deviation, np.sqrt(weights @ y**2 - (weights @ y) ** 2), rtol=1e-6)
    single = KernelRegressor(0.5).fit(X, Y).predict(QUERIES, return_std=True)
    assert [part.shape for part in single] == [(6,), (6,)]
    np.testing.assert_allclose(single[1], deviation[:, 0], rtol=1e-9)


def test_explain_gives_the_points_that_made_a_prediction() -> None:
    model = KernelRegressor(0.5).fit(X, Y)
    weights = weights_at(QUERIES, X, 0.5)
    found = model.explain(QUERIES, k=4)
    order = np.argsort(-weights, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(found.indices, order)
    np.testing.assert_allclose(found.weights, np.take_along_axis(weights, order, 1))
    np.testing.assert_array_equal(found.targets, Y[order])
    every = model.explain(QUERIES, k=1000)
    assert every.weights.shape == (6, 24)
    np.testing.assert_allclose((every.weights * every.targets).sum(1), model.predict(QUERIES))


def test_a_whole_weight_counts_copies_and_zero_removes_a_point() -> None:
    weight = np.arange(24) % 4
    for bandwidth in (0.5, "cv", "cv-per-feature"):
        weighted = KernelRegressor(bandwidth).fit(X, Y, sample_weight=weight)
        repeated = KernelRegressor(bandwidth).fit(X.repeat(weight, 0), Y.repeat(weight))
        np.testing.assert_allclose(weighted.predict(QUERIES), repeated.predict(QUERIES), rtol=1e-9)
    found = weighted.explain(QUERIES, k=3)
    assert (weight[found.indices] > 0).all()
    np.testing.assert_array_equal(found.targets, Y[found.indices])
    thirds = KernelRegressor(0.5).fit(X, Y, sample_weight=weight / 3).predict(QUERIES)
    np.testing.assert_allclose(thirds, KernelRegressor(0.5).fit(X, Y, sample_weight=weight).predict(QUERIES))
    scored = [KernelRegressor(0.5, Gaussian(1.0)).fit(X, Y, sample_weight=weight).predict(QUERIES), thirds]
    np.testing.assert_allclose(*scored)


@pytest.mark.parametrize("score", [Cosine(), Temperature(), Gaussian(0.3), Additive(2, 2, 3)], ids=repr)
def test_any_score_is_a_kernel_over_the_square_of_the_bandwidth(score: torch.nn.Module) -> None:
    model = KernelRegressor(0.6, score).fit(X, Y)
    assert getattr(score, "start", None) is None  # fitting changes no parameter
    logits = model._score(torch.tensor(QUERIES), torch.tensor(X)).detach().numpy() / 0.36
    weights = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(model.predict(QUERIES), weights @ Y / weights.sum(1), rtol=1e-9)
    searched = KernelRegressor(kernel=score).fit(X, Y)
    assert 0 < searched.bandwidth_ < 1e3
    assert searched.loo_loss_ <= 1.2


def test_a_dot_product_is_that_of_the_points_over_their_bandwidths() -> None:
    h = np.array([0.7, 2.0])
    kernel = np.exp((QUERIES / h) @ (X / h).T)
    found = KernelRegressor(h, "dot").fit(X, Y).predict(QUERIES)
    np.testing.assert_allclose(found, kernel @ Y / kernel.sum(1, keepdims=True)[:, 0])


def test_single_precision_stays_single_and_correct() -> None:
    rng = np.random.default_rng(0)
    far = rng.normal(size=(80, 3)) + 1e4  # the offset alone uses up the digits of float32
    far32, y = far.astype(np.float32), rng.normal(size=80)
    truth = KernelRegressor(0.05).fit(far32.astype(np.float64), y)
    found = KernelRegressor(0.05).fit(far32, y)
    assert found.predict(far32).dtype == np.float32
    np.testing.assert_allclose(found.predict(far32), truth.predict(far32.astype(np.float64)), atol=1e-4)
    assert found.explain(far32).weights.dtype == np.float32


def test_double_precision_is_used_where_single_precision_cannot_separate_neighbours() -> None:
    x = np.linspace(0, 1000, 3001, dtype=np.float32)[:, None]
    wide, y = x.astype(np.float64), np.sin(x[:, 0])
    found = KernelRegressor(0.3).fit(x, y).predict(x)
    np.testing.assert_allclose(found, KernelRegressor(0.3).fit(wide, y).predict(wide), atol=1e-4)


def test_a_query_far_from_every_point_takes_the_nearest_and_stays_finite() -> None:
    model = KernelRegressor(1e-3).fit(X, Y)
    mean, deviation = model.predict([[500.0, 1.0], [0.5, 1.589]], return_std=True)
    np.testing.assert_allclose(mean, [Y[8], Y[0]])
    np.testing.assert_allclose(deviation, 0, atol=1e-6)


def test_a_fit_above_cv_points_samples_and_narrows_the_bandwidth() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 6, (600, 1))
    y = np.sin(x[:, 0]) + 0.3 * rng.normal(size=600)
    some, every = KernelRegressor(cv_points=100).fit(x, y), KernelRegressor().fit(x, y)
    assert some.bandwidth_ == KernelRegressor(cv_points=100).fit(x, y).bandwidth_
    assert some.bandwidth_ == pytest.approx(every.bandwidth_, rel=0.5)


def test_a_fitted_model_survives_pickle_and_its_score_too() -> None:
    model = KernelRegressor(0.5, Cosine()).fit(X, Y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(QUERIES), model.predict(QUERIES))


@pytest.mark.parametrize(
    ("parameters", "error", "says"),
    [
        ({"bandwidth": "best"}, ArgumentError, "'cv-per-feature'"),
        ({"bandwidth": 0.0}, ArgumentError, "above 0"),
        ({"bandwidth": float("nan")}, ArgumentError, "finite"),
        ({"bandwidth": [1.0, 2.0, 3.0]}, ArgumentError, "2 features"),
        ({"bandwidth": True}, DtypeError, "bool"),
        ({"bandwidth": None}, DtypeError, "NoneType"),
        ({"kernel": "cubic"}, ArgumentError, "'gaussian', 'dot'"),
        ({"kernel": Cosine}, ArgumentError, "a score of regard.scores"),
        ({"kernel": Cosine(), "bandwidth": "cv-per-feature"}, ArgumentError, "one bandwidth"),
        ({"kernel": Cosine(), "bandwidth": [1.0, 1.0]}, ArgumentError, "one bandwidth"),
        ({"cv_points": 1}, ArgumentError, "cv_points"),
    ],
)
def test_an_invalid_parameter_is_one_clear_error(parameters: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=r"KernelRegressor: ") as caught:
        KernelRegressor(**parameters).fit(X, Y)
    assert says in str(caught.value)


def test_bad_weights_and_bad_k_are_one_clear_error() -> None:
    with pytest.raises(ArgumentError, match="sample_weight must be at least 0"):
        KernelRegressor(1.0).fit(X, Y, sample_weight=np.where(np.arange(24) == 3, -1.0, 1.0))
    with pytest.raises(ValueError, match=r"(?i)sample.weight"):
        KernelRegressor(1.0).fit(X, Y, sample_weight=np.zeros(24))
    for k in (0, 1.5, True):
        with pytest.raises(ArgumentError, match="explain: k must be"):
            KernelRegressor(1.0).fit(X, Y).explain(QUERIES, k=k)


def test_without_scikit_learn_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("regard.memory")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'regard\[learn\]'"):
        from regard.memory.regressor import KernelRegressor  # noqa: F401
