"""A fuzzer for what clients send to a broker and what servers send to a client.

    python -m tests.fuzz 10000000 --seed 7      ten million mutated lines
    python -m tests.fuzz --long 1200            only lines of a mebibyte, for 20 minutes of CPU
    python -m tests.fuzz --replay finding.txt   run the steps of a finding again

A finding is a `Finding`, or any other exception that leaves `World.run`. The one rule: everything
that happens to a broker is a step, so what was found can be replayed, and reduced, from its steps.
"""


class Finding(AssertionError):
    """What was fuzzed did something it must not do."""
