"""The egress proxy's way out: names looked up once, addresses checked, servers verified."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

from megacomposer.env.egress.policy import EgressPolicy
from megacomposer.env.egress.request import RefusedError, UpstreamError
from megacomposer.env.egress.stream import CHUNK_BYTES, Activity, SocketStream

_ADDRESSES_TRIED = 4

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve_host(host: str, port: int) -> list[str]:
    """Addresses of a name, by this host's resolver. Raises OSError."""
    del port
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Dialer:
    """Connects to hosts that a policy allows.

    `ca_path` is a file of certificates that are trusted besides the host's own.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        *,
        resolve: Resolve,
        ca_path: str | None,
        connect_s: float,
        idle_s: float,
    ) -> None:
        self._policy, self._resolve, self._ca_path = policy, resolve, ca_path
        self._connect_s, self._idle_s = connect_s, idle_s

    async def dial(self, host: str, port: int, *, activity: Activity, tls: bool) -> SocketStream:
        """A connection to a checked address. What was checked is what is dialled: a name is
        looked up once. Raises RefusedError, UpstreamError."""
        literal = ":" in host or host.replace(".", "").isdigit()
        try:
            async with asyncio.timeout(self._connect_s):
                addresses = [host] if literal else await self._resolve(host, port)
        except OSError as error:
            raise UpstreamError(f"cannot look up {host}: {str(error) or 'timed out'}") from error
        refused = {a: self._policy.refused_address(a) for a in addresses}
        reachable = [a for a in addresses if not refused[a]]
        if not reachable:
            kinds = ", ".join(sorted({why for why in refused.values() if why})) or "none"
            raise RefusedError("address", f"{host} leads to an address of kind: {kinds}")
        context: ssl.SSLContext | None = None
        if tls:
            from megacomposer.env.egress.tls import upstream_context

            context = upstream_context(self._ca_path)
        problem = ""
        for address in reachable[:_ADDRESSES_TRIED]:
            try:
                async with asyncio.timeout(self._connect_s):
                    reader, writer = await asyncio.open_connection(
                        address,
                        port,
                        limit=CHUNK_BYTES,
                        ssl=context,
                        server_hostname=host if tls else None,
                    )
            except ssl.SSLCertVerificationError as error:
                message = error.verify_message
                raise UpstreamError(f"its certificate is not valid: {message}") from error
            except OSError as error:
                problem = str(error) or "timed out"
            else:
                return SocketStream(reader, writer, self._idle_s, activity)
        raise UpstreamError(f"cannot connect: {problem}")
