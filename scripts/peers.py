"""Runs every program in docs/peers, those of the peers with the peers installed into a place of its own.

The peers come from the package index that pip is set up for; nothing else in this checkout needs them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.installations import binaries
from harness.postgres import Server, create_database
from harness.programs import PEERS, TASKS, Program, ProgramError, run

# pgqueuer 1.6 fails with Typer 0.29: its command line calls `.name` on what is text there.
PACKAGES = (
    "procrastinate",
    "pgqueuer",
    "typer<0.25",
    "asyncpg",
    "pgmq",
    "celery",
    "sqlalchemy",
    "psycopg[binary]",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pg", type=int, default=18)
    parser.add_argument("--only", choices=PEERS, help="this peer alone")
    parser.add_argument("--venv", type=Path, help="keep the peers here, and use them if they are here")
    arguments = parser.parse_args()
    chosen = [arguments.only] if arguments.only else PEERS
    with tempfile.TemporaryDirectory(prefix="pgmb-peers-") as scratch:
        place = arguments.venv or Path(scratch) / "venv"
        install(place)
        with Server.start(arguments.pg, name="peers", memory=True) as server:
            shown = [show(Program(peer, task), server, place) for task in TASKS for peer in chosen]
    return 0 if all(shown) else 1


def install(place: Path) -> None:
    if not (place / "bin" / "pip").exists():
        venv.create(place, with_pip=True)
    packages = [*PACKAGES, str(Path(__file__).resolve().parents[1])]
    subprocess.run(
        [place / "bin" / "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True
    )
    for line in subprocess.check_output([place / "bin" / "pip", "freeze"], text=True).splitlines():
        if line.split("==")[0] in {"procrastinate", "pgqueuer", "pgmq", "celery"}:
            print(line)


def show(program: Program, server: Server, place: Path) -> bool:
    name = create_database(server)
    with server.connect(name) as connection:
        connection.execute("create table orders (id int)")
    path = f"{(place / 'bin').absolute()}:{binaries(server.major)}"
    environment = {"PYTHONPATH": "."} if program.peer == "procrastinate" else {}
    if program.peer == "pgmq":
        # The client would CREATE EXTENSION, which this server has not: the SQL inside the package will do.
        environment = {"DATABASE_URL": server.url(name), "PG_INIT_EXTENSION": "false"}
        script = "from pgmq.install import get_embedded_install_sql; print(get_embedded_install_sql())"
        with server.connect(name) as connection:
            connection.execute(subprocess.check_output([place / "bin" / "python", "-c", script]))
    try:
        outcome = " | ".join(
            line.strip() for line in run(program, server.dsn(name), path, environment).splitlines()
        )
    except ProgramError as error:
        print(f"{program.task:12} {program.peer:14} {program.lines:3} lines  FAILED\n{error}")
        return False
    print(f"{program.task:12} {program.peer:14} {program.lines:3} lines  {outcome[:240]}")
    return True


if __name__ == "__main__":
    sys.exit(main())
