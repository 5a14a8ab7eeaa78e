"""The page of the admin: what tasks there are, and what became of them."""

from django.contrib import admin
from django.http import HttpRequest

from mqks.django.models import TaskRow


@admin.register(TaskRow)
class TaskRowAdmin(admin.ModelAdmin):
    list_display = ("id", "task_path", "status", "attempts", "enqueued_at", "finished_at")
    list_filter = ("status", "queue_name")
    search_fields = ("id", "task_path")
    exclude = ("errors",)
    readonly_fields = ("attempts", "traceback")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: TaskRow | None = None) -> bool:
        return False
