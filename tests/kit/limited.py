"""`python -m tests.kit.limited serve …`: the broker, which may open `OPEN_FILES` files."""

import os
import resource
import sys

from mqks.commands import main

if __name__ == "__main__":
    files = int(os.environ["OPEN_FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    sys.exit(main(sys.argv[1:]))
