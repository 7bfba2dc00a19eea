"""What changed since a commit: the packages to test, and those that lack a line for the changelog.

python tools/changes.py affected BASE      a JSON list of the packages touched, dependants included
python tools/changes.py fragments BASE     fails where code of a package changed without a fragment in changelog.d
"""

from __future__ import annotations

import json
import subprocess
import sys

from workspace import PACKAGES, ROOT, affected

__all__ = ["changed_files", "without_fragment"]


def changed_files(base: str) -> list[str] | None:
    """The files that differ from where this branch left a commit; None where git does not know it (a new branch)."""
    line = ["git", "-C", str(ROOT), "diff", "--name-only", f"{base}...HEAD"]
    done = subprocess.run(line, check=False, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def without_fragment(files: list[str]) -> list[str]:
    """The packages of whose code something changed, but neither a fragment nor, in a release, the changelog."""
    missing = []
    for name, package in PACKAGES.items():
        folder = package.folder.relative_to(ROOT).as_posix()
        code = any(file.startswith(f"{folder}/src/") and not file.endswith(".md") for file in files)
        told = any(file.startswith(f"{folder}/changelog.d/") or file == f"{folder}/CHANGELOG.md" for file in files)
        if code and not told:
            missing.append(name)
    return missing


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["affected", base]:
            files = changed_files(base)
            print(json.dumps(list(PACKAGES) if files is None else affected(files)))
        case ["fragments", base]:
            if missing := without_fragment(changed_files(base) or []):
                sys.exit(f"No fragment in changelog.d of {', '.join(missing)}: CONTRIBUTING.md tells how to write one.")
        case _:
            sys.exit(__doc__)
