"""Pauses something while there is a reason to.

The one rule: it runs exactly while it has no reason to rest. Only `rest` and `resume` add and
remove reasons.
"""

from mqks.compiled import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Resting:
    """Reasons are bits of a number. A subclass defines how it stops and continues."""

    __slots__ = ("rests",)

    def __init__(self) -> None:
        self.rests = 0

    def rest(self, why: int) -> None:
        goes_on = not self.rests
        self.rests |= why
        if goes_on:
            self._stop()

    def resume(self, why: int) -> None:
        """End these reasons."""
        if self.rests & why:
            self.rests &= ~why
            if not self.rests:
                self._go_on()

    def _stop(self) -> None:
        raise NotImplementedError

    def _go_on(self) -> None:
        raise NotImplementedError
