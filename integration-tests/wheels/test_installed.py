"""The wheels, installed: all import side by side, and each can go without harm to the others."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from workspace import PACKAGES

IMPORT = """
import importlib, importlib.metadata, json, pkgutil, sys
found = {}
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    found[name] = package.__file__
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith("__main__"):
            found[module.name] = importlib.import_module(module.name).__file__
for group in ("foak.plugins", "foak.dense_weights", "console_scripts"):
    for entry in importlib.metadata.entry_points(group=group):
        if entry.module.startswith(tuple(f"{name}." for name in sys.argv[1:])):
            entry.load()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Installed:
    """An environment with the wheels in it, and everything else from the environment that runs the tests."""

    python: Path
    site: Path
    dist: Path

    def pip(self, *arguments: str) -> None:
        line = [sys.executable, "-m", "pip", "--quiet", "--python", str(self.python), *arguments]
        subprocess.run(line, check=True, capture_output=True)

    def install(self, *names: str) -> None:
        # pip sees what the other environment holds, too.
        how = ("--ignore-installed", "--no-index", "--no-deps", "--no-compile")
        self.pip("install", *how, f"--find-links={self.dist}", *names)

    def modules(self, *names: str) -> dict[str, str]:
        """Imports packages with all of their modules: name to file."""
        line = [self.python, "-P", "-B", "-c", IMPORT, *(PACKAGES[name].module for name in names)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found

    def files(self) -> dict[str, str]:
        """Every file of the wheels to its checksum."""
        return {
            str(file.relative_to(self.site)): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in self.site.rglob("*")
            if file.is_file() and file.relative_to(self.site).parts[0].startswith("foak")
        }


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path in a .pth file is searched, but the .pth files in it are not read: an editable foak does not shine through.
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (site / "everything-else.pth").write_text(f"{Path(torch.origin).parents[1]}\n", encoding="utf-8")
    made = Installed(folder / "bin" / "python", site, dist)
    made.install(*PACKAGES)
    return made


def test_everything_imports_side_by_side(installed: Installed) -> None:
    found = installed.modules(*PACKAGES)
    assert all(Path(file).is_relative_to(installed.site) for file in found.values())
    written = {
        f"{package.module}.{'.'.join(path.relative_to(package.source).with_suffix('').parts)}".removesuffix(".__init__")
        for package in PACKAGES.values()
        for path in package.source.rglob("*.py")
        if path.name != "__main__.py"
    }
    assert set(found) == written
    assert not (installed.site / "foak" / "__init__.py").exists()


@pytest.mark.parametrize("gone", PACKAGES)
def test_uninstalling_one_leaves_the_others_whole(installed: Installed, gone: str) -> None:
    before = installed.files()
    own = (f"{PACKAGES[gone].module.replace('.', '/')}/", f"{gone.replace('-', '_')}-")
    installed.pip("uninstall", "--yes", gone)
    try:
        left = {file: digest for file, digest in before.items() if not file.startswith(own)}
        assert left
        assert installed.files() == left
    finally:
        installed.install(gone)
    assert installed.files() == before
