"""A backend for Django's Tasks: `django.tasks` of Django 6, the package django-tasks before.

    TASKS = {"default": {"BACKEND": "pgmb.django.tasks.PgmbBackend"}}

A task is enqueued in the transaction that Django has open. `manage.py pgmb work` runs it; one that raises is
tried again, as any event is. Results are not kept.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import django
from django.utils import timezone
from django.utils.module_loading import import_string

from pgmb.app import Delivery
from pgmb.django import app

_PACKAGE = "django.tasks" if django.VERSION >= (6,) else "django_tasks"

if TYPE_CHECKING:
    from django_tasks.backends.base import BaseTaskBackend
else:
    BaseTaskBackend = import_module(f"{_PACKAGE}.backends.base").BaseTaskBackend

_tasks: Any = import_module(f"{_PACKAGE}.base")
_signals: Any = import_module(f"{_PACKAGE}.signals")


def backends() -> Any:
    """The project's backends by their names, each made when it is asked for."""
    return import_module(_PACKAGE).task_backends


class PgmbBackend(BaseTaskBackend):
    """A pgmb queue for each of QUEUES. OPTIONS are those of `App.queue`, such as `max_attempts`."""

    supports_defer = True
    supports_async_task = True
    supports_priority = True
    supports_get_result = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        # Django makes a backend for each thread.
        for queue in {f"tasks.{alias}.{name}" for name in self.queues} - app.queues.keys():
            app.queue(queue, lanes=[f"{queue}.high", f"{queue}.normal"], **self.options)
            app.on(f"{queue}.*", queue=queue)(self._run)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        self.validate_task(task)
        result = self._result(task, args, kwargs)
        lane = "high" if task.priority > 0 else "low" if task.priority < 0 else "normal"
        payload = {"task": task.module_path, "args": result.args, "kwargs": result.kwargs}
        given = app.publish(f"tasks.{self.alias}.{task.queue_name}.{lane}", payload, at=task.run_after)
        _set(result, id=str(given), enqueued_at=timezone.now())
        _signals.task_enqueued.send(type(self), task_result=result)
        return result

    def _run(self, event: Delivery[dict[str, Any]]) -> None:
        task = import_string(event.payload["task"])
        result = self._result(task, event.payload["args"], event.payload["kwargs"])
        now = timezone.now()
        _set(
            result,
            id=str(event.id),
            status=_tasks.TaskResultStatus.RUNNING,
            enqueued_at=event.published_at,
            started_at=now,
            last_attempted_at=now,
        )
        # Django counts attempts by workers.
        result.worker_ids.extend(["pgmb"] * event.attempt)
        _signals.task_started.send(type(self), task_result=result)
        context = (_tasks.TaskContext(task_result=result),) if task.takes_context else ()
        try:
            task.call(*context, *result.args, **result.kwargs)
        except BaseException:
            _set(result, status=_tasks.TaskResultStatus.FAILED, finished_at=timezone.now())
            _signals.task_finished.send(type(self), task_result=result)
            raise
        _set(result, status=_tasks.TaskResultStatus.SUCCESSFUL, finished_at=timezone.now())
        _signals.task_finished.send(type(self), task_result=result)

    def _result(self, task: Any, args: Any, kwargs: Any) -> Any:
        return _tasks.TaskResult(
            task=task,
            id="",
            status=_tasks.TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )


def _set(result: Any, **values: Any) -> None:
    """Change a result, which is frozen for those who get it."""
    for name, value in values.items():
        object.__setattr__(result, name, value)
