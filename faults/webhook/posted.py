"""What was posted where, and whether that is as it should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Post(NamedTuple):
    """A request that the server got, in the order of arrival."""

    endpoint: str
    event: int
    id: str
    """Its `webhook-id`."""
    process: str
    status: int | None
    """None: it was not answered."""


@dataclass(frozen=True, slots=True)
class Verdict:
    events: int
    posts: int
    lost: int
    """Events that an endpoint should have got and did not, or refused and never got again."""
    stray: int
    """Posts to an endpoint that the event is not for, or of an event that was not committed."""
    repeated: dict[str, int]
    """Posts that came again because their process was killed, by what the process is called."""
    unexplained: int
    """Posts that came again although their process lived on and they were not refused."""
    renamed: int
    """Events that came under more than one id, and ids that came for more than one event."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.stray or self.unexplained or self.renamed)

    def __str__(self) -> str:
        return (
            f"{self.events} events, {self.posts} posts, {self.lost} lost, {self.stray} stray, "
            f"{sum(self.repeated.values())} repeated after kills, {self.unexplained} unexplained, "
            f"{self.renamed} under another id"
        )


def judge(posts: Iterable[Post], meant: Mapping[str, Set[int]], killed: Collection[str]) -> Verdict:
    """meant: the events that each endpoint should get; killed: the processes that were."""
    of_delivery: dict[tuple[str, int], list[Post]] = defaultdict(list)
    ids: dict[int, set[str]] = defaultdict(set)
    events: dict[str, set[int]] = defaultdict(set)
    stray = 0
    for post in posts:
        of_delivery[post.endpoint, post.event].append(post)
        ids[post.event].add(post.id)
        events[post.id].add(post.event)
        stray += post.event not in meant.get(post.endpoint, ())
    repeated: dict[str, int] = defaultdict(int)
    unexplained = 0
    for deliveries in of_delivery.values():
        for nth, (earlier, later) in enumerate(pairwise(deliveries), 1):
            if earlier.status is not None and earlier.status >= 300:
                continue
            if earlier.status is None and earlier.process == later.process:
                # No answer came within the request's time: the dispatcher tries again.
                continue
            # The lease of the one that was killed may end after a retry that another one made.
            posted = [one.process for one in deliveries[:nth] if one.process != later.process]
            dead = [process for process in posted if process in killed]
            if dead:
                repeated[dead[-1]] += 1
            else:
                unexplained += 1
    lost = sum(
        not any(post.status is not None and post.status < 300 for post in of_delivery[endpoint, event])
        for endpoint, numbers in meant.items()
        for event in numbers
    )
    return Verdict(
        len(set().union(*meant.values())) if meant else 0,
        sum(map(len, of_delivery.values())),
        lost,
        stray,
        dict(repeated),
        unexplained,
        sum(len(names) > 1 for names in ids.values()) + sum(len(found) > 1 for found in events.values()),
    )
