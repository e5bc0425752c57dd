"""The egress proxy: the only way out of a sandbox, held to a policy.

    policy = EgressPolicy(task.egress)
    async with EgressProxy(policy, Path("/run/x/egress.sock"), record=log.record) as proxy:
        spec = SandboxSpec(egress_socket=str(proxy.socket), env=proxy_environment(...))

One proxy a sandbox: its audit events carry the sandbox's name, its byte budget is the task's, and
its certificate authority is trusted nowhere else.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import h11

from megacomposer.env.audit import Record, discard
from megacomposer.env.egress.dialer import Dialer, Resolve, resolve_host
from megacomposer.env.egress.exchange import (
    ProxyLimits,
    Traffic,
    answer,
    exchange,
    linger,
    pass_tunnel,
)
from megacomposer.env.egress.policy import EgressPolicy, rule_name, split_authority
from megacomposer.env.egress.request import (
    Exchange,
    RefusedError,
    Tunnel,
    UpstreamError,
    check_head,
    read_target,
    request_headers,
    shown_path,
)
from megacomposer.env.egress.stream import (
    CHUNK_BYTES,
    Activity,
    ByteStream,
    HttpPeer,
    SocketStream,
    TlsStream,
)

if TYPE_CHECKING:
    from megacomposer.env.egress.tls import CertificateAuthority

_SOCKET_PATH_BYTES = 107  # sockaddr_un


class EgressProxy:
    """A proxy for HTTP and CONNECT on a Unix socket.

    `socket` is made by `start` for anyone who can reach it: keep it in a directory of mode 0700.
    `sandbox` names the sandbox in audit events. `upstream_ca_path` is a file of certificates that
    are trusted besides the host's own, for internal mirrors. Raises ValueError where the policy
    looks into HTTPS and the `env` extra is not installed.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        socket: Path,
        *,
        sandbox: str = "",
        record: Record = discard,
        limits: ProxyLimits | None = None,
        resolve: Resolve = resolve_host,
        upstream_ca_path: str | None = None,
    ) -> None:
        if len(str(socket).encode()) > _SOCKET_PATH_BYTES:
            raise ValueError(
                f"socket: {socket} is longer than {_SOCKET_PATH_BYTES} bytes, the most that the "
                "kernel takes; use a directory with a shorter name"
            )
        self.policy, self.socket = policy, socket
        self.limits = limits or ProxyLimits()
        self._traffic = Traffic(self.limits)
        self._sandbox, self._record = sandbox, record
        self._dialer = Dialer(
            policy,
            resolve=resolve,
            ca_path=upstream_ca_path,
            connect_s=self.limits.connect_s,
            idle_s=self.limits.idle_s,
        )
        self._authority = _authority() if policy.inspects else None
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def used_bytes(self) -> int:
        """Bodies and tunnels so far, both directions."""
        return self._traffic.used_bytes

    @property
    def ca_certificate_pem(self) -> str:
        """The proxy's own authority; "" where the policy looks into no HTTPS."""
        return self._authority.certificate_pem if self._authority else ""

    @property
    def ca_bundle_pem(self) -> str:
        """The host's roots and the proxy's authority: a trust store for the sandbox."""
        if self._authority is None:
            return ""
        from megacomposer.env.egress.tls import host_roots_pem

        return host_roots_pem() + "\n" + self._authority.certificate_pem

    async def start(self) -> None:
        """Raises OSError where the socket cannot be made."""
        assert self._server is None, "a proxy starts once"
        self._server = await asyncio.start_unix_server(
            self._accept, path=self.socket, limit=CHUNK_BYTES, backlog=self.limits.connections
        )
        self.socket.chmod(0o666)  # the sandbox's user is not ours

    async def close(self) -> None:
        """Cut all connections (their audit events are written) and remove the socket."""
        if self._server is None:
            return
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None
        self.socket.unlink(missing_ok=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # Connections of clients ----------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = SocketStream(reader, writer, self.limits.idle_s, Activity())
        try:
            if len(self._tasks) > self.limits.connections:
                line = b"egress proxy: too many connections at once; close some and try again\n"
                head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\n"
                head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(line)
                await stream.write(head + line)
            else:
                await self._converse(stream, None)
            await linger(stream)
            await stream.close()
        except (OSError, h11.ProtocolError):
            pass  # the client is gone, or no longer makes sense; what it asked is in the log
        finally:
            stream.abort()

    async def _converse(self, stream: ByteStream, tunnel: Tunnel | None) -> None:
        """Requests of one client, one after the other."""
        client = HttpPeer(stream, h11.SERVER, self.limits.head_bytes)
        while True:
            try:
                async with asyncio.timeout(self.limits.head_s):
                    event = await client.event()
            except h11.RemoteProtocolError as error:
                log = Exchange(method="?", **_where(tunnel))
                refusal = RefusedError("malformed", str(error), status=error.error_status_hint)
                await self._refuse(client, log, refusal)
                return
            if not isinstance(event, h11.Request):
                return  # the client has closed
            if event.method == b"CONNECT" and tunnel is None:
                await self._connect(client, event)
                return
            if not await self._forward(client, event, tunnel):
                return
            client.http.start_next_cycle()

    async def _refuse(self, client: HttpPeer, log: Exchange, refusal: RefusedError) -> None:
        """Record a denial, and tell the client where it can still be told."""
        log.reason, log.status = refusal.reason, refusal.status
        self._record("egress_denied", sandbox=self._sandbox, **log.details())
        line = f"egress denied: {log.shown()}: {refusal.advice}"
        await answer(client, refusal.status, line, refusal.reason)

    # Requests ------------------------------------------------------------------------------------

    async def _forward(self, client: HttpPeer, request: h11.Request, tunnel: Tunnel | None) -> bool:
        """One request from its head to the end of its answer; True: the client may send another."""
        log = Exchange(method=request.method.decode("ascii"), **_where(tunnel))
        log.path = shown_path(request.target.decode("ascii"))
        try:
            target = read_target(request, tunnel)
            log.host, log.port, log.path = target.host, target.port, shown_path(target.path)
            check_head(request)
            self._traffic.check_body(request)
            decision = self.policy.decide(log.method, target.host, target.port, target.path)
            log.rule = rule_name(decision.rule)
            if not decision.allowed:
                raise RefusedError(decision.reason, decision.advice)
            assert decision.rule is not None
            async with asyncio.timeout(self.limits.exchange_s):
                upstream = await self._dialer.dial(
                    target.host,
                    target.port,
                    activity=client.stream.activity,
                    tls=target.scheme == "https",
                )
                try:
                    head = h11.Request(
                        method=request.method,
                        target=target.path.encode("ascii"),
                        headers=request_headers(request, target, decision.rule),
                    )
                    await exchange(client, upstream, head, log, self._traffic)
                finally:
                    upstream.abort()
        except RefusedError as refusal:
            await self._refuse(client, log, refusal)
            return False
        except UpstreamError as error:
            log.error, log.status = str(error), 502
            await answer(client, 502, f"egress proxy: {log.shown()}: {error}", "upstream")
        except TimeoutError:
            log.error, log.status = "the request took too long", 504
            await answer(client, 504, f"egress proxy: {log.shown()}: it took too long", "timeout")
        except (OSError, h11.ProtocolError) as error:
            log.error = f"the client went away: {error}"
            raise
        except asyncio.CancelledError:
            log.error = "the proxy was closed"
            raise
        finally:
            if not log.reason:
                self._record("egress_allowed", sandbox=self._sandbox, **log.details())
        if client.http.our_state is h11.SEND_BODY:
            raise ConnectionResetError("the answer broke off")  # never let it look complete
        return client.http.our_state is h11.DONE and client.http.their_state is h11.DONE

    # Tunnels -------------------------------------------------------------------------------------

    async def _connect(self, client: HttpPeer, request: h11.Request) -> None:
        """Open a tunnel: passed on unseen, or taken apart into its requests."""
        log = Exchange(method="CONNECT")
        upstream: SocketStream | None = None
        outside = client.stream
        assert isinstance(outside, SocketStream), "no tunnel inside a tunnel"
        try:
            try:
                log.host, log.port = split_authority(request.target.decode("ascii"), None)
            except ValueError as error:
                raise RefusedError("malformed", str(error), status=400) from None
            while (event := await client.event()) is not h11.PAUSED:
                if not isinstance(event, h11.EndOfMessage):
                    raise RefusedError("malformed", "CONNECT has no body", status=400)
            decision = self.policy.connect(log.host, log.port)
            log.rule = rule_name(decision.rule)
            if not decision.allowed:
                raise RefusedError(decision.reason, decision.advice)
            self._traffic.count(0)
            if not decision.inspect:
                upstream = await self._dialer.dial(
                    log.host, log.port, activity=outside.activity, tls=False
                )
            ok = h11.Response(status_code=200, headers=[], reason=b"Connection established")
            await client.send(ok)
            outside.push_back(client.http.trailing_data[0])
            if upstream is None:
                await self._inspect(outside, log)
            else:
                log.status = 200
                await self._pass(outside, upstream, log)
        except RefusedError as refusal:
            await self._refuse(client, log, refusal)
        except UpstreamError as error:
            log.error, log.status = str(error), 502
            self._record("egress_allowed", sandbox=self._sandbox, **log.details())
            await answer(client, 502, f"egress proxy: {log.shown()}: {error}", "upstream")
        finally:
            if upstream:
                upstream.abort()

    async def _inspect(self, outside: SocketStream, log: Exchange) -> None:
        """Take a tunnel's requests one by one; they are logged, the tunnel itself is not."""
        assert self._authority is not None
        async with asyncio.timeout(self.limits.head_s):
            first = await outside.read()
        if not first:
            return
        outside.push_back(first)
        if first[:1] != b"\x16":  # no TLS handshake: some clients tunnel plain HTTP as well
            await self._converse(outside, Tunnel(scheme="http", host=log.host, port=log.port))
            return
        tls = TlsStream(outside, self._authority.context(log.host))
        try:
            async with asyncio.timeout(self.limits.head_s):
                await tls.handshake()
        except OSError as error:  # ssl.SSLError is one, too
            log.error = f"{type(error).__name__}: {error}"
            refusal = RefusedError("tls", "the client does not trust the proxy's authority")
            raise refusal from error
        await self._converse(tls, Tunnel(scheme="https", host=log.host, port=log.port))
        await tls.end()

    async def _pass(self, outside: SocketStream, upstream: SocketStream, log: Exchange) -> None:
        try:
            await pass_tunnel(outside, upstream, log, self._traffic)
        except OSError as error:
            log.error = f"cut off: {str(error) or 'nothing moved for too long'}"
            raise
        except asyncio.CancelledError:
            log.error = "the proxy was closed"
            raise
        except RefusedError as refusal:
            log.reason = refusal.reason
            raise
        finally:
            if not log.reason:
                self._record("egress_allowed", sandbox=self._sandbox, **log.details())


def _authority() -> CertificateAuthority:
    try:
        from megacomposer.env.egress.tls import CertificateAuthority
    except ImportError as error:
        raise ValueError(
            "egress rules that look into HTTPS need certificates: pip install 'megacomposer[env]' "
            f"({error})"
        ) from error
    return CertificateAuthority()


def _where(tunnel: Tunnel | None) -> dict[str, Any]:
    return {"host": tunnel.host, "port": tunnel.port} if tunnel else {}
