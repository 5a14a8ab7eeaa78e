"""The app in INSTALLED_APPS that keeps the results."""

from django.apps import AppConfig


class MqksConfig(AppConfig):
    name = "mqks.django"
    label = "mqks"
    verbose_name = "MQKS tasks"
    default_auto_field = "django.db.models.BigAutoField"
