"""Ways in for others: HTTP, SQS, Celery, dramatiq, taskiq, Django, Node.js."""
