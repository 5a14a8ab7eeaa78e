"""`manage.py work`: the database is made, and the workers of both run until SIGTERM or SIGINT."""

import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    help = "Run the workers of Celery and of Django Tasks."

    def handle(self, *args: Any, **options: Any) -> None:
        call_command("migrate", verbosity=0)
        command = [sys.executable, "-m", "celery", "-A", "depot", "worker", "--concurrency=2"]
        celery = subprocess.Popen([*command, "--loglevel=WARNING"], cwd=settings.BASE_DIR)
        try:
            call_command("mqks_worker", threads=2)
        finally:
            celery.terminate()
            celery.wait()
