"""The Python snippets of the page on archiving run as they stand, on a table that was archived."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.segments import seal
from pgmb.lake.dead import DeadArchiver
from tests.lake.conftest import Lake

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "lake.md"

pytestmark = [pytest.mark.new_database]


def test_the_snippets_read_the_tables(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake.db.execute("select pgmb.publish('order.paid', '{\"order\": 42}', 'customer-7')")
    lake.db.execute("select pgmb.publish('order.sent', '{}')")
    lake.db.execute("select pgmb.create_queue('bill', '{order.paid}', starting => pgmb.earliest())")
    lake.db.execute("select pgmb.bury(lease, error => 'no such card') from pgmb.receive('bill')")
    seal(lake.db)
    lake.archive()
    lake.age()
    assert lake.dropped() == [0]
    list(DeadArchiver(lake.dsn, "main").archive())
    url = Path(lake.url)
    (url.parent / "parent" / "lake").mkdir(parents=True)
    for name in ("main", "main_dead"):
        (url.parent / "parent" / "lake" / name).symlink_to(url.with_name(name.replace("main", url.name)))
    monkeypatch.chdir(url.parent / "parent")
    first, second, client, dead = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    found: dict[str, Any] = {}
    exec(compile(first, str(PAGE), "exec"), found)
    assert found["orders"].rows() == [("customer-7", "42")]
    done = subprocess.run(
        [sys.executable, "-c", f"{second}\nprint(paid)"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    exec(compile(client.replace("postgresql:///app", lake.dsn), str(PAGE), "exec"), {})
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().out.splitlines()] == [
        "order.paid {'order': 42}",
        "order.sent {}",
    ]
    exec(compile(dead, str(PAGE), "exec"), found)
    assert found["worst"].rows() == [("bill", "no such card", 1)]
