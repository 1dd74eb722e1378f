"""Messages that a Pub/Sub consumer holds, by ordering key, and the decision about each message that arrives.

Pub/Sub delivers the messages of an ordering key in order to one stream. After a nack or an expired lease it delivers
that message again *and all later ones of the key*, perhaps to another stream. Messages that it sent before it received
the nack are still on their way: if one of them were handled, it would overtake the message that was given back.
Therefore a key that gave a message back is *interrupted*, and later messages of the key are refused (nacked without
being handled) until

- the message that was given back arrives again, or
- a refused message arrives again, although its first delivery was refused after the service had confirmed the nack. The
  service delivers messages of a key in order, so another consumer has finished the message that was given back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Final

from mailboat.consumer.broker.protocol import Record

LONGEST_TAIL: Final = 100
"""Messages of one key that are held at the same time."""
_MAX_INTERRUPTIONS: Final = 10_000
_LONGEST_PAUSE: Final = 1.0


@dataclass(slots=True, eq=False)
class Held:
    """A message that is leased and not settled. ``ack_id`` is that of its last delivery."""

    message_id: str
    key: str
    published: datetime
    size: int
    ack_id: str
    record: Record | None = None
    """None if the message was not handed to the engine."""
    given_back: bool = False


@dataclass(slots=True)
class HeldKey:
    """The messages of one key, oldest first."""

    number: int
    """The partition of its records: the engine can forget this key alone."""
    head_since: float
    """When the oldest message became the oldest."""
    messages: dict[str, Held] = field(default_factory=dict)
    leaving: bool = False
    """True while the engine forgets the key: messages are held and not handed on."""


@dataclass(slots=True)
class Interruption:
    """A message was given back: later messages of its key are refused until it arrives again."""

    message_id: str
    overflow: bool = False
    """True if the message was refused because the key was at its bound: the messages before it are held."""
    confirmed: bool = False
    """True if the service has confirmed the nack of the message."""
    refused: set[str] = field(default_factory=set)
    """Messages that were refused after the confirmation."""
    pause: float = 0.0
    """Delay of nacks in seconds. It grows while the key stays at its bound: a nacked message may return at once."""

    def ends_with(self, message: Held) -> bool:
        return message.message_id == self.message_id or message.message_id in self.refused


class Verdict(Enum):
    """What to do with a delivery."""

    HAND_ON = "hand on"
    HOLD = "hold"
    KNOWN = "known"
    """The message is held already. Its new ack id replaces the old one."""
    REFUSE = "refuse"


class HeldMessages:
    """All held messages of one source."""

    def __init__(self, longest_tail: int = LONGEST_TAIL) -> None:
        self.keys: dict[str, HeldKey] = {}
        self.without_key: dict[str, Held] = {}
        self.interruptions: dict[str, Interruption] = {}
        self.bytes = 0
        self._longest_tail = longest_tail
        self._numbers = 0

    def __len__(self) -> int:
        return len(self.without_key) + sum(len(key.messages) for key in self.keys.values())

    def __iter__(self) -> Iterator[Held]:
        yield from self.without_key.values()
        for key in self.keys.values():
            yield from key.messages.values()

    def find(self, message: Held) -> Held | None:
        """Return the message with the same id that is held."""
        if not message.key:
            return self.without_key.get(message.message_id)
        key = self.keys.get(message.key)
        return None if key is None else key.messages.get(message.message_id)

    def arrive(self, message: Held, now: float) -> Verdict:
        """Decide about a delivery, and hold the message unless it is refused."""
        held = self.find(message)
        if held is not None:
            held.ack_id = message.ack_id
            return Verdict.KNOWN
        if not message.key:
            self.without_key[message.message_id] = message
            self.bytes += message.size
            return Verdict.HAND_ON
        interruption = self.interruptions.get(message.key)
        if interruption is not None:
            if not interruption.ends_with(message):
                if interruption.confirmed:
                    interruption.refused.add(message.message_id)
                return Verdict.REFUSE
            del self.interruptions[message.key]
        key = self.keys.get(message.key)
        if key is None:
            self._numbers += 1
            key = self.keys[message.key] = HeldKey(self._numbers, now)
        elif len(key.messages) >= self._longest_tail:
            pause = min(max(0.1, 2 * interruption.pause), _LONGEST_PAUSE) if interruption else 0.0
            self._interrupt(message.key, Interruption(message.message_id, overflow=True, pause=pause))
            return Verdict.REFUSE
        key.messages[message.message_id] = message
        self.bytes += message.size
        return Verdict.HOLD if key.leaving else Verdict.HAND_ON

    def interrupt(self, message: Held) -> Interruption | None:
        """Refuse later messages of the key: ``message``, the oldest one that was held, is given back.

        Returns None if an earlier message of the key was given back already.
        """
        known = self.interruptions.get(message.key)
        if known is not None and not known.overflow:
            return None
        return self._interrupt(message.key, Interruption(message.message_id))

    def _interrupt(self, key: str, interruption: Interruption) -> Interruption:
        self.interruptions.pop(key, None)
        if len(self.interruptions) >= _MAX_INTERRUPTIONS:
            del self.interruptions[next(iter(self.interruptions))]
        self.interruptions[key] = interruption
        return interruption

    def remove(self, message: Held, now: float) -> bool:
        """Forget a message that is settled or given back. Returns False if it is not held any more."""
        if self.find(message) is not message:
            return False
        self.bytes -= message.size
        if not message.key:
            del self.without_key[message.message_id]
            return True
        key = self.keys[message.key]
        del key.messages[message.message_id]
        key.head_since = now
        if not key.messages and not key.leaving:
            del self.keys[message.key]
        return True

    def release(self, key: str) -> None:
        """Forget a key and its messages."""
        self.bytes -= sum(message.size for message in self.keys.pop(key).messages.values())

    def returnable(self, key: str) -> list[Held]:
        """Return the messages at the front of a key that the engine has given back.

        A message behind one that is still being handled stays: if it were nacked now, another consumer might start it
        too early.
        """
        front = []
        for message in self.keys[key].messages.values() if key in self.keys else ():
            if not message.given_back:
                break
            front.append(message)
        return front
