"""A task and its result. With the outbox, also when it is to be published."""

from django.db import models

STATUSES = [(name, name.capitalize()) for name in ("READY", "RUNNING", "FAILED", "SUCCESSFUL")]


class TaskRow(models.Model):
    id = models.CharField(primary_key=True, max_length=32, editable=False)
    status = models.CharField(max_length=10, choices=STATUSES, default="READY")
    task_path = models.TextField()
    backend = models.CharField(max_length=200)
    queue_name = models.CharField(max_length=200)
    priority = models.SmallIntegerField(default=0)
    run_after = models.DateTimeField(null=True)
    arguments = models.JSONField()
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True, db_index=True)
    worker_ids = models.JSONField(default=list)
    errors = models.JSONField(default=list)
    return_value = models.JSONField(null=True)
    unique = models.JSONField(null=True, verbose_name="unique key")
    duplicate_of = models.TextField(default="")
    relay_at = models.DateTimeField(null=True, editable=False)
    refusal = models.TextField(default="", verbose_name="refused by the broker")

    class Meta:
        verbose_name = "task"
        ordering = ("-enqueued_at",)
        indexes = (
            models.Index(
                "relay_at", name="mqks_unsent", condition=models.Q(relay_at__isnull=False)
            ),
        )

    def __str__(self) -> str:
        return f"{self.task_path} {self.id}"

    @property
    def attempts(self) -> int:
        return len(self.worker_ids)

    @property
    def traceback(self) -> str:
        """Of the last failure."""
        return str(self.errors[-1][1]) if self.errors else ""
