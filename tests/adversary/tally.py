"""`python -m tests.adversary.tally ATTACKER`: runs its attempts, each of which is a test, and prints how many
got through.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ATTACKERS: dict[str, tuple[str, ...]] = {
    "connect-only": ("adversary/test_connect_only.py",),
    "publisher": ("adversary/test_publisher.py", "contract/test_publisher_attacks.py"),
    "reader": (
        "adversary/test_reader.py",
        "contract/test_costly_filters.py",
        "server/sse/test_costly_filters.py",
    ),
    "consumer": ("adversary/test_consumer.py",),
    "condition-author": (
        "adversary/test_condition_author.py",
        "contract/test_condition_attacks.py",
        "contract/test_matching_privileges.py",
    ),
    "table-owner": ("adversary/test_table_owner.py", "contract/test_trigger_attacks.py"),
    "any-table-owner": ("adversary/test_any_table_owner.py", "contract/test_restricted_operations.py"),
    "admin": ("adversary/test_admin.py",),
    "no-key": ("adversary/test_no_key.py", "server/test_connections.py"),
    "http-key": ("adversary/test_http_keys.py", "server/rest/test_scopes.py"),
    "foreign-site": ("adversary/test_foreign_site.py",),
    "webhook-receiver": ("adversary/test_webhook_receiver.py",),
    "payload-author": ("adversary/test_payload_author.py",),
}
TESTS = Path(__file__).parents[1]


def main() -> int:
    files = ATTACKERS[sys.argv[1]]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--pg",
        "18",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
    ]
    ran = subprocess.run(
        [*command, *(str(TESTS / file) for file in files)], capture_output=True, text=True, check=False
    )
    last = ran.stdout.strip().rsplit("\n", 1)[-1]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    tried = counts.get("passed", 0) + failed
    if not counts.get("passed"):
        print(ran.stdout[-2000:], ran.stderr[-1000:])
    print(f"{tried} attempts, {failed} got through")
    return 1 if failed or not counts.get("passed") else 0


if __name__ == "__main__":
    sys.exit(main())
