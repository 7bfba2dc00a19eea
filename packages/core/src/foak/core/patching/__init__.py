"""Patching of single module instances: found by structure, verified, reversible and reported."""

from foak.core.patching.patcher import ModelPatcher
from foak.core.patching.rule import NotApplicable, Rule
from foak.core.patching.verify import Verdict, compare

__all__ = ["ModelPatcher", "NotApplicable", "Rule", "Verdict", "compare"]
