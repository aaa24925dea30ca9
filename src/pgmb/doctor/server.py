"""The server: version, durability, vacuum, what keeps old rows alive, disk."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pgmb.doctor.finding import Check, Look, Verdict, ago, fail, note, ok, skip, warn

_OLDEST, _NEWEST = 15, 18
_RELOAD = "select pg_reload_conf();"


def _version(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    major = row["number"] // 10_000
    if major < _OLDEST:
        yield fail(
            f"PostgreSQL {row['version']} is not supported",
            f"Upgrade to {_OLDEST} or later, up to {_NEWEST}.",
        )
    elif major > _NEWEST:
        yield note(f"PostgreSQL {row['version']} is newer than any that pgmb was tested on, {_NEWEST}")
    else:
        yield ok(f"PostgreSQL {row['version']}")


def _durability(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    for setting, loss in (
        ("fsync", "a crash of the machine can lose committed events and damage the database"),
        ("full_page_writes", "a crash of the machine can damage the database"),
    ):
        if row[setting] == "off":
            yield fail(f"{setting} is off: {loss}", f"alter system set {setting} = on; {_RELOAD}")
    if row["synchronous_commit"] == "off":
        yield warn(
            "synchronous_commit is off for everybody: a crash loses publishes that were told to be committed",
            f"alter system set synchronous_commit = on; {_RELOAD} receive is fast without.",
        )


def _standby(look: Look) -> Iterable[Verdict]:
    if look.rows[0]["standby"]:
        yield fail(
            "this is a standby: it serves reads between positions, but nobody can publish or receive here",
            "Connect to the primary, for example with target_session_attrs=read-write.",
        )


def _autovacuum(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["relation"] is None:
            yield warn(
                f"{row['setting']} is off: tables grow and transaction ids run out",
                f"alter system set {row['setting']} = on; {_RELOAD}",
            )
        else:
            yield warn(
                f"autovacuum is off for {row['relation']}",
                f"alter table {row['relation']} reset (autovacuum_enabled);",
            )


def _pinned(look: Look) -> Iterable[Verdict]:
    limits = look.limits
    for row in look.rows:
        kind, name, owner, age, xids = (row[part] for part in ("kind", "name", "owner", "age", "xids"))
        long = age is not None and age > limits.pinned_for
        many = (xids or 0) > limits.pinned_xids
        idle_slot = kind == "slot" and row["state"] == "inactive"
        if not (long or many or idle_slot):
            continue
        since = f" for {ago(age)}" if age is not None else ""
        if kind == "session":
            yield warn(
                f"session {name} of {owner} ({row['state']}) keeps old rows alive{since},"
                f" {xids:,} transaction ids: {' '.join((row['query'] or '').split())}",
                f"End it: select pg_terminate_backend({name}); or set idle_in_transaction_session_timeout.",
            )
        elif kind == "prepared":
            yield warn(
                f"prepared transaction {name!r} of {owner} keeps old rows alive{since},"
                f" {xids:,} transaction ids",
                f"commit prepared '{name}'; or rollback prepared '{name}';",
            )
        else:
            yield warn(
                f"replication slot {name} ({row['state']}) keeps old rows alive, {xids:,} transaction ids",
                f"Start its consumer, or select pg_drop_replication_slot('{name}');",
            )
    if look.rows and not look.rows[0]["sees_all"]:
        yield skip(
            "sees sessions of this role only", "grant pg_read_all_stats, to see who else keeps rows alive."
        )


def _disk(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    directory = row["directory"]
    if directory is None:
        yield skip(
            "may not know where the data lies", "grant pg_read_all_settings, or watch the disk on the server."
        )
        return
    # Only a unix socket says that a path there is a path here.
    local = look.host.startswith(("/", "@"))
    try:
        status = os.statvfs(directory) if local else None
    except OSError:
        status = None
    if status is None or not status.f_blocks:
        yield skip("the server's disk cannot be read from here", "Watch it on the server.")
        return
    free = status.f_bavail / status.f_blocks
    gigabytes = status.f_bavail * status.f_frsize / 1e9
    if free < look.limits.disk:
        yield warn(
            f"{free:.0%} of the disk is free, {gigabytes:,.1f} GB",
            "Let streams keep less: pgmb streams alter NAME --keep-for 7d.",
        )
    else:
        yield ok(f"{free:.0%} free, {gigabytes:,.1f} GB")


_PINNED = """
select h.*, pg_has_role(current_user, 'pg_read_all_stats', 'usage') sees_all from (
  select 'session' kind, a.pid::text name, a.usename::text owner, a.state,
    clock_timestamp() - a.xact_start age, greatest(age(a.backend_xmin), age(a.backend_xid)) xids,
    left(a.query, 60) query
  from pg_stat_activity a
  where (a.backend_xmin is not null or a.backend_xid is not null) and a.pid <> pg_backend_pid()
    and (a.datid is null or a.datname = current_database())
    and a.backend_type is distinct from 'autovacuum worker'
  union all
  select 'prepared', p.gid, p.owner::text, null, clock_timestamp() - p.prepared, age(p.transaction), null
  from pg_prepared_xacts p where p.database = current_database()
  union all
  select 'slot', s.slot_name::text, null, case when s.active then 'active' else 'inactive' end, null,
    greatest(age(s.xmin), age(s.catalog_xmin)), null
  from pg_replication_slots s where s.xmin is not null or s.catalog_xmin is not null
  union all
  select 'none', null, null, null, null, null, null
) h
order by h.age desc nulls last
"""

CHECKS = (
    Check(
        "server version",
        "supported",
        "select current_setting('server_version_num')::int number,"
        " split_part(current_setting('server_version'), ' ', 1) version",
        _version,
        of_schema=False,
    ),
    Check("standby", "this is the primary", "select pg_is_in_recovery() standby", _standby, of_schema=False),
    Check(
        "durability",
        "what is committed survives a crash",
        "select current_setting('fsync') fsync, current_setting('full_page_writes') full_page_writes,"
        # What the server would give to anybody, not what this session may have set.
        " (select reset_val from pg_settings where name = 'synchronous_commit') synchronous_commit",
        _durability,
        of_schema=False,
    ),
    Check(
        "autovacuum",
        "on",
        "select name setting, null relation from pg_settings"
        " where name in ('autovacuum', 'track_counts') and setting = 'off'"
        " union all select null, c.oid::regclass::text from pg_class c"
        " join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'pgmb' and c.reloptions && '{autovacuum_enabled=false,autovacuum_enabled=off}'",
        _autovacuum,
        of_schema=False,
    ),
    Check("old transactions", "none keeps old rows alive for long", _PINNED, _pinned, of_schema=False),
    Check(
        "disk",
        "enough",
        "select case when pg_has_role(current_user, 'pg_read_all_settings', 'usage')"
        " then current_setting('data_directory') end directory",
        _disk,
        of_schema=False,
    ),
)
