"""Load programs for message servers, and the runner that compares them side by side.

The one rule: the broker under test is the slowest part. Bytes are built before the clock starts,
counted while it runs, and checked after it has stopped.
"""
