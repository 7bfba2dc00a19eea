"""The patcher: offers every module of a model to every rule, verifies, binds, reports, and takes it all off again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from foak.core.errors import UnsupportedError
from foak.core.patching import binding as bindings
from foak.core.patching.rebinding import called_global, rebind
from foak.core.patching.rule import NotApplicable, Rule
from foak.core.patching.structure import structure
from foak.core.patching.twin import is_tensor_parallel, parameters_of, stand_in, trial_device
from foak.core.patching.verify import Verdict, compare, isolated
from foak.core.report import PatchRecord, PatchReport

_ABSENT = object()


@dataclass
class _Plan:
    """What the rules have settled on for one module, before anything is bound."""

    module: nn.Module
    replacement: Callable[..., Any] | None = None
    replaced_by: str = ""
    functions: dict[str, Any] = field(default_factory=dict)
    functions_by: dict[str, str] = field(default_factory=dict)
    wrappers: list[tuple[str, Callable[..., Any]]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    attributes_by: dict[str, str] = field(default_factory=dict)

    @property
    def forward_rules(self) -> tuple[str, ...]:
        names = [self.replaced_by] if self.replaced_by else []
        return (*names, *self.functions_by.values(), *(name for name, _ in self.wrappers))


class ModelPatcher:
    """Applies rules to one model, per module instance.

    No class, no module of Python and no other model is changed, so two patchers cannot undo one another. Within one
    patcher, rules on the same module compose when they replace different things (a function that the forward calls, the
    whole forward, a wrapper around it); where two want the same thing the second is kept out and the report names both.
    """

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.report = PatchReport()
        self._bound: list[tuple[nn.Module, bindings.Binding]] = []
        self._attributes: list[tuple[Any, str, Any, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._verdicts: dict[Hashable, Verdict] = {}
        self._rebound: dict[Hashable, Callable[..., Any]] = {}

    def add(self, rule: Rule) -> None:
        """Add a rule; raises ``ValueError`` for a name that is taken."""
        if any(rule.name == other.name for other in self.rules):
            raise ValueError(f"a rule named {rule.name!r} was added already")
        self.rules.append(rule)

    def apply(self, model: nn.Module, *, strict: bool = True) -> PatchReport:
        """Offer every module of a model to every rule, and bind what passes verification.

        Args:
            model: the model; on the meta device nothing but stand-ins on the CPU computes.
            strict: refuse a model in which rules that were asked for by name found nothing of their kind.

        Returns:
            The report: one record for each pair of a rule and a module that it matched.

        Raises:
            UnsupportedError: under ``strict``, naming the configuration keys; nothing is patched then.
        """
        report = PatchReport()
        report.notes += self.report.notes  # what plugins have said before
        self.report = report  # and may say later
        plans: list[_Plan] = []
        for name, module in model.named_modules():
            plan = _Plan(module)
            for rule in self.rules:
                record = self._consider(rule, name, module, plan)
                if record is not None:
                    report.records.append(record)
            if plan.forward_rules or plan.attributes:
                plans.append(plan)
        unserved = self._unserved(model, report)
        if unserved is not None:
            if strict:
                raise UnsupportedError(unserved)
            report.notes.append(unserved)
        for plan in plans:
            self._bind(plan)
        return report

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an instance attribute of any object.

        `restore` puts back what was there, or its absence, unless somebody has set it anew since.
        """
        self._attributes.append((owner, name, owner.__dict__.get(name, _ABSENT), value))
        setattr(owner, name, value)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Have `restore` call a function, for what is neither a forward nor a fixed attribute (a hook)."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Take everything off, last first. What others have wrapped since stays theirs, and passes through ours.

        Raises: the first error of what was registered with `on_restore`, after everything else is off.
        """
        first: BaseException | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except BaseException as error:  # noqa: BLE001  (raised below)
                first = error if first is None else first
        while self._attributes:
            owner, name, before, ours = self._attributes.pop()
            if owner.__dict__.get(name, _ABSENT) is not ours:
                continue
            if before is _ABSENT:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = before
        while self._bound:
            module, binding = self._bound.pop()
            binding.remove(module)
        if first is not None:
            raise first

    # -- one rule and one module ------------------------------------------------------------------------------------

    def _consider(self, rule: Rule, name: str, module: nn.Module, plan: _Plan) -> PatchRecord | None:
        try:
            reason = rule.match(module)
        except NotApplicable as error:
            return _record(rule, name, module, "kept", str(error))
        if reason is None:
            return None
        refusal = self._refusal(rule, module, plan)
        if refusal is not None:
            return _record(rule, name, module, "kept", refusal)
        try:
            verdict = self._verify(rule, module)
            replacement = rule.build(module) if verdict.passed else None
        except NotApplicable as error:
            return _record(rule, name, module, "kept", str(error))
        if replacement is None:
            return _record(rule, name, module, "kept", verdict.reason)
        if rule.wraps:
            plan.wrappers.append((rule.name, replacement))
        elif rule.attribute_name is not None:
            plan.attributes[rule.attribute_name] = replacement
            plan.attributes_by[rule.attribute_name] = rule.name
        elif rule.function_name is not None:
            plan.functions[rule.function_name] = replacement
            plan.functions_by[rule.function_name] = rule.name
        else:
            plan.replacement, plan.replaced_by = replacement, rule.name
        return _record(rule, name, module, "patched", f"{reason}; {verdict.reason}" if verdict.reason else reason)

    def _refusal(self, rule: Rule, module: nn.Module, plan: _Plan) -> str | None:
        """Why a rule cannot have its target on this module, whoever holds it; None if it can."""
        attribute = rule.attribute_name
        if attribute is not None:
            if attribute in plan.attributes_by:
                return f"{attribute} is replaced already, by {plan.attributes_by[attribute]}, not by {rule.name}"
            if module.__dict__.get(attribute) is rule.build(module):
                return f"{attribute} is replaced already, by {rule.name} of another framework"
            return None
        earlier = bindings.binding_of(module)
        if earlier is not None and not rule.wraps:
            return f"the forward is patched already, by {', '.join(earlier.rules)}; {rule.name} was not added to it"
        if is_tensor_parallel(module):
            return "its parameters are sharded (DTensor); apply foak before sharding"
        if any(parameter.numel() == 0 for parameter in module.parameters()):
            return "its parameters are partitioned (DeepSpeed ZeRO-3), so nothing can be tried on it"
        function_name = rule.function_name
        if function_name is not None:
            if function_name in plan.functions_by:
                return f"{function_name} is replaced already, by {plan.functions_by[function_name]}, not by {rule.name}"
            if plan.replaced_by:
                return f"the whole forward is replaced by {plan.replaced_by}, so {rule.name} has no call to replace"
        elif not rule.wraps:
            if plan.replaced_by:
                return f"the forward is replaced already, by {plan.replaced_by}, not by {rule.name}"
            if plan.functions_by:
                others = ", ".join(plan.functions_by.values())
                return f"the forward's calls are replaced by {others}, so {rule.name} must leave the forward"
            if bindings.own_forward(module) is None:
                return "somebody else has replaced this instance's forward"
        return None

    # -- verification -----------------------------------------------------------------------------------------------

    def _verify(self, rule: Rule, module: nn.Module) -> Verdict:
        if rule.verify is None and rule.wraps:
            return Verdict(True, "")
        called = None if rule.function_name is None else id(_called(rule, module))
        variant = None if rule.variant is None else rule.variant(module)
        key = (rule.name, structure(module, whole_forward=called is None), called, variant)
        if key not in self._verdicts:
            with isolated(trial_device(module)):
                self._verdicts[key] = rule.verify(module) if rule.verify else self._try(rule, module)
        return self._verdicts[key]

    def _try(self, rule: Rule, module: nn.Module) -> Verdict:
        if rule.function_name is not None:
            called, replacement = _called(rule, module), rule.build(module)
            trials: Iterator[Verdict] = (
                compare(called, replacement, args, kwargs) for args, kwargs in rule.cases(module)
            )
        else:
            trials = self._try_forward(rule, module)
        verdict = Verdict(False, "the rule has no trial call")
        for verdict in trials:
            if not verdict.passed:
                break
        return verdict

    def _try_forward(self, rule: Rule, module: nn.Module) -> Iterator[Verdict]:
        forward = bindings.own_forward(module)
        assert forward is not None  # `_refusal` has looked
        twin = stand_in(module)
        wide = copy.deepcopy(twin).double()
        replacement = rule.build(twin)
        cases = [(module.training, case) for case in rule.cases(twin)]
        # The model may change its mode later: a dropout that is silent now must be noticed.
        for training, (args, kwargs) in [*cases, (not module.training, rule.sample(twin))]:
            twin.train(training)
            wide.train(training)
            yield compare(
                functools.partial(forward, twin),
                functools.partial(replacement, twin),
                args,
                kwargs,
                parameters=parameters_of(twin),
                wide=functools.partial(forward, wide),
                wide_parameters=parameters_of(wide),
            )

    # -- binding ----------------------------------------------------------------------------------------------------

    def _bind(self, plan: _Plan) -> None:
        module = plan.module
        for name, value in plan.attributes.items():
            self.set_attribute(module, name, value)
        if not plan.forward_rules:
            return
        replacement = plan.replacement
        if plan.functions:
            current = bindings.current_function(module, bindings.forward_slot(module))
            key = (id(current), *((name, id(value)) for name, value in sorted(plan.functions.items())))
            if key not in self._rebound:
                self._rebound[key] = rebind(current, plan.functions)  # type: ignore[arg-type]
            replacement = self._rebound[key]
        binding = bindings.bind(module, plan.forward_rules, replacement, [wrapper for _, wrapper in plan.wrappers])
        self._bound.append((module, binding))

    def _unserved(self, model: nn.Module, report: PatchReport) -> str | None:
        """A sentence on what was asked for by name and has nothing of its kind in the model; None if all was served."""
        served = {record.rule for record in report.records}
        keys = {rule.key for rule in self.rules if rule.key}
        unserved = sorted(k for k in keys if not any(r.name in served for r in self.rules if r.key == k))
        if not unserved:
            return None
        kernels = "; ".join(
            f"{key} ({', '.join(rule.kernel or rule.name for rule in self.rules if rule.key == key)})"
            for key in unserved
        )
        return (
            f"{type(model).__name__} has no module that could take what was asked for by name: {kernels}. "
            "Set the key to false, or to auto to have it used where it fits."
        )


def _record(rule: Rule, name: str, module: nn.Module, outcome: Any, reason: str) -> PatchRecord:
    return PatchRecord(name, type(module).__name__, rule.name, rule.kernel or rule.name, outcome, reason)


def _called(rule: Rule, module: nn.Module) -> Callable[..., Any]:
    assert rule.function_name is not None
    forward = bindings.current_function(module, bindings.forward_slot(module))
    function = called_global(forward, rule.function_name)
    if function is None:
        raise NotApplicable(f"its forward calls nothing by the name {rule.function_name}")
    return function  # type: ignore[no-any-return]
