"""Run notebooks from top to bottom, and keep their outputs in them.

    python scripts/run_notebooks.py              runs all of notebooks/
    python scripts/run_notebooks.py 1_quickstart runs the named ones

What is kept does not name the machine: temporary directories and the directory of the project are taken out of
paths, dates are replaced by one, ids that differ from run to run by numbered ones, and pictures are made small.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
MAX_BYTES, MAX_TOTAL = 300_000, 1_200_000  # of a notebook with its outputs, and of all
KINDS = ("image/png", "text/html", "text/plain")  # what is kept of an output
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
DATE = re.compile(r"\b20\d\d-\d\d-\d\d(?P<time>[ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?(?P<ago>( UTC)?, \d+ \w+ ago)?")
ULID = re.compile(r"\b01[0-9a-v]{24}\b")
PLACE = re.compile(r"(?<![\w~.<])/(?:home|root|Users|tmp|work|mnt|opt|private|var)/|\b[A-Z]:\\")

Notebook = Any


def all_notebooks() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


# ---- running


def executed(path: Path, directory: Path, variables: Mapping[str, str]) -> Notebook:
    """Run a notebook in a directory, in a process with these environment variables beside those of this one."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(directory)}}
    quiet = ["--IPKernelApp.log_level=ERROR"]
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where, extra_arguments=quiet)
    client.create_kernel_manager()
    client.km.shutdown_wait_time = 60  # on a busy machine, removing temporary directories takes its time
    client.execute(env=os.environ | variables)
    return notebook


def variables_of(temporary: Path) -> dict[str, str]:
    """Where a kernel keeps its files, so that it neither finds nor leaves any elsewhere."""
    names = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR", "TMPDIR")
    for name in names:
        (temporary / name).mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own_store = {"TRAJSTORE_DEMO": str(temporary / "none")}  # the notebooks record what they show
    return {name: str(temporary / name) for name in names} | {"PYTHONPATH": path} | own_store


# ---- what is kept


def tidy(notebook: Notebook, clean: Callable[[str], str]) -> None:
    """Leave what a reader looks at: sources, and outputs that do not name the machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [_tidied(output, clean) for output in _joined(cell.outputs)]


def _joined(outputs: list[Any]) -> Iterator[Any]:
    """Outputs in which pieces of one stream are one."""
    last = None
    for output in outputs:
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            continue
        if last is not None:
            yield last
        last = output
    if last is not None:
        yield last


def _tidied(output: Any, clean: Callable[[str], str]) -> Any:
    if output.output_type == "stream":
        output.text = clean(output.text)
    if "data" in output:
        data = {kind: output.data[kind] for kind in KINDS if kind in output.data}
        if "image/png" in data:
            data = {"image/png": _small(data["image/png"])}
        output.data = {kind: text if kind == "image/png" else clean(text) for kind, text in data.items()}
        output.metadata = {}
    return output


def _small(png: str) -> str:
    """The picture with at most 256 colours."""
    out = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode() + "\n"


class Cleaner:
    """Takes out of texts what differs from machine to machine, and from run to run."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = re.compile(rf"(?:file://)?{re.escape(str(temporary))}(?:/TMPDIR)?(?:/tmp\w+)?/")
        self._ids: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        text = self._temporary.sub("", text).replace(f"{ROOT}/", "")
        return ULID.sub(self._numbered, DATE.sub(_fixed_date, text))

    def _numbered(self, match: re.Match[str]) -> str:
        return self._ids.setdefault(match[0], f"{len(self._ids) + 1:026d}")


def _fixed_date(match: re.Match[str]) -> str:
    return "2026-01-01" + (f"{match['time'][0]}00:00" if match["time"] else "") + (" UTC" if match["ago"] else "")


# ---- what may not be kept


def problems(notebook: Notebook, n_bytes: int) -> Iterator[str]:
    """What is wrong with the outputs of a notebook that is kept."""
    if n_bytes > MAX_BYTES:
        yield f"{n_bytes:,} bytes; at most {MAX_BYTES:,}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "was not run from top to bottom"
    if not any(cell.outputs for cell in code):
        yield "has no outputs"
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            yield from (f"cell {number}: {problem}" for problem in _problems_of_output(output))


def _problems_of_output(output: Any) -> Iterator[str]:
    if output.output_type == "error":
        yield f"{output.ename}: {output.evalue}"
    if output.get("name") == "stderr":
        yield f"warnings or errors are shown: {output.text[:200]}"
    for text in texts(output):
        if found := PLACE.search(text):
            yield f"names a place on a machine: {text[max(0, found.start() - 40) : found.end() + 40]!r}"
        host = os.uname().nodename
        if len(host) > 4 and re.search(rf"\b{re.escape(host)}\b", text):
            yield "names this machine"


def texts(output: Any) -> list[str]:
    """What an output shows, apart from pictures."""
    data = output.get("data", {})
    return [output.get("text", ""), *(text for kind, text in data.items() if kind.startswith("text/"))]


# ---- the command


def main(names: list[str]) -> int:
    paths = [NOTEBOOKS / f"{Path(name).stem}.ipynb" for name in names] or all_notebooks()
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        sys.exit(f"no such notebook: {', '.join(missing)}; there are {', '.join(p.stem for p in all_notebooks())}")
    return max(_run(path) for path in paths)


def _run(path: Path) -> int:
    before = _processor_seconds()
    with tempfile.TemporaryDirectory() as directory:
        temporary = Path(directory).resolve()
        notebook = executed(path, NOTEBOOKS, variables_of(temporary))
        tidy(notebook, Cleaner(temporary))
    text = nbformat.writes(notebook) + "\n"
    found = list(problems(notebook, len(text.encode())))
    path.write_text(text, "utf-8")
    seconds = _processor_seconds() - before
    print(f"{path.stem}: {seconds:.1f} s of processor time, {len(text) / 1000:.0f} kB", *found, sep="\n  ")
    return int(bool(found))


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a notebook; by default all")
    sys.exit(main(parser.parse_args().names))
