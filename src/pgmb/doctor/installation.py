"""The installation: schema version, cluster, roles, indexes."""

from __future__ import annotations

from collections.abc import Iterable

from pgmb import schema
from pgmb.doctor.finding import Check, Look, Verdict, fail, ok, warn

_ROLES = ("pgmb_publisher", "pgmb_consumer", "pgmb_admin")


def _schema(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if not row["exists"]:
        yield fail("schema pgmb is not installed in this database", "pgmb install")
    elif not row["usable"]:
        yield fail(
            f"user {row['user']} may not use schema pgmb",
            f"grant pgmb_publisher, pgmb_consumer to {row['user']}; or pgmb.grant_publish, grant_consume.",
        )


def _version(look: Look) -> Iterable[Verdict]:
    found: int | None = look.rows[0]["version"] if look.rows else None
    newer = found is not None and found > schema.VERSION
    if found == schema.VERSION:
        yield ok(f"version {found}")
    elif schema.works_with(found):
        yield warn(
            f"schema pgmb is at version {found}, this package installs {schema.VERSION}",
            "Upgrade the pgmb package everywhere." if newer else "pgmb upgrade",
        )
    else:
        yield fail(
            f"schema pgmb is at version {found}, this package works with {schema.VERSION}",
            "Upgrade the pgmb package." if newer else "pgmb upgrade",
        )


def _cluster(look: Look) -> Iterable[Verdict]:
    if not look.rows[0]["same_cluster"]:
        yield fail(
            "the log was restored or copied from another cluster: positions hold that one's transaction ids",
            "Stop publishers and consumers, then: select pgmb.rebase(); until it returns false",
        )


def _roles(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    missing = [role for role in _ROLES if role not in row["present"]]
    if missing:
        yield warn(
            f"there is no role {', '.join(missing)}",
            f"{' '.join(f'create role {role} nologin;' for role in missing)} then `pgmb install`.",
        )
    user = row["user"]
    held = [role for role in _ROLES if role in row["held"]]
    if row["owner"]:
        yield ok(f"{user} owns the schema")
    elif held:
        yield ok(f"{user} is a member of {', '.join(held)}")
    else:
        yield warn(
            f"user {user} is a member of none of {', '.join(_ROLES)}",
            f"grant pgmb_publisher, pgmb_consumer to {user}; unless it was granted some one by one.",
        )


def _indexes(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["twin"] is None:
            yield fail(f"index {row['index']} is invalid", f"reindex index {row['index']};")
        else:
            yield warn(f"index {row['index']} repeats {row['twin']}", f"drop index {row['index']};")


_ROLES_QUERY = """
select current_user::text "user",
  pg_has_role(current_user, (select nspowner from pg_namespace where nspname = 'pgmb'), 'usage') owner,
  array(select r.rolname::text from pg_roles r where r.rolname like 'pgmb\\_%') present,
  array(select r.rolname::text from pg_roles r
    where r.rolname like 'pgmb\\_%' and pg_has_role(current_user, r.oid, 'usage')) held
"""

_INDEXES = """
with ours as (
  select i.*, i.indexrelid::regclass::text name, c.relkind
  from pg_index i join pg_class c on c.oid = i.indexrelid
  where c.relnamespace = 'pgmb'::regnamespace
)
select o.name index, null twin from ours o where not o.indisvalid and o.relkind = 'i'
union all
select o.name, first.name
from ours o join ours first on first.indrelid = o.indrelid and first.indexrelid < o.indexrelid
  and first.indkey = o.indkey and first.indclass = o.indclass and first.indoption = o.indoption
  and first.indcollation = o.indcollation and o.relkind = first.relkind
  and first.indexprs::text is not distinct from o.indexprs::text
  and first.indpred::text is not distinct from o.indpred::text
  and (first.indisunique or not o.indisunique) and first.indisvalid and o.indisvalid
order by 1
"""

CHECKS = (
    Check(
        "schema",
        "installed",
        "select n.oid is not null as exists, coalesce(has_schema_privilege(n.oid, 'usage'), false) usable,"
        ' current_user::text "user"'
        " from (values (1)) one left join pg_namespace n on n.nspname = 'pgmb'",
        _schema,
        of_schema=False,
        gate=True,
    ),
    Check("schema version", "", "select version from pgmb.installation", _version, gate=True),
    Check("cluster", "the log belongs to this cluster", "select * from pgmb.cluster_health()", _cluster),
    Check("roles", "", _ROLES_QUERY, _roles),
    Check("indexes", "all valid, none twice", _INDEXES, _indexes),
)
