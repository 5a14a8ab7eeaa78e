"""Ways in for others: HTTP, SQS, Celery, dramatiq, huey, taskiq, Django, Node.js."""
