"""The judge of what was posted: each kind of wrong is seen, and a kill explains one repeat."""

from __future__ import annotations

from faults.webhook.posted import Post, judge

KILLED = {"dead"}


def post(event: int, process: str = "live", status: int | None = 204, **other: str) -> Post:
    return Post(other.get("endpoint", "e"), event, other.get("id", f"id-{event}"), process, status)


def test_what_came_once_is_clean() -> None:
    verdict = judge([post(1), post(2)], {"e": {1, 2}}, KILLED)
    assert verdict.clean
    assert (verdict.events, verdict.posts) == (2, 2)


def test_what_did_not_come_or_was_refused_or_not_answered_is_lost() -> None:
    posts = [post(1, status=500), post(2, "dead", None)]
    assert judge(posts, {"e": {1, 2, 3}}, KILLED).lost == 3


def test_what_came_to_the_wrong_endpoint_or_was_never_committed_is_stray() -> None:
    posts = [post(1), post(1, endpoint="f"), post(9)]
    assert judge(posts, {"e": {1}, "f": set()}, KILLED).stray == 2


def test_a_repeat_is_explained_by_a_kill_or_a_refusal_and_by_nothing_else() -> None:
    killed = judge([post(1, "dead"), post(1)], {"e": {1}}, KILLED)
    assert killed.clean
    assert killed.repeated == {"dead": 1}
    assert judge([post(1, status=500), post(1)], {"e": {1}}, KILLED).clean
    assert judge([post(1, status=None), post(1)], {"e": {1}}, KILLED).clean
    assert judge([post(1, "other", None), post(1)], {"e": {1}}, KILLED).unexplained == 1
    assert judge([post(1), post(1)], {"e": {1}}, KILLED).unexplained == 1
    assert judge([post(1), post(1, "dead")], {"e": {1}}, KILLED).unexplained == 1
    assert judge([post(1, "dead"), post(1, "dead"), post(1)], {"e": {1}}, KILLED).unexplained == 1


def test_an_event_has_one_id_and_an_id_one_event() -> None:
    assert judge([post(1, "dead"), post(1, id="other")], {"e": {1}}, KILLED).renamed == 1
    assert judge([post(1, id="same"), post(2, id="same")], {"e": {1, 2}}, KILLED).renamed == 1
