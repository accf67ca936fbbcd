"""Draw docs/img/cost.svg from bench/results: memory against length, and speed beside the kernels of others."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
INK, TEAL, LIGHT, GREY = "#7b8591", "#0d9488", "#5cc4b9", "#a3abb5"  # all of them read on white and on black
BARS = {"FA4": GREY, "cuDNN": GREY, "FlexAttention": GREY, "regard": TEAL, "regard, entropy": LIGHT}
PEERS = ("FlashAttention-4,\nplain", "cuDNN, plain", "FlexAttention,\nplain")
LABELS = (*PEERS, "regard, with lse\nand largest logit", "regard, with\nentropy too")


def rows(name: str) -> list[dict[str, float]]:
    """Return the rows of a table of results."""
    found: list[dict[str, float]] = json.loads((ROOT / f"bench/results/{name}.json").read_text("utf-8"))["rows"]
    return found


def speeds() -> list[float]:
    """TFLOP/s of each bar: the forward pass at head dim 128 and 16,384 tokens."""
    row = next(row for row in rows("gpu_forward") if row["case"] == "d128, n16384, full")
    return [row[column] for column in BARS]


def draw() -> Figure:
    """Return the figure."""
    figure = Figure(figsize=(9, 3.1), layout="constrained")
    memory, speed = figure.subplots(1, 2, width_ratios=[1, 1.15])

    tokens = [row["tokens"] for row in rows("memory")]
    for column, colour, label in (
        ("one n × n matrix, MiB", GREY, "one n × n matrix"),
        ("peak above inputs, MiB", TEAL, "observe, with backward"),
    ):
        values = [row[column] for row in rows("memory")]
        memory.loglog(tokens, values, "o-", color=colour)
        memory.annotate(
            f"{label}\n{values[-1]:,.0f} MiB", (tokens[-1], values[-1]), (9, -8), textcoords="offset points"
        )
    memory.set_title("Memory, one head", loc="left", size=11)
    memory.set_xticks(tokens, [f"{count:,}" for count in tokens], minor=False)
    memory.set_yticks([64, 256, 1024, 4096], ["64 MiB", "256 MiB", "1 GiB", "4 GiB"])
    memory.minorticks_off()
    memory.set_xlabel("tokens")

    values = speeds()
    bars = speed.barh(LABELS, values, color=list(BARS.values()), height=0.66)
    speed.bar_label(bars, [f"{value:.0f}" for value in values], padding=4)
    speed.invert_yaxis()
    speed.set_title("Forward, one H200, bf16", loc="left", size=11)
    speed.set_xlabel("TFLOP/s, 16,384 tokens, head dim 128")
    speed.tick_params(left=False)
    for axes in (memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
    speed.spines["left"].set_visible(False)
    return figure


def main() -> None:
    """Write the plot."""
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "regard", "font.size": 10, **ink}):
        path = ROOT / "docs/img/cost.svg"
        draw().savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text("utf-8").splitlines()) + "\n", "utf-8")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
