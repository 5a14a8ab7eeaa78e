"""A segment, byte by byte, as docs/storage.md describes the format.

The one rule: these bytes never change, since databases have them.
"""

from mqks.broker.spine.message.mark import Mark
from mqks.journal.segment import checksum
from mqks.journal.stored import decode

SEGMENT_ID, CRC = 3, 618806370
LINES = """
# Header: "MQS2", 2 sections:
4d 51 53 32 02 00 00 00
# Section 1: queue id 1 (mail), next_seq 6:
01 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00
# Cursor 6:
06 00 00 00 00 00 00 00
# 1 run, 1 ack range, 1 short mark, no long mark:
01 00 00 00 01 00 00 00 01 00 00 00 00 00 00 00
# Run: number 4, 2 messages (4 and 5), 2026-11-20T22:01:19.464125Z:
04 00 00 00 00 00 00 00 02 00 00 00 bd fe 4a 62 bc 60 06 00
# Its text at offset 0, 43 bytes:
00 00 00 00 00 00 00 00 2b 00 00 00 00 00 00 00
# Ack range: from number 1, 2 numbers: 1 (acked), 2 (rejected):
01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00
# Short mark: number 4, version 2, retry 1, rejects, losses, flags 1: delivered:
04 00 00 00 00 00 00 00 02 00 00 00 01 00 00 00 00 00 01
# Section 2: queue id 2 (audit), next_seq 5:
02 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00
# Cursor 1: never consumed:
01 00 00 00 00 00 00 00
# 1 run, no ack range, no marks:
01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
# Run: number 4, 1 message, written at the same time:
04 00 00 00 00 00 00 00 01 00 00 00 bd fe 4a 62 bc 60 06 00
# Its text at offset 43, 21 bytes:
2b 00 00 00 00 00 00 00 15 00 00 00 00 00 00 00
# Text: m2 event=user.new bob:
6d 32 20 65 76 65 6e 74 3d 75 73 65 72 2e 6e 65 77 20 62 6f 62 0a
# M4 event=user.new dan:
6d 34 20 65 76 65 6e 74 3d 75 73 65 72 2e 6e 65 77 20 64 61 6e
# The same once more: the two runs are different lists:
6d 34 20 65 76 65 6e 74 3d 75 73 65 72 2e 6e 65 77 20 64 61 6e
"""
"""The queues mail (id 1) and audit (id 2) are bound to user.new. m1, m2, m3 were published and
delivered to a consumer of mail with manual ack; audit has no consumer. Then came in one chunk
`a1 ack w1 m1`, `r1 reject w1 m2`, `m4 publish --confirm user.new dan`. m2 was rejected: its old
number 2 is settled, and it exists again as number 4, delivered at once."""


def test_a_segment_is_what_these_bytes_say() -> None:
    digits = [line for line in LINES.splitlines() if not line.startswith("#")]
    body = bytes.fromhex("".join(digits))
    assert checksum(SEGMENT_ID, body) == CRC
    mail, audit = decode(body)
    [both], [single] = mail.runs, audit.runs
    assert (mail.acks, [*mail.marks.items()]) == (
        [(1, 2)],
        [(4, Mark(2, retry=1, redelivered=True))],
    )
    assert both.lines(body) == [b"m2 event=user.new bob", b"m4 event=user.new dan"]
    assert single.lines(body) == [b"m4 event=user.new dan"]
