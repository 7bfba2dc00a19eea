"""Scatter plots of a comparison: one for each metric, the reference on x, the new run on y."""

from __future__ import annotations

from pathlib import Path

from foak_bench.comparison import METRICS, Comparison, Thresholds

__all__ = ["draw"]

_COLOURS = {"equal": "0.45", "better": "tab:green", "worse": "tab:red"}


def draw(comparison: Comparison, thresholds: Thresholds, folder: Path) -> list[Path]:
    """Writes `throughput.png`, `memory.png` and `loss.png`, with the line y = x, the band of the threshold, and a name
    beside every point outside of it; returns their paths."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for metric in METRICS:
        points = [found for found in comparison.differences if found.metric == metric.name]
        if not points:
            continue
        allowed = getattr(thresholds, metric.name)
        figure = Figure(figsize=(6, 6), dpi=100, layout="constrained")
        axes = figure.add_subplot()
        values = [value for point in points for value in (point.reference, point.new) if value == value]
        low, high = min(values), max(values)
        margin = 0.05 * (high - low) or 0.05 * high
        ends = (low - margin, high + margin)
        axes.plot(ends, ends, color="0.2", linewidth=1, label="y = x")
        axes.fill_between(
            ends,
            [end * (1 - allowed) for end in ends],
            [end * (1 + allowed) for end in ends],
            color="0.9",
            label=f"± {allowed:.0%}",
        )
        for outcome, colour in _COLOURS.items():
            chosen = [point for point in points if point.outcome == outcome]
            if chosen:
                axes.scatter([p.reference for p in chosen], [p.new for p in chosen], c=colour, s=18, label=outcome)
        for point in points:
            if point.outcome != "equal":
                right = point.reference > sum(ends) / 2
                axes.annotate(
                    f"{point.scenario} ({point.change:+.1%})",
                    (point.reference, point.new),
                    xytext=(-5 if right else 5, 4),
                    textcoords="offset points",
                    horizontalalignment="right" if right else "left",
                    fontsize=6,
                )
        axes.set(xlim=ends, ylim=ends, xlabel=f"REF: {metric.label}", ylabel=f"NEW: {metric.label}", aspect="equal")
        axes.legend(loc="upper left", frameon=False)
        path = folder / f"{metric.name}.png"
        figure.savefig(path)
        written.append(path)
    return written
