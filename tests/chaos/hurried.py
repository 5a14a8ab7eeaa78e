"""`python -m mqks` with turns of a millisecond, which end in the middle of whatever has come in."""

import sys

from mqks.commands import main
from mqks.server import running

if __name__ == "__main__":
    vars(running)["CHUNK_S"] = 0.001
    sys.exit(main())
