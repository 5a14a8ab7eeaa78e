"""Every fixed maximum, its unit in its name. What an operator may change is in `settings`.

The one rule: a number here bounds something that a peer or a disk could otherwise make grow.
"""

from typing import Final

SEQ_MAX: Final = (1 << 63) - 1
"""The greatest number that a request may name: of a message, or a time in microseconds."""

SCHEDULED_SEQ: Final = 1 << 52
"""Numbers of messages that are published with a delay begin here. They are no part of the log, and
exact as a number of JavaScript, too."""

DELETE_DELAY_S_MAX: Final = 1e9
"""Longest delay of a delete rule."""

DURATION_S_MAX: Final = 1e9
"""Longest delay, ttl, backoff and ack timeout: 31 years."""

TIME_S_MAX: Final = 1e10
"""Latest time that a message may be due, in seconds since 1970: in 2286."""

COUNT_MAX: Final = 1_000_000_000
"""Most retries, losses and messages to prefetch."""

PREFETCH: Final = 10
"""Unacked messages that a consumer of our clients holds, unless it asks for another number: so few
that other consumers get their share, so many that it seldom waits for the next one."""

DEAD_LETTERS_MAX: Final = 16
"""Longest chain of queues, each of which is for the dead letters of the one before."""

QUEUE_TABLES_MAX: Final = 256
"""`[[queue]]` tables in mqks.toml. A new queue that none of them matches takes a millisecond."""

META_BYTES_MAX: Final = 4096
"""Longest attributes of a message, percent-encoded."""

LABELS_BYTES_MAX: Final = 32 * 1024
"""Longest labels of a queue, percent-encoded."""

READERS_MAX: Final = 8
"""Readers of a queue."""

REASON_BYTES_MAX: Final = 512
"""Longest reason of a reject, before it is percent-encoded."""

KEY_BYTES_MAX: Final = 256
"""Longest key of a message, percent-encoded."""

ESCAPED_STEP_BYTES: Final = 1024 * 1024
"""Escaped data that are checked before the time is looked at: 8 ms at most."""

PRIORITY_MIN: Final = -128
"""Lowest priority of a message; higher ones are delivered first."""
PRIORITY_MAX: Final = 127
"""Highest priority of a message."""

TRANSACTION_LINES_MAX: Final = 1000
"""Requests between `begin` and `commit`, which are done in one step."""

TRANSACTION_BYTES_MAX: Final = 4 * 1024 * 1024
"""Length of these requests, which are kept for each connection until `commit`."""

TRANSACTIONS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Length of the requests of all connections that wait for `commit`."""

TRANSACTION_COPIES_MAX: Final = 4096
"""Messages among them, times the queues of each, and messages that are trimmed."""

MASK_BYTES_MAX: Final = 1024
"""Longest event mask. A star of it looks through a name once; a hostile mask takes 5 ms for a
name of 1 MiB."""

WORDS_MAX: Final = 1024
"""Spaces between the arguments of one request, except where data or names follow."""

STEP_LINE_BYTES: Final = 8 * 1024
"""Bytes of a line of names that are parsed before the time is looked at: up to a millisecond."""

MASKS_MAX: Final = 100
"""Event masks in one request: each is tried on all that the queue is bound to."""

STEP_MASKS: Final = 1024
"""Nodes and parts with stars of bound masks that are tried on an event before the time is looked
at: half a millisecond. A publish whose event takes more goes on in later turns."""

ROUTES_BYTES_MAX: Final = 8 * 1024 * 1024
"""Remembered routes of events while queues are bound to masks, about; one more, and all of them
are forgotten, which takes a few milliseconds."""

CHUNK_S: Final = 0.02
"""How long all connections together may have the event loop in one turn for what has come in; what
is left then waits for the next turns. So is work that nobody waits for."""

LINES_MAX: Final = 2048
"""Lines that gather before a chunk looks at the time: a millisecond."""

COPIES_MAX: Final = 1024 * 1024
"""Messages that gather before they are published, times the queues of the event that has most."""

GROUPS_QUEUES: Final = 64
"""Queues of all events that gather side by side. What goes to more gathers alone."""

GROUPS_COPIES_MAX: Final = 16 * 1024
"""Messages times queues of what gathers side by side: it is published within one turn, in a few
milliseconds, so that nobody sees later messages of a connection without the earlier ones."""

GATHERED_MAX: Final = GROUPS_COPIES_MAX + LINES_MAX
"""Messages for one queue that gather before they are published."""

ROUTE_QUEUES: Final = 256
"""Queues that get their copies before the time is looked at: half a millisecond."""

STEP_COPIES: Final = 8 * 1024
"""Messages times queues that are routed before the time is looked at: a few milliseconds."""

STEP_MESSAGES: Final = 1024
"""Messages settled, rejected or given back before the time is looked at: a millisecond or two."""

NEAR_MAX: Final = 64 * 1024
"""Scheduled messages of one queue whose bodies are in memory because they are due soon, about."""

GONE_MIN: Final = 1024
"""Scheduled messages that were taken out and still have an entry, before those are tidied up:
then there may be as many as scheduled messages."""

KEYED_MAX: Final = 4_000_000
"""Ready messages of one queue whose keys are known, in a queue that is ordered by key or fair to
keys: how far it looks behind messages whose keys are held. About 50 bytes each, and 250 for each
key."""

PACED_KEYS_MAX: Final = 1_000_000
"""Keys of one queue with `--rate-per-key` whose buckets are not full, about; others wait until
there is room for theirs. About 200 bytes each, and 100 for each whose messages wait for it."""

STEP_RULED: Final = 128
"""Messages in one step, in a queue with rules or delivered by key: each takes some 20 µs."""

STEP_ERRORS: Final = 64
"""Requests refused together before the time is looked at: a millisecond."""

STEP_BODIES: Final = 16 * 1024
"""Messages let go of before the time is looked at: a millisecond or two."""

STEP_NAMES: Final = 4096
"""Events bound, unbound or sorted before the time is looked at: a millisecond or two."""

STEP_BOUND_MASKS: Final = 32
"""Masks bound or unbound before the time is looked at: each may have 500 parts."""

PACE_NS: Final = 5_000_000
"""Deliveries at a rate come together for so long at most, if they do not fill the burst before: a
timer for each of 100,000 a second would take all of the time."""

TAKERS_MAX: Final = 512
"""Consumers of one queue that are served before the time is looked at: a millisecond."""

BATCH_QUEUES_MAX: Final = 1024
"""Queues in one commit. A batch of more is written in several, its confirms go with the last."""

BATCH_COPIES_MAX: Final = 128 * 1024
"""Messages in the queues of one commit, of which one queue may have more."""

PAGE_BYTES: Final = 2 * 1024 * 1024
"""One read of a queue's waiting messages from disk, about."""

STEP_BYTES: Final = 2 * 1024 * 1024
"""Messages that move, are due or die before others have their turn, about: what they take in memory
until they are written, beside what may be there."""

NEAR_BYTES_MAX: Final = 16 * 1024 * 1024
"""With so many bytes of scheduled messages of one queue in memory, no more are read ahead."""

READ_AHEAD_BYTES: Final = 4 * 1024 * 1024
"""Below this many bytes in memory, a queue that is being consumed asks for its next page."""

SCARCE_BYTES: Final = 256 * 1024
"""What a queue that is being consumed keeps in memory, about, while memory is short."""

DELIVERY_BYTES: Final = 256 * 1024
"""One step of a delivery from a backlog, about: the connection's high-water mark is looked at
between steps."""

SEGMENTS_DROPPED_MAX: Final = 64
"""Segments dropped in one commit, so that no commit takes long."""

SEGMENT_MERGE_COUNT: Final = 512
"""This many small segments are merged into one."""

SEGMENT_BYTES_MAX: Final = 64 * 1024 * 1024
"""One segment, unless a single message is larger. A larger commit is written as several, in one
transaction: SQLite takes at most 1,000,000,000 bytes in a row, and a segment is read as a whole."""

SEGMENT_SMALL_BYTES: Final = 16 * 1024
"""A segment below this size counts as small."""

ONCE_ID_BYTES_MAX: Final = 128
"""Longest id of publish --once that is remembered as it is; of a longer one its hash is."""

TAIL_NAMES_MAX: Final = 100
"""Events and masks of one tail."""

TAIL_BACKLOG_MESSAGES: Final = 50_000
TAIL_BACKLOG_BYTES: Final = 16 * 1024 * 1024
"""What waits to be compared with the masks of tails; of more they are only told how many."""

READS_WAITING_MAX: Final = 16
"""Reads of the journal that one connection may send ahead."""

READ_ROWS_DEFAULT: Final = 100_000
READ_ROWS_MAX: Final = 1_000_000
"""Messages in one reply to read."""

READ_BYTES: Final = 4 * 1024 * 1024
"""One reply to read or peek, at most twice as much."""

READ_BYTES_MIN: Final = 64 * 1024
"""One reply to read or peek, while many replies wait for clients that do not take them."""

READ_DISK_BYTES: Final = 64 * 1024 * 1024
"""What one reply to read or peek takes from the disk, about: messages that lie between many of
other queues, and others who wait for theirs."""

LEASE_S: Final = 30.0
"""A receive leases messages for so long, unless it or the queue says otherwise."""
RECEIVE_MAX: Final = 100
"""Messages in one reply to receive: each is marked, scheduled and told by itself."""
RECEIVE_WAIT_S_MAX: Final = 60.0
RECEIVES_WAITING_MAX: Final = 20_000
"""Receives of all connections that wait for messages, about 1 KB each."""

EVALUATIONS_MAX: Final = 4
"""Expressions of `_eval` that are under way at once, each of which may hold some 10 MB; those of
other connections wait."""

PEEK_ROWS_DEFAULT: Final = 10
PEEK_ROWS_MAX: Final = 1000
"""Messages in one reply to peek."""

HTTP_CONNECTIONS_MAX: Final = 256
"""Connections at once to the port of metrics and health; for one more the oldest that waits for its
peer is closed."""

HTTP_WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of requests to one port that are not parsed yet, together; for more, whose is most is closed."""

HTTP_UNREAD_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of answers that the peers of one port have yet to read, together; for more, who has read nothing
for longest is closed."""

HTTP_PIECE_BYTES_MAX: Final = 64 * 1024
HTTP_PIECE_LINES_MAX: Final = 256
"""What is parsed of a request in a turn, and the line ends in it: chunks of one byte take 2 ms."""

HTTP_BODY_BYTES_MAX: Final = 64 * 1024
"""Of a body, what is parsed before somebody reads it, up to a piece more."""

HTTP_HEAD_LINES_MAX: Final = 256
"""Lines of the head of a request, and of what follows its last chunk; the last piece of it may have
more."""

HTTP_QUERY_FIELDS_MAX: Final = 2000
"""Fields in the query of a request: they take 5 ms."""

HTTP_LINGER_BYTES_MAX: Final = 64 * 1024 * 1024
"""What is read, to no effect, of a request after its answer."""

API_BODIES_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bodies of the HTTP API that are read or not stored yet, together. A longer one is read alone."""

API_BODY_S: Final = 30.0
"""How long sending one may take."""

API_STREAMS_MAX: Final = 64
"""Streams of the HTTP API."""

API_STREAM_BYTES_MAX: Final = 256 * 1024
"""Messages of a stream that wait to be shown, about; what comes meanwhile the broker drops."""

API_WAITS_MAX: Final = 128
"""Requests to the HTTP API that wait for messages."""

SQS_CONNECTIONS_MAX: Final = 16_384
"""Connections at once to the port of SQS, most of which wait for messages."""

SQS_REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
"""Longest request to it: 1 MiB of messages, with their escapes."""

SQS_LINE_BYTES_MAX: Final = 2 * 1024 * 1024 + 16 * 1024
"""Longest line from it: 1 MiB of newlines, escaped, and attributes."""

SQS_QUEUES_MAX: Final = 10_000
"""Queues whose attributes it knows without asking, for a second, or their last purges, for 60."""

SQS_RECENT_MAX: Final = 100_000
"""Messages whose first delivery it remembers, and as many sequence numbers."""

SQS_TASKS_MAX: Final = 1000
"""Queues of which it remembers message move tasks, ten each."""

HISTORY_QUEUES_MAX: Final = 100
"""Queues whose rates of the last day are kept: 34 KiB each."""

STATS_ROWS_DEFAULT: Final = 1000
STATS_ROWS_MAX: Final = 10_000
"""Rows in one reply to stats."""

STATS_BYTES_MAX: Final = 1024 * 1024
"""A list in a reply to stats ends with the row that makes it longer than this."""

LISTS_MAX: Final = 4
"""Lists of stats that are made at once; those of other connections wait, and all of them while the
replies that clients have not taken are as many as may be."""

REASON_CHARACTERS_MAX: Final = 500
"""Longest reason kept with an error."""

MASKED_NAME_BYTES_MAX: Final = 256
"""Longest name that the masks of a user are tried on; longer ones need `**`. The worst mask takes
a millisecond for it."""

STRANGER_LINE_BYTES_MAX: Final = 4096
"""Longest line before authentication."""

STRANGER_LINES_MAX: Final = 32
"""Lines before authentication; then the connection is closed."""

STRANGER_ERRORS_MAX: Final = 8
"""Error replies before authentication; then the connection is closed."""

CREDENTIALS_BYTES_MAX: Final = 4096
"""Longest arguments of `auth`: they are kept until it is their turn to be verified."""

AUTH_FAILURES_MAX: Final = 3
"""Wrong credentials on one connection; then it is closed."""

LOGINS_WAITING_MAX: Final = 64
"""Passwords that wait to be verified, one after the other, each a thirtieth of a second or more."""

LOGINS_WAITING_PER_ADDRESS_MAX: Final = 16
"""Those from one address, which may wait for a pause."""

LOGINS_WRONG_MAX: Final = 3
"""Wrong passwords without a pause. After each further one the next waits, twice as long."""

LOGIN_PAUSE_S_MAX: Final = 4.0
"""Longest pause, for one user name from one address."""

LOGIN_PAUSE_ADDRESS_S_MAX: Final = 0.25
"""Longest pause, for all user names from one address: many users may share it."""

LOGIN_PAUSES_MAX: Final = 4096
"""Addresses, and user names from them, whose wrong passwords are counted."""

LOGIN_FORGET_S: Final = 60.0
"""After this time without another one, wrong passwords no longer count."""

STUCK_S: Final = 5.0
"""Who takes nothing for so long, or does not go on with a long line, is closed when there is hardly
room for anybody's."""

PIECE_BYTES_MAX: Final = 256 * 1024
"""What is read from a connection at once, at most."""

PIECE_BYTES_MIN: Final = 1024
"""What is read at once when there is no room for what is not handled."""

PIECE_LATE_BYTES_MAX: Final = 16 * 1024
"""What is read at once when the turn of the event loop is over."""

TLS_PIECE_BYTES_MAX: Final = 128 * 1024
"""What is read from a connection with TLS at once: in records of one byte that takes 12 ms."""

TLS_PIECE_LATE_BYTES_MAX: Final = 2 * 1024
"""What is decrypted at once when the turn of the event loop is over."""

TLS_HANDSHAKE_RECORDS_MAX: Final = 64
"""TLS records from a connection until its handshake is done."""

TLS_EMPTY_RECORDS_MAX: Final = 16
"""TLS records without data, such as new keys, from a connection in `TLS_EMPTY_RECORDS_S`: each
takes 0.1 ms."""

TLS_EMPTY_RECORDS_S: Final = 60.0

LONG_LINES_READ: Final = 8
"""Lines longer than `PIECE_BYTES_MIN` which are read in the same time when there is hardly room."""

SILENT_S: Final = 2.0
"""After this time without a commit of a journal on another machine, what it holds is not delivered:
another broker may deliver it soon."""

FORSAKEN_S: Final = 45.0
"""After this time without one, clients are closed, so that they look for another broker."""

LINGER_BYTES_MAX: Final = 1024 * 1024
"""What is read, to no effect, from a connection that broke the rules."""

DRAIN_S: Final = 30.0
DRAIN_S_MAX: Final = 86400.0
"""How long a drain waits for what consumers hold, without `--timeout` and at most."""

DRAINS_WAITING_MAX: Final = 64
"""Drains of one connection that have no answer yet."""

RELOADS_WAITING_MAX: Final = 64
"""Reloads that have no answer yet."""

DRAIN_HOLDERS_MAX: Final = 100
"""Consumers that the answer to a drain names."""

REJECT_PAUSE_S_MAX: Final = 3600
"""Longest `--pause` of a reject."""

SCHEDULES_MAX: Final = 1000
"""Schedules of one server."""

SCHEDULE_BYTES_MAX: Final = 64 * 1024
"""Flags, event and data of what a schedule publishes."""

BATCH_BYTES: Final = 1024
"""What a batch counts besides its name and what follows it."""

BATCH_ENDS_MAX: Final = 256
"""Batches that end in one commit; others that are done end in the next ones."""

CRON_BYTES_MAX: Final = 256
"""Cron expression of a schedule, and name of its time zone."""

TICK_MISSED_S: Final = 60
"""A tick of a schedule that is later than this was missed."""

TICK_RETRY_S: Final = 1
"""Pause before a tick that could not be published is tried again."""

ERRORS_TOLD_MAX: Final = 1000
"""Failed requests, the last ones, that are kept in memory for stats."""

ERRORS_BURST_US: Final = 10_000_000
"""Failed requests of one connection with shorter pauses are a burst, whose first one is kept."""

LOOP_HELD_LINES_MAX: Final = 10
"""Log lines in one minute of what held the event loop."""

DROPPED_LINES_MAX: Final = 100
"""Queues of which one minute's log says that dead messages were dropped."""

ERRORS_PER_SECOND_MAX: Final = 100
"""Failed requests that are logged in one second."""

AUDIT_TOLD_MAX: Final = 1000
"""Records of the audit, the last ones, that are kept in memory for stats."""

RENAMED_BINDINGS_MAX: Final = 100_000
RENAMED_QUEUES_MAX: Final = 1000
RENAMED_BYTES_MAX: Final = 1024 * 1024
"""Bindings of a queue that is renamed, queues whose dead letters go there, and the length of what
schedules publish there: they are changed in one step."""

PROGRESS_BYTES_MAX: Final = 200
"""Text of a `progress`."""

PROGRESS_MAX: Final = 50_000
"""Deliveries of which the progress is known, of all consumers; the one told first is forgotten."""

TRACES_MAX: Final = 16
"""Names that are traced at once."""

TRACE_S: Final = 600.0
TRACE_S_MAX: Final = 86_400.0
"""How long they are traced, by default and at most."""

AUDIT_TEXT_BYTES_MAX: Final = 256
"""Of the arguments of a request in its record."""

AUDIT_PER_SECOND_MAX: Final = 400
AUDIT_PARTY_PER_SECOND_MAX: Final = 100
"""Records in one second, of all, and of one user or, without users, one address. What is beyond
them is counted, in one record for each party and action."""

AUDIT_FAILED_LOGINS_PER_SECOND_MAX: Final = 20
AUDIT_PARTY_FAILED_LOGINS_PER_SECOND_MAX: Final = 5
"""Records of failed logins in one second, of all and of one address."""

AUDIT_BEYOND_MAX: Final = 100
"""Parties and actions that are counted separately in one second."""

USERS_BYTES_MAX: Final = 16 * 1024 * 1024
"""Longest users file."""

SCRYPT_MEMORY_BYTES_MAX: Final = 256 * 1024 * 1024
"""What verifying one password may take."""
