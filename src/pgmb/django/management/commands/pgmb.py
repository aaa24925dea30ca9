"""`manage.py pgmb …`: the command line, on the database of the settings."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from pgmb import cli
from pgmb.django.application import alias, dsn_of


class Command(BaseCommand):
    help = "Runs pgmb on the settings' database: work, serve, status and all others."
    requires_system_checks: tuple[()] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        # The options are pgmb's, --help and --version among them.
        self.execute_pgmb(argv[2:])

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("arguments", nargs="*")

    def handle(self, *_: Any, arguments: list[str], **__: Any) -> None:
        self.execute_pgmb(arguments)

    def execute_pgmb(self, arguments: list[str]) -> None:
        dsn = dsn_of(alias())
        os.environ["PGMB_DSN"] = dsn
        # Worker processes import the project as this one did.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
        if arguments[:1] == ["work"]:
            os.environ["PGMB_WORK_DSN"] = dsn
            arguments = ["work", "pgmb.django.worker:app", *arguments[1:]]
        sys.argv = ["manage.py pgmb", *arguments]
        cli.main()
