"""What a plugin says about one kind of module: how to recognise it, how to try it, and what to put in its place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from foak.core.patching.verify import Verdict

Case = tuple[tuple[Any, ...], dict[str, Any]]
"""One call: positional and keyword arguments."""


class NotApplicable(Exception):
    """Raised by a rule's functions: the module is of the rule's kind, but the original must stay, for this reason."""


@dataclass(frozen=True)
class Rule:
    """One replacement that is offered to every module of a model.

    Attributes:
        name: unique within a patcher; stands in the report and in every refusal.
        target: what is replaced: ``"forward"``, the module's forward; ``"forward:NAME"``, the function that the
            module's forward calls by its global name ``NAME`` (also through decorators); or ``"attribute:NAME"``, an
            attribute of the instance.
        match: says why the module is of this rule's kind (one short sentence for the report), or None if it is not.
            It decides by structure, and must not look at values of parameters: they may be on the meta device.
        sample: arguments of one trial call. For ``"forward"`` it gets the module's stand-in (see
            ``foak.core.patching.twin``), else the module. It draws from torch's default generator, which is seeded and
            put back around it.
        build: the replacement. For ``"forward"``: a function whose first argument is the module; for
            ``"forward:NAME"``: a callable with the signature of ``NAME``; for ``"attribute:NAME"``: the value, and the
            rule needs ``verify``. It must not close over the module (which is a stand-in during verification).
        kernel: what runs instead, for the report; the rule's name by default.
        key: the dotted configuration key by which a user asked for this rule, if it was asked for by name. A model
            without any module that the rules of one key match is then refused.
        wraps: the replacement calls what was there before. ``build`` then gives a function that is called as
            ``wrapper(inner, module, *args, **kwargs)`` with ``inner(module, *args, **kwargs)`` being what it wraps.
            Wrappers are not compared with the original by the patcher: give ``verify`` where they compute.
        more_samples: further trial calls, where one cannot show all that the replacement must get right.
        verify: replaces the standard verification, where a single call of the module is no fair comparison.
        variant: what tells two modules apart that are of one structure (see ``foak.core.patching.structure``), where
            that leaves something out; each variant is verified by itself.
    """

    name: str
    target: str
    match: Callable[[nn.Module], str | None]
    sample: Callable[[nn.Module], Case]
    build: Callable[[nn.Module], Callable[..., Any]]
    kernel: str = ""
    key: str | None = None
    wraps: bool = False
    more_samples: Callable[[nn.Module], Iterable[Case]] | None = None
    verify: Callable[[nn.Module], Verdict] | None = None
    variant: Callable[[nn.Module], Hashable] | None = None

    def __post_init__(self) -> None:
        """Check the target's form; raises ``ValueError``."""
        kind, colon, name = self.target.partition(":")
        if kind not in ("forward", "attribute") or bool(colon) != name.isidentifier() or self.target == "attribute":
            raise ValueError(
                f"rule {self.name!r}: target {self.target!r} is none of 'forward', 'forward:NAME' and 'attribute:NAME'"
            )
        if self.wraps and self.target != "forward":
            raise ValueError(f"rule {self.name!r}: only a whole forward can be wrapped, not {self.target!r}")
        if self.attribute_name is not None and self.verify is None:
            raise ValueError(f"rule {self.name!r}: a rule on an attribute needs its own `verify`")

    @property
    def function_name(self) -> str | None:
        """The global name that is replaced in the forward, or None for another target."""
        return self.target.removeprefix("forward:") if self.target.startswith("forward:") else None

    @property
    def attribute_name(self) -> str | None:
        """The instance attribute that is replaced, or None for another target."""
        return self.target.removeprefix("attribute:") if self.target.startswith("attribute:") else None

    def cases(self, module: nn.Module) -> list[Case]:
        """All trial calls for a module (its stand-in)."""
        more = self.more_samples(module) if self.more_samples is not None else ()
        return [self.sample(module), *more]
