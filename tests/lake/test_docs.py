"""The Python snippets of the page on archiving run as they stand, on a table that was archived."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.segments import seal
from tests.lake.conftest import Lake

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "lake.md"

pytestmark = [pytest.mark.new_database]


def test_the_snippets_read_the_table(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    lake.db.execute("select pgmb.publish('order.paid', '{\"order\": 42}', 'customer-7')")
    lake.db.execute("select pgmb.publish('order.sent', '{}')")
    seal(lake.db)
    lake.archive()
    url = Path(lake.url)
    (url.parent / "parent" / "lake").mkdir(parents=True)
    (url.parent / "parent" / "lake" / "main").symlink_to(url)
    monkeypatch.chdir(url.parent / "parent")
    first, second = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(first, str(PAGE), "exec"), found)
    assert found["orders"].rows() == [("customer-7", "42")]
    done = subprocess.run(
        [sys.executable, "-c", f"{second}\nprint(paid)"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
