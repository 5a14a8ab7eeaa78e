"""Its database and broker are those of the environment."""

import os

SECRET_KEY = "of a test"
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "mqks.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "tests.django_project.urls"
ALLOWED_HOSTS = ["testserver"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
POSTGRES = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": os.environ.get("PGDATABASE"),
    "USER": os.environ.get("PGUSER"),
    "HOST": os.environ.get("PGHOST"),
}
DATABASES = {
    "default": POSTGRES
    if os.environ.get("TEST_DB") == "postgres"
    else {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_DB", ":memory:"),
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
OPTIONS = {"url": os.environ.get("MQKS_URL"), "backoff": (0.1, 1), "dead_letters": "dead"}
TASKS = {
    "default": {
        "BACKEND": "mqks.django.MqksBackend",
        "QUEUES": ["default", "own"],
        "OPTIONS": {**OPTIONS, "queues": {"own": {"dead_letters": "own.dead"}}},
    },
    "outbox": {
        "BACKEND": "mqks.django.MqksBackend",
        "OPTIONS": {**OPTIONS, "outbox": True, "prefix": "outbox."},
    },
}
LOGGING_CONFIG = None
