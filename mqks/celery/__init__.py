"""Celery on MQKS: the schemes `mqks://`, `mqkss://` and `mqks+unix://` of kombu's connections.

The one rule: importing this imports no part of kombu that needs its serializers, since kombu
imports it together with them.
"""

from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES.update(dict.fromkeys(("mqks", "mqkss"), "mqks.celery.transport:Transport"))

SERIALIZER = (None, None, "application/x-mqks")
"""Registered as a serializer that nothing uses. Kombu has entry points for serializers, which it
loads in each process, but none for transports."""
