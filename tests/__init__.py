"""Tests of the broker, the journal, the server and the wire they speak."""
