"""What a check raises."""


class ConformanceError(AssertionError):
    """A receiver did what a receiver must not do.

    Attributes:
        tensor: The tensor that holds other bits than it should; None where it is not about one.
        version: The version whose bits were expected; None where it is not about one.
    """

    def __init__(self, message: str, *, tensor: str | None = None, version: int | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.version = version
