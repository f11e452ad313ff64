"""Log lines with fields, for people or for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and whatever fields the line carries."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **_fields(record)}, default=str)


class TextFormatter(logging.Formatter):
    """time level message key=value ..."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        text = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()}{fields}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(log_format: str, log_level: str) -> None:
    """Sends this project's and its libraries' log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
