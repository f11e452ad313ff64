"""Ask an embedserve server from Python: numpy in, numpy out, blocking or asyncio."""

from embedserve.client._admin import AdminClient
from embedserve.client._async import AsyncClient
from embedserve.client._channel import TLS
from embedserve.client._errors import ServiceError
from embedserve.client._messages import LookupResult, OutputName, TopKResult
from embedserve.client._sync import Client

__all__ = ["TLS", "AdminClient", "AsyncClient", "Client", "LookupResult", "OutputName", "ServiceError", "TopKResult"]
