"""Every error of the project, and the gRPC code each becomes.

EmbedserveError
├── InvalidArgument      INVALID_ARGUMENT      a request's field: which, what was given, what is allowed
├── NotFound             NOT_FOUND             a table or version; lists what exists
├── FailedPrecondition   FAILED_PRECONDITION   the table cannot do that
├── ResourceExhausted    RESOURCE_EXHAUSTED    a limit; overload, with a time to retry after
├── DeadlineExceeded     DEADLINE_EXCEEDED     too late before work was begun
├── Unavailable          UNAVAILABLE           draining
├── Unauthenticated      UNAUTHENTICATED       no token, or a wrong one
├── ArtifactError        DATA_LOSS             a version's files are damaged, foreign or incomplete
├── SourceError          INVALID_ARGUMENT      what was to be imported cannot be
└── ConfigError          INVALID_ARGUMENT      a configuration that cannot be served
"""

from __future__ import annotations


class EmbedserveError(Exception):
    """Base of all; `str()` is the sentence that a caller reads, `code` the gRPC status name."""

    code = "INTERNAL"


class InvalidArgument(EmbedserveError):
    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class NotFound(EmbedserveError):
    code = "NOT_FOUND"


class FailedPrecondition(EmbedserveError):
    code = "FAILED_PRECONDITION"


class ResourceExhausted(EmbedserveError):
    """`retry_after_s` is set where waiting helps (overload) and None where it does not (a size limit)."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EmbedserveError):
    code = "DEADLINE_EXCEEDED"


class Unavailable(EmbedserveError):
    code = "UNAVAILABLE"


class Unauthenticated(EmbedserveError):
    code = "UNAUTHENTICATED"


class ArtifactError(EmbedserveError):
    code = "DATA_LOSS"


class SourceError(EmbedserveError):
    code = "INVALID_ARGUMENT"


class ConfigError(EmbedserveError):
    code = "INVALID_ARGUMENT"
