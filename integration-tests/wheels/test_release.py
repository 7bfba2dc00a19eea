"""Releases, tried in clones: what a tag must say, what is refused, and a package that runs ahead of its siblings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from workspace import PACKAGES, ROOT, affected, floors, package_of_tag


def git(folder: Path, *arguments: str) -> str:
    line = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost", *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def tool(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(folder / "tools" / script), *arguments]
    return subprocess.run(line, check=False, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the last commit, with this tree's tools."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    git(folder, "config", "user.name", "test")
    git(folder, "config", "user.email", "test@localhost")
    for tag in git(folder, "tag").split():
        git(folder, "tag", "--delete", tag)
    for script in (ROOT / "tools").glob("*.py"):
        (folder / "tools" / script.name).write_bytes(script.read_bytes())
    git(folder, "add", "tools")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=The tools of this tree")
    return folder


def write_fragment(clone: Path, name: str) -> None:
    (clone / PACKAGES[name].folder.relative_to(ROOT) / "changelog.d" / "+x.fixed.md").write_text("Something.\n")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "--message=A change")


def test_a_release_commits_and_tags_one_package(clone: Path) -> None:
    write_fragment(clone, "foak-kernels")
    made = tool(clone, "release.py", "make", "foak-kernels", "0.9.0")
    assert made.returncode == 0, made.stderr
    assert "git push origin HEAD foak-kernels-v0.9.0" in made.stdout
    changed = git(clone, "diff", "--name-only", "HEAD~1").splitlines()
    assert all(file.startswith("shared/kernels/") for file in changed)
    assert '__version__ = "0.9.0"' in (clone / "shared/kernels/src/foak/kernels/_version.py").read_text()
    assert "- Something." in tool(clone, "release.py", "notes", "foak-kernels-v0.9.0").stdout
    assert not list((clone / "shared/kernels/changelog.d").glob("*.md"))
    assert git(clone, "status", "--porcelain") == ""
    assert tool(clone, "release.py", "check", "foak-kernels-v0.9.0").returncode == 0

    wrong = tool(clone, "release.py", "check", "foak-kernels-v0.9.1")
    assert wrong.returncode == 1
    assert "_version.py says 0.9.0" in wrong.stderr
    again = tool(clone, "release.py", "make", "foak-kernels")
    assert "nothing to release" in again.stderr
    write_fragment(clone, "foak-kernels")
    assert "is below 0.9.0" in tool(clone, "release.py", "make", "foak-kernels", "0.8.0").stderr
    assert "is released already" in tool(clone, "release.py", "make", "foak-kernels", "0.9.0").stderr
    after = tool(clone, "release.py", "check", "foak-kernels-v0.9.0")
    assert "this commit has no such tag" in after.stderr
    assert "Committed and tagged foak-kernels-v0.9.1" in tool(clone, "release.py", "make", "foak-kernels").stdout


def test_a_package_is_not_released_before_the_siblings_that_it_requires(clone: Path) -> None:
    write_fragment(clone, "foak-padding-free")
    before = git(clone, "rev-parse", "HEAD")
    refused = tool(clone, "release.py", "make", "foak-padding-free")
    assert refused.returncode == 1
    assert "requires foak-core>=0.1,<0.2, whose floor is not released" in refused.stderr
    assert (git(clone, "rev-parse", "HEAD"), git(clone, "tag"), git(clone, "status", "--porcelain")) == (before, "", "")
    git(clone, "tag", "foak-core-v0.1.0")
    assert tool(clone, "release.py", "make", "foak-padding-free").returncode == 0


def test_a_change_that_needs_an_unreleased_sibling_is_caught(clone: Path, tmp_path: Path) -> None:
    """A plugin uses what its sibling has in the tree, but not in the oldest release that the plugin admits."""
    git(clone, "tag", "foak-core-v0.1.0")
    version = clone / "packages/core/src/foak/core/_version.py"
    version.write_text(version.read_text() + "NEW = 1\n")
    write_fragment(clone, "foak-core")

    def use(target: Path) -> subprocess.CompletedProcess[str]:
        built = tool(clone, "floors.py", "foak-padding-free", str(target / "wheels"))
        if built.returncode:
            return built
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", f"--target={target}"]
        wheels = [str(wheel) for wheel in (target / "wheels").glob("foak_core-*.whl")]
        subprocess.run([*pip, *wheels], check=True, capture_output=True)
        code = f"import sys; sys.path.insert(0, {str(target)!r}); from foak.core._version import NEW"
        return subprocess.run([sys.executable, "-S", "-c", code], check=False, capture_output=True, text=True)

    assert "cannot import name 'NEW'" in use(tmp_path / "old").stderr
    project = clone / "packages/padding-free/pyproject.toml"
    project.write_text(project.read_text().replace("foak-core>=0.1,", "foak-core>=0.1.1,"))
    unreleased = use(tmp_path / "unreleased")
    assert "whose floor is neither released nor the 0.1.0 of this tree" in unreleased.stderr
    git(clone, "commit", "--quiet", "--all", "--message=Require the new one")
    assert tool(clone, "release.py", "make", "foak-core", "patch").returncode == 0
    assert use(tmp_path / "released").returncode == 0


def test_a_tag_names_a_package_and_a_version() -> None:
    assert package_of_tag("foak-fast-kernels-v1.2.3") == (PACKAGES["foak-fast-kernels"], "1.2.3")
    for wrong in ("foak-core-0.1.0", "foak-core-v", "foak-nothing-v0.1.0", "v0.1.0", "foak-core-v0.1.0rc1"):
        with pytest.raises(ValueError, match="is no tag of a release"):
            package_of_tag(wrong)


def test_a_change_affects_the_package_and_its_dependants() -> None:
    plugins = {"foak-fast-kernels", "foak-padding-free", "foak-quantized-peft"}
    assert set(affected(["packages/core/src/foak/core/config.py"])) == {"foak-core", *plugins}
    assert set(affected(["shared/kernels/pyproject.toml"])) == {"foak-kernels", *plugins - {"foak-padding-free"}}
    assert affected(["packages/padding-free/tests/test_packing.py"]) == ["foak-padding-free"]
    assert affected(["docs/index.md", "README.md", "packages/core/README.md"]) == []
    assert set(affected(["constraints/ci.txt"])) == set(PACKAGES)


def test_every_requirement_has_one_lower_bound() -> None:
    assert floors()["torch"]
    assert not any(name.startswith("foak-") for name in floors())
