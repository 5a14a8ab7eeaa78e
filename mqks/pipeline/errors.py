"""What the pipeline raises on purpose.

    MqksError
    └── PipelineError       70
        ├── DataLost        65  messages that were to be read are gone, or the queue was made anew
        ├── BadOption       78  an option of format("mqks") is unknown or bad (a ValueError, too)
        ├── BadRow          65  a row that the protocol cannot say (a ValueError, too)
        ├── JavaMissing     69  Spark needs Java, and there is none that will do
        ├── ExtraMissing    69  a package that is not installed is needed
        ├── JobFailed       70  a job of Spark failed
        ├── ServerAway      69  there is no server, or not for long enough
        ├── LakeInUse       69  another process writes to the lake
        ├── ReplayDoubles   65  what is replayed would be archived again
        └── LakeUnfit       65  the lake is of another format, not shared, or of no use as it is

The one rule: the message is a single line for the person who has to act on it.
"""

from mqks.errors import MqksError


class PipelineError(MqksError):
    """The root of what the pipeline raises."""


class DataLost(PipelineError, exit_code=65):
    """Messages between two offsets are gone; `failOnDataLoss=false` goes on with what is there."""


class BadOption(PipelineError, ValueError, exit_code=78):
    """An option or column that the source does not know, or a value it cannot use."""


class BadRow(PipelineError, ValueError, exit_code=65):
    """A row that the protocol cannot say; the message names the row and the reason."""


class JavaMissing(PipelineError, exit_code=69):
    """There is no Java, or it is too old."""


class ExtraMissing(PipelineError, exit_code=69):
    """A package of an extra is not installed."""


class JobFailed(PipelineError):
    """A job of Spark failed; the message has the reason of the task that failed."""


class ServerAway(PipelineError, exit_code=69):
    """The server could not be reached for as long as the retries last."""


class LakeInUse(PipelineError, exit_code=69):
    """Another process writes to the lake: two archives at once would undo each other's work."""


class ReplayDoubles(PipelineError, exit_code=65):
    """A replay into a queue that the lake was archived from."""


class LakeUnfit(PipelineError, exit_code=65):
    """There is no such lake, it is of another format, or its file system lacks what is needed."""
