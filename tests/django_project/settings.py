"""Its database and broker are those of the environment."""

import os

SECRET_KEY = "of a test"
USE_TZ = True
INSTALLED_APPS = ["mqks.django"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_DB", ":memory:"),
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
OPTIONS = {"url": os.environ.get("MQKS_URL"), "backoff": (0.1, 1), "dead_letters": "dead"}
TASKS = {
    "default": {"BACKEND": "mqks.django.MqksBackend", "OPTIONS": OPTIONS},
    "outbox": {
        "BACKEND": "mqks.django.MqksBackend",
        "OPTIONS": {**OPTIONS, "outbox": True, "prefix": "outbox."},
    },
}
LOGGING_CONFIG = None
