"""The page: starts tasks, and shows those of its address until they are done."""

from typing import Any
from urllib.parse import urlencode

from celery.result import AsyncResult
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template import engines
from django.urls import path

from depot.tasks import by_celery, by_tasks

PAGE = engines["django"].from_string("""<!doctype html>
<title>Depot</title>
{% if waiting %}<meta http-equiv="refresh" content="1">{% endif %}
<form method="post">{% csrf_token %}
  <button name="by" value="celery">Pack an order by Celery</button>
  <button name="by" value="tasks">Pack an order by Django Tasks</button>
</form>
<ol>
{% for by, status, result in orders %}<li>{{ by }}: {{ status }} {{ result }}</li>{% endfor %}
</ol>
""")


def start(by: str, order: int) -> str:
    """The id of the task, when the broker has stored it."""
    started = by_celery.delay(order) if by == "celery" else by_tasks.enqueue(order)
    return f"{by}-{started.id}"


def look(started: str) -> tuple[str, str, Any]:
    by, _, task_id = started.partition("-")
    if by == "celery":
        done = AsyncResult(task_id)
        return by, done.status, done.result if done.ready() else ""
    result = by_tasks.get_result(task_id)
    return by, result.status, result.return_value if result.is_finished else ""


def orders(request: HttpRequest) -> HttpResponse:
    started = request.GET.getlist("task")
    if request.method == "POST":
        started.append(start(request.POST["by"], len(started) + 1))
        return HttpResponseRedirect(f"?{urlencode({'task': started}, doseq=True)}")
    found = [look(each) for each in started]
    waiting = not all(result for _, _, result in found)
    return HttpResponse(PAGE.render({"orders": found, "waiting": waiting}, request))


urlpatterns = [path("", orders)]
