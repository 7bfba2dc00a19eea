"""The loss plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["plot_loss"]


def plot_loss(
    path: Path,
    steps: Sequence[int],
    loss: Sequence[float],
    eval_loss: Sequence[tuple[int, float]] = (),
    *,
    title: str = "",
) -> None:
    """Draws training and held-out loss over steps into a PNG file.

    A figure of its own on the Agg canvas: neither pyplot's state nor its settings are touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, loss, marker="o", markersize=3, linewidth=1.2, label="training loss")
    if eval_loss:
        axes.plot(
            *zip(*eval_loss, strict=True),
            marker="s",
            markersize=5,
            linestyle="--",
            linewidth=1.2,
            label="held-out loss",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        figure.savefig(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
