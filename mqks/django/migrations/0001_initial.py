"""The table of tasks."""

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies: ClassVar[list[Any]] = []

    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="TaskRow",
            fields=[
                (
                    "id",
                    models.CharField(
                        editable=False, max_length=32, primary_key=True, serialize=False
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("READY", "Ready"),
                            ("RUNNING", "Running"),
                            ("FAILED", "Failed"),
                            ("SUCCESSFUL", "Successful"),
                        ],
                        default="READY",
                        max_length=10,
                    ),
                ),
                ("task_path", models.TextField()),
                ("backend", models.CharField(max_length=200)),
                ("queue_name", models.CharField(max_length=200)),
                ("priority", models.SmallIntegerField(default=0)),
                ("run_after", models.DateTimeField(null=True)),
                ("arguments", models.JSONField()),
                ("enqueued_at", models.DateTimeField()),
                ("started_at", models.DateTimeField(null=True)),
                ("last_attempted_at", models.DateTimeField(null=True)),
                ("finished_at", models.DateTimeField(db_index=True, null=True)),
                ("worker_ids", models.JSONField(default=list)),
                ("errors", models.JSONField(default=list)),
                ("return_value", models.JSONField(null=True)),
                ("relay_at", models.DateTimeField(editable=False, null=True)),
                ("refusal", models.TextField(default="", verbose_name="refused by the broker")),
            ],
            options={
                "verbose_name": "task",
                "ordering": ("-enqueued_at",),
                "indexes": [
                    models.Index(
                        models.F("relay_at"),
                        condition=models.Q(("relay_at__isnull", False)),
                        name="mqks_unsent",
                    )
                ],
            },
        ),
    ]
