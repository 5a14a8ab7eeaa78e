"""What is of MQKS here: an app, the backend of tasks, and the broker of Celery."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).parents[1]
DATA = Path(os.environ.get("DEPOT_DATA", BASE_DIR / "data"))
(DATA / "results").mkdir(parents=True, exist_ok=True)
URL = os.environ.get("MQKS_URL", "mqks://localhost")

INSTALLED_APPS = ["depot", "mqks.django"]
TASKS = {"default": {"BACKEND": "mqks.django.MqksBackend", "OPTIONS": {"url": URL}}}

CELERY_BROKER_URL = URL
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
# Any process can look at these results. Those of `rpc://` are for the one that waits for them.
CELERY_RESULT_BACKEND = f"file://{DATA}/results"

SECRET_KEY = "of an example"
DEBUG = True
USE_TZ = True
ROOT_URLCONF = "depot.urls"
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DATA / "db.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }
}
