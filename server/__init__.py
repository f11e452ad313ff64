"""The server: configuration, engine, service and front ends."""

from embedserve.server.config import ServerConfig, load_config
from embedserve.server.plan import plan as plan_of
from embedserve.server.serve import serve

__all__ = ["ServerConfig", "load_config", "plan_of", "serve"]
