"""Promise: the database decides what is archived. It plans sealed segments without gaps, digests them,
and lets retention drop only those whose copy was found to be the same."""

from __future__ import annotations

import hashlib
from typing import Any

import psycopg
import pytest

from harness.segments import fill, seal
from tests.conftest import Connect
from tests.contract.cast import Cast
from tests.contract.test_privileges import refused

DB = psycopg.Connection[Any]

RECORD = "select pgmb.record_archived('main', %s, %s, %s, %s)"


def value(db: DB, statement: str, *given: Any) -> Any:
    row = db.execute(statement.encode(), given).fetchone()
    return None if row is None else row[0]


def fails(db: DB, statement: str, *given: Any) -> str | None:
    with pytest.raises(psycopg.Error) as error:
        db.execute(statement.encode(), given)
    return error.value.sqlstate


@pytest.fixture
def archived(db: DB) -> DB:
    """A stream with a lake, two sealed segments and an open one."""
    db.execute("select pgmb.create_lake('main', 's3://lake/main', '0 s')")
    fill(db, 100)
    seal(db)
    seal(db)
    fill(db, 10)
    return db


def test_the_plan_has_sealed_segments_with_their_bounds(archived: DB) -> None:
    planned = archived.execute("select segment, lo, hi, bytes > 0 from pgmb.plan_archive('main')").fetchall()
    assert planned == [(0, -1, 100, True), (1, (1 << 40) - 1, None, True)]
    archived.execute("update pgmb.segment set sealed_at = null where number = 0")
    assert archived.execute("select from pgmb.plan_archive('main')").fetchall() == []


def test_what_was_not_recorded_is_not_dropped(archived: DB) -> None:
    assert archived.execute("select pgmb.droppable()").fetchall() == []
    events, digest = archived.execute("select * from pgmb.digest_segment('main', 0)").fetchone() or (0, b"")
    assert events == 100
    assert fails(archived, RECORD, 0, 99, digest, 1) == "MB062"
    assert fails(archived, RECORD, 0, 100, b"", 1) == "MB062"
    assert fails(archived, RECORD, 0, None, None, 1) == "MB062"
    assert archived.execute("select pgmb.droppable()").fetchall() == []
    assert value(archived, RECORD, 0, 100, digest, 1) is True
    assert value(archived, RECORD, 0, 100, digest, 2) is False
    assert archived.execute("select lake_version, url, epoch from pgmb.archived").fetchall() == [
        (1, "s3://lake/main", 1)
    ]
    assert archived.execute("select pgmb.droppable()").fetchall() == [(0,)]
    archived.execute("select pgmb.drop_segments()")
    assert value(archived, "select verified from pgmb.lake_of('main')") == 0
    assert value(archived, RECORD, 1, 0, hashlib.sha256().digest(), 1) is True


def test_open_and_unknown_segments_have_no_digest(archived: DB) -> None:
    for segment in (2, 3, 99):
        assert fails(archived, "select pgmb.digest_segment('main', %s)", segment) == "MB063"
    assert fails(archived, "select pgmb.digest_segment('nothing', 0)") == "MB001"


@pytest.mark.parametrize(
    "change",
    ["seq = seq + 1000", "xid = '3'", "published_at = published_at + interval '1 microsecond'",
     "id = gen_random_uuid()", "topic = topic || '.'", "key = coalesce(key, '') || '.'",
     "payload = (payload::text || ' ')::json", "headers = '{}'"],
)  # fmt: skip
def test_the_digest_covers_every_column(archived: DB, change: str) -> None:
    before = value(archived, "select digest from pgmb.digest_segment('main', 0)")
    archived.execute("delete from pgmb.archived")
    assert value(archived, "select digest from pgmb.digest_segment('main', 0)") == before, "it repeats"
    archived.execute("delete from pgmb.archived")
    archived.execute(
        f"update pgmb.segment_1_0 set {change} where seq = (select max(seq) from pgmb.segment_1_0)".encode()
    )
    assert value(archived, "select digest from pgmb.digest_segment('main', 0)") != before


def test_the_digest_does_not_depend_on_the_client(archived: DB) -> None:
    before = value(archived, "select digest from pgmb.digest_segment('main', 0)")
    archived.execute("delete from pgmb.archived")
    archived.execute("set client_encoding = 'LATIN1'")
    archived.execute("set timezone = 'Asia/Tokyo'")
    archived.execute("set bytea_output = 'escape'")
    assert value(archived, "select digest = %s::bytea from pgmb.digest_segment('main', 0)", before) is True
    assert value(archived, "show client_encoding") == "LATIN1"


def test_a_rebase_changes_what_is_not_verified_and_keeps_the_rest(archived: DB) -> None:
    first, second = (
        archived.execute("select * from pgmb.digest_segment('main', %s)", [n]).fetchone() or ()
        for n in (0, 1)
    )
    archived.execute(RECORD, [1, *second, 1])
    archived.execute("select pgmb.rebase()")
    assert fails(archived, RECORD, 0, *first, 1) == "MB062", "its xids are others now"
    assert archived.execute("select * from pgmb.digest_segment('main', 0)").fetchone() != first
    assert archived.execute("select * from pgmb.digest_segment('main', 1)").fetchone() == second
    assert archived.execute("select segment, epoch from pgmb.archived order by 1").fetchall() == [
        (0, 2),
        (1, 1),
    ]


def test_a_copy_of_a_database_does_not_write_to_the_originals_table(archived: DB) -> None:
    source = value(archived, "select source from pgmb.lake_of('main')")
    archived.execute("update pgmb.installation set identity = gen_random_uuid()")
    assert fails(archived, "select pgmb.lake_of('main')") == "MB061"
    archived.execute("select pgmb.create_lake('main', 's3://lake/copy')")
    assert value(archived, "select source from pgmb.lake_of('main')") != source
    assert value(archived, "select url from pgmb.lake_of('main')") == "s3://lake/copy"


def test_a_stream_has_one_table(archived: DB) -> None:
    archived.execute("select pgmb.create_lake('main', 's3://lake/main', '1 day')")
    assert value(archived, "select keep_for = '1 day' and archive from pgmb.stream") is True
    assert fails(archived, "select pgmb.create_lake('main', 's3://lake/other')") == "MB004"
    assert fails(archived, "select pgmb.create_lake('main', '')") == "MB003"
    assert fails(archived, "select pgmb.create_lake('nothing', 's3://lake/x')") == "MB001"
    archived.execute("select pgmb.create_stream('other')")
    assert fails(archived, "select pgmb.lake_of('other')") == "MB061"
    archived.execute("select pgmb.drop_stream('main')")
    assert value(archived, "select count(*) from pgmb.lake") == 0


def test_one_archiver_holds_the_lock(archived: DB, connect: Any) -> None:
    other = connect()
    assert value(archived, "select pgmb.lock_lake('main')") is True
    assert value(other, "select pgmb.lock_lake('main')") is False
    archived.execute("select pg_advisory_unlock_all()")
    assert value(other, "select pgmb.lock_lake('main')") is True


def test_the_lake_is_for_admins(archived: DB, cast: Cast) -> None:
    role = cast.acting(cast.role("reader", "pgmb_consumer", "pgmb_publisher"))
    for call in (
        "create_lake('main', 'x')", "lake_of('main')", "plan_archive('main')", "digest_segment('main', 0)",
        "record_archived('main', 0, 0, '', 1)", "lock_lake('main')", "describe_lakes()",
    ):  # fmt: skip
        refused(role, f"select pgmb.{call}")
    admin = cast.acting(cast.role("archiver", "pgmb_admin"))
    admin.execute("select * from pgmb.plan_archive('main')")
    assert value(admin, "select events from pgmb.digest_segment('main', 0)") == 100
    assert value(admin, "select waiting from pgmb.describe_lakes()") == 2


COLUMNS = """'[{"name": "a", "type": "int"}, {"name": "b", "type": "string", "path": ["c", "b"]}]'"""


def test_a_projection_is_declared_once_and_replaced_only_if_told_to(archived: DB) -> None:
    declared = f"select pgmb.create_projection('p', 'main', '{{order.*}}', {COLUMNS}, 'rescue')"
    assert value(archived, declared) == "s3://lake/main_p"
    assert value(archived, declared) == "s3://lake/main_p", "the same again changes nothing"
    changed = declared.replace("rescue", "drop")
    assert fails(archived, changed) == "MB004"
    fields = "'p', 1, '{a,x}', '{number,string}', '{5,7}', '{6,7}', array[now(), now()], array[now(), now()]"
    archived.execute(f"select pgmb.record_fields({fields}), pgmb.record_fields({fields})")
    archived.execute("select pgmb.record_projection('p', 1, 3, 1, 2, 10, 1, 0)")
    assert value(archived, "select pgmb.record_projection('p', 1, 3, 1, 1, 99, 1, 0)") is False, "older"
    assert value(archived, "select rows from pgmb.describe_projections()") == 10
    assert value(archived, "select sum(last_seq) from pgmb.describe_fields('p')") == 13
    archived.execute(changed.replace("'drop')", "'drop', replace => true)"))
    assert value(archived, "select generation from pgmb.projection_of('p')") == 2
    assert value(archived, "select count(*) from pgmb.describe_fields('p')") == 0, "of another declaration"
    archived.execute("select pgmb.record_projection('p', 1, 3, 1, 9, 10, 1, 0)")
    assert value(archived, "select segment from pgmb.describe_projections()") is None
    many = "array(select 'f' || lpad(n::text, 3, '0') from generate_series(1, 300) n)"
    archived.execute(
        f"select pgmb.record_fields('p', 2, {many} || '{{a,c}}', array_fill('number'::text, '{{302}}'),"
        " array_fill(1::bigint, '{302}'), array_fill(1::bigint, '{302}'), array_fill(now(), '{302}'),"
        " array_fill(now(), '{302}'))"
    )
    assert value(archived, "select count(*) from pgmb.describe_fields('p')") == 202, "declared ones, and 200"
    for wrong in ("'p', 'none', '{#}', '[1]'", "'p', 'main', '{#}', '[]'", "'p', 'main', '{}', '[1]'",
                  "'p-q', 'main', '{#}', '[1]'", "'q', 'main', '{#}', '[1]', 'keep'"):  # fmt: skip
        assert fails(archived, f"select pgmb.create_projection({wrong})") in (
            "MB001",
            "MB003",
            "MB007",
            "23514",
        )
    archived.execute("select pgmb.create_stream('other')")
    assert fails(archived, "select pgmb.create_projection('q', 'other', '{#}', '[1]')") == "MB061"
    assert value(archived, "select pgmb.drop_projection('p')") == "s3://lake/main_p"
    assert fails(archived, "select pgmb.projection_of('p')") == "MB066"


def test_readers_of_a_stream_find_its_projections_and_admins_change_them(archived: DB, cast: Cast) -> None:
    archived.execute(f"select pgmb.create_projection('p', 'main', '{{#}}', {COLUMNS})")
    reader = cast.acting(cast.role("reader", "pgmb_consumer"))
    assert value(reader, "select url from pgmb.projection_of('p')") == "s3://lake/main_p"
    for call in ("describe_projections()", "drop_projection('p')", "lock_projection('p')"):
        refused(reader, f"select pgmb.{call}")
    refused(cast.acting(cast.role("stranger", "pgmb_publisher")), "select pgmb.projection_of('p')")
    admin = cast.acting(cast.role("projecting", "pgmb_admin"))
    assert value(admin, "select pgmb.lock_projection('p')") is True
    assert value(admin, "select upto from pgmb.projection_of('p')") is None, "nothing is verified yet"
    # A copy of the database must not write to the table.
    archived.execute("update pgmb.installation set identity = gen_random_uuid()")
    assert fails(archived, "select pgmb.projection_of('p')") == "MB066"


@pytest.mark.parametrize(
    ("url", "dead_url"),
    [
        ("s3://lake/main", None),
        ("s3a://lake//main/", None),
        ("s3://lake/main/audit", None),
        ("S3://lake/./main_dead/audit", None),
        ("s3://lake", None),
        ("s3://lake/other", "s3://lake/main/dead"),
        ("s3://lake/other", "s3://lake/other/dead"),
        ("s3://lake/paid/inside", None),
        ("s3://lake/was", None),
    ],
)
def test_no_table_lies_in_the_folder_of_another(archived: DB, url: str, dead_url: str | None) -> None:
    archived.execute(
        "select pgmb.create_projection('paid', 'main', '{#}', %s, url => 's3://lake/paid')",
        ['[{"name": "a", "type": "int"}]'],
    )
    archived.execute("select pgmb.create_stream('audit')")
    # The table of the database that this one is a copy of.
    archived.execute(
        "insert into pgmb.archived (stream, segment, epoch, events, digest, url, lake_version, verified_at)"
        " select stream, 77, 1, 1, 'x', 's3://lake/was/main', 1, now() from pgmb.lake"
    )
    assert fails(archived, "select pgmb.create_lake('audit', %s, dead_url => %s)", url, dead_url) == "MB004"
    place = "select pgmb.create_projection('inside', 'main', '{#}', %s, url => %s)"
    columns = '[{"name": "a", "type": "int"}]'
    if dead_url is None:
        assert fails(archived, place, columns, url) == "MB004"
    archived.execute("select pgmb.create_lake('audit', 's3://lake/audit')")


@pytest.mark.parametrize("url", ["s3://lake/x/../main", "/lake/.."])
def test_a_url_that_leads_out_of_its_folder_is_refused(archived: DB, url: str) -> None:
    archived.execute("select pgmb.create_stream('audit')")
    assert fails(archived, "select pgmb.create_lake('audit', %s)", url) == "MB003"


def test_of_two_nested_tables_declared_at_once_one_is_refused(db: DB, connect: Connect) -> None:
    db.execute("select pgmb.create_stream('audit')")
    other = connect()
    with db.transaction():
        db.execute("select pgmb.create_lake('main', 's3://lake/main')")
        other.execute("set lock_timeout = '200 ms'")
        assert fails(other, "select pgmb.create_lake('audit', 's3://lake/main/audit')") == "55P03"
    assert fails(other, "select pgmb.create_lake('audit', 's3://lake/main/audit')") == "MB004"
