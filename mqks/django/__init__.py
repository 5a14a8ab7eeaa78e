"""Django Tasks on MQKS: `"BACKEND": "mqks.django.MqksBackend"`, with `mqks.django` in
INSTALLED_APPS. `manage.py mqks_worker` runs the tasks."""

from mqks.django.backend import MqksBackend

__all__ = ["MqksBackend"]
