"""Releases one package: raises its version, writes its changelog from the fragments, commits, tags, checks.

    python tools/release.py make foak-core [patch | minor | 0.2.0]   commit and tag; pushing the tag publishes
    python tools/release.py dry-run [foak-core …]                    the same in a clone, and the artefacts of it
    python tools/release.py check foak-core-v0.2.0                   does the tag say what the tree says?
    python tools/release.py notes foak-core-v0.2.0                   its part of the changelog
    python tools/release.py tag foak-core                            the tag of the version in the tree
    python tools/release.py build dist [foak-core …]                 builds and checks sdists and wheels

`make` without a version takes the one in the tree if it has no tag yet, else the next patch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from workspace import PACKAGES, ROOT, Package, package_of_tag

__all__ = ["NotReleasable", "build", "check", "dry_run", "fragments", "make", "next_version", "notes", "released_floor"]


class NotReleasable(Exception):
    """What stands in the way of a release, in a sentence."""


def git(*arguments: str, root: Path = ROOT) -> str:
    """What a git command prints."""
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def tags() -> set[str]:
    return set(git("tag", "--list", "foak-*-v*").split())


def fragments(package: Package) -> list[Path]:
    """The changelog fragments that no release has taken up yet."""
    return sorted((package.folder / "changelog.d").glob("*.md"))


def next_version(package: Package, wish: str | None) -> str:
    """The version that a release makes.

    Args:
        package: the package.
        wish: `patch`, `minor`, a version, or None: the version in the tree if it is not released, else the next patch.

    Raises:
        NotReleasable: the version is no version, is released, or is below the tree's.
    """
    current = tuple(int(part) for part in package.version.split("."))
    major, minor, patch = current
    released = package.tag in tags()
    if wish is None:
        wish = "patch" if released else package.version
    if wish in ("patch", "minor"):
        return f"{major}.{minor}.{patch + 1}" if wish == "patch" else f"{major}.{minor + 1}.0"
    if not re.fullmatch(r"\d+\.\d+\.\d+", wish):
        raise NotReleasable(f"{wish!r} is no version: patch, minor, or three numbers such as 0.2.0")
    if tuple(int(part) for part in wish.split(".")) < current:
        raise NotReleasable(f"{package.name} {wish} is below {package.version}, which is in the tree")
    if f"{package.name}-v{wish}" in tags():
        raise NotReleasable(f"{package.name} {wish} is released already")
    return wish


def make(package: Package, wish: str | None) -> str:
    """Commits and tags a release.

    Returns:
        The tag.

    Raises:
        NotReleasable: the tree has uncommitted changes, there is nothing new, or `check` says no.
    """
    if git("status", "--porcelain", "--untracked-files=no"):
        raise NotReleasable("there are uncommitted changes: commit them first")
    if not fragments(package):
        raise NotReleasable(f"{package.name} has no fragment in changelog.d: nothing to release")
    version = next_version(package, wish)
    check_siblings(package)
    package.set_version(version)
    towncrier = ("towncrier", "build", "--yes", f"--version={version}", "--config=pyproject.toml", "--dir=.")
    subprocess.run([sys.executable, "-m", *towncrier], check=True, cwd=package.folder, stdout=subprocess.DEVNULL)
    git("add", str(package.version_file))
    git("commit", "--quiet", f"--message=Release {package.name} {version}", "--", str(package.folder))
    git("tag", "--annotate", package.tag, f"--message={package.name} {version}")
    check(package.tag)
    return package.tag


def check(tag: str) -> None:
    """Holds a tag against the tree.

    Raises:
        ValueError: the tag names no package.
        NotReleasable: it says another version than `_version.py`, is not on this commit, the changelog does not begin
            with it, fragments are left, or a sibling's declared floor is not released.
    """
    package, version = package_of_tag(tag)
    if version != package.version:
        raise NotReleasable(f"{tag}: {package.version_file.relative_to(ROOT)} says {package.version}")
    if tag not in tags() or git("rev-list", "-n1", tag) != git("rev-parse", "HEAD"):
        raise NotReleasable(f"{tag}: this commit has no such tag")
    first = re.search(r"^## (\S+) \(", (package.folder / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if first is None or first[1] != version:
        raise NotReleasable(f"{tag}: CHANGELOG.md begins with {first[1] if first else 'nothing'}")
    if left := fragments(package):
        raise NotReleasable(f"{tag}: fragments are left: {', '.join(path.name for path in left)}")
    check_siblings(package)


def check_siblings(package: Package) -> None:
    """Raises `NotReleasable` where the floor that a package declares for a sibling is not released."""
    for sibling in package.siblings:
        if released_floor(package, sibling) is None:
            wanted = f"{sibling}{package.requirement(sibling)}"
            raise NotReleasable(f"{package.name} requires {wanted}, whose floor is not released: release it first")


def released_floor(package: Package, sibling: str) -> str | None:
    """The tag of the oldest version that a package admits of a sibling; None if that version has none."""
    floor = package.requirement(sibling).removeprefix(">=").partition(",")[0]
    return next((tag for tag in tags() if re.fullmatch(rf"{sibling}-v{re.escape(floor)}(\.0)*", tag)), None)


def notes(tag: str) -> str:
    """What the changelog says about a release."""
    package, version = package_of_tag(tag)
    text = (package.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version)} \(.*?\)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise NotReleasable(f"{tag}: CHANGELOG.md does not have {version}")
    return found[1].strip() + "\n"


def build(package: Package, target: Path) -> list[Path]:
    """Builds the sdist, and the wheel from it, into a folder, and checks both with twine and check-wheel-contents."""
    python = (sys.executable, "-m")
    line = (*python, "build", "--no-isolation", f"--outdir={target}", str(package.folder))
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    made = [target / f"{stem}-py3-none-any.whl", target / f"{stem}.tar.gz"]
    subprocess.run([*python, "twine", "check", "--strict", *made], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*python, "check_wheel_contents", made[0]], check=True, stdout=subprocess.DEVNULL)
    return made


def dry_run(names: list[str]) -> None:
    """Releases packages, each alone in a clone of the last commit, and builds what would be published.

    Siblings that are not released yet are taken as released in the version of the tree.
    """
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "clone"
            git("clone", "--quiet", str(ROOT), str(clone))
            git("config", "user.name", "dry run", root=clone)
            git("config", "user.email", "dry-run@localhost", root=clone)
            for sibling in PACKAGES[name].siblings:
                if not any(tag.startswith(f"{sibling}-v") for tag in tags()):
                    git("tag", PACKAGES[sibling].tag, root=clone)
            # The clone's own copy of this script: it works on the tree that it lies in.
            subprocess.run([sys.executable, clone / "tools" / "release.py", "rehearse", name], check=True)


def rehearse(package: Package) -> None:
    """In a clone: releases a package, holds everything about it against what is expected, and says what it saw."""
    before = {name: other.version for name, other in PACKAGES.items()}
    tag = make(package, "patch" if package.tag in tags() else None)
    if before[package.name] == package.version:
        # A first release keeps its version; the next one shows that a version is raised.
        (package.folder / "changelog.d" / "+rehearsal.fixed.md").write_text("A rehearsal.\n", encoding="utf-8")
        git("add", str(package.folder / "changelog.d"))
        git("commit", "--quiet", "--message=A change")
        first, tag = tag, make(package, "patch")
        print(f"{first} would be the first release; {tag} the one after it")
    changed = git("diff", "--name-only", f"{tag}~1", tag).splitlines()
    outside = [file for file in changed if not (ROOT / file).is_relative_to(package.folder)]
    assert not outside, f"a release of {package.name} changes {outside}"
    assert all(other.version == before[name] for name, other in PACKAGES.items() if name != package.name)
    try:
        check(f"{package.name}-v99.0.0")
    except NotReleasable as refused:
        print(f"a wrong tag is refused: {refused}")
    else:
        raise AssertionError("a tag of another version passed the check")
    with tempfile.TemporaryDirectory() as folder:
        for artefact in build(package, Path(folder)):
            print(f"{artefact.name}  {artefact.stat().st_size / 1024:.0f} KiB")
            if artefact.suffix == ".whl":
                with zipfile.ZipFile(artefact) as archive:
                    (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
                    assert f"\nVersion: {package.version}\n" in archive.read(metadata).decode()
    for name, other in PACKAGES.items():
        if package.name in other.siblings:
            print(f"{name} {other.version} requires {package.name}{other.requirement(package.name)}")
    print(f"{tag}: {len(notes(tag).splitlines())} lines of changelog, {len(changed)} files changed\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    line = commands.add_parser("make")
    line.add_argument("package", choices=PACKAGES)
    line.add_argument("version", nargs="?")
    commands.add_parser("dry-run").add_argument("packages", nargs="*", metavar="PACKAGE")
    for name in ("rehearse", "tag"):
        commands.add_parser(name).add_argument("package", choices=PACKAGES)
    line = commands.add_parser("build")
    line.add_argument("target", type=Path)
    line.add_argument("packages", nargs="*", metavar="PACKAGE")
    for name in ("check", "notes"):
        commands.add_parser(name).add_argument("tag")
    given = parser.parse_args()
    try:
        if given.command == "make":
            tag = make(PACKAGES[given.package], given.version)
            print(f"Committed and tagged {tag}. Publish it with: git push origin HEAD {tag}")
        elif given.command in ("dry-run", "build"):
            if unknown := set(given.packages) - set(PACKAGES):
                parser.error(f"no package: {', '.join(sorted(unknown))}")
            names = given.packages or list(PACKAGES)
            if given.command == "dry-run":
                dry_run(names)
            else:
                print(*(made for name in names for made in build(PACKAGES[name], given.target)), sep="\n")
        elif given.command == "rehearse":
            rehearse(PACKAGES[given.package])
        elif given.command == "tag":
            print(PACKAGES[given.package].tag)
        elif given.command == "check":
            check(given.tag)
        else:
            print(notes(given.tag), end="")
    except (NotReleasable, ValueError) as stop:
        sys.exit(str(stop))


if __name__ == "__main__":
    main()
