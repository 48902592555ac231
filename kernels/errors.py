"""Errors of the kernels: what was wrong, what was expected, what to use instead."""


class KernelUnavailableError(RuntimeError):
    """The Triton kernels cannot run here. Nothing was computed; there is no silent fallback."""


class ArgumentError(ValueError):
    """An argument of a kernel has the wrong shape, type, device or value.

    The facts are also attributes: ``argument``, ``expected``, ``got``.
    """

    def __init__(self, argument: str, expected: str, got: str) -> None:
        super().__init__(f"{argument}: expected {expected}, got {got}")
        self.argument = argument
        self.expected = expected
        self.got = got

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """Return how to make it again: engines send errors from worker to worker."""
        return type(self), (self.argument, self.expected, self.got)
