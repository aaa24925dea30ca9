"""Promise: a defect that was once found is caught when it comes back.

Each mutation changes the text of an installed function so that a known defect returns. The test that holds
the promise must then fail: a check that cannot fail proves nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.concurrency import test_stepped_administration as administration
from tests.concurrency import test_stepped_claims as claims
from tests.concurrency import test_stepped_fencing as fencing
from tests.concurrency import test_stepped_rotation as rotation
from tests.contract import test_batch_bytes as sizes
from tests.contract import test_boundaries as boundaries
from tests.contract import test_clock as clock
from tests.contract import test_convert as convert
from tests.contract import test_dropped_queues as dropped
from tests.contract import test_fair as fair
from tests.contract import test_isolation_levels as isolation
from tests.contract import test_many_leases as many
from tests.contract import test_ordered as ordered
from tests.contract import test_positions_belong as belonging
from tests.contract import test_positions_durable as durable
from tests.contract import test_rebase as rebasing
from tests.contract import test_rotation as rotating
from tests.contract import test_sweeps as sweeps

queue, s, lost = fencing.queue, belonging.s, durable.lost
batch, ended = claims.batch, claims.ended
one, two = ordered.one, ordered.two
broker = convert.broker
own_clock = clock.own_clock
stepping = clock.stepping
"""Fixtures of the tests that catch."""


# Which test catches a mutation does not depend on PostgreSQL's version.
pytestmark = pytest.mark.once


@dataclass(frozen=True)
class Mutation:
    """In `function`, `old` becomes `new`; then `caught_by` fails. Its other arguments are fixtures."""

    defect: str
    function: str
    old: str
    new: str
    caught_by: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)

    def apply(self, connection: psycopg.Connection[Any]) -> None:
        rows = connection.execute(
            "select pg_get_functiondef(oid) from pg_proc"
            " where pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[]) and proname = %s",
            [self.function],
        ).fetchall()
        texts = [text for (text,) in rows if self.old in text]
        assert len(texts) == 1, f"{self.function} has {len(texts)} times: {self.old}"
        connection.execute(sql.SQL(texts[0].replace(self.old, self.new)))


MUTATIONS = [
    Mutation(
        "what a tenant of a fair queue was given is forgotten in the next receive",
        "serve",
        "(m.given = m.turns or l.nth = 1 and m.given = 0) goes_last",
        "(m.given > 0 or l.nth = 1) goes_last",
        fair.test_the_rest_of_a_turn_comes_with_the_next_receive,
    ),
    Mutation(
        "the position of an ordered queue passes the place of a dead letter that is being sent back",
        "send_back",
        "for key share skip locked",
        "",
        ordered.test_a_dead_letter_sent_back_is_delivered_once_the_event_ahead_is_settled,
    ),
    Mutation(
        "events that a conversion sets aside never expire",
        "bury_expired",
        "r.fresh and",
        "false and",
        convert.test_events_that_wait_expire_after_a_conversion_as_before,
        {"before": "lanes", "after": "plain"},
    ),
    Mutation(
        "rows of queues that are still there are cleared with those of dropped ones",
        "clear_dropped_queues",
        " and not exists (select from pgmb.queue q where q.id = p.queue)",
        "",
        dropped.test_maintenance_removes_rows_of_a_queue_dropped_beside_a_receive,
    ),
    Mutation(
        "maintenance leaves rows of queues that were dropped beside a receive",
        "tables_without_key",
        "to_regclass('pgmb.retry'), ",
        "",
        dropped.test_maintenance_removes_rows_of_a_queue_dropped_beside_a_receive,
    ),
    Mutation(
        "a lease holds large events without bound",
        "fitting_end",
        "e.before >= pgmb_internal.batch_bytes()",
        "false",
        sizes.test_leases_of_large_events_and_of_large_retries_end_at_the_bytes_of_a_batch,
    ),
    Mutation(
        "a batch ends at a number that was read before its snapshot",
        "boundary",
        "  snapshot := pgmb_internal.snapshot();\n"
        "  last := coalesce(pg_sequence_last_value(boundary.numbers), 0);",
        "  last := coalesce(pg_sequence_last_value(boundary.numbers), 0);\n"
        "  perform pg_sleep(0.01);\n"
        "  snapshot := pgmb_internal.snapshot();",
        boundaries.test_the_first_drop_of_a_session_loses_none_of_the_newest_events,
    ),
    Mutation(
        "a lease of the future holds up all keys of an ordered queue",
        "recent_leases",
        " filter (where c.at <= recent_leases.now)",
        "",
        clock.test_a_dead_consumer_of_an_ordered_queue_holds_its_keys_alone_after_the_clock_was_ahead,
    ),
    Mutation(
        "keys of leases that are in flight for long are given to others",
        "is_noted",
        "return holder is not null and",
        "return false and",
        many.test_an_event_waits_for_its_key_beside_many_leases,
    ),
    Mutation(
        "a limit does not count leases that are in flight for long",
        "room_in_flight",
        " - (newest.flight).events",
        "",
        many.test_a_limit_holds_beside_many_leases,
        {"kind": ""},
    ),
    Mutation(
        "leases that are in flight for long count after they ended",
        "room_in_flight",
        "room := room + pgmb_internal.recount_noted(lane, now);",
        "null;",
        many.test_a_limit_holds_beside_many_leases,
        {"kind": ""},
    ),
    Mutation(
        "a superseded receive that noted leases commits",
        "note_leases",
        "perform pgmb_internal.recheck_at_commit(base.queue, base.id);",
        "",
        many.test_a_superseded_receive_that_noted_leases_does_not_commit,
    ),
    Mutation(
        "requests paid for in the future hold up an endpoint",
        "take_requests",
        "case when a.paid_until < now + interval '1 second' then a.paid_until end",
        "a.paid_until",
        clock.test_an_endpoint_with_a_rate_gets_requests_after_the_clock_was_ahead,
    ),
    Mutation(
        "a statement claims a batch that its snapshot does not show",
        "claim_next",
        "and pg_snapshot_xmax(claim_next.seen) > pg_snapshot_xmax(before.batch_snapshot)\n",
        "\n",
        claims.test_a_batch_that_was_opened_after_the_snapshot_is_not_claimed,
    ),
    Mutation(
        "a statement goes on from a claim while a generation may be opened",
        "claim_next",
        "and before.openings = q.openings and now",
        "and now",
        claims.test_it_refuses_while_a_generation_is_being_opened,
    ),
    Mutation(
        "a statement passes numbers that are not committed",
        "claim_next",
        "or claim_next.start <> claim_next.last - claim_next.counted",
        "",
        claims.test_it_passes_no_number_that_is_not_committed,
    ),
    Mutation(
        "a statement opens a batch although an event may be late",
        "claim_next",
        "and pgmb_internal.had_finished(c.batch_next, c.batch_snapshot)",
        "",
        claims.test_it_opens_no_batch_where_an_event_may_be_late,
    ),
    Mutation(
        "a statement opens a batch that begins before the queue's position",
        "claim_next",
        "(c.batch_seq = claim_next.start and c.place",
        "(c.place",
        claims.test_it_opens_batches_one_after_the_other,
    ),
    Mutation(
        "a statement opens a batch by a snapshot that is older than the last one",
        "claim_next",
        "and pg_snapshot_xmax(claim_next.seen) > pg_snapshot_xmax(c.batch_snapshot)",
        "",
        claims.test_a_snapshot_from_before_the_last_batch_opens_none,
    ),
    Mutation(
        "a statement opens a batch over events that were read before",
        "claim_next",
        "c.read_before <= claim_next.start and",
        "",
        claims.test_it_opens_no_batch_over_events_that_came_before_late_ones,
    ),
    Mutation(
        "a statement takes retried events for those after its position",
        "claim_next",
        "and c.hi >= claim_next.start",
        "",
        claims.test_a_lease_of_retried_events_tells_nothing_of_the_log,
    ),
    Mutation(
        "a statement takes a lease with gaps for one without",
        "claim_next",
        "and c.hi = claim_next.start and c.events = c.hi - c.lo",
        "and c.hi = claim_next.start",
        claims.test_a_long_batch_is_left_where_its_numbers_have_a_gap,
    ),
    Mutation(
        "a made-up snapshot becomes a queue's position",
        "claim_next",
        "and pg_snapshot_xmax(claim_next.seen) <= pg_snapshot_xmax(pg_current_snapshot())",
        "",
        claims.test_made_up_snapshots_do_not_become_the_position,
    ),
    Mutation(
        "a statement opens a batch before a segment that opened after its snapshot",
        "claim_next",
        "or pgmb_internal.segment_of(noted) <> claim_next.segment",
        "",
        claims.test_a_rotation_after_its_snapshot_hides_nothing,
    ),
    Mutation(
        "a wait for a crowd counts as a wait for one transaction",
        "lock_newest",
        "not coalesce(holders && (pgmb_internal.lock_state(key)).holders, false)",
        "false",
        fencing.test_consumers_that_hold_the_lock_in_turn_supersede_nobody,
        {"end": "commit"},
    ),
    Mutation(
        "R1: the ack of a young lease does not ask whether it was superseded",
        "ack_claim",
        "and c.openings = pg_sequence_last_value('pgmb.opening'::regclass)",
        "",
        fencing.test_a_superseded_lease_is_lost_however_young_it_is,
        {"how": "ack(%s)"},
    ),
    Mutation(
        "R1: other settling calls do not ask whether it was superseded",
        "hold_claim",
        "if stands <> 'holds' then",
        "if false then",
        fencing.test_a_superseded_lease_is_lost_however_young_it_is,
        {"how": "retry(%s, after => '0 s')"},
    ),
    Mutation(
        "R1: a generation that is being opened counts for nothing",
        "standing",
        "if newer.opening and not exists (",
        "if false and not exists (",
        fencing.test_a_lease_that_another_may_be_taking_over_is_not_settled,
        {"how": "ack(%s)"},
    ),
    Mutation(
        "R1: a superseded transaction commits what it received",
        "refuse_void",
        "and pgmb_internal.may_be_void(new.queue, new.id) then",
        "and false then",
        fencing.test_a_superseded_receive_of_retried_events_gives_them_back,
    ),
    Mutation(
        "consumers supersede an administrative call that is open",
        "is_administered",
        "return true;",
        "return false;",
        administration.test_an_open_purge_is_not_superseded,
    ),
    Mutation(
        "a receive that waits for a lane that a conversion removes is told that the queue was dropped",
        "lock_as_found",
        "return null;\n  end;",
        "raise;\n  end;",
        administration.test_a_receive_that_waits_while_a_conversion_removes_lanes_finds_the_new_form,
        {"before": "lanes", "limit": "", "in_order": None},
    ),
    Mutation(
        "a lease of a lane that a conversion removed can be settled",
        "standing",
        "or not exists (select from pgmb.generation g where g.queue = standing.queue and g.number = -1)",
        "",
        administration.test_a_call_supersedes_a_long_receive_of_a_lane,
        {"call": "convert_queue('q')", "settled": False},
    ),
    Mutation(
        "R2: a retry lease that was taken over can be settled",
        "hold_claim",
        "not pgmb_internal.is_leased(held.state)",
        "not (pgmb_internal.is_leased(held.state) or held.state = 'expired')",
        fencing.test_a_retry_lease_is_lost_as_a_whole,
        {"how": "ack(%s)"},
    ),
    Mutation(
        "R3: the next event of a key waits to be woken",
        "lease_due_in_order",
        "if events > 0 then",
        "if false then",
        fencing.test_what_waits_behind_a_key_comes_when_its_parts_are_settled_at_once,
        {"first": "ack(%s, array[%s])", "second": "ack(%s, array[%s])"},
    ),
    Mutation(
        "a key begins behind an event that its lease can give back",
        "pass_keys",
        "order by r.key, r.origin, r.seq",
        "order by r.key, r.origin desc, r.seq desc",
        ordered.test_a_parked_event_that_is_retried_stays_ahead_of_those_parked_with_it,
    ),
    Mutation(
        "a lease of retried events does not hold their keys",
        "recent_leases",
        "from unnest(retried) one",
        "from unnest('{}'::bigint[]) one",
        ordered.test_a_dead_letter_sent_back_waits_for_a_retried_lease_too,
    ),
    Mutation(
        "an event of an ordered queue comes before a retried one that a scan for due rows has passed",
        "take_next",
        "waiting is not null or ",
        "",
        ordered.test_a_retry_that_a_scan_for_due_rows_has_passed_keeps_its_place,
    ),
    Mutation(
        "R4: maintain() rotates at every call",
        "rotate_due",
        "g.number = pgmb_internal.segment_of(newest_seq) - 1",
        "g.number = g.number - 1",
        rotating.test_a_stream_older_than_rotate_every_rotates_once_per_period,
    ),
    Mutation(
        "R5: a position of a lost timeline is accepted",
        "assert_position",
        "if kept = (given).proof then",
        "if true then",
        durable.test_readers_refuse_a_position_that_a_failover_lost,
    ),
    Mutation(
        "R6: the commit of a position is not flushed",
        "make_tick",
        "if current_setting('synchronous_commit') = 'off' then",
        "if false then",
        durable.test_a_position_holds_after_a_crash,
        {"commit": "off"},
    ),
    Mutation(
        "a sweep ends all leases that expired, however long that takes",
        "sweep",
        "      exit when stopped;\n",
        "",
        sweeps.test_many_leases_that_expire_together_come_again_under_a_statement_timeout,
        {"kind": "plain"},
    ),
    Mutation(
        "a sweep looks for no expired lease while many are being settled",
        "sweep",
        "exit when stopped or swept >= sweep.now;",
        "exit when stopped or swept >= sweep.now or cardinality(held) >= most;",
        sweeps.test_a_lease_is_taken_over_beside_a_transaction_that_settles_many_late,
    ),
    Mutation(
        "a sweep forgets which leases it found settled",
        "sweep_when_due",
        " or swept.held is distinct from base.held",
        "",
        sweeps.test_many_leases_settled_late_leave_the_sweep_nothing_to_look_at,
        {"end": "commit"},
    ),
    Mutation(
        "an event that becomes due keeps the time of an earlier decision",
        "wake_first",
        ", decided_at = wake_first.now",
        "",
        clock.test_events_that_became_due_while_the_clock_was_ahead_come_when_it_is_right,
        {"kind": "ordered"},
    ),
    Mutation(
        "R7: the sweep passes a lease that is being shortened",
        "extend",
        "if expires < held.expires_at then",
        "if false then",
        fencing.test_a_lease_made_shorter_while_sweeps_pass_is_taken_over,
        {"lease_for": "0 s", "of": "fresh"},
    ),
    Mutation(
        "R7: an extend compares an end that another extend is changing",
        "extend",
        "'no key update'",
        "'key share'",
        fencing.test_two_extends_of_one_lease_lose_no_event,
        {"of": "fresh"},
    ),
    Mutation(
        "a rebase delivers everything above one number again",
        "last_consumed",
        "return greatest(consumed, last);",
        "return consumed;",
        rebasing.test_a_rebase_delivers_what_waited_and_nothing_else,
        {"state": rebasing.among_late_events, "kind": "plain"},
    ),
    Mutation(
        "a rebase takes what a queue has not received for received",
        "rebase_passed",
        "and not pgmb_internal.has_passed(newest, g)",
        "and false",
        rebasing.test_a_rebase_of_a_long_history_locks_few_segments_at_once,
        {},
    ),
    Mutation(
        "R8: a janitor with an old snapshot is let in",
        "assert_read_committed",
        "in ('repeatable read', 'serializable')",
        "in ('none')",
        isolation.test_an_event_committed_after_a_janitors_snapshot_is_not_dropped,
        {"step": "maintain"},
    ),
    Mutation(
        "R9: a segment opens although a publisher does not see it",
        "rotate",
        "if not next_one.writers && pgmb_internal.log_writers(log::regclass) then",
        "if true then",
        rotation.test_a_transaction_publishes_across_any_number_of_rotations,
        {"how": "publish", "level": "read committed"},
    ),
    Mutation(
        "R10: a lease has room for 16 bits of the generation",
        "claim_of_bits",
        "int8(substring(bits, 25, 64))",
        "int8(substring(bits, 25, 64)) & 72057594037927935",
        fencing.test_leases_are_settled_after_any_number_of_supersessions,
    ),
    Mutation(
        "R11: the whole lease is given up beside an open ack of a part",
        "settle_as_failed",
        "case when whole then 'update' else 'share' end",
        "'key share'",
        fencing.test_an_event_that_is_being_acked_does_not_come_again,
        {"how": "release(%s)", "of": "fresh"},
    ),
    Mutation(
        "a receive that waited for a conversion goes on by the old form",
        "lock_as_found",
        "if pgmb_internal.generation_of(base.id) <> found.generation and not exists (",
        "if false and not exists (",
        convert.test_a_receive_that_waited_for_a_conversion_takes_nothing_by_the_old_form,
        {"before": "fair"},
    ),
    Mutation(
        "what follows a dead letter in an ordered lease stays with the lease",
        "fail_retried",
        "where r.id = any (behind)",
        "where false",
        ordered.test_the_last_attempt_gives_back_what_the_lease_holds_behind_it,
    ),
    Mutation(
        "D2: a position of a stream that was created again is accepted",
        "assert_position",
        "if (given).stream is distinct from here.salt then",
        "if false then",
        belonging.test_a_stream_that_was_created_again_refuses_positions_of_the_one_before,
        {"entry": "seek", "taken": "earliest"},
    ),
    Mutation(
        "R11: numbers in the range that the lease does not hold are settled",
        "numbers_of",
        "and (held.seqs is null or one = any (held.seqs))",
        "",
        fencing.test_numbers_that_a_lease_does_not_hold_are_not_settled,
    ),
]


@pytest.fixture
def install(install: Callable[[str], None], request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Installs the schema on a server of the test's own, with the mutation."""

    def install_mutated(dsn: str) -> None:
        install(dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            request.node.callspec.params["mutation"].apply(connection)

    return install_mutated


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.defect)
def test_a_defect_that_comes_back_is_caught(mutation: Mutation, request: pytest.FixtureRequest) -> None:
    wanted = set(inspect.signature(mutation.caught_by).parameters) - set(mutation.arguments)
    own = vars(inspect.getmodule(mutation.caught_by))
    assert {name: own[name] for name in wanted & own.keys()} == {
        name: globals()[name] for name in wanted & own.keys()
    }, "with other fixtures it may fail for other reasons"
    fixtures = {name: request.getfixturevalue(name) for name in wanted}
    if "stepping" in wanted:
        mutation.apply(fixtures["stepping"][0])
    elif not wanted & {"install", "lost"}:
        with psycopg.connect(request.getfixturevalue("dsn"), autocommit=True) as connection:
            mutation.apply(connection)
    with pytest.raises((AssertionError, psycopg.Error, pytest.fail.Exception)):
        mutation.caught_by(**fixtures, **mutation.arguments)
