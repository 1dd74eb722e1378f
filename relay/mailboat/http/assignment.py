"""An assignment of partitions to relays: the body of ``PUT /assignment``.

    {"generation": 7, "subscriptions": {"shop/orders-to-kafka": {"0": "relay-a", "1": "relay-b"}}}

Generations increase. A relay refuses a generation older than its current one, so that a delayed request can't revert a
newer assignment.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Final

from pydantic import ValidationError

from mailboat.errors import ConfigError
from mailboat_spec.assignment import AssignmentRequest
from mailboat_spec.wire_format import unpack

LARGEST: Final = 1024 * 1024
"""Maximum bytes of a body: enough for 20,000 partitions, or 100,000 compressed."""

Assign = Callable[[str, int, dict[int, str]], Awaitable[bool]]
"""Apply the assignment of one subscription: name, generation, owners by partition. Returns False if a newer generation
is in use. Raises ``LookupError`` for a subscription that this relay does not serve."""


def parse(content: bytes, source: str) -> AssignmentRequest:
    """Parse an assignment, compressed or not. Raises ``ConfigError`` that names the source and the field."""
    try:
        document = json.loads(unpack(content))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not JSON: {error}.") from error
    try:
        return AssignmentRequest.model_validate(document)
    except ValidationError as error:
        problems = [
            f"{source}: {'.'.join(str(step) for step in problem['loc']) or 'the document'}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)[:10]
        ]
        example = '{"generation": 1, "subscriptions": {"namespace/name": {"0": "relay-id"}}}'
        raise ConfigError("\n".join([*problems, f"An assignment looks like {example}."])) from error


async def apply_assignment(assignment: AssignmentRequest, assign: Assign) -> dict[str, list[str]]:
    """Apply the assignment of every subscription and return their names by outcome.

    A refused one does not affect the others.
    """
    outcome: dict[str, list[str]] = {"accepted": [], "stale": [], "unknown": []}
    for name, owners in assignment.subscriptions.items():
        try:
            accepted = await assign(name, assignment.generation, dict(owners))
        except LookupError:
            outcome["unknown"].append(name)
        else:
            outcome["accepted" if accepted else "stale"].append(name)
    return outcome
