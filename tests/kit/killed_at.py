"""`python -m tests.kit.killed_at N PROGRAM ARGUMENTS…`: a program killed before its N-th line.

It counts the lines of the program's own file as they are executed, in the main thread. Before the
N-th it writes the line's number to its standard error, and is gone by SIGKILL: no block ends, no
buffer is flushed. What its other threads were about to send has been sent by then, as an ack that
must not be sent yet would be. A program that ends sooner ends as ever.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from itertools import count
from types import FrameType
from typing import Any

OTHERS_S = 0.02
"""So long the other threads go on."""


def main() -> None:
    _, fatal, program, *arguments = sys.argv
    numbers = count(1)

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and next(numbers) == int(fatal):
            os.write(2, b"%d\n" % frame.f_lineno)
            time.sleep(OTHERS_S)
            os.kill(os.getpid(), signal.SIGKILL)
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return at_line if frame.f_code.co_filename == program else None

    sys.argv = [program, *arguments]
    sys.settrace(at_call)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
