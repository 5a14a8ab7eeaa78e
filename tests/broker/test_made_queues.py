"""Limits of the queues that a user has made: how many there are, and what waits in all of them."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from mqks.broker.features.admission.made import MadeCapacity
from mqks.users import User, Users, hash_token
from tests.kit.lab import Lab
from tests.kit.seeds import printed_seed


class UserLab(Lab):
    """Whoever is called as a user, with a digit behind it or without, has logged in as that."""

    def __init__(self, memory_bytes: int = 1 << 24, calls_a_turn: int = 0, **limits: Any) -> None:
        self.users = [user("alice", **limits), user("bob")]
        super().__init__(memory_bytes, calls_a_turn)

    def crash(self) -> None:
        super().crash()
        self.reload(*self.users)

    def reload(self, *users: User) -> None:
        self.users = [*users]
        self.broker.set_users(Users(self.users, b"key"))

    def send(self, who: str, *lines: bytes) -> None:
        name = who.rstrip("0123456789")
        if who not in self.connections and name in [each.name for each in self.users]:
            super().send(who, b"- auth " + name.encode())
        super().send(who, *lines)

    def outcome(self, who: str, line: bytes) -> str:
        """The reason for which a request is refused; empty if it is not."""
        errors, before = self.broker.last_errors, len(self.broker.last_errors)
        self.do(who, line)
        return errors[-1].reason if len(errors) > before else ""

    def told(self, name: str = "alice") -> tuple[int, int | None]:
        told = self.broker.made.told(name)
        return told["queues"], told["queue_bytes"]

    def makers(self) -> dict[bytes, str]:
        return {name: queue.policy.made_by for name, queue in self.broker.queues.items()}

    def waiting(self) -> int:
        """Bytes that wait in the queues of alice, counted anew."""
        queues = self.broker.queues.values()
        return sum(each.contents[1] for each in queues if each.policy.made_by == "alice")


def user(name: str, **limits: Any) -> User:
    every = ["**"]
    return User(name, token=hash_token(name), publish=every, consume=every, admin=True, **limits)


# ------------------------------------------------------------------------------- how many


@pytest.mark.parametrize(
    "line",
    [
        *(b"r subscribe new e", b"r consume new e", b"r set_queue new --retries=3"),
        *(b"r set_queue q1 --dead-letters=new", b"r move q1 new", b"r redrive q1 --to=new"),
    ],
)
def test_whatever_makes_one_too_many_is_refused(line: bytes) -> None:
    lab = UserLab(queues_max=2)
    lab.do("alice", b"s subscribe q1 e", b"s subscribe q2 e")
    bound = dict(lab.broker.bindings.by_name)
    assert lab.outcome("alice", line) == (
        "queues_max of user alice is 2, and 2 that it has made exist"
    )
    assert [*lab.broker.queues] == [b"q1", b"q2"]
    assert lab.broker.bindings.by_name == bound
    assert lab.broker.limits_reached["user_queues_max"] == 1
    # Others may, and alice may use what is theirs.
    assert lab.outcome("bob", line.replace(b"r", b"b", 1)) == ""
    assert lab.outcome("alice", line) == ""
    assert lab.makers() == {b"q1": "alice", b"q2": "alice", b"new": "bob"}
    # Who makes room may make another one.
    assert lab.outcome("alice", b"d delete_queue q2") == ""
    assert lab.outcome("alice", b"s subscribe q3 e") == ""
    lab.check()


def test_two_at_once_are_one_too_many() -> None:
    lab = UserLab(queues_max=2)
    lab.do("alice", b"s subscribe q e")
    assert lab.outcome("alice", b"s set_queue x --dead-letters=y").startswith("queues_max of user")
    moves = (b"b begin", b"m move q x", b"m move q y", b"m move q x", b"c commit --confirm")
    lab.do("alice", *moves)
    assert lab.replies[-1].startswith(b"c error")
    assert [*lab.broker.queues] == [b"q"]
    lab.do("alice", b"b begin", b"m move q x", b"m move q x", b"c commit --confirm")
    assert lab.replies[-1] == b"c ok "
    assert lab.makers() == {b"q": "alice", b"x": "alice"}


def race(lab: Lab, who: str, action: bytes, reason: str) -> None:
    """Each request takes many turns before it makes its queue, and the disk writes between them."""
    many = b" ".join(b"e%d" % n for n in range(9000))
    for n in range(5):
        lab.send(f"{who}{n}", b"r%d %b --confirm q%d %b" % (n, action, n % 4, many))
    while not (lab.broker.last_errors or lab.broker.queues):
        lab.work()
        lab.take()
    assert not lab.broker.queues
    # The fourth of them is one too many; the fifth is for a queue that is on its way.
    [refused] = lab.broker.last_errors
    assert refused.reason == reason
    lab.land()
    lab.rest()
    assert sorted(lab.broker.queues) == [b"q0", b"q1", b"q2"]
    assert len(lab.broker.last_errors) == 1


@pytest.mark.parametrize("action", [b"subscribe", b"consume"])
def test_requests_that_race_make_no_more(action: bytes) -> None:
    lab = UserLab(calls_a_turn=2, queues_max=3)
    race(lab, "alice", action, "queues_max of user alice is 3, and 3 that it has made exist")
    # What was kept for them is free again.
    lab.do("alice1", b"d delete_queue q0")
    assert lab.outcome("alice2", b"s subscribe q4 e") == ""
    assert lab.outcome("alice2", b"s subscribe q5 e") != ""


@pytest.mark.parametrize("action", [b"subscribe", b"consume"])
def test_requests_that_race_make_no_more_than_the_server_may_have(action: bytes) -> None:
    lab = Lab(calls_a_turn=2, queues_max=3)
    race(lab, "k", action, "the limit of 3 queues is reached (queues_max)")
    lab.do("k1", b"d delete_queue q0", b"s subscribe q4 e", b"s subscribe q5 e")
    assert sorted(lab.broker.queues) == [b"q1", b"q2", b"q4"]


def test_a_queue_that_two_requests_make_counts_once() -> None:
    lab = UserLab(calls_a_turn=2, queues_max=2)
    for n in range(2):
        many = b" ".join(b"e%d-%d" % (n, event) for event in range(9000))
        lab.send(f"alice{n}", b"s subscribe --confirm q " + many)
    while b"q" not in lab.broker.queues:
        lab.work()
    assert lab.connections["alice1"].works
    lab.send("alice2", b"s set_queue --confirm other")
    assert b"other" in lab.broker.queues
    lab.rest()
    assert lab.told() == (2, None)
    assert lab.outcome("alice2", b"s set_queue third") != ""


def test_a_place_is_free_again_when_its_request_fails() -> None:
    lab = UserLab(queues_max=1)
    over = lab.broker.settings.bindings_per_queue_max + 1
    events = b" ".join(b"e%d" % n for n in range(over))
    assert "bindings_per_queue_max" in lab.outcome("alice", b"s subscribe q " + events)
    assert lab.outcome("alice", b"s subscribe r e") == ""


def test_dead_letters_are_never_refused_and_count_for_who_made_their_queue() -> None:
    lab = UserLab(queues_max=2, queue_bytes_max=40)
    lab.do("alice", b"s set_queue q --dead-letters=dead", b"s subscribe q e")
    lab.do("bob", b"m publish e 0123456789", b"c consume q --manual-ack")
    lab.do("alice", b"d delete_queue dead", b"s subscribe other f")
    lab.do("bob", b"r reject c m --dead")
    assert lab.makers() == {b"q": "alice", b"other": "alice", b"dead": "alice"}
    queues, size = lab.told()
    assert (queues, size) == (3, lab.waiting())
    assert size is not None
    assert size > 40, "a dead letter is longer than its message"
    assert lab.outcome("bob", b"m publish e x").startswith("queue_bytes_max is 40, ")
    # What is redriven into a queue that is gone makes it again, for whoever redrives.
    lab.do("alice", b"x delete_queue q")
    lab.do("bob", b"r redrive dead")
    assert lab.makers()[b"q"] == "bob"
    assert lab.told() == (2, 0)
    lab.check()


@pytest.mark.parametrize("is_together", [False, True])
def test_what_would_be_redriven_into_one_too_many_stays(is_together: bool) -> None:
    lab = UserLab(queues_max=3)
    lab.do("alice", b"s subscribe dead", b"s subscribe dead e", b"s subscribe q1 f")
    letter = b"reason=ttl&queue=%b&tries=1&published=1.000&died=2.000"
    for name in (b"q1", b"q2", b"q3", b"q2"):
        lab.do("bob", b"m publish --to=dead --dead-letter=%b e x" % (letter % name))
    redrive = [b"b begin", b"r redrive --confirm dead", b"c commit --confirm"]
    lab.do("alice", *(redrive if is_together else redrive[1:2]))
    assert b"r ok 3" in lab.replies
    ready = {name: queue.ready for name, queue in lab.broker.queues.items()}
    assert ready == {b"dead": 1, b"q1": 1, b"q2": 2}
    lab.do("bob", b"r redrive dead")
    assert lab.makers()[b"q3"] == "bob"
    lab.check()


# ------------------------------------------------------------------------------- how much


def test_what_waits_in_all_of_them_counts_whoever_publishes() -> None:
    lab = UserLab(queue_bytes_max=115)
    lab.do("alice", b"s subscribe a1 a both", b"s subscribe a2 a2 both")
    lab.do("bob", b"s subscribe b a both")
    size = len(b"m event=a 0123456789")
    for n in range(3):
        assert lab.outcome("bob", b"m publish --confirm a 0123456789") == "", n
    assert lab.outcome("bob", b"m publish --delay=60 a2 0123456789") == ""
    assert lab.told() == (2, lab.waiting())
    left = 115 - lab.waiting()
    assert 0 < left < size
    reason = lab.outcome("bob", b"m publish a 0123456789")
    assert reason == (
        f"queue_bytes_max is 115, the message has {size}, and {115 - left} bytes wait in a queue "
        "bound to 'a' and the others of the user who made it"
    )
    # Nothing of it is in the queue of bob either.
    assert lab.broker.queues[b"b"].ready == 3
    fits = left - len(b"m event=a ")
    assert lab.outcome("bob", b"m publish a " + b"x" * (fits + 1)) != ""
    assert lab.outcome("bob", b"m publish a " + b"x" * fits) == ""
    assert lab.told() == (2, 115)
    assert lab.broker.limits_reached["user_queue_bytes_max"] == 2
    # In whichever queue room is made, it is for all.
    lab.do("bob", b"c consume a1")
    assert lab.outcome("bob", b"m publish a2 0123456789") == ""
    lab.do("alice", b"d delete_queue a2")
    assert lab.told() == (1, 0)
    lab.check()


def test_a_message_for_two_of_them_counts_twice() -> None:
    lab = UserLab(queue_bytes_max=39)
    lab.do("alice", b"s subscribe a1 e", b"s subscribe a2 e")
    assert len(b"m event=e 0123456789") == 20
    assert lab.outcome("bob", b"m publish e 0123456789") != ""
    assert lab.told() == (2, 0)
    assert lab.outcome("bob", b"m publish e 012345678") == ""
    assert lab.told() == (2, 38)
    # So it is in a transaction, which leaves nothing when it fails.
    lab.do("alice", b"p purge a1", b"p purge a2")
    lab.do("bob", b"b begin", b"m publish e x", b"n publish e 0123456789", b"c commit --confirm")
    assert lab.replies[-1].startswith(b"c error")
    assert lab.told() == (2, 0)
    lab.check()


def test_what_a_receive_was_waiting_for_counts_in_the_other_queues() -> None:
    """It goes from the publish to the lease, and never waits."""
    lab = UserLab(queue_bytes_max=39)
    lab.do("alice", b"s subscribe a1 a1", b"s subscribe a2 a2")
    lab.send("bob", b"r receive a1 --wait=60")
    assert lab.outcome("bob1", b"m publish a1 0123456789") == ""
    assert lab.told() == (2, lab.waiting())
    assert lab.outcome("bob1", b"m publish a2 0123456789") != ""
    lab.check()


@pytest.mark.parametrize("policy", [b"--overflow=drop", b"--messages-max=1 --overflow=drop"])
def test_a_queue_that_drops_refuses_beyond_it(policy: bytes) -> None:
    lab = UserLab(queue_bytes_max=30)
    lab.do("alice", b"s subscribe q e", b"s set_queue q " + policy)
    assert lab.outcome("bob", b"m publish e 0123456789") == ""
    assert lab.outcome("bob", b"m publish e 0123456789") != ""
    lab.do("alice", b"p purge q")
    assert lab.outcome("bob", b"m publish e 0123456789") == ""


@pytest.mark.parametrize("flags", [b"", b"--confirm ", b"--ttl=60 ", b"--to=q ", b"--delay=9 "])
def test_of_a_burst_as_many_come_in_as_there_is_room_for(flags: bytes) -> None:
    lab = UserLab(queue_bytes_max=20_000)
    lab.do("alice", b"s subscribe q e", b"s subscribe r e")
    lines = [b"m%05d publish %be x" % (n, flags) for n in range(2_000)]
    size = len(b"m00000 event=e x")
    lab.do("bob", *lines)
    while "bob" in lab.connections and lab.connections["bob"].overrun:
        lab.rest()
    queues = lab.broker.queues.values()
    count = sum(queue.ready + queue.scheduled for queue in queues)
    per_message = lab.waiting() // count
    assert per_message >= size
    copies = 1 if b"--to" in flags else 2
    assert 20_000 - lab.waiting() < per_message * copies
    assert lab.broker.limits_reached["user_queue_bytes_max"] == 2_000 - count // copies
    lab.check()


def test_a_line_of_a_mebibyte() -> None:
    lab = UserLab(queue_bytes_max=1 << 20)
    lab.do("alice", b"s subscribe q e")
    body = b"x" * ((1 << 20) - len(b"m publish e "))
    assert lab.outcome("bob", b"m publish e " + body) == ""
    assert lab.outcome("bob", b"n publish e " + body) != ""
    assert lab.told() == (1, (1 << 20) - 2)
    lab.do("alice", b"p purge q")
    assert lab.outcome("bob", b"n publish e " + body) == ""
    # It may be as the name of a user, too: the reason is cut like any other.
    long = "a" * (1 << 20)
    lab.reload(user("alice"), user("bob"), user(long, queues_max=1))
    lab.connections["x"] = lab.broker.connect("x", local=True)
    lab.broker.access.authenticate(lab.connections["x"], lab.broker.access.users.get(long))
    assert lab.outcome("x", b"s subscribe l1 e") == ""
    assert len(lab.outcome("x", b"s subscribe l2 e")) < 10_000


# ------------------------------------------------------------------------------- reloads


def test_a_limit_that_is_lowered_takes_nothing_away() -> None:
    lab = UserLab()
    lab.do("alice", *[b"s subscribe q%d e" % n for n in range(5)])
    lab.do("bob", b"m publish e 0123456789")
    assert lab.told() == (5, None)
    assert not any(isinstance(q.capacity, MadeCapacity) for q in lab.broker.queues.values())
    lab.reload(user("alice", queues_max=2, queue_bytes_max=50), user("bob"))
    lab.rest()
    assert lab.told() == (5, 100)
    assert "is 2, and 5 that" in lab.outcome("alice", b"s subscribe q5 e")
    assert "100 bytes wait" in lab.outcome("bob", b"m publish e x")
    assert lab.outcome("alice", b"c consume --confirm q0") == ""
    assert lab.told() == (5, 80)
    lab.check()
    # Raised it is what it was, lifted nothing counts any more.
    lab.reload(user("alice", queues_max=9, queue_bytes_max=1000), user("bob"))
    assert lab.outcome("bob", b"m publish e x") == ""
    lab.reload(user("bob"))
    lab.rest()
    assert lab.told() == (5, None)
    assert not any(isinstance(q.capacity, MadeCapacity) for q in lab.broker.queues.values())
    assert lab.outcome("bob", b"m publish e " + b"x" * 5000) == ""
    lab.check()
    # Who is there again has made what it had made.
    lab.reload(user("alice", queue_bytes_max=9), user("bob"))
    lab.rest()
    assert lab.told() == (5, lab.waiting())


def test_what_a_capacity_knew_it_knows_under_a_limit_and_after_it() -> None:
    lab = UserLab()
    lab.do("alice", b"s set_queue q --messages-max=3 --bytes-max=1000", b"s subscribe q e")
    lab.do("alice", b"p pause q --publishes --for=60", b"m publish --delay=1 --to=q e x")
    for limits in ({"queue_bytes_max": 1000}, {}, {"queue_bytes_max": 50}):
        lab.reload(user("alice", **limits), user("bob"))
        lab.rest()
        assert "paused" in lab.outcome("bob", b"m publish e x")
        lab.check()
    lab.wait(61)
    assert lab.outcome("bob", b"m publish e x") == ""
    assert lab.outcome("bob", b"m publish e " + b"x" * 40) != ""
    lab.reload(user("alice"), user("bob"))
    lab.rest()
    assert lab.outcome("bob", b"m publish e x") == ""
    assert lab.outcome("bob", b"m publish e x") == ""
    assert lab.outcome("bob", b"m publish e x").startswith("messages_max is 3")
    lab.check()


def test_a_reload_takes_as_many_turns_as_there_are_queues() -> None:
    lab = UserLab(calls_a_turn=3)
    lab.do("alice", *[b"s subscribe q%d e%d" % (n, n) for n in range(2000)])
    lab.do("alice", *[b"m publish e%d x" % n for n in range(2000)])
    waiting = lab.waiting()
    lab.reload(user("alice", queue_bytes_max=waiting), user("bob"))
    turns = 0
    while lab.broker.has_work:
        lab.work()
        turns += 1
        # Queues that it comes to later, and that are made or gone meanwhile, count once.
        if turns == 2:
            lab.send("alice", b"d delete_queue q0", b"d delete_queue q1999", b"s subscribe new e5")
    assert turns > 5
    lab.rest()
    assert lab.told() == (1999, lab.waiting())
    lab.check()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_who_made_what_outlives_a_crash_a_reset_and_a_new_name(memory_bytes: int) -> None:
    lab = UserLab(memory_bytes, queues_max=3, queue_bytes_max=1000)
    lab.do("alice", b"s set_queue q --retries=3", b"s subscribe q e", b"s set_queue q --reset")
    lab.do("alice", b"s subscribe old e", b"r rename old new")
    lab.do("bob", b"s subscribe b e")
    lab.do("nobody", b"s subscribe n e")
    lab.do("bob", b"m publish e x", b"d publish --delay=9 e x", b"c consume q --manual-ack")
    makers, told = lab.makers(), lab.told()
    assert makers == {b"q": "alice", b"new": "alice", b"b": "bob", b"n": ""}
    lab.crash()
    lab.rest()
    assert lab.makers() == makers
    assert lab.told()[0] == 2
    assert lab.told()[1] == lab.waiting()
    # What was unacked is ready again; on disk the lengths of messages are known by their mean.
    assert lab.waiting() > (told[1] or 0)
    assert lab.outcome("alice", b"s subscribe q3 e") == ""
    assert lab.outcome("alice", b"s subscribe q4 e") != ""
    lab.check()


def lines(chance: random.Random) -> Iterator[bytes]:
    name = chance.choice([b"a1", b"a2", b"a3", b"b"])
    body = b"x" * chance.randrange(30)
    yield b"m%d publish --confirm %b %b" % (chance.randrange(9), chance.choice([b"e", b"f"]), body)
    yield b"d%d publish --delay=%d e %b" % (chance.randrange(9), chance.randrange(1, 9), body)
    yield b"t%d publish --ttl=3 --to=%b e %b" % (chance.randrange(9), name, body)
    yield chance.choice([b"c%b consume %b --manual-ack --prefetch=2", b"c%b consume %b"]) % (
        name,
        name,
    )
    yield b"x delete_consumer c" + name
    yield b"k ack c%b --all" % name
    yield b"k reject c%b --all" % name + chance.choice([b"", b" --dead", b" --delay=2"])
    yield b"p purge " + name + chance.choice([b"", b" --scheduled", b" --limit=1"])
    yield b"v move %b %b --limit=2" % (name, chance.choice([b"a1", b"b"]))
    yield b"s subscribe %b e" % name
    yield b"s set_queue %b --dead-letters=a1" % name
    yield b"z delete_queue " + name
    yield b"q promote %b --all" % name
    yield b"y cancel %b --all" % name


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_refused_is_exactly_what_there_is_no_room_for(memory_bytes: int) -> None:
    chance = random.Random(printed_seed())
    lab = UserLab(memory_bytes, queue_bytes_max=300)
    lab.do("alice", b"s subscribe a1 e f", b"s subscribe a2 e", b"s subscribe a3 f")
    lab.do("bob", b"s subscribe b e f")
    refused = published = 0
    for _ in range(600):
        line = chance.choice([*lines(chance)])
        if chance.random() < 0.1:
            lab.wait(chance.choice([0.5, 3]))
        if chance.random() < 0.02:
            lab.reload(user("alice", queue_bytes_max=chance.choice([0, 200, 400])), user("bob"))
            lab.rest()
        if chance.random() < 0.01:
            lab.crash()
            lab.rest()
        [*_, limit] = [each.queue_bytes_max for each in lab.users if each.name == "alice"]
        if b" publish --confirm" in line:
            message_id, _, _, event, body = line.split(b" ")
            queues = lab.broker.bindings.routes.route(event) or {}
            size = len(b"%b event=%b %b" % (message_id, event, body))
            copies = sum(queue.policy.made_by == "alice" for queue in queues)
            fits = not limit or not copies or lab.waiting() + size * copies <= limit
            assert (lab.outcome("bob", line) == "") == fits, line
            refused += not fits
            published += 1
        else:
            lab.do(chance.choice(["alice", "bob"]), line)
        lab.check()
        assert lab.told()[1] == (lab.waiting() if limit else None), line
    assert published > 20
