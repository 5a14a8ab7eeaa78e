r"""Steps: everything that can happen to a broker, as data and as one line of text.

    a:c1 consume q e1\n	b:m1 publish e1 x\n	a-

A letter names a connection: `a` to `c` may do everything, `u` is a user whose masks allow little,
`s` has yet to authenticate. `a:` sends bytes, `a-` disconnects, `a.` closes the sending side,
`a|` takes no more replies, `a>` takes them again. `*name value` happens to the server. Steps are
separated by tabs; data is escaped as in a Python string.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CONNECTIONS = "abcus"
SIGNS = {":": "send", "-": "leave", ".": "end", "|": "pause", ">": "resume"}
SIGN_OF = {verb: sign for sign, verb in SIGNS.items()}
CORPUS = Path(__file__).parent / "corpus"


class Step(NamedTuple):
    verb: str
    who: str = "*"
    data: bytes = b""


Steps = tuple[Step, ...]


def send(who: str, data: bytes) -> Step:
    return Step("send", who, data)


def escaped(data: bytes) -> str:
    return data.decode("latin-1").encode("unicode_escape").decode()


def unescaped(text: str) -> bytes:
    return text.encode().decode("unicode_escape").encode("latin-1")


def written(steps: Iterable[Step]) -> str:
    return "\t".join(
        f"*{verb} {escaped(data)}".rstrip()
        if who == "*"
        else f"{who}{SIGN_OF[verb]}{escaped(data)}"
        for verb, who, data in steps
    )


def read(line: str) -> Steps:
    return tuple(_step(text) for text in line.rstrip("\n").split("\t"))


def _step(text: str) -> Step:
    if text[0] == "*":
        verb, _, data = text[1:].partition(" ")
        return Step(verb, "*", unescaped(data))
    return Step(SIGNS[text[1]], text[0], unescaped(text[2:]))


def load(path: Path) -> list[Steps]:
    return [read(line) for line in path.read_text().split("\n") if line]


def save(path: Path, corpus: Iterable[Iterable[Step]]) -> None:
    path.write_text("".join(line + "\n" for line in sorted(map(written, corpus))))


def lines_of(steps: Iterable[Step]) -> list[bytes]:
    """All lines that are sent whole in one step."""
    return [line for verb, _, data in steps if verb == "send" for line in data.split(b"\n") if line]


def lines_apart(steps: Steps) -> Steps:
    return tuple(
        step._replace(data=line)
        for step in steps
        for line in (step.data.splitlines(keepends=True) if step.verb == "send" else [step.data])
    )
