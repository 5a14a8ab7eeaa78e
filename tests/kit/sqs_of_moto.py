"""The server with the account that moto's tests expect."""

import sys

from mqks.commands import main
from mqks.sqs import messages, queues

queues.ACCOUNT = messages.ACCOUNT = "123456789012"  # type: ignore[misc, attr-defined]
sys.exit(main())
