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
        self.environment |= {"DJANGO_SETTINGS_MODULE": "shop.settings", "TZ": "UTC"}

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def manage(self, *arguments: str) -> str:
        return self.run("manage.py", *arguments)

    def python(self, program: str) -> str:
        return self.run("-c", f"import django; django.setup()\n{program}")

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


@pytest.fixture
def project(tmp_path: Path, empty_dsn: str) -> Project:
    shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    return Project(tmp_path / "project", empty_dsn)


def test_migrate_installs_and_the_projects_own_tests_pass(project: Project) -> None:
    project.manage("migrate")
    assert "No changes" in project.manage("makemigrations", "--check")
    assert "Ran 2 tests" in project.manage("test")
    assert "shop.events.send_receipt" in project.manage("pgmb", "queues", "list")
    # Again, on what is there.
    assert "No migrations to apply" in project.manage("migrate")


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

OBSERVED = """
from pgmb._core.observer import NullObserver, PublishCall
from pgmb.django import app

class Observer(NullObserver):
    def publishing(self, topic, headers, stream):
        return PublishCall({"trace": topic})

class Instrumentation:
    def observe(self, broker, *, working=False):
        broker.observer = Observer()

app.observe_by(Instrumentation())
from django.db import transaction
from pgmb.django.testing import published
with transaction.atomic():
    app.publish("order.seen", {})
    print(published("order.seen")[0].headers)
    transaction.set_rollback(True)
print(published("order.seen"))
app.close()
"""


def test_instrumentation_sees_what_is_published(project: Project) -> None:
    project.manage("migrate")
    assert project.python(OBSERVED) == "{'trace': 'order.seen'}\n[]\n"


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
    project.manage("migrate")
    with psycopg.connect(project.dsn, autocommit=True) as db, project.working():

        def unsent() -> int:
            ((count,),) = db.execute("select count(*) from shop_order where not receipt_sent")
            return int(count)

        assert project.python(PAY).split()[:1] == ["200"]
        assert db.execute("select total from shop_order order by id").fetchall() == [(5,), (7,)]
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

ENQUEUE = """
import datetime
from django.db import transaction
from django.utils import timezone
from shop.tasks import amark, mark
later = timezone.now() + datetime.timedelta(hours=1)
with transaction.atomic():
    result = mark.enqueue(1, receipt=True)
    print(result.status, result.id)
    mark.using(priority=-5).enqueue(3, receipt=False)
    amark.enqueue(2)
    mark.using(run_after=later).enqueue(4, receipt=True)
try:
    with transaction.atomic():
        mark.enqueue(5, receipt=True)
        raise KeyError
except KeyError:
    pass
from pgmb.django import app
print(app.handle("tasks.default.default", 10))
from shop.models import Order
print(list(Order.objects.order_by("id").values_list("total", "receipt_sent")))
try:
    mark.get_result(result.id)
except NotImplementedError:
    print("no results")
"""


def test_djangos_tasks_are_enqueued_in_the_transaction(project: Project) -> None:
    (project.root / "shop" / "tasks.py").write_text(TASKS)
    with (project.root / "shop" / "settings.py").open("a") as settings:
        settings.write('TASKS = {"default": {"BACKEND": "pgmb.django.tasks.PgmbBackend"}}\n')
    project.manage("migrate")
    told = project.python(ENQUEUE)
    assert "READY" in told
    # The highest priority first.
    assert "3\n[(2, False), (1, True), (3, False)]\nno results\n" in told
    with psycopg.connect(project.dsn) as db:
        assert db.execute("select count(*) from pgmb.delayed").fetchone() == (1,)
        ((marked,),) = db.execute("select count(*) from pgmb.log_main where topic like 'tasks.%'")
        assert marked == 3


ADMIN = """
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
user = User.objects.create_superuser("root")
client = Client()
client.force_login(user)
page = client.get("/admin/pgmb/queue/").content.decode()
print("https://status.example/ui/queue?name=shop.events.send_receipt" in page)
print(client.get("/admin/pgmb/queue/add/").status_code)
"""


def test_the_admin_lists_queues_with_links_into_the_dashboard(project: Project) -> None:
    with (project.root / "shop" / "settings.py").open("a") as settings:
        settings.write(
            'PGMB_DASHBOARD_URL = "https://status.example/"\n'
            "INSTALLED_APPS += ['django.contrib.admin', 'django.contrib.auth', 'django.contrib.contenttypes',"
            " 'django.contrib.sessions', 'django.contrib.messages']\n"
            "MIDDLEWARE = ['django.contrib.sessions.middleware.SessionMiddleware',"
            " 'django.contrib.auth.middleware.AuthenticationMiddleware',"
            " 'django.contrib.messages.middleware.MessageMiddleware']\n"
            "TEMPLATES = [{'BACKEND': 'django.template.backends.django.DjangoTemplates', 'APP_DIRS': True,"
            " 'OPTIONS': {'context_processors': ['django.template.context_processors.request',"
            " 'django.contrib.auth.context_processors.auth',"
            " 'django.contrib.messages.context_processors.messages']}}]\n"
        )
    with (project.root / "shop" / "urls.py").open("a") as urls:
        urls.write('from django.contrib import admin\nurlpatterns += [path("admin/", admin.site.urls)]\n')
    project.manage("migrate")
    assert "True\n403\n" in project.python(ADMIN)
