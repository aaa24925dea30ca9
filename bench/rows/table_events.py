"""table-events: what the triggers cost an INSERT of 100,000 rows."""

from __future__ import annotations

from bench.contender import Contender
from bench.crew import Job, Work
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import backends_only, contest
from bench.wire import Client

_TABLE = """
    create table person (
      id bigint generated always as identity primary key,
      name text not null,
      email text not null,
      born date,
      note text,
      created_at timestamptz not null default now()
    )"""
_INSERT = """
    insert into person (name, email, born, note)
    select 'person ' || n, 'person' || n || '@example.org', date '1970-01-01' + n % 20000, repeat('x', 60)
    from generate_series(1, {}) n"""


def run(ground: Ground, form: Form) -> Outcome:
    rows = 2_000 if form.name == "tiny" else 100_000
    outcome = Outcome(
        "table-events", f"INSERT of {rows:,} rows in one statement, backend CPU, with events and without"
    )

    def jobs(name: str, site: Site) -> list[Job]:
        site.connection.execute(_TABLE)
        if name == "with":
            site.connection.execute("select pgmb.push_table_mutations('person')")
        return [Job(site.dsn, "pgmb", _insert, {"rows": rows})]

    sites = {"without": ground.site("pgmb"), "with": ground.site("pgmb")}
    try:
        outcome.readings = contest(sites, form.rounds, jobs, backends_only)
    finally:
        for site in sites.values():
            site.close()
    outcome.checks = [
        outcome.compare("table events, INSERT cost vs without", "without", "with", 4, at_least=False)
    ]
    outcome.notes = [f"by the clock {outcome.ratio('without', 'with', 'per_second'):.2f}x"]
    return outcome


def _insert(client: Client, _: Contender, *, rows: int) -> Work:
    # The warm-up takes the first rows of both the table and the log.
    client.connection.execute(_INSERT.format(100))

    def measured() -> dict[str, float]:
        client.connection.execute(_INSERT.format(rows))
        return {"messages": rows}

    return measured
