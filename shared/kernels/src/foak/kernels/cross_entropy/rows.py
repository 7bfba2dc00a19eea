"""What the row functions of both implementations read and write, and which implementation's run.

The row functions are the arithmetic of a loss on logits [n, V], without autograd; `plain.py` and `triton.py` have both:

    forward_rows(logits, labels, out, options, gradient=None, overwrite=False)
        fills `out`; when `gradient` [n, V] is given, also writes d loss / d logits of every row into it.
    gradient_rows(logits, labels, saved, upstream, options, gradient)
        writes the gradient of `upstream` weighted outputs into `gradient`, from what `forward_rows` left in `saved`.

`gradient` may be `logits` itself, which is then overwritten; else `logits` is left as it is, unless `overwrite` allows
to use its memory.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from foak.kernels.backend import Backend
from foak.kernels.cross_entropy.options import LossOptions
from foak.kernels.cross_entropy.stats import TokenStats

_ALWAYS = ("lse", "miss", "loss")


class RowBuffers(NamedTuple):
    """Numbers per row of logits, float32 (float64 for float64 logits), one tensor for all of them.

    lse: logsumexp of the logits. miss: one minus the label's probability, as the sum of the others', so that it keeps
    its relative accuracy when the label is almost certain. loss: of the token. Then what was asked for of TokenStats.
    """

    values: Tensor  # [fields, n]
    fields: tuple[str, ...]

    @classmethod
    def allocate(
        cls, count: int, like: Tensor, dtype: torch.dtype, options: LossOptions, wanted: Sequence[str]
    ) -> Self:
        """Room for `count` rows on the device of `like`, uninitialised."""
        fields = (*_ALWAYS, *(name for name in wanted if not (name == "log_probs" and options.is_plain)))
        return cls(torch.empty((len(fields), count), dtype=dtype, device=like.device), fields)

    def position(self, name: str) -> int:
        """The index of a field in `values`; -1 when it was not asked for."""
        return position_of(name, self.fields)

    def get(self, name: str) -> Tensor:
        """A field, [n]."""
        return self.values[self.fields.index(name)]

    def rows(self, span: slice) -> Self:
        """The same fields of the rows in `span`, sharing memory."""
        return self._replace(values=self.values[:, span])

    def stats(self, wanted: Sequence[str]) -> TokenStats:
        """The `wanted` statistics of these rows, [n] each."""
        found: dict[str, Tensor] = {}
        for name in wanted:
            if name == "is_top1":
                found[name] = self.get(name) != 0
            elif name in self.fields:
                found[name] = self.get(name)
            else:  # log_probs, which is the negative of a plain loss
                found[name] = -self.get("loss")
        return TokenStats(**found)


def position_of(name: str, fields: Sequence[str]) -> int:
    """The index of `name` in `fields`; -1 where it is not."""
    return fields.index(name) if name in fields else -1


class Upstream(NamedTuple):
    """The gradients that flow into a row's outputs, [n] each and contiguous; None where nothing flows."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None

    def rows(self, span: slice) -> "Upstream":
        """Those of the rows in `span`."""
        return Upstream(*(None if value is None else value[span] for value in self))

    def folded(self, options: LossOptions) -> "Upstream":
        """The same with the log-probabilities' part counted as the loss's, where the loss is their negative."""
        if self.log_probs is None or not options.is_plain:
            return self
        return Upstream(-self.log_probs if self.loss is None else self.loss - self.log_probs, None, self.entropy)


def row_functions(backend: Backend) -> ModuleType:
    """The module whose `forward_rows` and `gradient_rows` run. Imports triton when they are kernels."""
    if backend == "triton":
        from foak.kernels.cross_entropy import triton

        return triton
    from foak.kernels.cross_entropy import plain

    return plain
