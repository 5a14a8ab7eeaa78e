"""Ways in for others: HTTP, SQS, Celery, Django, taskiq, Node.js."""
