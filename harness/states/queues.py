"""Queues, their settings, and the generations that superseding receives opened."""

from __future__ import annotations

from typing import Any

from harness.states.running import Db, rows, value


def queue_number(db: Db, queue: str = "q") -> int:
    """The number by which internal functions and leases name a queue."""
    return int(value(db, "select id from pgmb.queue where name = %s", [queue]))


def queue_names(db: Db) -> list[str]:
    """The queues that exist, those of endpoints included, sorted."""
    return [name for (name,) in rows(db, "select name from pgmb.queue where lane_of is null order by name")]


def paused_queues(db: Db) -> dict[str, str | None]:
    """The queues that are paused, each with the reason. Reads no event, as pgmb.queue_status would."""
    return dict(
        rows(db, "select name, paused_reason from pgmb.queue where lane_of is null and paused_at is not null")
    )


def queue_settings(db: Db, queue: str = "q") -> dict[str, Any]:
    """A queue's settings as pgmb.queue_settings gives them."""
    found: dict[str, Any] = value(db, "select pgmb.queue_settings(%s)", [queue])
    return found


def lane_settings(db: Db, name: str, queue: str = "q") -> list[Any]:
    """The different values that the lanes of a queue have for a setting, or for their first `topic`."""
    column = {"topic": "topics[1]"}.get(name, name)
    return [
        value
        for (value,) in rows(
            db,
            f"select distinct q.{column} from pgmb.queue q left join pgmb.queue head on head.id = q.lane_of"
            " where coalesce(head.name, q.name) = %s",
            [queue],
        )
    ]


_TABLES = (
    "queue",
    "binding",
    "generation",
    "claim",
    "settlement",
    "shortened",
    "noted_lease",
    "noted_key",
    "retry",
    "delivery",
    "dead",
)


def kept_of_queues(db: Db) -> dict[str, list[str]]:
    """What is kept of all queues but their events in the log, by kind; nothing if there was never a queue."""
    kept = {
        table: [row for (row,) in rows(db, f"select t::text from pgmb.{table} t order by 1")]
        for table in _TABLES
    }
    return {table: found for table, found in kept.items() if found}


def contents(db: Db, queue: str = "q") -> list[str]:
    """Everything that is kept of a queue but its events in the log, for comparison."""
    kept = rows(db, "select q::text from pgmb.queue q where q.name = %s", [queue])
    for table in ("claim", "retry", "dead"):
        kept += rows(
            db,
            f"select t::text from pgmb.{table} t join pgmb.queue q on q.id = t.queue where q.name = %s"
            " order by 1",
            [queue],
        )
    return [row for (row,) in kept]


def times_bound(db: Db, queue: str = "q") -> int:
    """How often the patterns, filter or condition of a queue were written."""
    return int(value(db, "select bindings from pgmb.queue where name = %s", [queue]))


def lock_queues(db: Db) -> None:
    """Make all that reads queues wait until the transaction ends."""
    rows(db, "lock table pgmb.queue in access exclusive mode")


def open_generations(db: Db, queue: str | None = None) -> int:
    """How many generations receivers opened, of a queue with its lanes, or of all."""
    return int(
        value(
            db,
            "select count(*) from pgmb.generation g join pgmb.queue q on q.id = g.queue"
            " left join pgmb.queue head on head.id = q.lane_of"
            " where coalesce(head.name, q.name) = coalesce(%s, head.name, q.name)"
            " and g.base is not null and g.number > 0",
            [queue],
        )
    )


def generations(db: Db, queue: str = "q") -> list[tuple[int, int, float]]:
    """The generations that receivers opened: number, the claim that it went on from, when (epoch)."""
    return rows(
        db,
        "select g.number, g.base, extract(epoch from g.opened_at)::float from pgmb.generation g"
        " join pgmb.queue q on q.id = g.queue where q.name = %s and g.opened_at is not null",
        [queue],
    )


def noted_generation(db: Db, queue: str = "q") -> int:
    """The generation at which receives of a queue look first."""
    return int(value(db, "select generation from pgmb.queue where name = %s", [queue]))


def generation_is_marked(db: Db, queue: str = "q") -> bool:
    """Whether a session has begun to open a generation and has not committed it."""
    return bool(
        value(
            db,
            "select exists (select from pgmb.generation g join pgmb.queue q on q.id = g.queue"
            " where q.name = %s and g.number > 0 and g.base is null and g.xmax <> '0')",
            [queue],
        )
    )


def open_generation(db: Db, queue: str = "q") -> None:
    """Open the first generation of a queue, as a receiver that supersedes another does."""
    rows(
        db,
        "update pgmb.generation g set base = 0 from pgmb.queue q"
        " where q.id = g.queue and q.name = %s and g.number = 1",
        [queue],
    )


def remove_next_generations(db: Db) -> None:
    """Make queues whose rows of later generations were not added yet."""
    rows(db, "delete from pgmb.generation where number > 0")


def supersede_often(db: Db, times: int = 70_000) -> None:
    """Make queues whose receives were superseded that often."""
    rows(db, "update pgmb.claim set id = id + (%s::bigint << 40)", [times])
    rows(db, "insert into pgmb.generation (queue, number, base) select id, %s, 1 from pgmb.queue", [times])
    rows(db, "select pgmb_internal.add_generations(id) from pgmb.queue")


_WITHOUT_KEY = {
    "pgmb.claim": "leases",
    "pgmb.settlement": "events settled singly",
    "pgmb.shortened": "leases behind a sweep",
    "pgmb.noted_lease": "noted leases",
    "pgmb.noted_key": "keys of noted leases",
    "pgmb.retry": "retries",
}


def left_of_dropped_queues(db: Db) -> dict[str, int]:
    """How much of what is left belongs to queues that are gone, by what it is."""
    counts = {
        _WITHOUT_KEY.get(table, table): value(
            db,
            f"select count(*) from {table} t"
            " where not exists (select from pgmb.queue q where q.id = t.queue)",
        )
        for (table,) in rows(db, "select unnest(pgmb_internal.tables_without_key())::text")
    }
    return {kind: count for kind, count in counts.items() if count}


def use_up_queue_numbers(db: Db) -> None:
    """Make a database in which as many queues were created as there are numbers for them."""
    rows(db, "select setval('pgmb.queue_id_seq', 16777215)")
