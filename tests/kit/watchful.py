"""`python -m tests.kit.watchful …`: `mqks` that looks at its files, and for room on a full disk, at
once instead of after a second.

A journal in PostgreSQL whose owner has not given it up is taken at once: the owner must be dead.
"""

import sys

from mqks.__main__ import main
from mqks.journal.sqlite import texts
from mqks.server import writer

writer.LOOK_S = writer.RETRY_S = 0.03
vars(texts)["RETRY_S"] = 0.03
if any(word.startswith("postgresql:") for word in sys.argv):
    from mqks.journal.postgres import claim  # here, since a server with a file need not load it

    claim.SUSPECT_S = 0.0

if __name__ == "__main__":
    sys.exit(main())
