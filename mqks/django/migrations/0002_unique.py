"""Unique tasks."""

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies: ClassVar[list[Any]] = [("mqks", "0001_initial")]

    operations: ClassVar[list[Any]] = [
        migrations.AddField(
            "taskrow", "unique", models.JSONField(null=True, verbose_name="unique key")
        ),
        migrations.AddField("taskrow", "duplicate_of", models.TextField(default="")),
    ]
