"""A challenge and response by HMAC-SHA256, in both directions, before anything else is said.

Both ends choose a nonce. The agent proves first that it knows the key, so that a stranger who
connects to the leader receives a nonce and nothing else; then the leader proves it. The proofs
cover both nonces and the role, so that none can be replayed or reflected. The keys that
authenticate the messages afterwards, one for each direction, follow from the key and both nonces.

A side is a generator without a socket: it yields what to do next and is sent the line that came.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec

NO_PROTOCOL = "it does not speak attnbench's protocol"

LINE_BYTES = 512
"""The longest line of a handshake."""

_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class HandshakeError(Exception):
    """The other end is not of this run; the message says what it did."""


class WrongSecretError(HandshakeError):
    """The other end speaks the protocol and knows another secret."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one connection's messages."""

    to_leader: bytes
    to_agent: bytes


class _Opening(msgspec.Struct, forbid_unknown_fields=True):
    attnbench_link: Literal[1]
    nonce: _Hex


class _Challenge(msgspec.Struct, forbid_unknown_fields=True):
    nonce: _Hex


class _Proof(msgspec.Struct, forbid_unknown_fields=True):
    proof: _Hex


@dataclass(frozen=True, slots=True)
class Step:
    """What a side does next."""

    line: bytes | None = None
    """To send."""
    keys: Keys | None = None
    """The handshake is done, once the line is sent."""


Side = Generator[Step, bytes, None]

REFUSAL = b'{"refused":"secret"}'
"""Tells an agent with another secret so; it is not authenticated, and ends that agent alone."""

T = TypeVar("T")


def agent_side(key: bytes) -> Side:
    """The agent's side; raises HandshakeError."""
    ours = secrets.token_hex(32)
    line = yield Step(msgspec.json.encode(_Opening(1, ours)))
    theirs = _read(line, _Challenge).nonce
    line = yield Step(msgspec.json.encode(_Proof(_proof(key, "agent", ours, theirs))))
    # msgspec tells no two untagged kinds apart.
    if line == REFUSAL:
        raise WrongSecretError("it knows another secret")
    _require(_read(line, _Proof).proof, _proof(key, "leader", ours, theirs))
    yield Step(keys=_keys(key, ours, theirs))


def leader_side(key: bytes) -> Side:
    """The leader's side; raises HandshakeError."""
    line = yield Step()
    theirs = _read(line, _Opening).nonce
    ours = secrets.token_hex(32)
    line = yield Step(msgspec.json.encode(_Challenge(ours)))
    _require(_read(line, _Proof).proof, _proof(key, "agent", theirs, ours))
    answer = msgspec.json.encode(_Proof(_proof(key, "leader", theirs, ours)))
    yield Step(answer, _keys(key, theirs, ours))


def _read(line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(NO_PROTOCOL) from error


def _require(proof: str, right: str) -> None:
    if not hmac.compare_digest(proof, right):
        raise WrongSecretError("it knows another secret")


def _proof(key: bytes, role: str, of_agent: str, of_leader: str) -> str:
    text = f"attnbench proof of the {role} {of_agent} {of_leader}"
    return hmac.digest(key, text.encode(), hashlib.sha256).hex()


def _keys(key: bytes, of_agent: str, of_leader: str) -> Keys:
    def derived(direction: str) -> bytes:
        text = f"attnbench messages {direction} {of_agent} {of_leader}"
        return hmac.digest(key, text.encode(), hashlib.sha256)

    return Keys(to_leader=derived("to the leader"), to_agent=derived("to the agent"))
