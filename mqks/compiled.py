"""What compiled modules need: `hatch_build.py` names them, and compiles them with mypyc.

The one rule: without the compiler's package everything here does nothing.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**settings):
        """Settings of a class for the compiler."""
        return lambda decorated: decorated


def is_compiled() -> bool:
    """Whether this installation was built with compiled modules."""
    spec = find_spec("mqks.protocol.lines")  # Of a package that loads little.
    return spec is not None and not str(spec.origin).endswith(".py")
