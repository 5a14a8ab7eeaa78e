"""Who rests says why.

The one rule: it goes on exactly while it has no reason to rest, and `rest` and `resume` alone
change that.
"""


class Resting:
    """Reasons are the bits of a number. A subclass says what it means to stop and to go on."""

    __slots__ = ("rests",)

    def __init__(self) -> None:
        self.rests = 0

    def rest(self, why: int) -> None:
        goes_on = not self.rests
        self.rests |= why
        if goes_on:
            self._stop()

    def resume(self, why: int) -> None:
        """These reasons hold no longer."""
        if self.rests & why:
            self.rests &= ~why
            if not self.rests:
                self._go_on()

    def _stop(self) -> None:
        raise NotImplementedError

    def _go_on(self) -> None:
        raise NotImplementedError
