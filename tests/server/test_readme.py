"""The README's first minutes over HTTP, run in a shell as they stand but for the port."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_the_first_minutes_over_http(dsn: str, tmp_path: Path) -> None:
    section = README.read_text().partition("## Over HTTP\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    port = free_port()
    heard = tmp_path / "heard"
    kept = [line for line in block.splitlines() if not line.startswith(("pip ", "export "))]
    script = (
        "\n".join(kept).replace("8080", str(port)).replace("pgmb up &", f"pgmb up --port {port} &\n{READY}")
    )
    script = script.replace("order.%23' &", f"order.%23' > {heard} &\n{LISTENS}")
    ran = subprocess.run(
        ["bash", "-e", "-c", f"trap 'kill $(jobs -p)' EXIT\n{script}\n{HEARD}"],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PGMB_DSN": dsn,
            "URL": f"http://127.0.0.1:{port}",
            "HEARD": str(heard),
        },
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert '"ids":[' in ran.stdout
    assert '"topic":"order.paid"' in heard.read_text()


READY = "until curl -sf $URL/readyz > /dev/null; do sleep 0.05; done"
LISTENS = "until grep -q '^id:' $HEARD; do sleep 0.05; done"
HEARD = "until grep -q '^data:' $HEARD; do sleep 0.05; done"
