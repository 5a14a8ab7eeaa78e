"""Runs tests: `python .ci/once_more.py NAMED PYTEST ARGUMENT…`. A test that fails is run once more,
by itself, with the seed that it has printed; if it passes then, NAMED, a file, gets its name.

The one rule: a single test may pass only by itself, in all runs that share the file, and none of
those that look for what is lost. A run that was interrupted has failed.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
FAILED = 1
"""How pytest ends when tests have failed. With any other status it did not run all of them."""
REPEATED_MAX = 5
"""With more that have failed there is no chance to blame."""
NEVER_BY_CHANCE = re.compile(r"test_(chaos|fuzz|damage|power_cut|simulation)\.py::")
SEED = re.compile(r"TEST_SEED=(\d+)|--hypothesis-seed=(\d+)")


def told(command: list[str]) -> tuple[int, str]:
    """Status and output of a command, which is shown as well."""
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def seeds(output: str, test: str) -> tuple[dict[str, str], list[str]]:
    """What brings the same chance again: variables and flags."""
    name = test.partition("::")[2].replace("::", ".")
    parts = re.split(r"^_+ (?:ERROR at \w+ of )?(.+) _+$", output, flags=re.M)
    found = [
        SEED.finditer(part)
        for head, part in zip(parts[1::2], parts[2::2], strict=True)
        if head == name
    ]
    variables, flags = {}, []
    for ours, hypothesis in (match.groups() for matches in found for match in matches):
        if ours:
            variables["TEST_SEED"] = ours
        else:
            flags = [f"--hypothesis-seed={hypothesis}"]
    return variables, flags


def passes_by_itself(pytest: str, test: str, output: str) -> bool:
    variables, flags = seeds(output, test)
    print(f"\n=== once more: {test}", *variables.values(), *flags, flush=True)
    command = [pytest, "-q", "--hypothesis-profile=full", *flags, test]
    return subprocess.run(command, env={**os.environ, **variables}).returncode == 0


def main(named: Path, command: list[str]) -> int:
    LAST_FAILED.unlink(missing_ok=True)
    status, output = told(command)
    if status != FAILED or not LAST_FAILED.exists():
        return status
    failed = list(json.loads(LAST_FAILED.read_text()))
    # What is no test is a file that was not read: then no test has run.
    if not 1 <= len(failed) <= REPEATED_MAX or not all("::" in each for each in failed):
        return FAILED
    passed = [test for test in failed if passes_by_itself(command[0], test, output)]
    with named.open("a") as file:
        file.writelines(f"{test}\n" for test in passed)
    known = named.read_text().splitlines()
    forgiven = len(known) == 1 and not NEVER_BY_CHANCE.search(known[0])
    return 0 if passed == failed and forgiven else FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
