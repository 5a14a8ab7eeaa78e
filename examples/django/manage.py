"""A project of Django with background work by Celery and by Django Tasks, both on one broker.

Start a broker (`mqks serve`). Then, in two shells,

    python examples/django/manage.py work
    python examples/django/manage.py runserver

and see http://localhost:8000. It needs `pip install '.[celery,django]'` in a checkout, or the same
extras of the wheel.
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "depot.settings")
    execute_from_command_line(sys.argv)
