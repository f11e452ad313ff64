"""The server: configuration, engine, service and front ends."""

from embedserve.server.config import ServerConfig, load_config
from embedserve.server.serve import serve

__all__ = ["ServerConfig", "load_config", "serve"]
