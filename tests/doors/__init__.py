"""Ways in for others: HTTP, SQS, Celery, dramatiq, huey, FastStream, taskiq, Django, Node.js."""
