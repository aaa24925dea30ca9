"""Where the PostgreSQL programs of each major version are."""

from __future__ import annotations

import functools
from pathlib import Path

from harness.account import server_account

PG18_IN_CHECKOUT = Path(__file__).resolve().parent.parent / ".postgres" / "18"
# Used instead when the server account cannot see the checkout, for example below a home directory.
PG18_COPY = Path("/var/lib/pgmb-dev/postgres-18")

_CANDIDATES = {
    15: [Path("/usr/lib/postgresql/15/bin")],
    18: [PG18_IN_CHECKOUT / "bin", PG18_COPY / "bin", Path("/usr/lib/postgresql/18/bin")],
}


def usable(folder: Path) -> bool:
    return server_account().reaches(folder / "postgres")


@functools.cache
def binaries(major: int) -> Path:
    """The folder with `initdb` and `postgres` of this major version."""
    for folder in _CANDIDATES.get(major, []):
        if usable(folder):
            return folder
    raise RuntimeError(f"PostgreSQL {major} is not installed here; run `make setup`")


def available() -> list[int]:
    """The major versions that can be started on this machine."""
    return [major for major, folders in _CANDIDATES.items() if any(usable(folder) for folder in folders)]
