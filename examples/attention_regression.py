"""Attention as a regressor on real data: predict the progression of a disease from the most similar patients.

The diabetes data of scikit-learn: 442 patients, ten measurements, and the progression a year later. The bandwidths are
found by leave-one-out: one for all measurements, or one for each, which is more than 331 patients can determine. A
model of one measurement alone shows the fit, its band and the weights behind one prediction; the picture is written to
a temporary folder, and its path is printed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from regard.memory import KernelRegressor

ASKED = 0.05  # the body-mass index, in the data's own units, at which the prediction is explained


def draw(model: KernelRegressor, x: np.ndarray, y: np.ndarray) -> Figure:
    """Plot the points, the fit with its band, and the weight of each point at ASKED."""
    line = np.linspace(x.min(), x.max(), 300)[:, None]
    mean, deviation = model.predict(line, return_std=True)
    behind = model.explain([[ASKED]], k=len(x))
    weight = np.zeros(len(x))
    weight[behind.indices[0]] = behind.weights[0]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.fill_between(line[:, 0], mean - deviation, mean + deviation, alpha=0.2, label="± one standard deviation")
    above.scatter(x[:, 0], y, s=10 + 3000 * weight, alpha=0.5, color="grey", label="patients, sized by their weight")
    above.plot(line[:, 0], mean, linewidth=2, label=f"fit, h = {model.bandwidth_:.3g}")
    above.plot([ASKED], model.predict([[ASKED]]), "o", color="black", label="the prediction explained")
    above.set_ylabel("progression after a year")
    above.legend(loc="upper left")
    below.vlines(x[:, 0], 0, weight, linewidth=1)
    below.axvline(ASKED, linestyle=":", color="black")
    below.set_xlabel("body-mass index (centred and scaled)")
    below.set_ylabel("weight")
    return figure


def main() -> int:
    x, y = load_diabetes(return_X_y=True)
    train, test, known, hidden = train_test_split(x, y, test_size=0.25, random_state=0)
    alone = KernelRegressor().fit(train[:, 2:3], known)
    one, each = KernelRegressor().fit(train, known), KernelRegressor("cv-per-feature").fit(train, known)
    scores = {
        "body-mass index alone": alone.score(test[:, 2:3], hidden),
        "all ten, one bandwidth": one.score(test, hidden),
        "all ten, one bandwidth each": each.score(test, hidden),
    }
    for name, score in scores.items():
        print(f"R² on unseen patients, {name:30} {score:.3f}")
    wide = [name for name, h in zip(load_diabetes().feature_names, each.bandwidth_, strict=True) if h > 3 * x.std()]
    print(f"measurements that the search found uninformative: {', '.join(wide) or 'none'}")
    predicted, deviation = each.predict(test[:1], return_std=True)
    behind = each.explain(test[:1], k=5)
    print(f"a patient: {predicted[0]:.0f} ± {deviation[0]:.0f} predicted from those below, {hidden[0]:.0f} measured:")
    for weight, index, target in zip(*(part[0] for part in behind), strict=True):
        print(f"  patient {index:3}  weight {weight:.3f}  progression {target:.0f}")
    where = Path(tempfile.mkdtemp(prefix="regard-")) / "regression.png"
    draw(alone, train[:, 2:3], known).savefig(where, dpi=120)
    print(f"the fit, its band and the weights behind one prediction: {where}")
    return 0 if 0.1 < scores["body-mass index alone"] < scores["all ten, one bandwidth"] else 1


if __name__ == "__main__":
    sys.exit(main())
