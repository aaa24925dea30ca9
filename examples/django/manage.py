"""Run with PGHOST, PGDATABASE and the like set: python manage.py migrate; python manage.py pgmb work."""

import os
import sys

from django.core.management import execute_from_command_line

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
execute_from_command_line(sys.argv)
