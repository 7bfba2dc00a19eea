"""A mutation: one known fault, as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {
    "kernels": "shared/kernels/src/foak/kernels",
    "core": "packages/core/src/foak/core",
    "fast_kernels": "packages/fast-kernels/src/foak/fast_kernels",
    "quantized_peft": "packages/quantized-peft/src/foak/quantized_peft",
    "padding_free": "packages/padding-free/src/foak/padding_free",
}
TESTS = {
    "kernels": "shared/kernels/tests",
    "core": "packages/core/tests",
    "fast_kernels": "packages/fast-kernels/tests",
    "quantized_peft": "packages/quantized-peft/tests",
    "padding_free": "packages/padding-free/tests",
    "integration": "integration-tests",
}


class StaleMutation(Exception):
    """A mutation's text is not in its file exactly once: the mutation must be brought up to date."""


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: what it does wrong.
        file: in which source, as ``package/path`` with a package of `SOURCES`.
        text: what stands there, exactly once.
        replacement: what the fault makes of it.
        tests: which must fail, as ``package/path`` with a package of `TESTS`, each a file or a test in one.
        more: further texts and what becomes of each, where one place guards what another would let through.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    more: tuple[tuple[str, str], ...] = ()

    @property
    def package(self) -> str:
        """The package that it is in."""
        return self.file.partition("/")[0]

    def path_in(self, root: Path) -> Path:
        """Its file below a copy of the repository's folders."""
        return root / SOURCES[self.package] / self.file.partition("/")[2]

    @property
    def selected(self) -> list[str]:
        """The tests as pytest takes them, from the repository's root."""
        return [f"{TESTS[package]}/{path}" for package, _, path in (test.partition("/") for test in self.tests)]

    def check_tests(self, root: Path) -> None:
        """Looks for the tests.

        Raises:
            StaleMutation: a file or a test is not there.
        """
        for test in self.selected:
            file, _, name = test.partition("::")
            path = root / file
            if not path.is_file():
                raise StaleMutation(f"{self.name}: there is no {path}")
            if name and f"def {name.partition('[')[0]}(" not in path.read_text(encoding="utf-8"):
                raise StaleMutation(f"{self.name}: there is no {name} in {path}")

    def mutated(self, root: Path) -> str:
        """The file's content with the fault in it.

        Raises:
            StaleMutation: the text is not there exactly once, or the fault is not even Python.
        """
        path = self.path_in(root)
        if not path.is_file():
            raise StaleMutation(f"{self.name}: there is no {path}")
        changed = path.read_text(encoding="utf-8")
        for text, replacement in ((self.text, self.replacement), *self.more):
            if changed.count(text) != 1:
                raise StaleMutation(f"{self.name}: {text!r} is {changed.count(text)} times in {path}, not once")
            changed = changed.replace(text, replacement)
        try:
            compile(changed, str(path), "exec")
        except SyntaxError as error:
            raise StaleMutation(f"{self.name}: {path} is no Python any more: {error}") from error
        return changed
