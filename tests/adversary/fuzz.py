"""`python -m tests.adversary.fuzz SETS`: as many random sets of grants on each of the two installations,
and what they let through.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

FILE = "tests/adversary/test_grant_fuzz.py"


def main() -> int:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "--pg", "18", "-p", "no:cacheprovider", FILE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PGMB_GRANT_EXAMPLES": sys.argv[1]},
    )
    found = re.findall(r"(\d+) grant sets, (\d+) calls", ran.stdout)
    outside = len(re.findall(r"^FAILED|^ERROR", ran.stdout, re.MULTILINE))
    if ran.returncode:
        print(ran.stdout[-3000:])
    sets, calls = (sum(int(one[place]) for one in found) for place in (0, 1))
    print(f"{sets} grant sets, {calls} calls, {outside} outside the model")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
