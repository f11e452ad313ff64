"""What both clients tell their channel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import grpc

SERVICE = "/embedserve.v1.EmbeddingService/"
DEFAULT_TIMEOUT_S = 5.0

# Every call is idempotent, so one that found no server is tried again, with jittered backoff, in its deadline.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "embedserve.v1.EmbeddingService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.enable_retries", 1),
    ("grpc.max_receive_message_length", -1),  # the server's max_response_bytes is the limit
    ("grpc.max_send_message_length", -1),
]


@dataclass(frozen=True)
class TLS:
    """PEM bytes. root_certificates: whom to trust (None: the system's); the other two: who we are, for mTLS."""

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()
