"""What mkdocs does beside reading docs/: the READMEs become pages, and what is known to the code is written by it.

Every page has the path in the site's sources that it has in the repository, so that links between pages work in both.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# A link in Markdown whose target is no address and no place on the same page.
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts docs/ at its place in the repository, and the other pages that git knows beside it."""
    made = Files([file for file in files if not file.is_documentation_page()])
    for file in files:
        if file.is_documentation_page():
            # The address stays: /install/, not /docs/install/.
            made.append(_page(f"docs/{file.src_uri}", config, file.dest_uri))
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    for path in listed.stdout.splitlines():
        if path.endswith(("README.md", "CONTRIBUTING.md")) and path != "README.md" and not path.startswith("docs/"):
            made.append(_page(path, config, None))
    return made


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the ops' own pages behind that of the kernels."""
    ops = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("shared/kernels/src/foak/kernels/*/README.md"))
    (group,) = (entry["Ops"] for entry in config.nav or [] if "Ops" in entry)
    group[1:] = [{Path(path).parent.name: path} for path in ops]
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in what the code knows, and leads links to folders to their README."""
    for name, text in (("configuration", configuration_reference), ("run file", run_file_reference)):
        marker = f"<!-- {name}: by the code -->"
        if marker in markdown:
            markdown = markdown.replace(marker, text())

    def lead(found: re.Match[str]) -> str:
        target = normpath(join(dirname(page.file.src_uri), found["target"]))
        anchor = found["anchor"] or ""
        if files.get_file_from_path(target):
            return found[0]
        if files.get_file_from_path(f"{target}/README.md"):
            return f"[{found['text']}]({found['target'].rstrip('/')}/README.md{anchor})"
        if (ROOT / target).exists():
            # In the repository, but no page: its path says where.
            return found["text"] if found["text"].startswith("`") else f"{found['text']} (`{target}`)"
        return found[0]

    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_LINK.sub(lead, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, _LINK.sub(lead, markdown[end:])])


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """A page that no menu leads to would not be found: an error like every warning."""
    listed = {page.file.src_uri for page in nav.pages}
    missing = {file.src_uri for file in files.documentation_pages()} - listed
    if missing:
        raise ValueError(f"mkdocs.yml lists no {', '.join(sorted(missing))}")


def configuration_reference() -> str:
    """Every key of every installed plugin, by section, as the plugins declare them."""
    from foak.core.discovery import installed_plugins

    lines: list[str] = []
    for installed in installed_plugins():
        plugin = installed.plugin
        for path in dict.fromkeys((*plugin.all_of, *plugin.any_of)):
            keys = [key for key in plugin.keys if not key.under or path in key.under]
            lines += [
                f"## `{path}`",
                "",
                f"Of [{installed.dist}](../packages/{str(installed.dist).removeprefix('foak-')}/README.md).",
                "",
                "| key | allowed | default | does |",
                "| --- | --- | --- | --- |",
                *(_row(key.name, key.describe_allowed(), _default(key.default), key.help) for key in keys),
                "",
            ]
    return "\n".join(lines)


def run_file_reference() -> str:
    """The keys of the sections `model` and `data`, as the dataclasses that are read describe them."""
    import dataclasses
    import inspect
    import typing

    from foak.core.train.fields import _describe
    from foak.core.train.runfile import DataSection, ModelSection

    lines: list[str] = []
    for name, section in (("model", ModelSection), ("data", DataSection)):
        described = dict(re.findall(r"^    (\w+): (.*?)$", _attributes(inspect.getdoc(section) or ""), re.MULTILINE))
        hints = typing.get_type_hints(section)
        lines += [f"### `{name}`", "", "| key | allowed | default | is |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(section):
            default = "required" if field.default is dataclasses.MISSING else _default(field.default)
            lines.append(_row(field.name, _describe(hints[field.name]), default, described[field.name]))
        lines.append("")
    return "\n".join(lines)


def _attributes(docstring: str) -> str:
    """The entries of a docstring's `Attributes:`, each on one line."""
    return re.sub(r"\n {5,}", " ", docstring.partition("Attributes:\n")[2])


def _page(path: str, config: MkDocsConfig, address: str | None) -> File:
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=address)


def _default(value: Any) -> str:
    if value is None:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _row(name: str, *cells: str) -> str:
    return " | ".join([f"| `{name}`", *(cell.replace("|", "\\|").replace("\n", " ") for cell in cells), ""]).rstrip()
