"""A Python session, as `python -m asyncio`, for programs that come as lines of JSON on stdin.

The one rule: a line `done` follows each that has ended; the first that fails ends the session.
"""

import ast
import asyncio
import inspect
import json
import sys

names = {"__name__": "__main__"}
with asyncio.Runner() as runner:
    for line in sys.stdin:
        code = compile(json.loads(line), "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        done = eval(code, names)
        if inspect.iscoroutine(done):
            runner.run(done)
        print("done", flush=True)
