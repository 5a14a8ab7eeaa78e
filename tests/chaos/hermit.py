"""A client with queues of its own, which nobody else touches: every line it gets is foreseen.

It does one step after the other, over two connections, and `tests.kit.model.Model` says exactly
which lines come. What a crash may take back are its last steps: the queues that are found must be
those of the model after some of them. The one rule: a step begins when all lines of the last have
come.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from tests.chaos.checker import Found, Violation
from tests.chaos.crowd import peeked
from tests.chaos.plan import LifePlan
from tests.chaos.wire import Gone, Life, Wire
from tests.kit.model import MASK, Message, Model

Do = Callable[[Model], object]
MESSAGES_MAX = 25
"""In one of its queues, about."""


@dataclass(slots=True)
class Line:
    text: str
    do: Do
    confirm: bool


class Hermit:
    """Lives longer than the servers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queues = [f"{name}.q1", f"{name}.q2"]
        self.events = [f"{name}.e1", f"{name}.a.b", f"{name}.a.c.b"]
        self.base = Model()
        """What is certainly durable."""
        self.doing: list[tuple[Do, bool]] = []
        """What was done since; true for what was confirmed, or must have been received."""
        self.loose: set[str] = set()
        """Data of messages that were delivered without ack, and may come back."""
        self._datas = 0
        self.model = Model()
        self.life: Life
        self.plan: LifePlan
        self.rng: random.Random
        self.wires: dict[str, Wire] = {}
        self.lines: dict[str, list[str]] = {}

    # -- a life

    async def run(self, life: Life, plan: LifePlan) -> None:
        self.life, self.plan = life, plan
        self.rng = random.Random(f"{plan.seed} {plan.number} {self.name}")
        self.model = deepcopy(self.base)
        self.wires, self.lines = {}, {}
        try:
            await self._connect("k1")
            await self._connect("k2")
            while not life.ending:
                await self._step()
        except Gone:
            if not life.ending:
                raise Violation(f"{self.name} was left") from None

    async def _connect(self, connection: str) -> None:
        lines: list[str] = []

        def came(name: bytes, word: bytes, rest: bytes) -> None:
            lines.append(b" ".join((name, word, rest)).decode())

        self.lines[connection] = lines
        self.wires[connection] = await Wire.open(self.life, f"{self.name}-{connection}")
        self.wires[connection].on_line = came

    async def _step(self) -> None:
        what = self.rng.random()
        connection = self.rng.choice(["k1", "k2"])
        if what < 0.04:
            await self._disconnect(connection)
        elif what < 0.12:
            await self._look(connection)
        else:
            count = 1 if self.plan.solitary or self.plan.pages else self.rng.choice([1, 1, 2, 6])
            lines = [self._line(connection) for _ in range(count)]
            # What a consumer gets may have to come from disk, and so at any time later.
            lines = [line for line in lines if " consume" in line.text][:1] or lines
            await self._do(connection, lines)

    async def _do(self, connection: str, lines: list[Line]) -> None:
        for line in lines:
            # Some are gone by what was done before them: then they do nothing.
            self.doing.append((line.do, False))
        self.doing.append((Model.commit, False))
        for do, _ in self.doing[-len(lines) - 1 :]:
            do(self.model)
        wire = self.wires[connection]
        done: list[bool] = []

        def told(word: bytes, rest: bytes) -> bool:
            done.append(True)
            return True

        # The next step may come over the other connection.
        wire.ask(b"p", told)
        data = "".join(line.text + "\n" for line in lines).encode() + b"p ping\n"
        if self.rng.random() < 0.1 and len(lines) == 1:
            await wire.send_in_pieces(data, self.rng, 3)
        else:
            wire.send(data)
        await wire.until(lambda: done)
        await self._told()
        await self._done(lines[-1].confirm)

    async def _done(self, confirmed: bool) -> None:
        """The step is carried out; what it confirmed is durable, with all before it."""
        told = self._loose(self.model)
        self.model.told.clear()
        self.loose = told if confirmed else self.loose | told
        if confirmed:
            for do, _ in self.doing:
                do(self.base)
            self.base.told.clear()
            self.doing.clear()
        else:
            self.doing = [(do, True) for do, _ in self.doing]

    async def _told(self) -> None:
        """Wait for the lines that are due."""
        for connection, due in self.model.told.items():
            lines = self.lines[connection]
            await self.wires[connection].until(partial(_has, lines, len(due)))
        for connection, lines in self.lines.items():
            due = self.model.told.get(connection, [])
            if _by_id(lines) != _by_id(due):
                raise Violation(f"{self.name} got {lines} over {connection}, and {due} was due")
            lines.clear()

    @staticmethod
    def _loose(model: Model) -> set[str]:
        lines = [line for told in model.told.values() for line in told]
        return {line.split(" ", 4)[4] for line in lines if ".x ok " in line and " event=" in line}

    async def _disconnect(self, connection: str) -> None:
        ids = [each.id for each in self.model.attached if each.connection == connection]

        def do(model: Model) -> None:
            model.disconnect(connection, ids)

        self.doing.append((do, False))
        do(self.model)
        wire = self.wires[connection]
        wire.finish()
        await wire.until_closed()
        if self.life.ending:
            raise Gone
        await self._connect(connection)
        await self._told()
        await self._done(False)

    # -- looking

    async def _ask(self, connection: str, line: str, last: Callable[[bytes], bool]) -> list[bytes]:
        told: list[bytes] = []
        done: list[bool] = []

        def take(word: bytes, rest: bytes) -> bool:
            told.append(rest if word == b"ok" else word)
            if word == b"error" or last(rest):
                done.append(True)
            return bool(done)

        wire = self.wires[connection]
        wire.ask(b"look", take)
        wire.send(f"look {line}\n".encode())
        await wire.until(lambda: done)
        return told

    async def _look(self, connection: str) -> None:
        """All is durable then, and what readers see is what the model has."""
        await self._ask(connection, "ping --confirm x", lambda rest: rest == b"")
        await self._done(True)
        name = self.rng.choice(self.queues)
        told = await self._ask(connection, f"peek {name} --limit=1000", lambda r: r == b"--end")
        rows = [peeked(rest) for rest in told[:-1]]
        queue = self.model.queues.get(name)
        due = self.model.messages(name) if queue else []
        found = [(r.name.decode(), r.event.decode(), r.data.decode(), r.retry) for r in rows]
        if found != [(m.id, m.event, m.data, m.retry) for m in due]:
            raise Violation(f"{self.name} sees {found} in {name}, and {due} is there")
        [stats] = await self._ask(connection, f"stats queue {name}", lambda _: True)
        if queue is None:
            if stats != b"error":
                raise Violation(f"{name} is there: {stats!r}")
            return
        consumers = [each for each in self.model.attached if each.queue == name]
        has = json.loads(stats)
        masks = [MASK + mask for mask in has["masks"]]
        seen = has["ready"], has["unacked"], [*masks, *has["events"]], has["consumer_ids"]
        unacked = sum(len(each.unacked) for each in consumers)
        events = sorted(self.model.bindings.get(name, ()))
        if seen != (len(queue.ready), unacked, events, [each.id for each in consumers]):
            raise Violation(f"{name} is {seen}, and the model {queue} {consumers} {events}")
        if due and self.rng.random() < 0.5:
            await self._trim(connection, name, due, [row.number for row in rows])

    async def _trim(
        self, connection: str, name: str, due: list[Message], numbers: list[int]
    ) -> None:
        cut = self.rng.randrange(len(due) + 1)
        end = numbers[cut] if cut < len(due) else numbers[-1] + 1
        waiting = self.model.queues[name].ready
        count = sum(any(m is each for each in waiting) for m in due[:cut])

        def do(model: Model) -> None:
            model.confirm(connection, "t", model.trim(name, count))

        await self._do(connection, [Line(f"t trim --confirm {name} {end}", do, True)])

    # -- lines

    def _line(self, connection: str) -> Line:
        model, rng = self.model, self.rng
        confirm = rng.random() < 0.5
        flag = " --confirm" if confirm else ""
        name = rng.choice(self.queues)
        makers = [self._publish] * 6 + [self._settle] * 8 + [self._consume] * 3
        makers += [self._rebind] * 3 + [self._other] * 2 + [self._purge]
        crowded = any(len(queue.ready) > MESSAGES_MAX for queue in model.queues.values())
        maker = self._purge if crowded else rng.choice(makers)
        return maker(connection, name, flag, confirm)

    def _confirm(self, do: Do, connection: str, request: str, confirm: bool) -> Do:
        def both(model: Model) -> None:
            do(model)
            if confirm:
                model.confirm(connection, request)

        return both

    def _publish(self, connection: str, name: str, flag: str, confirm: bool) -> Line:
        rng = self.rng
        message, event = f"{self.name}.m{rng.randrange(4)}", rng.choice(self.events)
        self._datas += 1
        data = f"d{self._datas} {'y' * rng.randrange(100)}"
        flags = {"--confirm"} if confirm else set[str]()
        if rng.random() < 0.2:
            flags.add("--mandatory")
        if rng.random() < 0.2:
            # Of one that is lost in a crash nobody knows whether it was.
            message = f"{self.name}.o{self.plan.number}.{rng.randrange(4)}"
            flags |= {"--once", "--confirm"}

        def do(model: Model) -> None:
            queues = sorted(q for q in model.queues if model.leads(event, q))
            model.publish_with(connection, message, event, data, flags, queues)

        words = [message, "publish", *sorted(flags), event, data]
        # An error confirms nothing.
        return Line(" ".join(words), do, confirm and "--mandatory" not in flags)

    def _settle(self, connection: str, name: str, flag: str, confirm: bool) -> Line:
        rng = self.rng
        consumers = list(self.model.consumers.values())
        consumer = rng.choice(consumers).id if consumers else f"{self.name}.c1"
        there = self.model.consumers.get(consumer)
        ids = [m.id for m in there.unacked] if there else []
        message = rng.choice(ids) if ids and rng.random() < 0.8 else f"{self.name}.m1"
        if rng.random() < 0.1:
            message = "--all"
        action = "reject" if rng.random() < 0.3 else "ack"

        def do(model: Model) -> None:
            getattr(model, action)(consumer, message)

        text = f"s {action}{flag} {consumer} {message}"
        return Line(text, self._confirm(do, connection, "s", confirm), confirm)

    def _consume(self, connection: str, name: str, flag: str, confirm: bool) -> Line:
        rng = self.rng
        number = rng.choice(["1", "2"])
        if self.plan.solitary:
            number = name[-1]
        manual = rng.random() < 0.8
        consumer = f"{self.name}.{number}" + (".c" if manual else ".x")
        there = [c.id for c in self.model.attached if c.queue == name]
        if self.plan.solitary and there:
            consumer, manual = there[0], there[0].endswith(".c")
        events = rng.sample(self.events, rng.randrange(3))
        add = rng.sample(self.events, rng.randrange(3))
        rule = rng.choice([None, None, "", "5000"])

        def do(model: Model) -> None:
            model.consume(connection, consumer, name, events, add, rule, manual, confirm)

        words = [consumer, "consume" + flag, name, *events]
        words += ["--add", *add] if add else []
        if rule is not None:
            words.append("--delete-queue-when-unused" + (f"={rule}" if rule else ""))
        words += ["--manual-ack"] if manual else []
        return Line(" ".join(words), do, confirm)

    def _rebind(self, connection: str, name: str, flag: str, confirm: bool) -> Line:
        rng = self.rng
        events = rng.sample(self.events, rng.choice([0, 0, 1, 2]))
        remove = rng.sample(self.events, rng.choice([0, 0, 1]))
        masks = rng.choice([[], [], [f"{self.name}.*"], ["*.*.b"], ["*"], ["*.*.*.b"]])
        add = rng.sample(self.events, rng.choice([0, 1, 2]))
        bound = [f"{self.name}.*", f"{self.name}.**", f"{self.name}.*.b"]
        add_masks = rng.sample(bound, rng.choice([0, 0, 0, 1, 2]))
        masks = masks + rng.sample(bound, rng.choice([0, 0, 1]))

        def do(model: Model) -> None:
            model.rebind(name, events, remove, masks, add, add_masks)

        words = [f"rb rebind{flag} {name}", *events]
        words += ["--add", *add] if add else []
        words += ["--add-mask", *add_masks] if add_masks else []
        words += ["--remove-mask", *masks] if masks else []
        words += ["--remove", *remove] if remove else []
        return Line(" ".join(words), self._confirm(do, connection, "rb", confirm), confirm)

    def _purge(self, connection: str, name: str, flag: str, confirm: bool) -> Line:
        def do(model: Model) -> None:
            model.confirm(connection, "pu", model.trim(name, 1 << 60))

        return Line(f"pu purge --confirm {name}", do, True)

    def _other(self, connection: str, name: str, flag: str, confirm: bool) -> Line:
        rng, do = self.rng, partial
        rule = rng.choice(["", "5000"])
        consumer = rng.choice([f"{self.name}.{n}.{k}" for n in "12" for k in "cx"])
        events = rng.sample(self.events, rng.choice([1, 2]))
        seconds = f"={rule}" if rule else ""
        text, what = rng.choice(
            [
                (f"delete_consumer{flag} {consumer}", do(_delete_consumer, consumer)),
                (f"delete_queue{flag} {name}", do(_delete_queue, name)),
                (f"delete_queue{flag} {name} --when-unused{seconds}", do(_unused, name, rule)),
                (f"subscribe{flag} {name} {' '.join(events)}", do(_subscribe, name, set(events))),
            ]
        )
        return Line(f"ot {text}", self._confirm(what, connection, "ot", confirm), confirm)

    # -- after a restart

    def restarted(
        self,
        found: dict[bytes, Found],
        rules: dict[str, str | None],
        bound: dict[str, set[str]],
        *,
        stopped: bool,
    ) -> None:
        """The queues are those of the model after some of what was done last; a clean stop loses
        nothing of what was certainly received."""
        reasons = []
        received = sum(received for _, received in self.doing) if stopped else 0
        for candidate, loose in list(self._candidates())[received:]:
            try:
                self._compare(candidate, loose, found, rules, bound)
            except Violation as reason:
                reasons.append(str(reason))
            else:
                self._begin_again(candidate, found)
                return
        raise Violation(f"{self.name}: none of {len(reasons)} fits: " + "; ".join(reasons))

    def _candidates(self) -> Iterator[tuple[Model, set[str]]]:
        model = deepcopy(self.base)
        for do in [None, *(do for do, _ in self.doing)]:
            if do is not None:
                do(model)
            candidate = deepcopy(model)
            candidate.recover(0.0)
            yield candidate, self.loose | self._loose(model)

    def _compare(
        self,
        candidate: Model,
        loose: set[str],
        found: dict[bytes, Found],
        rules: dict[str, str | None],
        bound: dict[str, set[str]],
    ) -> None:
        for name in self.queues:
            queue, there = candidate.queues.get(name), found.get(name.encode())
            if (queue is None) != (there is None):
                raise Violation(f"{name} is {there and 'there'}, and {queue}")
            if bound.get(name, set()) != candidate.bindings.get(name, set()):
                raise Violation(f"{name} is bound to {bound.get(name)}, {candidate.bindings}")
            if queue is None or there is None:
                continue
            if queue.rule != rules[name]:
                raise Violation(f"{name} has the rule {rules[name]!r}, and {queue.rule!r}")
            due = [(m.id, m.event, m.data) for m in queue.ready]
            retries = {m.data: m.retry for m in queue.ready}
            rows = []
            for row in there.rows:
                key = row.name.decode(), row.event.decode(), row.data.decode()
                if key[2] not in retries and key[2] in loose:
                    continue
                rows.append(key)
                retry = retries.get(key[2], 0)
                assert row.retry is not None
                if not retry - 1 <= row.retry <= retry:
                    raise Violation(f"{key} has retry {row.retry}, and {retry}")
            if rows != due:
                raise Violation(f"{name} has {rows}, and {due}")

    def _begin_again(self, candidate: Model, found: dict[bytes, Found]) -> None:
        for name, queue in candidate.queues.items():
            queue.ready.clear()
            for row in found[name.encode()].rows:
                candidate.places += 1
                words = row.name.decode(), row.event.decode(), row.data.decode()
                queue.ready.append(Message(candidate.places, *words, row.retry or 0))
        self.base = candidate
        self.base.told.clear()
        self.doing.clear()
        self.loose.clear()


def _has(lines: list[str], count: int) -> bool:
    return len(lines) >= count


def _delete_consumer(consumer: str, model: Model) -> None:
    model.delete_consumer(consumer)


def _delete_queue(name: str, model: Model) -> None:
    model.delete_queue(name)


def _unused(name: str, rule: str, model: Model) -> None:
    model.delete_when_unused(name, rule)


def _subscribe(name: str, events: set[str], model: Model) -> None:
    changed = model.bindings.get(name, set()) != events
    model._bind(name, events)
    model._make(name)
    if changed:
        model._update(name, None)


def _by_id(lines: list[str]) -> dict[tuple[str, bool], list[str]]:
    """An update may overtake a delivery that has to come from disk; errors without their ids."""
    found: dict[tuple[str, bool], list[str]] = {}
    for line in lines:
        line = re.sub(" error [0-9a-f]{24}$", " error", line)
        found.setdefault((line.split(" ")[0], " ok --update " in line), []).append(line)
    return found
