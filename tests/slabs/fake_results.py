"""What the fake driver's calls end with."""

from enum import IntEnum


class CUresult(IntEnum):
    """The results that the fake gives, with CUDA's numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class Refused(Exception):
    """Ends a fake call with this result."""

    def __init__(self, result: CUresult) -> None:
        super().__init__(result.name)
        self.result = result


def invalid() -> Refused:
    """Return what CUDA says of most mistakes."""
    return Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
