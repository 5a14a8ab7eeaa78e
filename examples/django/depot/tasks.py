"""The same work twice: as a task of Celery, and as one of Django."""

import time

from celery import shared_task

import mqks.django

try:
    from django.tasks import task
except ImportError:  # Before Django 6.
    from django_tasks import task


@shared_task
def by_celery(order: int) -> str:
    return _pack(order)


@task
@mqks.django.limits(retries=5, backoff=(1, 60))
def by_tasks(order: int) -> str:
    return _pack(order)


def _pack(order: int) -> str:
    time.sleep(1)
    return f"order {order} is packed"
