"""pgmb endpoints: create, look, change, hold, sign, try, send again, drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from standardwebhooks.webhooks import Webhook

from harness.answers import answering
from harness.receiver import ReceiverProcess
from pgmb.webhooks.secrets import generate_key, generate_secret, parse_secret
from tests.cli.conftest import Run
from tests.contract.endpoints import claim, receive, settle, settle_claimed

# What the commands ask of the server is tested on every major, elsewhere.
pytestmark = pytest.mark.once(15)

Done = Callable[..., str]
URL = "https://hooks.example/in"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGMB_SECRET_KEY", generate_key())
    monkeypatch.delenv("PGMB_SECRET_KEY_FILE", raising=False)


def test_an_endpoint_from_its_creation_to_its_end(done: Done, run: Run) -> None:
    made = done("endpoints", "create", "hook", URL, "order.*", "--rps", "50", "--header", "x-team: billing")
    assert made.startswith("Endpoint hook gets order.*.\nSecret: whsec_")
    again = done("endpoints", "create", "hook", URL, "order.*", "refund.#", "--timeout", "5s")
    assert again == "Endpoint hook gets order.*, refund.#.\n", "it has a secret"
    shown = run("endpoints", "show", "hook", "--json").json
    assert (shown["patterns"], shown["rps"], shown["timeout"]) == (["order.*", "refund.#"], None, "PT5S")
    assert (shown["secrets"], shown["headers"], shown["state"]) == (1, [], "active")

    settings = ("--rps", "7", "--retry-after", "0s,5s,1h30m", "--log", "all", "--keep-response")
    more = (
        "--body",
        "cloudevents",
        "--header",
        "x-a:b:c",
        "--metadata",
        '{"team": "a"}',
        "--gzip-above",
        "9",
    )
    done("endpoints", "alter", "hook", *settings, *more, "--description", "The shop's")
    done(
        "endpoints", "bind", "hook", "invoice.#", "--filter", "$.payload.total > $least", "--param", "least=5"
    )
    shown = run("endpoints", "show", "hook", "--json").json
    assert (shown["rps"], shown["retry_after"]) == (7, ["P0D", "PT5S", "PT5400S"])
    assert (shown["log"], shown["keep_response"], shown["body"]) == ("all", True, "cloudevents")
    assert (shown["headers"], shown["metadata"], shown["gzip_above"]) == (["x-a"], {"team": "a"}, 9)
    assert (shown["patterns"], shown["params"]) == (["invoice.#"], {"least": 5})
    told = " ".join(done("endpoints", "show", "hook").split())
    assert "The shop's" in told
    assert '{"team":"a"}' in told

    done("endpoints", "pause", "hook", "--reason", "holiday")
    assert run("endpoints", "list", "--json").json[0]["reason"] == "holiday"
    done("endpoints", "disable", "hook")
    assert "disabled" in done("endpoints", "list")
    done("endpoints", "resume", "hook")
    assert run("endpoints", "show", "hook", "--json").json["state"] == "active"
    assert run("endpoints", "drop", "hook").code == 2, "it asks first"
    assert done("endpoints", "drop", "hook", "--yes") == "Dropped endpoint hook.\n"
    assert run("endpoints", "list", "--json").json == []


def test_secrets_come_from_files_and_are_shown_once(done: Done, run: Run, tmp_path: Path) -> None:
    mine, private = generate_secret(), generate_secret("v1a")
    (tmp_path / "secret").write_text(mine + "\n")
    assert mine not in done("endpoints", "create", "hook", URL, "--secret-file", str(tmp_path / "secret"))
    out = done("endpoints", "create", "signed", URL, "--secret-file", "-", stdin=private.encode())
    assert f"Public key: {parse_secret(private).public}" in out
    assert private not in out
    done("endpoints", "create", "unsigned", URL, "--unsigned")
    assert run("endpoints", "show", "unsigned", "--json").json["secrets"] == 0
    assert run("endpoints", "create", "told", URL, "--json").json["secret"].startswith("whsec_")

    rotated = run("endpoints", "rotate-secret", "hook", "--overlap", "2h")
    assert "Secret: whsec_" in rotated.out
    assert "not shown again" in rotated.err
    assert run("endpoints", "show", "hook", "--json").json["secrets"] == 2
    done("endpoints", "rotate-secret", "hook", "--overlap", "0s", "--secret-file", "-", stdin=mine.encode())
    assert run("endpoints", "show", "hook", "--json").json["secrets"] == 1


def test_a_key_is_made(done: Done, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGMB_SECRET_KEY")
    made = done("endpoints", "key").strip()
    assert made != done("endpoints", "key").strip()
    refused = run("endpoints", "create", "hook", URL, "--secret-file", "-", stdin=generate_secret().encode())
    assert refused.code == 1
    assert "PGMB_SECRET_KEY" in refused.err
    assert "are not signed" in run("endpoints", "create", "hook", URL).err
    assert "signed" not in run("endpoints", "create", "hook", URL, "--unsigned").err
    monkeypatch.setenv("PGMB_SECRET_KEY", made)
    assert "Secret: whsec_" in done("endpoints", "create", "hook", URL)


REFUSED = [
    (("show", "none"), 1, "does not exist"),
    (("create", "hook", "ftp://x/"), 1, "invalid endpoint URL"),
    (("create", "hook", URL, "--retry-after", "soon"), 2, "not a duration"),
    (("create", "hook", URL, "--metadata", "{"), 2, "not JSON"),
    (("create", "hook", URL, "--header", "secret"), 1, "not a header"),
    (("create", "hook", URL, "--secret-file", "/nowhere"), 1, "No such file"),
    (("alter", "hook"), 1, "nothing to change"),
    (("resend", "none", "00000000-0000-0000-0000-000000000000"), 1, "no endpoint is named"),
    (("resend", "none", "not-an-id"), 2, "UUID"),
    (("replay", "none", "--since", "latest"), 2, "not a time"),
    (("replay", "none", "--since", "1h"), 1, "no endpoint is named"),
    (("test", "none"), 1, "does not exist"),
]


def test_what_cannot_be_is_refused_in_a_line(run: Run) -> None:
    for words, code, said in REFUSED:
        outcome = run("endpoints", *words)
        assert outcome.code == code, words
        assert said in " ".join(outcome.err.replace("│", " ").split()), words
        assert "Traceback" not in outcome.err


def test_what_went_by_is_sent_again(done: Done, run: Run, db: psycopg.Connection[Any]) -> None:
    done("endpoints", "create", "hook", URL)
    ids = [done("publish", "a.b", str(number)).split()[-1].strip(".") for number in range(3)]
    got = receive(db)
    ((endpoint,),) = db.execute("select id from pgmb.endpoints").fetchall()
    settle(db, got.lease, None, [(got.seqs(0)[0], endpoint, None, "status", True, True)])

    def due() -> list[int]:
        held = claim(db)
        settle_claimed(db, held.lease, held.rows())
        return sorted(held)

    assert done("endpoints", "redrive", "hook", "--since", "1h") == "Sending 1 event again.\n"
    assert due() == [0]
    outcome = run("endpoints", "resend", "hook", *ids[1:], "00000000-0000-0000-0000-000000000001")
    assert outcome.out == "Sending 2 events again.\n"
    assert "1 were not found" in outcome.err
    assert due() == [1, 2]
    assert done("endpoints", "replay", "hook", "--since", "earliest") == "Sending 3 events again.\n"
    assert due() == [0, 1, 2]
    outcome = run("endpoints", "replay", "hook", "--since", "1h", "--filter", "$.payload > 0", "--max", "1")
    assert outcome.out == "Sending 1 event again.\n"
    assert "may be more" in outcome.err
    assert due() == [1]


@pytest.fixture
def receiver() -> Iterator[ReceiverProcess]:
    """Answers with the status that the path names."""
    answers = {str(status): partial(answering, status=status, body=b"thanks") for status in (200, 500)}
    with ReceiverProcess(("webhook-id", "webhook-timestamp", "webhook-signature"), answers) as receiver:
        yield receiver


def test_an_endpoint_is_tried_and_what_came_of_it_written_down(
    done: Done, run: Run, receiver: ReceiverProcess
) -> None:
    place = receiver.url
    made = run("endpoints", "create", "hook", f"{place}/200", "--keep-response", "--json").json
    refused = run("endpoints", "test", "hook", "--json")
    assert (refused.code, refused.json["status"]) == (1, None)
    assert "not public" in refused.json["detail"]

    tried = run("endpoints", "test", "hook", "--allow", "127.0.0.0/8", "--json")
    assert tried.code == 0, tried.err
    assert (tried.json["status"], tried.json["error"], tried.json["response"]) == (200, None, "thanks")
    (request,) = receiver.requests()
    assert Webhook(made["secret"]).verify(request.body, request.headers) == {"test": True, "endpoint": "hook"}

    done("endpoints", "create", "batches", f"{place}/500", "--batch", "5")
    tried = run("endpoints", "test", "batches", "--allow", "127.0.0.0/8")
    assert tried.code == 1
    assert "500" in tried.out
    assert receiver.requests()[1].body.startswith(b"[")
    attempts = run("endpoints", "attempts", "batches", "--json").json
    assert [(one["status"], one["topic"], one["attempt"]) for one in attempts] == [(500, "pgmb.test", 1)]
    assert "pgmb.test" in done("endpoints", "attempts", "batches")
    assert len(run("endpoints", "attempts", "hook", "--json").json) == 2
    done("endpoints", "create", "quiet", URL)
    assert done("endpoints", "attempts", "quiet") == "No attempts.\n"
