"""The address that a host listens on: the one that the others are told, and no other."""

from __future__ import annotations

import ipaddress
import socket

from harness.run.nodes.errors import HostError

ENDPOINT = "launcher.rdzv_endpoint"


def split_endpoint(text: str | None) -> tuple[str, int] | None:
    """The host and the port of ``HOST:PORT`` or ``[IPV6]:PORT``; None if it is neither."""
    host, _, port = (text or "").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        return None
    return host, int(port)


def is_everywhere(host: str) -> bool:
    """Whether a host's text stands for all addresses of a machine, which is none to reach it by."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def url(host: str, port: int) -> str:
    """torch.distributed's name of a store at an address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def listen(host: str, port: int, *, backlog: int = 128) -> socket.socket:
    """A socket that listens on the address of ``host``, with port 0 on a free port.

    Raises HostError if the host has no such address, or another program has the port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise HostError(
            f"{host}: this host knows no address of that name ({error}); give an IP address in "
            f"{ENDPOINT}"
        ) from error
    refused: OSError | None = None
    for family, *_, address in found:
        try:
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            refused = error
    assert refused is not None, "a name that is known has an address"
    raise HostError(
        f"port {port} of {host} cannot be listened on by {socket.gethostname()} "
        f"({refused.strerror}); name a free port of this host's own address in {ENDPOINT}"
    ) from refused


def warning_about(host: str, listener: socket.socket) -> str | None:
    """A warning if a name means this machine alone, as some installations write in /etc/hosts."""
    address = listener.getsockname()[0]
    try:
        ipaddress.ip_address(host)
        return None
    except ValueError:
        pass
    if host == "localhost" or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return (
        f"{host} is {address} here, which other hosts cannot reach; if there are any, give this "
        f"host's IP address in {ENDPOINT}"
    )
