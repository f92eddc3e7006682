"""mkdocs hooks: what makes the documentation site of README, docs, docstrings and the command line.

The Markdown is written for the forge. When the site is built, the references and the pages from outside `docs` are
added, links are turned to where their targets are on the site, and pictures are put into their pages, where they
have the colours of the page.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

import trajstore

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
    "notebooks/README.md": "notebooks/index.md",
}
COPIED = ("LICENSE", "CITATION.cff", "examples/*.py")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)[^\n]*\n.*?^(?P=indent)(?P=ticks) *$", re.M | re.S)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"(\]\(\s*<?)([^)\s>]+)(>?[^)]*\))")
PICTURE = re.compile(r"^!\[([^\]]*)\]\((pictures/[\w-]+\.svg)\)$", re.M)
LIST_ITEM = re.compile(r" *([-*]|\d+\.) ")
IMAGE_TYPES = ("image/png", "image/jpeg", "image/svg+xml", "image/gif")
ALT = "The picture that the code above draws"

_markdown: dict[str, str] = {}  # of the pages of this build
_nav: list[Navigation] = []

# ---- files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in `docs`."""
    for source, target in PAGES.items():
        _add(files, config, target, (ROOT / source).read_text("utf-8"))
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            _add(files, config, path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    for path in notebooks():
        _add(files, config, f"notebooks/{path.stem}.md", notebook_page(path))
    _add(files, config, "reference/cli.md", cli_page())
    for name, text in api_pages().items():
        _add(files, config, f"reference/{name}.md", text)
    return files


def _add(files: Files, config: MkDocsConfig, target: str, text: str) -> None:
    files.append(File.generated(config, target, content=text))


def notebooks() -> list[Path]:
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


# ---- links and pictures


def source_of(page: str) -> str:
    """The path in the repository of what became a page."""
    for source, target in PAGES.items():
        if target == page:
            return source
    return re.sub(r"\.md$", ".ipynb", page) if page.startswith("notebooks/") else f"docs/{page}"


def place_on_site(source: str) -> str:
    """The path in the site's sources of a file of the repository."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("notebooks/"):
        return re.sub(r"\.ipynb$", ".md", source)
    return source.removeprefix("docs/")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the forge's Markdown into the site's."""
    here = page.file.src_uri
    if here.startswith("reference/"):
        _markdown[here] = markdown
        return markdown
    source = ROOT / source_of(here)
    texts = [markdown, notebook_page(source, is_rich=False)] if source.suffix == ".ipynb" else [markdown]
    texts = [outside_code(text, lambda prose: with_blank_lines(_with_links(prose, here))) for text in texts]
    _markdown[here] = texts[-1]
    return PICTURE.sub(_inlined, texts[0])


def outside_code(text: str, change: Callable[[str], str], code: Callable[[str], str] = str) -> str:
    """Change what is not in a fence, and if wanted also the fences."""
    parts, start = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[start : fence.start()]), code(fence[0])]
        start = fence.end()
    return "".join([*parts, change(text[start:])])


def _with_links(prose: str, page: str) -> str:
    code = [match.span() for match in CODE.finditer(prose)]

    def turned(match: re.Match[str]) -> str:
        if any(start < match.start(2) < stop for start, stop in code):
            return match[0]
        return match[1] + turned_link(match[2], page) + match[3]

    return LINK.sub(turned, prose)


def turned_link(link: str, page: str) -> str:
    """A link of a file of the repository, as it is on the page that the file became."""
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", path):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(page)), path))
    return posixpath.relpath(place_on_site(target), posixpath.dirname(page) or ".") + mark + anchor


def with_blank_lines(prose: str) -> str:
    """Python-Markdown takes a list right after a paragraph for a part of it."""
    lines: list[str] = []
    for line in prose.split("\n"):
        if lines and LIST_ITEM.match(line) and _is_paragraph(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _is_paragraph(line: str) -> bool:
    return bool(line.strip()) and not LIST_ITEM.match(line) and not line.startswith((" ", "|", "#"))


def _inlined(match: re.Match[str]) -> str:
    svg = (ROOT / "docs" / match[2]).read_text("utf-8")
    svg = re.sub(r"<\?xml.*?\?>\s*|<!--.*?-->\s*", "", svg, flags=re.S).replace("<svg ", '<svg class="picture" ', 1)
    return f'<figure class="picture">{re.sub(chr(10) + "+", " ", svg)}</figure>'


# ---- notebooks


def notebook_page(path: Path, *, is_rich: bool = True) -> str:
    """The cells of a notebook as Markdown, with the outputs that are kept in it; plain ones for language models."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell, is_rich)) + "\n"


def _cell(cell: dict[str, Any], is_rich: bool) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code":
        yield f"```python\n{source}\n```"
        for output in cell.get("outputs", []):
            yield from _rich(output) if is_rich else _plain(output)


def _rich(output: dict[str, Any]) -> Iterator[str]:
    data = output.get("data", {})
    for kind in IMAGE_TYPES:
        if kind in data:
            yield f'<img alt="{ALT}" src="data:{kind};base64,{"".join(data[kind]).strip()}">'
            return
    if "text/html" in data:
        html = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]).strip())
        yield f'<div class="output">{html}</div>'
    else:
        yield from _plain(output)


def _plain(output: dict[str, Any]) -> Iterator[str]:
    data = output.get("data", {})
    if text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
        yield f"```text\n{text}\n```"


# ---- the references


def cli_page() -> str:
    """All commands with their arguments and options, as the program itself describes them."""
    import typer.main

    from trajstore.cli.app import app

    command = typer.main.get_command(app())
    intro = "Made from the program itself. [The command line](../cli.md) explains the commands with examples."
    return "\n\n".join(["# Command line reference", intro, *_command(command, "trajstore", 2)]) + "\n"


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    if level > 2:
        yield f"{'#' * (level - 1)} {name}"
    yield inspect.cleandoc(command.help or "")
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        usage = [_argument_name(argument) for argument in _arguments(command)]
        yield f"```text\n{' '.join([name, '[OPTIONS]', *usage])}\n```"
    yield from _table("argument", [(_argument_name(p), p) for p in _arguments(command)])
    yield from _table("option", [(_option_name(p), p) for p in command.params if p.param_type_name == "option"])
    for subname, subcommand in subcommands.items():
        yield from _command(subcommand, f"{name} {subname}", level + 1)


def _arguments(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "argument"]


def _argument_name(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper()) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _option_name(option: Any) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar or _type_name(option)}"


def _type_name(option: Any) -> str:
    if hasattr(option, "type"):  # of click, which typer used to build on
        return str(option.type.name.upper())
    annotation = option.type_descriptor.annotation
    return {str: "TEXT", int: "INTEGER", float: "FLOAT"}.get(
        annotation, getattr(annotation, "__name__", "VALUE").upper()
    )


def _table(kind: str, rows: list[tuple[str, Any]]) -> Iterator[str]:
    if rows:
        cells = [f"| `{name}` | {_described(parameter)} |" for name, parameter in rows]
        yield "\n".join([f"| {kind} | |", "|---|---|", *cells])


def _described(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    default = parameter.default
    shown = default not in (None, False, (), [], "") and not callable(default) and not parameter.required
    return f"{text} Default: `{default}`." if shown and parameter.param_type_name == "option" else text


# The pages of the reference: names below `trajstore`, an asterisk for all public names of a package. Names of
# `trajstore` itself that are not listed are on the last page.
API = {
    "buffer": ("The live buffer", "ReplayBuffer Retention SamplesPerInsert StorageReport"),
    "stores": (
        "Stores",
        "create open copy merge split pack repair Store Snapshot EpisodeTable Checkpoint Writer WriterOptions"
        " Schema Field EpisodeKey Handle Handles DiskCache estimate_cost Cost Prices store.verify.verify"
        " store.evicting.evict store.pruning.prune",
    ),
    "sampling": (
        "Sampling",
        "Reader Windows Batch Ring Priorities Linear Hindsight Mixture BatchDataset WindowDataset"
        " sampling.returns.advantages sampling.returns.returns_to_go sampling.staleness.staleness_weights",
    ),
    "ranks": ("Several ranks and Ray", "redistribute Partitions PartitionReport request_checkpoint ray.*"),
    "plots": ("Plots and the viewer", "plot.* viewer.*"),
    "inspection": (
        "Questions about a store",
        "inspection.episode_queries.query_episodes inspection.episode_queries.EpisodeQueries"
        " inspection.episode_queries.EpisodePage inspection.downsampling.episode_series"
        " inspection.downsampling.EpisodeSeries inspection.field_statistics.field_statistics"
        " inspection.field_statistics.FieldStatistics inspection.doctor.examination.examine"
        " inspection.doctor.finding.Finding inspection.differences.compare inspection.differences.Differences",
    ),
    "drop_ins": (
        "Drop-ins for other libraries",
        "compat.rlinf.* compat.torchrl.* compat.stable_baselines3.* compat.alf.* compat.objectrl.ReplayBuffer",
    ),
    "datasets": (
        "Datasets of other libraries",
        "datasets.conversion.import_episodes datasets.conversion.export_episodes"
        " datasets.conversion.ConversionReport datasets.minari.* datasets.lerobot.* datasets.diffusion_policy.*"
        " datasets.torchrl.* datasets.robomimic.open_reader datasets.robomimic.open_writer"
        " datasets.d4rl.open_reader datasets.d4rl.open_writer",
    ),
    "testing": (
        "Testing",
        "testing.conformance.StorageConformance testing.model.ModelStore testing.strategies.schemas"
        " testing.strategies.episodes testing.strategies.steps testing.strategies.metadata",
    ),
    "packages": ("Other names", "logging.* compat.gymnasium.*"),
}


def api_pages() -> dict[str, str]:
    """Directives for mkdocstrings, by page."""
    listed = {name for _, names in API.values() for name in names.split()}
    unlisted = [name for name in trajstore.__all__ if name not in listed]
    errors = sorted(
        (name for name in unlisted if name.endswith("Error")), key=lambda name: name != "TrajstoreError"
    )
    others = {"packages": [name for name in unlisted if name not in errors]}
    pages = {
        page: _api_page(heading, names.split() + others.get(page, [])) for page, (heading, names) in API.items()
    }
    return pages | {"errors": _api_page("Errors", errors)}


def _api_page(heading: str, names: list[str]) -> str:
    directives = [f"::: trajstore.{one}" for name in names for one in _expanded(name)]
    return "\n\n".join([f"# {heading}", *directives]) + "\n"


def _expanded(name: str) -> list[str]:
    if not name.endswith(".*"):
        return [name]
    package = name.removesuffix(".*")
    return [f"{package}.{one}" for one in import_module(f"trajstore.{package}").__all__]


# ---- for language models


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the navigation for `on_post_build`."""
    _nav[:] = [nav]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, a list of the pages, llms-full.txt, their Markdown, and each page of Markdown by itself."""
    site = Path(config.site_dir)
    texts = {name: text for name, text in _markdown.items() if not _is_made_of_docstrings(text)}
    for name, text in texts.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, "utf-8")
    parts = [f"# {config.site_name}", f"> {config.site_description}"]
    for top in _nav[0].items:
        parts += [f"## {top.title}", "\n".join(_listed(top, config.site_url or ""))]
    (site / "llms.txt").write_text("\n\n".join(parts) + "\n", "utf-8")
    in_order = [page.file.src_uri for page in _nav[0].pages]
    (site / "llms-full.txt").write_text("\n\n".join(texts[name] for name in in_order if name in texts), "utf-8")


def _is_made_of_docstrings(markdown: str) -> bool:
    return "\n::: " in markdown


def _listed(item: Any, site_url: str) -> Iterator[str]:
    if isinstance(item, Section):
        for child in item.children:
            yield from _listed(child, site_url)
    else:
        text = _markdown[item.file.src_uri]
        is_html = _is_made_of_docstrings(text)
        url = item.file.dest_uri if is_html else item.file.src_uri
        yield f"- [{item.title}]({site_url}{url})" + ("" if is_html else f": {summary(text)}")


def summary(markdown: str) -> str:
    """The first sentence of a page."""
    paragraphs = re.split(r"\n\n+", outside_code(markdown, str, code=lambda fence: ""))
    first = next((p for p in paragraphs if p.strip() and not p.startswith(("#", "|", "-", "!", "    "))), "")
    sentence = re.split(r"(?<=[.:])\s", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).strip() + " ")[0]
    return " ".join(sentence.split()).rstrip(":")
