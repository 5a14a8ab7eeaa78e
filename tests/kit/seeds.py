"""Seeds of random tests: `TEST_SEED=NUMBER pytest …` runs what has printed that line once again."""

import os
import random


def printed_seed() -> int:
    seed = int(os.environ.get("TEST_SEED", random.randrange(2**32)))
    print(f"TEST_SEED={seed}")
    return seed
