"""Ways in for others: HTTP, SQS, Celery, dramatiq, FastStream, taskiq, Django, Node.js."""
