"""`format("pgmb")` is there for every PySpark session, costs it nothing, and says what it misses."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]


def python(program: str) -> str:
    """What a program in a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_is_found_the_way_pyspark_looks_loads_nothing_else_and_travels_by_name() -> None:
    program = """
        import sys
        import pyspark.sql.datasource
        from importlib import import_module
        from pkgutil import iter_modules
        from pyspark import cloudpickle
        before = set(sys.modules)
        import pyspark_pgmb
        print(*sorted(set(sys.modules) - before))
        names = [module.name for module in iter_modules() if module.name.startswith("pyspark_")]
        print(*(import_module(name).DefaultSource.name() for name in names))
        sent = cloudpickle.dumps(pyspark_pgmb.DefaultSource)
        assert cloudpickle.loads(sent) is pyspark_pgmb.DefaultSource
        print(len(sent))
    """
    loaded, found, size = python(program).splitlines()
    assert loaded == "pyspark_pgmb"
    assert "pgmb" in found.split()
    assert int(size) < 100


def test_without_the_extra_only_its_use_fails_and_says_what_to_install() -> None:
    # The last is what an older PySpark lacks.
    needed = ("pyarrow", "adbc_driver_postgresql", "pyspark.sql.streaming.datasource")
    program = f"""
        import sys
        import pyspark.sql.datasource
        from pyspark_pgmb import DefaultSource
        source = DefaultSource({{}})
        for missing in {needed}:
            kept = sys.modules.pop(missing, None)
            sys.modules[missing] = None
            for use, arguments in [
                (source.schema, []),
                (source.reader, [None]),
                (source.streamReader, [None]),
                (source.writer, [None, False]),
                (source.streamWriter, [None, False]),
            ]:
                try:
                    use(*arguments)
                except ImportError as error:
                    print(error)
            del sys.modules[missing]
            if kept is not None:
                sys.modules[missing] = kept
    """
    said = python(program).splitlines()
    assert len(said) == 15
    for missing, line in zip((name for name in needed for _ in range(5)), said, strict=True):
        assert 'pip install "pgmb[spark]"' in line
        assert f"import of {missing}" in line


def test_the_wheel_carries_it(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {"pyspark_pgmb.py", "pytest_pgmb.py", "pgmb/__init__.py"} <= set(archive.namelist())
