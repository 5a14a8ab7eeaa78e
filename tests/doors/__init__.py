"""Ways in for others: HTTP, SQS, Celery, Django, Node.js."""
