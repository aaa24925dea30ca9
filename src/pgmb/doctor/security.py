"""What remains the operator's affair: who may connect, how, and as whom the functions run."""

from __future__ import annotations

from collections.abc import Iterable

from pgmb.doctor.finding import Check, Look, Verdict, note, warn


def _connect(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if row["public"]:
        yield note(
            f"every role may connect to database {row['name']}",
            f"revoke connect on database {row['quoted']} from public; grant it to the roles that need it.",
        )


def _advisory(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if row["public"]:
        yield note(
            f"every role may take any advisory lock ({row['public']} functions are open to PUBLIC)",
            "Where roles that are not trusted may connect: revoke execute on the pg_advisory functions of"
            " pg_catalog from public, and grant it to the roles that use them.",
        )


def _tls(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if row["remote"] and not row["encrypted"]:
        yield warn(
            f"this connection from {row['remote']} is not encrypted",
            "Set ssl = on, use hostssl in pg_hba.conf, and sslmode=verify-full in the DSN.",
        )
    if row["plain"]:
        yield warn(
            f"{row['plain']} other connections over a network are not encrypted",
            "Use hostssl in pg_hba.conf, and sslmode=verify-full in the DSNs.",
        )


def _owner(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if row["superuser"]:
        yield note(
            f"schema pgmb belongs to {row['owner']}, a superuser: its functions run with that role's rights",
            "Install as a role that owns the database and is no superuser; see docs/explanation/security.md.",
        )


def _unsigned(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if row["endpoints"]:
        yield note(
            f"{row['unsigned']} endpoints have no secret, so that requests to them are not signed:"
            f" {row['endpoints']}",
            "pgmb endpoints rotate-secret NAME",
        )


CHECKS = (
    Check(
        "who may connect",
        "only roles that were granted it may connect",
        "select d.datname as name, quote_ident(d.datname) as quoted, exists ("
        " select from aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a"
        " where a.grantee = 0 and a.privilege_type = 'CONNECT') as public"
        " from pg_database d where d.datname = current_database()",
        _connect,
        of_schema=False,
    ),
    Check(
        "advisory locks",
        "only roles that were granted it may take advisory locks",
        "select count(*) as public from pg_proc p"
        " where p.pronamespace = 'pg_catalog'::regnamespace"
        " and p.proname in ('pg_advisory_lock', 'pg_advisory_xact_lock', 'pg_try_advisory_lock',"
        " 'pg_try_advisory_xact_lock', 'pg_advisory_lock_shared', 'pg_advisory_xact_lock_shared',"
        " 'pg_try_advisory_lock_shared', 'pg_try_advisory_xact_lock_shared')"
        " and exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a"
        " where a.grantee = 0)",
        _advisory,
        of_schema=False,
    ),
    Check(
        "encryption",
        "connections over a network are encrypted",
        "select (select host(a.client_addr) from pg_stat_activity a where a.pid = pg_backend_pid()"
        "   and not a.client_addr <<= any (array['127.0.0.0/8', '::1/128']::inet[])) as remote,"
        " coalesce((select s.ssl from pg_stat_ssl s where s.pid = pg_backend_pid()), false) as encrypted,"
        " (select count(*) from pg_stat_activity a join pg_stat_ssl s using (pid)"
        "   where a.datname = current_database() and a.pid <> pg_backend_pid() and not s.ssl"
        "   and not a.client_addr <<= any (array['127.0.0.0/8', '::1/128']::inet[])) as plain",
        _tls,
        of_schema=False,
    ),
    Check(
        "owner",
        "the schema's owner is no superuser",
        "select r.rolname as owner, r.rolsuper as superuser"
        " from pg_namespace n join pg_roles r on r.oid = n.nspowner where n.nspname = 'pgmb'",
        _owner,
    ),
    Check(
        "signatures",
        "every endpoint's requests are signed",
        "select count(*) as unsigned, left(string_agg(e.name, ', ' order by e.name), 200) as endpoints"
        " from pgmb.endpoints e where e.secrets = 0",
        _unsigned,
    ),
)
