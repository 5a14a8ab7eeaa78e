"""The app of Celery: `celery -A depot worker` finds it here."""

import os
from typing import Any

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "depot.settings")
app: Any = Celery("depot")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["depot"])
