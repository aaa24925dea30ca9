"""`pgmb` for a shell that calls it often: forked from a process that has imported it, most of its work.

with forks(directory) as path:   # a folder with the commands, for PATH
    subprocess.run(["sh", "-c", "pgmb status"], env={**os.environ, "PATH": path})

`pgmb-python` is `python -W error -` in the same way.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

# Sends its arguments, directory, variables and streams, and ends as the fork does.
_COMMAND = """#!{python} -IS
import json, os, socket, sys
asked = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(asked)
    sys.exit(int(server.recv(10)))
"""

# Arrow and Delta take half a second to import: once, before the first command that needs them is forked.
_LAKE = "pgmb.lake.projection.projector"


@contextlib.contextmanager
def forks(directory: Path) -> Generator[str]:
    """A `PATH` on which these are commands."""
    address = directory / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        for name in ("pgmb", "pgmb-python"):
            command = directory / name
            command.write_text(_COMMAND.format(python=sys.executable, address=str(address)))
            command.chmod(0o755)
        # It ends with its standard input, also if this process is killed.
        with subprocess.Popen(
            [sys.executable, "-m", "harness.forks", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        ):
            # If that process dies, its clients are refused instead of waiting for ever.
            listener.close()
            yield f"{directory}{os.pathsep}{os.environ['PATH']}"


def _serve(listener: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in waiting.select()]
            if sys.stdin in ready:
                return
            client, _ = listener.accept()
            with client:
                size, streams, _, _ = socket.recv_fds(client, 4, 3)
                with client.makefile("rb") as sent:
                    asked = json.loads(sent.read(int.from_bytes(size, "big")))
                if "lake" in asked[0]:
                    importlib.import_module(_LAKE)
                if os.fork() == 0:
                    _run(client, streams, *asked)
                for stream in streams:
                    os.close(stream)


def _run(
    client: socket.socket, streams: list[int], words: list[str], directory: str, variables: dict[str, str]
) -> None:
    code: object = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = words
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        # Python's own belong to other files: of another kind, perhaps.
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, buffering=1, closefd=False)  # noqa: SIM115 # to the end of the process
            for number, mode in enumerate("rww")
        )
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv[0] = Path(sys.argv[0]).name
        try:
            if sys.argv[0] == "pgmb":
                importlib.import_module("pgmb.cli").main()
            else:
                _execute(sys.stdin.read())
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        client.sendall(str(code).encode())
        os._exit(0)


def _execute(program: str) -> None:
    warnings.simplefilter("error")
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(program, "<stdin>", "exec"), module.__dict__)


if __name__ == "__main__":
    for module in ("pgmb.cli", "pgmb.schema"):
        importlib.import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
