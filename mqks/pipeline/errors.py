"""What the pipeline raises on purpose.

    MqksError
    └── PipelineError       70
        ├── DataLost        65  messages that were to be read are gone, or the queue was made anew
        ├── BadOption       78  an option of format("mqks") is unknown or bad (a ValueError, too)
        ├── BadRow          65  a row that the protocol cannot say (a ValueError, too)
        └── JavaMissing     69  Spark needs Java, and there is none that will do

The one rule: the message is a single line for the person who has to act on it.
"""

from mqks.errors import MqksError


class PipelineError(MqksError):
    """The root of what the pipeline raises."""


class DataLost(PipelineError):
    """Messages between two offsets are gone; `failOnDataLoss=false` goes on with what is there."""

    exit_code = 65


class BadOption(PipelineError, ValueError):
    """An option or column that the source does not know, or a value it cannot use."""

    exit_code = 78


class BadRow(PipelineError, ValueError):
    """A row that the protocol cannot say; the message names the row and the reason."""

    exit_code = 65


class JavaMissing(PipelineError):
    """There is no Java, or it is too old."""

    exit_code = 69
