"""The complete definition of the schema in a database, as data that two databases can be compared by."""

from __future__ import annotations

from typing import Any

import psycopg

PARTS: dict[str, str] = {
    "relations": """
        select c.relname, c.relkind, c.relpersistence, c.relrowsecurity, c.relforcerowsecurity, c.reloptions,
          pg_get_partkeydef(c.oid), pg_get_expr(c.relpartbound, c.oid),
          pg_get_userbyid(c.relowner) = current_user
        from pg_class c where c.relnamespace = 'pgmb'::regnamespace and c.relkind not in ('i', 'I')""",
    "columns": """
        select c.relname, row_number() over (partition by c.oid order by a.attnum), a.attname,
          format_type(a.atttypid, a.atttypmod), a.attnotnull,
          a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid), a.attstorage, a.attcompression,
          a.attcollation::regcollation,
          (select array_agg(x::text order by x::text) from unnest(a.attacl) x)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where c.relnamespace = 'pgmb'::regnamespace and a.attnum > 0 and not a.attisdropped""",
    "constraints": """
        select conrelid::regclass, conname, contype, condeferrable, condeferred, convalidated,
          pg_get_constraintdef(oid)
        from pg_constraint where connamespace = 'pgmb'::regnamespace""",
    "indexes": """
        select i.indrelid::regclass, pg_get_indexdef(i.indexrelid), i.indisunique, i.indisprimary,
          i.indisvalid, c.reloptions
        from pg_index i join pg_class c on c.oid = i.indexrelid
        where c.relnamespace = 'pgmb'::regnamespace""",
    "functions": """
        select oid::regprocedure, pg_get_functiondef(oid), proconfig, prosecdef, provolatile, proparallel,
          (select array_agg(x::text order by x::text)
           from unnest(coalesce(proacl, acldefault('f', proowner))) x)
        from pg_proc where pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[]) and prokind <> 'a'""",
    "triggers": """
        select t.tgrelid::regclass, t.tgname, pg_get_triggerdef(t.oid), t.tgenabled
        from pg_trigger t join pg_class c on c.oid = t.tgrelid
        where c.relnamespace = 'pgmb'::regnamespace and not t.tgisinternal""",
    "policies": """
        select tablename, policyname, permissive, roles, cmd, qual, with_check
        from pg_policies where schemaname = 'pgmb'""",
    "types": """
        select t.typname, t.typtype, t.typcategory, (
          select array_agg(e.enumlabel order by e.enumsortorder) from pg_enum e where e.enumtypid = t.oid)
        from pg_type t where t.typnamespace = 'pgmb'::regnamespace""",
    "sequences": """
        select sequencename, data_type, start_value, min_value, max_value, increment_by, cycle, cache_size
        from pg_sequences where schemaname = 'pgmb'""",
    "rights": """
        select c.relname, (select array_agg(x::text order by x::text) from unnest(coalesce(c.relacl,
            acldefault(case c.relkind when 'S' then 's'::"char" else 'r' end, c.relowner))) x)
        from pg_class c where c.relnamespace = 'pgmb'::regnamespace and c.relkind not in ('i', 'I', 'c')""",
    "schema rights": """
        select nspname, (select array_agg(x::text order by x::text) from unnest(nspacl) x)
        from pg_namespace where nspname in ('pgmb', 'pgmb_internal')""",
    "views": "select viewname, definition from pg_views where schemaname = 'pgmb'",
    "comments": """
        select d.classoid::regclass, d.objsubid, d.description from pg_description d
        where d.objoid in (select oid from pg_class where relnamespace = 'pgmb'::regnamespace
          union all select oid from pg_proc
            where pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[]))""",
    "version": "select version, epoch from pgmb.installation",
    "streams": """
        select id, name, rotate_every, rotate_events, keep_for, drop_unread, archive
        from pgmb.stream""",
    "stream ids": "select last_value from pgmb.stream_id_seq",
}


def catalog(connection: psycopg.Connection[Any]) -> dict[str, list[str]]:
    """Each part's rows as sorted text, so that a difference reads well."""
    return {
        part: sorted(row[0] for row in connection.execute(f"select r::text from ({query}) r").fetchall())
        for part, query in PARTS.items()
    }
