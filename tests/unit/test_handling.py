"""The judge of fault histories must be able to say no."""

from __future__ import annotations

from pathlib import Path

from faults.worker.handling import Diary, Handling, judge, read, seconds_between


def one(number: int, began: int, ended: int, process: str = "p", attempt: int = 1) -> Handling:
    return Handling("k", number, attempt, began, ended, process)


def test_one_after_another_is_in_order() -> None:
    verdict = judge([one(0, 1, 2), one(1, 3, 4, "q"), one(2, 5, 6)], {"k": range(3)})
    assert verdict.ordered
    assert verdict.lost == verdict.repeated == 0


def test_what_was_never_done_is_lost() -> None:
    unfinished = Handling("k", 1, 1, 3, 9, "p", finished=False)
    assert judge([one(0, 1, 2), unfinished], {"k": range(2), "other": range(1)}).lost == 2


def test_overtaking_is_seen() -> None:
    verdict = judge([one(1, 1, 2), one(0, 3, 4)], {"k": range(2)})
    assert verdict.disordered == 1
    assert not verdict.ordered


def test_coming_again_is_no_overtaking() -> None:
    verdict = judge([one(0, 1, 2), one(1, 3, 4), one(0, 5, 6, "q", attempt=2)], {"k": range(2)})
    assert verdict.ordered
    assert verdict.repeated == 1


def test_two_at_once_are_seen_unless_a_lease_expired() -> None:
    verdict = judge([one(0, 1, 10), one(1, 5, 6, "q")], {"k": range(2)})
    assert (verdict.overlapping, verdict.explained) == (1, 0)
    verdict = judge([one(0, 1, 10), one(0, 5, 6, "q", attempt=2), one(1, 11, 12)], {"k": range(2)})
    assert (verdict.overlapping, verdict.explained) == (0, 1)


def test_a_torn_line_is_passed_over_and_a_kill_ends_what_was_begun(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    diary = Diary(path)
    diary.begin("k", 0, 1)
    diary.end("k", 0, 1)
    diary.begin("k", 1, 1)
    path.write_bytes(path.read_bytes() + b"b k 2 1 99")
    first, second = read(path, killed_at=1 << 60)
    assert first.finished
    assert (second.finished, second.ended) == (False, 1 << 60)
    assert seconds_between([first]) >= 0
