"""publish-one: one client, one event a call: pgmb.publish, the Python client's statement, a plain insert."""

from __future__ import annotations

import re
from itertools import count

from bench.contender import Contender
from bench.crew import Job, Work
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Outcome
from bench.payload import TOPIC, payloads
from bench.rounds import backends_only, contest
from bench.wire import Client
from pgmb._core import statements

_PLAIN, _FUNCTION, _CLIENT = "insert into the log", "pgmb.publish", "Python client"
_ROUNDS = 3
"""Times the form's rounds."""


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("publish-one", "1 client, 1 event a call, on the same log")
    events = max(200, form.publish // 20)
    sites = {name: ground.site("pgmb") for name in (_PLAIN, _FUNCTION, _CLIENT)}
    try:
        outcome.readings = contest(
            sites,
            form.rounds * _ROUNDS,
            lambda name, site: [Job(site.dsn, "pgmb", _publish, {"way": name, "events": events})],
            backends_only,
        )
    finally:
        for site in sites.values():
            site.close()
    outcome.checks = [
        outcome.compare("publish(1), SQL, vs plain insert", _FUNCTION, _PLAIN, 0.75),
        outcome.compare("publish(1), Python, vs plain insert", _CLIENT, _PLAIN, 0.75),
    ]
    return outcome


def _publish(client: Client, contender: Contender, *, way: str, events: int) -> Work:
    (payload,) = payloads(1)
    topic = TOPIC.encode()
    values: tuple[bytes | None, ...] = (topic, payload)
    if way == _PLAIN:
        send = client.prepare("insert into pgmb.log_main (topic, payload) values ($1, $2)", "text", "json")
    elif way == _FUNCTION:
        send = client.prepare("select pgmb.publish($1, $2)", "text", "json")
    else:
        number = count(1)
        text = re.sub(
            "%s", lambda _: f"${next(number)}", statements.insert("", None, None, None, "main").text
        )
        send = client.prepare(text, "text", "json", "text", "json")
        values = (topic, payload, None, None)
    for _ in range(50):
        send(*values)

    def measured() -> dict[str, float]:
        for _ in range(events):
            send(*values)
        return {"messages": events}

    return measured
