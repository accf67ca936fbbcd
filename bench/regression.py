"""What does exact kernel regression cost, compared with statsmodels and scikit-learn: error, time and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from _harness import Row, report
from sklearn.datasets import make_friedman1
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor
from statsmodels.nonparametric.kernel_regression import KernelReg

from regard.memory.regressor import KernelRegressor

FEATURES, NOISE = 10, 1.0
LARGE, SMALL = (100_000, 10_000), (4_000, 400)  # training and query points; KernelRidge and KernelReg get the second
Taken = tuple[float, float]  # wall-clock seconds, and CPU seconds, which other load affects less
Made = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def made(sizes: tuple[int, int]) -> Made:
    train, asked = sizes
    x, y = make_friedman1(train + asked, FEATURES, noise=NOISE, random_state=0)
    return x[:train], y[:train], x[train:], y[train:]


def timed(call: Callable[[], Any]) -> tuple[Any, Taken]:
    clock, processor = time.perf_counter(), time.process_time()
    answer = call()
    return answer, (time.perf_counter() - clock, time.process_time() - processor)


def peak() -> float:
    """The peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row(name: str, model: Any, data: Made, dtype: type = np.float64) -> Row:
    x, y, asked, _ = data
    x, asked = x.astype(dtype), asked.astype(dtype)
    _, fitting = timed(lambda: model.fit(x, y))
    predicted, predicting = timed(lambda: model.predict(asked))
    return _row(name, data, fitting, predicting, predicted) | {"predicted": predicted}


def _row(name: str, data: Made, fitting: Taken | None, predicting: Taken, predicted: np.ndarray) -> Row:
    sizes = f"{len(data[0]):,} × {len(data[2]):,}"
    error = float(np.sqrt(np.mean((predicted - data[3]) ** 2)))
    found: Row = {"points × queries": sizes, "method": name, "error (RMSE)": error}
    found["fit, s"] = fitting and fitting[0]
    return found | {"predict, s": predicting[0], "predict, processor s": predicting[1]}


def by_statsmodels(data: Made, bandwidth: np.ndarray, predicted: np.ndarray) -> tuple[Row, float]:
    """KernelReg at our bandwidths, and the largest difference from our predictions."""
    x, y, asked, _ = data
    model = KernelReg(y, x, "c" * FEATURES, reg_type="lc", bw=bandwidth)
    (mean, _), seconds = timed(lambda: model.fit(asked))
    found = _row("statsmodels KernelReg, our bandwidths", data, None, seconds, mean)
    return found, float(np.abs(mean - predicted).max())


def ridge() -> GridSearchCV:
    return GridSearchCV(KernelRidge(kernel="rbf"), {"alpha": [0.01, 0.1], "gamma": [0.1, 0.3, 1.0]}, cv=2)


def main(large: tuple[int, int], small: tuple[int, int]) -> None:
    data, rows = made(large), []
    each, before = KernelRegressor("cv-per-feature"), peak()
    rows.append(row("regard, one bandwidth per feature, float64", each, data))
    memory = peak() - before
    rows.append(row("the same in float32", KernelRegressor(each.bandwidth_), data, np.float32) | {"fit, s": None})
    rows.append(row("regard, one bandwidth, float64", KernelRegressor(), data))
    rows.append(row("scikit-learn KNeighborsRegressor, k = 10", KNeighborsRegressor(10, n_jobs=-1), data))
    few = made(small)
    mine = KernelRegressor("cv-per-feature")
    rows.append(row("regard, one bandwidth per feature, float64", mine, few))
    predicted = rows[-1]["predicted"]
    theirs, apart = by_statsmodels(few, mine.bandwidth_, predicted)
    rows.append(theirs)
    rows.append(row("scikit-learn KernelRidge, rbf by grid", ridge(), few))
    rows.append(row("scikit-learn KNeighborsRegressor, k = 10", KNeighborsRegressor(10, n_jobs=-1), few))
    for one in rows:
        one.pop("predicted", None)
        same = next(other for other in rows if other["points × queries"] == one["points × queries"])
        one["÷ regard's"] = one["predict, processor s"] / same["predict, processor s"]
    note = (
        f"Friedman's first function of {FEATURES} features, 5 of them irrelevant, and noise of deviation {NOISE}, "
        f"which no method can get below. A full matrix of {large[0]:,} × {large[1]:,} in float64 would need "
        f"{large[0] * large[1] * 8 / 1e9:.0f} GB (regard took {memory:,.0f} MiB above the data), and the matrix that "
        f"KernelRidge solves {large[0] ** 2 * 8 / 1e9:.0f} GB: it and KernelReg, which was not tried above, run at "
        f"the smaller size. Other work ran on the machine meanwhile: it affects wall-clock seconds most and processor "
        f"seconds less; ÷ regard's compares the latter for predict. fit includes each method's own search (regard: "
        f"leave-one-out on 2,000 points; KernelRidge: 6 settings; KernelReg and KNeighborsRegressor: none). Largest "
        f"difference of regard from KernelReg: {apart:.1e}. scikit-learn {version('scikit-learn')}, statsmodels "
        f"{version('statsmodels')}."
    )
    report("regression", "Exact kernel regression: error, time and memory", rows, note, difference=apart, mib=memory)


if __name__ == "__main__":
    shrink = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    main((LARGE[0] // shrink, LARGE[1] // shrink), (SMALL[0] // shrink, SMALL[1] // shrink))
