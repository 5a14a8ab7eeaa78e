"""What a queue, a message or a client may have: each hangs on the spine by a seam."""
