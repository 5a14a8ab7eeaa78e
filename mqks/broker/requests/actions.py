"""What does each action."""

from mqks.broker.requests import (
    binding,
    leases,
    looking,
    messages,
    operating,
    queues,
    redrives,
    renaming,
    scheduled,
    transactions,
)
from mqks.broker.requests.audited import Run, audited
from mqks.protocol.requests import ACTIONS, Action

_RUNS: dict[bytes, Run] = {
    b"publish": messages.publish,
    b"subscribe": binding.subscribe,
    b"consume": binding.consume,
    b"rebind": binding.rebind,
    b"ack": messages.ack,
    b"reject": messages.reject,
    b"release": messages.release,
    b"touch": messages.touch,
    b"set_prefetch": binding.set_prefetch,
    b"begin": transactions.begin,
    b"commit": transactions.commit,
    b"rollback": transactions.rollback,
    b"receive": leases.receive,
    b"lease": leases.lease,
    b"cancel": scheduled.cancel,
    b"promote": scheduled.promote,
    b"move": redrives.move,
    b"redrive": redrives.move,
    b"delete_consumer": binding.delete_consumer,
    b"delete_queue": queues.delete_queue,
    b"set_queue": queues.set_queue,
    b"pause": queues.pause,
    b"resume": queues.resume,
    b"rename": renaming.rename,
    b"purge": queues.purge,
    b"peek": looking.peek,
    b"tail": looking.tail,
    b"range": looking.range_,
    b"read": looking.read,
    b"trim": queues.trim,
    b"schedule": messages.schedule,
    b"unschedule": messages.unschedule,
    b"schedules": looking.tell_stats,
    b"stats": looking.tell_stats,
    b"trace": operating.trace,
    b"help": operating.help_,
    b"auth": operating.auth,
    b"set_name": operating.set_name,
    b"close_connection": operating.close_connection,
    b"read_only": operating.read_only,
    b"reload": operating.reload,
    b"drain": operating.drain,
    b"ping": operating.ping,
    b"_eval": operating.evaluate,
}
RUNS: dict[bytes, tuple[Action, Run]] = {
    name: (action, audited(_RUNS[name]) if action.is_audited else _RUNS[name])
    for name, action in ACTIONS.items()
}
