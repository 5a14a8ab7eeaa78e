"""The exceptions of the pipeline, with their exit codes.

    MqksError
    └── PipelineError       70
        ├── DataLost        65  messages to read are gone, or the queue was created again
        ├── BadOption       78  an option of format("mqks") is unknown or bad (also a ValueError)
        ├── BadRow          65  a row that the protocol does not allow (also a ValueError)
        ├── JavaMissing     69  Java is missing or too old for Spark
        ├── ExtraMissing    69  a required package is not installed
        ├── JobFailed       70  a Spark job failed
        ├── ServerAway      69  the server cannot be reached
        ├── StoreAway       69  the store of the lake cannot be reached
        ├── LakeInUse       69  another process writes to the lake
        ├── ReplayDoubles   65  the replayed messages would be archived again
        └── LakeUnfit       65  the lake has another format, is not shared, or cannot be used

The one rule: the message is a single line that says what is wrong and what to do.
"""

from mqks.errors import MqksError


class PipelineError(MqksError):
    """The base class."""


class DataLost(PipelineError, exit_code=65):
    """Messages between two offsets are gone; `failOnDataLoss=false` continues without them."""


class NoQueue(PipelineError, exit_code=65):
    """No queue matches the mask."""


class BadOption(PipelineError, ValueError, exit_code=78):
    """An unknown option or column, or an invalid value."""


class BadRow(PipelineError, ValueError, exit_code=65):
    """A row that the protocol does not allow; the message names the row and the reason."""


class JavaMissing(PipelineError, exit_code=69):
    """Java was not found, or it is too old."""


class ExtraMissing(PipelineError, exit_code=69):
    """A package of an extra is not installed."""


class JobFailed(PipelineError):
    """A Spark job failed; the message has the reason of the failed task."""


class ServerAway(PipelineError, exit_code=69):
    """The server could not be reached within all retries."""


class StoreAway(PipelineError, exit_code=69):
    """The object store of the lake does not answer; nothing is lost, and it may be tried again."""


class LakeInUse(PipelineError, exit_code=69):
    """Another process writes to the lake; two archives would overwrite each other's state."""


class LakeDiffers(PipelineError, exit_code=65):
    """A lake has not exactly the rows that were archived into it; it names a difference."""


class ReplayDoubles(PipelineError, exit_code=65):
    """A replay into a queue that the lake was archived from."""


class LakeUnfit(PipelineError, exit_code=65):
    """The lake does not exist, has another format, or its file system lacks a required feature."""
