"""Bearer tokens: who may call."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from embedserve.quant.errors import ConfigError, Unauthenticated

MIN_TOKEN_CHARACTERS = 16


class TokenAuth:
    """Admits a call whose `authorization` metadata is `Bearer <token>` with one of a file's tokens."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError if the file cannot be read or holds no token, or one too short to be secret."""
        try:
            lines = file.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot read tokens: {error}") from None
        self._tokens = [line.strip().encode() for line in lines if line.strip() and not line.startswith("#")]
        if not self._tokens:
            raise ConfigError(f"{file}: holds no token; write one a line")
        if min(map(len, self._tokens)) < MIN_TOKEN_CHARACTERS:
            raise ConfigError(f"{file}: a token is shorter than {MIN_TOKEN_CHARACTERS} characters")

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises Unauthenticated unless a token is there and right. Takes the same time for every wrong one."""
        for key, value in metadata:
            if key == "authorization":
                scheme, _, token = (value if isinstance(value, str) else value.decode("latin-1")).partition(" ")
                given = token.strip().encode("utf-8", "surrogateescape")
                # Every token is compared, so that time does not tell which one was near.
                if scheme.lower() == "bearer" and sum([hmac.compare_digest(given, known) for known in self._tokens]):
                    return
                raise Unauthenticated("the bearer token is not one this server knows")
        raise Unauthenticated("send metadata `authorization: Bearer <token>`")
