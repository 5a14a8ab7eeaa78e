"""Ways in for others: HTTP, SQS, Celery, dramatiq, Django, Node.js."""
