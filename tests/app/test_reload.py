"""`pgmb work --reload`: workers run what the files say, also after one that could not be run."""

from __future__ import annotations

import signal
from pathlib import Path

import pgmb
from harness.waiting import until_true
from pgmb.services.supervisor import python_files
from tests.app.stage import Workers

APP = """
import pgmb
from greetings import word

app = pgmb.App(DSN)


@app.on("greet")
def greet(name: str) -> None:
    print(word, name, flush=True)
"""


def test_workers_are_restarted_when_a_file_changes_and_outlive_a_syntax_error(
    dsn: str, tmp_path: Path
) -> None:
    workers = Workers(tmp_path, dsn, APP)
    # What the app imports counts like the app itself.
    imported = tmp_path / "greetings.py"
    imported.write_text("word = 'hello'\n")

    def logged(text: str) -> None:
        until_true(lambda: text in workers.log.read_text())

    with workers.running("--reload") as process, pgmb.connect(dsn, max_size=1) as broker:
        logged("working on shop.greet")
        broker.publish("greet", "first")
        logged("hello first")
        imported.write_text("word = 'broken\n")
        logged("reloading: greetings.py changed")
        logged("SyntaxError: unterminated string literal")
        logged("waiting for a file to change")
        broker.publish("greet", "second")
        imported.write_text("word = 'goodbye'\n")
        logged("goodbye second")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "hello second" not in workers.log.read_text()


def test_installed_packages_and_hidden_folders_are_not_watched(tmp_path: Path) -> None:
    for path in (
        "app.py",
        "shop/orders.py",
        "readme.md",
        ".git/hook.py",
        "env/lib/a.py",
        "node_modules/b.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    assert set(python_files(tmp_path)) == {"app.py", "shop/orders.py"}
