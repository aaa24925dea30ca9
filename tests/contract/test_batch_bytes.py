"""A batch is bounded by bytes as well as by its number of events, in every reader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

EVENTS = 12
EVENT_BYTES = 32 * 1024 + 2
BATCH_BYTES = 256 * 1024
"""In these tests; the number of pgmb would make them slow."""

# Hexadecimal digits at random are stored as they are: pglz finds nothing to compress.
_LARGE = f"select to_json(string_agg(md5(random()::text), '')) from generate_series(1, {EVENT_BYTES // 32})"

QUEUES = {
    "plain": "",
    "patterned": ", patterns => array['a.#']",
    "ordered": ", ordered => true",
    "limited": ", max_in_flight => 10000",
    "fair": ", fair_by => 'key'",
    "lanes": ", lanes => array['z', '#']",
}


def make_batches_small(db: psycopg.Connection[Any]) -> None:
    db.execute(
        "create or replace function pgmb_internal.batch_bytes() returns bigint language sql immutable"
        f" as 'select {BATCH_BYTES}::bigint'"
    )


def publish(db: psycopg.Connection[Any], events: int = EVENTS, topic: str = "a.b") -> None:
    db.execute(
        f"with large as materialized ({_LARGE})"
        f" select pgmb.publish('{topic}', large.to_json, key => (n % 3)::text)"
        f" from large, generate_series(1, {events}) n"
    )


def lease(db: psycopg.Connection[Any], queue: str, limit: int = 500) -> tuple[Any, list[int], int]:
    """A lease's id, the numbers of its events, and their bytes."""
    rows = db.execute(
        "select lease, seq, octet_length(payload::text) from pgmb.receive(%s, %s)", [queue, limit]
    ).fetchall()
    return (rows[0][0] if rows else None), [seq for _, seq, _ in rows], sum(size for *_, size in rows)


def drain(db: psycopg.Connection[Any], queue: str) -> list[Any]:
    """Receive everything, by leases that end at the bytes of a batch, and return the leases."""
    leases: list[Any] = []
    delivered: set[int] = set()
    while len(delivered) < EVENTS:
        held, seqs, size = lease(db, queue)
        assert seqs, f"{queue}: nothing more after {len(delivered)} events"
        assert size < BATCH_BYTES + EVENT_BYTES
        leases.append((held, len(seqs)))
        delivered.update(seqs)
        if queue == "ordered":
            # Keys of a lease are held until it is settled.
            assert db.execute("select pgmb.retry(%s, after => '0 s')", [held]).fetchone() == (len(seqs),)
            if len(delivered) == EVENTS:
                return leases
    return leases


def test_leases_of_large_events_and_of_large_retries_end_at_the_bytes_of_a_batch(
    db: psycopg.Connection[Any],
) -> None:
    make_batches_small(db)
    for kind, options in QUEUES.items():
        db.execute(f"select pgmb.create_queue('{kind}'{options})")
    publish(db)
    for kind in QUEUES:
        leases = drain(db, kind)
        # A lease holds what it returned.
        if kind != "ordered":
            for held, events in leases:
                assert db.execute("select pgmb.retry(%s, after => '0 s')", [held]).fetchone() == (events,)
        retried: set[int] = set()
        while len(retried) < EVENTS:
            held, seqs, size = lease(db, kind)
            assert seqs, f"{kind}: nothing more after {len(retried)} retries"
            assert size < BATCH_BYTES + EVENT_BYTES
            db.execute("select pgmb.ack(%s)", [held])
            retried.update(seqs)
        assert lease(db, kind)[1] == []


def test_late_and_own_events_end_at_the_bytes_of_a_batch(db: psycopg.Connection[Any], connect: Any) -> None:
    make_batches_small(db)
    db.execute("select pgmb.create_queue('q')")
    late = connect()
    late.autocommit = False
    publish(late)
    db.execute("select pgmb.publish('a.b', '1')")
    assert lease(db, "q")[2] == 1
    late.commit()
    received = 0
    while seqs := lease(db, "q")[1]:
        received += len(seqs)
        assert len(seqs) * EVENT_BYTES < BATCH_BYTES + EVENT_BYTES
    assert received == EVENTS


def test_pages_between_positions_end_at_the_bytes_of_a_batch(db: psycopg.Connection[Any]) -> None:
    make_batches_small(db)

    publish(db)
    upto = db.execute("select pgmb.position()::text").fetchone()
    assert upto is not None
    for read in (
        "pgmb.between('main', pgmb.earliest(), %(upto)s::pgmb.position, %(seq)s)",
        "pgmb.between('main', pgmb.earliest(), %(upto)s::pgmb.position, %(seq)s, 50)",
        "pgmb.between_filtered('main', pgmb.earliest(), %(upto)s::pgmb.position, %(seq)s)",
    ):
        seq, seen = 0, 0
        while rows := db.execute(
            f"select seq, octet_length(payload::text) from {read}", {"upto": upto[0], "seq": seq}
        ).fetchall():
            assert sum(size for _, size in rows) < BATCH_BYTES + EVENT_BYTES
            seq = rows[-1][0]
            seen += len(rows)
        assert seen == EVENTS


def test_events_beyond_the_bytes_of_a_batch_come_alone(db: psycopg.Connection[Any]) -> None:
    make_batches_small(db)
    db.execute("select pgmb.create_queue('q')")
    # As text 2 MB, which compress to a ninetieth, and count sixteen times their stored size.
    for _ in range(4):
        db.execute("select pgmb.publish('a', to_json(repeat('x', 2000000)))")
    assert [lease(db, "q")[2] for _ in range(4)] == [2000002] * 4
    assert lease(db, "q")[1] == []


def test_a_lease_holds_at_most_20000_events(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish_many('a', array_fill('1'::json, array[20001]))")
    assert len(lease(db, "q", 2147483647)[1]) == 20000
    assert len(lease(db, "q", 2147483647)[1]) == 1


def test_clients_of_one_session_that_write_dates_differently_receive_alike(
    db: psycopg.Connection[Any],
) -> None:
    """As behind a pooler: what one receive notes in the session, the next one reads."""
    db.execute("select pgmb.create_queue('q')")
    for style in ("SQL, DMY", "SQL, DMY", "ISO, MDY", "German", "Postgres, MDY"):
        db.execute("select set_config('datestyle', %s, false)", [style])
        db.execute("select pgmb.publish('t', '1') from generate_series(1, 3)")
        given = db.execute(
            "select ack from pgmb.receive('q', 3) r, pgmb.ack(r.lease, array[r.seq])"
        ).fetchall()
        assert len(given) == 3


def test_a_look_at_large_values_by_a_clock_that_was_ahead_is_not_believed(
    db: psycopg.Connection[Any],
) -> None:
    make_batches_small(db)
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.ack(r.lease) from pgmb.receive('q', 2) r")
    db.execute(
        "select pgmb_internal.look_for_large(s.id, 0, clock_timestamp() + interval '1 hour')"
        " from pgmb.stream s where s.name = 'main'"
    )
    publish(db)
    _, seqs, size = lease(db, "q")
    assert 0 < len(seqs) < EVENTS
    assert size < BATCH_BYTES + EVENT_BYTES
