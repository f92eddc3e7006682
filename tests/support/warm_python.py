"""A Python that has imported what takes long, and forks itself for each program that a test runs.

Importing torch, numba and zarr takes seconds of a processor, which is most of what short programs cost. Such a
program begins as in a process of its own: as ``__main__``, with its arguments, directory, environment and streams,
on the main thread. It also ends as one: the interpreter of the forked child is finalized. Use `subprocess` where
the import itself is tested, and where options of the interpreter are needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Each request consists of four descriptors: the program as JSON, and the three streams. The program is executed at
# the level of the module, so that an exception ends the process as it ends any other.
_SERVER = """
import gc, importlib.util, json, os, socket, sys, warnings
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import trajstore
for name in trajstore.__all__:  # most are imported at their first use
    getattr(trajstore, name)
import zarr
if importlib.util.find_spec("numba"):
    import trajstore.sampling.compiled.batch_loops

def next_program(requests):
    gc.collect()
    gc.freeze()  # what is imported: the end of a child would look at all of it, and so copy it
    requests.sendall(b"ready\\n")
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
        if not descriptors:
            os._exit(0)
        with warnings.catch_warnings(action="ignore"):  # about threads of libraries
            pid = os.fork()
        if not pid:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        requests.sendall(b"%d\\n" % pid)
        requests.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.setpgid(0, 0)
    requests.close()
    with open(descriptors[0]) as file:
        program = json.load(file)
    for number, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return program

def begin(program):
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["env"])
    sys.warnoptions += program["warn"]
    warnings._processoptions(program["warn"])
    sys.argv, sys.path[0] = program["argv"], program["path"]
    kept = {name: value for name, value in globals().items() if name.startswith("__")}
    if program["path"]:
        kept["__file__"] = sys.argv[0]
    globals().clear()
    globals().update(kept)
    return compile(program["code"], kept.get("__file__", "<string>"), "exec")

exec(begin(next_program(socket.socket(fileno=int(sys.argv[2])))))
"""


class WarmPython:
    """Runs programs one after another, each in a fork of one process.

    Args:
        modules: Names of modules that are imported before, besides all of trajstore.
    """

    def __init__(self, *modules: str) -> None:
        self._requests, there = socket.socketpair()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-c", _SERVER, json.dumps(modules), str(there.fileno())]
        with there:
            environment = os.environ | {"PYTHONPATH": path}
            self._server = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment)
        self._answers = self._requests.makefile()
        assert self._answers.readline() == "ready\n"

    def close(self) -> None:
        self._answers.close()
        self._requests.close()
        self._server.wait(30)

    def run_code(self, code: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """As ``python -c code arguments``, with ``timeout``, ``cwd`` and ``env`` of `subprocess.run`.

        ``warn`` holds options ``-W`` of Python.
        """
        return self._run(code, "", ["-c", *map(str, arguments)], **options)

    def run_script(self, script: Path, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """As ``python script arguments``."""
        return self._run(script.read_text(), str(script.parent), [str(script), *map(str, arguments)], **options)

    def _run(
        self,
        code: str,
        path: str,
        argv: list[str],
        *,
        timeout: float,
        warn: Sequence[str] = (),
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        program: dict[str, Any] = {"code": code, "path": path, "argv": argv, "cwd": str(cwd or Path.cwd())}
        program |= {"env": dict(os.environ) if env is None else env, "warn": list(warn)}
        with contextlib.ExitStack() as files:
            request, empty, output, errors = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(4))
            json.dump(program, request)
            request.seek(0)
            socket.send_fds(self._requests, [b"1"], [file.fileno() for file in (request, empty, output, errors)])
            code_at_end = self._ended(timeout, argv)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(argv, code_at_end, output.read(), errors.read())

    def _ended(self, timeout: float, argv: list[str]) -> int:
        pid = int(self._answers.readline())
        self._requests.settimeout(timeout)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._server.kill()  # the answer was lost with the timeout
            raise subprocess.TimeoutExpired(argv, timeout) from None
        finally:
            self._requests.settimeout(None)


@contextlib.contextmanager
def warm_python(*modules: str) -> Iterator[WarmPython]:
    python = WarmPython(*modules)
    try:
        yield python
    finally:
        python.close()
