"""examples/django, as its user runs it: migrate, test, work; and what a project may add to it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from harness.databases import create_database, drop_database
from harness.server import Server
from harness.states import retries_waiting
from harness.waiting import until_true

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "django"

pytestmark = [pytest.mark.once(18), pytest.mark.timeout(180)]


class Project:
    """A copy of the example, on a database without pgmb."""

    def __init__(self, root: Path, dsn: str) -> None:
        self.root, self.dsn = root, dsn
        parts: dict[str, Any] = conninfo_to_dict(dsn)
        names = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGDATABASE": "dbname"}
        given = {name: str(parts[key]) for name, key in names.items()}
        self.environment = {**os.environ, **given, "PYTHONPATH": str(root)}
        self.environment["DJANGO_SETTINGS_MODULE"] = "shop.settings"

    def run(self, *command: str, settings: str = "shop.settings") -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.root,
            env={**self.environment, "DJANGO_SETTINGS_MODULE": settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def manage(self, *arguments: str) -> str:
        return self.run("manage.py", *arguments)

    def python(self, program: str, *, settings: str = "shop.settings") -> str:
        return self.run("-c", f"import django; django.setup()\n{program}", settings=settings)

    @contextmanager
    def working(self) -> Generator[None]:
        # Without services: their process costs more than this test, and other tests have it.
        command = [sys.executable, "manage.py", "pgmb", "work", "--no-services"]
        with subprocess.Popen(
            command, cwd=self.root, env=self.environment, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield
                process.send_signal(signal.SIGTERM)
                _, told = process.communicate(timeout=60)
                assert process.returncode == 0, told
            finally:
                process.kill()


MORE = """
from shop.settings import *

TASKS = {"default": {"BACKEND": "pgmb.django.tasks.PgmbBackend"}}
PGMB_DASHBOARD_URL = "https://status.example/"
ROOT_URLCONF = "shop.more_urls"
INSTALLED_APPS += [
    f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
context = [
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": context},
    }
]
"""

MORE_URLS = """
from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Generator[Project]:
    """The example, migrated, with settings for more in shop.more."""
    root = tmp_path_factory.mktemp("django") / "project"
    shutil.copytree(EXAMPLE, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {"more": MORE, "more_urls": MORE_URLS, "tasks": TASKS}.items():
        (root / "shop" / f"{name}.py").write_text(text)
    database = create_database(server)
    made = Project(root, server.dsn(database))
    made.python(MIGRATE)
    yield made
    drop_database(server, database)


MIGRATE = """
from django.core.management import call_command
call_command("migrate")
call_command("makemigrations", check_changes=True)
# Again, on what is there.
call_command("migrate")
"""


def test_the_projects_own_tests_pass(project: Project) -> None:
    assert "Ran 2 tests" in project.manage("test")


def test_the_command_is_on_the_settings_database(project: Project) -> None:
    assert "shop.events.send_receipt" in project.manage("pgmb", "queues", "list")


def test_the_page_shows_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "howto" / "django.md").read_text()
    shown = re.findall(r"^```python\n# (shop/\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    for name, text in shown:
        assert text in (EXAMPLE / name).read_text(), name


PAY = """
from django.test import Client
client = Client(raise_request_exception=False)
for total in (5, 0, 7):
    print(client.get(f"/pay/{total}").status_code)
"""

ASYNCHRONOUS = """
import asyncio
from pgmb.django import app
from shop.models import Order
async def main():
    order = await Order.objects.acreate(total=9)
    await app.apublish("order.paid", {"id": order.pk})
asyncio.run(main())
"""


def test_handlers_run_in_workers_and_recover_from_lost_connections(project: Project) -> None:
    with psycopg.connect(project.dsn, autocommit=True) as db, project.working():

        def unsent() -> int:
            ((count,),) = db.execute("select count(*) from shop_order where not receipt_sent and total > 4")
            return int(count)

        assert project.python(PAY).split()[:1] == ["200"]
        totals = "select total from shop_order where total in (0, 5, 7) order by id"
        assert db.execute(totals).fetchall() == [(5,), (7,)]
        until_true(lambda: unsent() == 0)
        # Also those that Django keeps for the handler's thread.
        db.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        project.python(ASYNCHRONOUS)
        until_true(lambda: unsent() == 0)
        assert retries_waiting(db) == 0


TASKS = """
try:
    from django.tasks import task
except ImportError:
    from django_tasks import task
from shop.models import Order

@task
def mark(total: int, *, receipt: bool) -> None:
    Order.objects.create(total=total, receipt_sent=receipt)

@task(priority=5, takes_context=True)
async def amark(context, total: int) -> None:
    assert context.attempt == 1
    await Order.objects.acreate(total=total)
"""

MORE_THAN_THE_EXAMPLE = """
import datetime
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from django.utils import timezone
from pgmb._core.observer import NullObserver, PublishCall
from pgmb.django import app
from pgmb.django.testing import assert_published, published
from shop.models import Order
from shop.tasks import amark, mark

call_command("migrate", verbosity=0)

# Tasks: the highest priority first.
first = Order.objects.count()
later = timezone.now() + datetime.timedelta(hours=1)
with transaction.atomic():
    result = mark.enqueue(1, receipt=True)
    assert result.status == "READY"
    mark.using(priority=-5).enqueue(3, receipt=False)
    amark.enqueue(2)
    mark.using(run_after=later).enqueue(4, receipt=True)
with transaction.atomic():
    mark.enqueue(5, receipt=True)
    transaction.set_rollback(True)
assert app.handle("tasks.default.default", 10) == 3
# One receive in eight begins with the lowest priority.
done = sorted(Order.objects.order_by("id").values_list("total", "receipt_sent")[first:])
assert done == [(1, True), (2, False), (3, False)], done
try:
    mark.get_result(result.id)
    raise AssertionError
except NotImplementedError:
    pass

# The admin.
client = Client()
client.force_login(User.objects.create_superuser("root"))
page = client.get("/admin/pgmb/queue/").content.decode()
assert "https://status.example/ui/queue?name=shop.events.send_receipt" in page
assert client.get("/admin/pgmb/queue/add/").status_code == 403

# Instrumentation sees what is published.
class Observer(NullObserver):
    def publishing(self, topic, headers, stream):
        return PublishCall({"trace": topic})

class Instrumentation:
    def observe(self, broker, *, working=False):
        broker.observer = Observer()

app.observe_by(Instrumentation())
with transaction.atomic():
    app.publish("order.seen", {})
    (event,) = assert_published("order.seen", count=1)
    assert event.headers == {"trace": "order.seen"}
    transaction.set_rollback(True)
assert published("order.seen") == []
app.close()
"""


def test_tasks_admin_and_instrumentation(project: Project) -> None:
    project.python(MORE_THAN_THE_EXAMPLE, settings="shop.more")
    with psycopg.connect(project.dsn) as db:
        assert db.execute("select topic from pgmb.delayed").fetchall() == [("tasks.default.default.normal",)]
        ((marked,),) = db.execute("select count(*) from pgmb.log_main where topic like 'tasks.%'")
        assert marked == 3
