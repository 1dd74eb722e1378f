"""Messages that a Pub/Sub consumer holds, by ordering key, and the decision about each message that arrives.

**Interruptions.** Pub/Sub delivers the messages of an ordering key in order to one stream. After a nack or an expired
lease it delivers that message again *and all later ones of the key*, perhaps to another stream. Messages that it sent
before it received the nack are still on their way: if one of them were handled, it would overtake the message that was
given back. Therefore a key that gave a message back is *interrupted*, and later messages of the key are refused (nacked
without being handled) until

- the message that was given back arrives again, or
- a refused message arrives again, although its first delivery was refused after the service had confirmed the nack. The
  service delivers messages of a key in order, so another consumer has finished the message that was given back. If an
  older message was refused in between, that one is unfinished, and only its own return counts.

**Tails.** The engine gets the first messages of a key, and the others wait here, so that they can be given back alone.
They are given back if the key does not progress and the messages held fill half of what the consumer may hold. So a key
that waits for its next attempt does not stop the others.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Final

from mailboat.consumer.broker.interfaces import Record

_MAX_INTERRUPTIONS: Final = 10_000
_LONGEST_PAUSE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much is held."""

    max_messages: int = 1_000
    max_bytes: int = 64 * 1024 * 1024
    longest_tail: int = 10
    """Messages of one key in the engine, and messages kept of a key that does not progress."""
    stuck_after: float = 5.0
    """Seconds without a settled message after which a key counts as one that does not progress."""


@dataclass(slots=True, eq=False)
class Held:
    """A message that is leased and not settled. ``ack_id`` is that of its last delivery."""

    message_id: str
    key: str
    published: datetime
    size: int
    ack_id: str
    content: Any = None
    """The message as it arrived, until it is handed to the engine."""
    record: Record | None = None
    """None until the message is handed to the engine."""
    released: bool = False


@dataclass(slots=True)
class HeldKey:
    """The messages of one key, oldest first."""

    number: int
    """The partition of its records: the engine can forget this key alone."""
    head_since: float
    """When the oldest message became the oldest."""
    messages: dict[str, Held] = field(default_factory=dict)
    waiting: deque[Held] = field(default_factory=deque)
    """The last of them, which the engine did not get."""
    releasing: bool = False
    """True while the engine forgets the key: no message is handed on."""


@dataclass(slots=True)
class Interruption:
    """A message was given back: later messages of its key are refused until it arrives again."""

    message_id: str
    overflow: bool = False
    """True if only the tail of the key was given back: the messages before it are held."""
    confirmed: bool = False
    """True if the service has confirmed the nack of the message."""
    refused: set[str] = field(default_factory=set)
    """Messages that were refused after the confirmation, and no older one since."""
    oldest: datetime | None = None
    """When the oldest of them was published."""
    pause: float = 0.0
    """Delay of nacks in seconds. It grows while the key stays at its bound: a nacked message may return at once."""

    def ends_with(self, message: Held) -> bool:
        return message.message_id == self.message_id or message.message_id in self.refused

    def refuse(self, message: Held) -> None:
        """Note a refused message. If it is older than those refused before, it is not finished: they may not be handled
        before it, so they no longer end the interruption."""
        if not self.confirmed:
            return
        if self.oldest is None or message.published < self.oldest:
            self.refused.clear()
            self.oldest = message.published
        self.refused.add(message.message_id)


class Decision(Enum):
    """What to do with a delivery."""

    DELIVER = "deliver"
    HOLD = "hold"
    DUPLICATE = "duplicate"
    """The message is held already. Its new ack id replaces the old one."""
    REFUSE = "refuse"


class HeldMessages:
    """All held messages of one source."""

    def __init__(self, bounds: Bounds) -> None:
        self.keys: dict[str, HeldKey] = {}
        self.without_key: dict[str, Held] = {}
        self.interruptions: dict[str, Interruption] = {}
        self._bounds = bounds
        self._count = 0
        self._bytes = 0
        self._numbers = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Held]:
        yield from self.without_key.values()
        for key in self.keys.values():
            yield from key.messages.values()

    def is_full(self, share: float = 1.0) -> bool:
        """Return whether this share of the bounds is used."""
        bounds = self._bounds
        return self._count >= share * bounds.max_messages or self._bytes >= share * bounds.max_bytes

    def find(self, message: Held) -> Held | None:
        """Return the message with the same id that is held."""
        if not message.key:
            return self.without_key.get(message.message_id)
        key = self.keys.get(message.key)
        return None if key is None else key.messages.get(message.message_id)

    def arrive(self, message: Held, now: float) -> Decision:
        """Decide about a delivery, and hold the message unless it is refused."""
        held = self.find(message)
        if held is not None:
            held.ack_id = message.ack_id
            return Decision.DUPLICATE
        if not message.key:
            self.without_key[message.message_id] = message
            self._add(message)
            return Decision.DELIVER
        interruption = self.interruptions.get(message.key)
        if interruption is not None:
            if not interruption.ends_with(message):
                interruption.refuse(message)
                return Decision.REFUSE
            del self.interruptions[message.key]
        key = self.keys.get(message.key)
        if key is None:
            self._numbers += 1
            key = self.keys[message.key] = HeldKey(self._numbers, now)
        is_long = bool(key.waiting) or len(key.messages) >= self._bounds.longest_tail
        if is_long and self._is_stuck(key, now) and self.is_full(0.5):
            pause = min(max(0.1, 2 * interruption.pause), _LONGEST_PAUSE) if interruption else 0.0
            self._interrupt(message.key, Interruption(message.message_id, overflow=True, pause=pause))
            return Decision.REFUSE
        key.messages[message.message_id] = message
        self._add(message)
        if is_long or key.releasing:
            key.waiting.append(message)
            return Decision.HOLD
        return Decision.DELIVER

    def next_of(self, key: str) -> list[Held]:
        """Return messages of a key that waited, to be handed on now."""
        found = self.keys.get(key)
        messages = []
        while (
            found is not None
            and not found.releasing
            and found.waiting
            and len(found.messages) - len(found.waiting) < self._bounds.longest_tail
        ):
            messages.append(found.waiting.popleft())
        return messages

    def tails(self, now: float) -> Iterator[list[Held]]:
        """Remove and yield the waiting messages of each key that does not progress, if half of the bounds is used."""
        if not self.is_full(0.5):
            return
        for key in list(self.keys.values()):
            if key.waiting and self._is_stuck(key, now) and not key.releasing:
                tail = list(key.waiting)
                for message in tail:
                    self.remove(message, key.head_since)
                yield tail

    def interrupt(self, message: Held, *, overflow: bool = False) -> Interruption | None:
        """Refuse later messages of the key: ``message`` and all held ones behind it are given back.

        Returns None if an earlier message of the key was given back already.
        """
        current = self.interruptions.get(message.key)
        if current is not None and not current.overflow:
            return None
        return self._interrupt(message.key, Interruption(message.message_id, overflow=overflow))

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
        self._count -= 1
        self._bytes -= message.size
        if not message.key:
            del self.without_key[message.message_id]
            return True
        key = self.keys[message.key]
        del key.messages[message.message_id]
        if message in key.waiting:
            key.waiting.remove(message)
        key.head_since = now
        if not key.messages and not key.releasing:
            del self.keys[message.key]
        return True

    def release(self, name: str, now: float) -> list[Held]:
        """Forget a key, and return its messages."""
        key = self.keys[name]
        messages = list(key.messages.values())
        for message in messages:
            self.remove(message, now)
        self.keys.pop(name, None)
        return messages

    def returnable(self, name: str) -> list[Held]:
        """Return the messages at the front of a key that the engine has given back, and the waiting ones behind them.

        A message behind one that is still being handled stays: if it were nacked now, another consumer might start it
        too early.
        """
        key = self.keys.get(name)
        front: list[Held] = []
        for message in () if key is None else key.messages.values():
            if not message.released and not (front and message.record is None):
                break
            front.append(message)
        return front

    def _is_stuck(self, key: HeldKey, now: float) -> bool:
        return now - key.head_since > self._bounds.stuck_after

    def _add(self, message: Held) -> None:
        self._count += 1
        self._bytes += message.size
