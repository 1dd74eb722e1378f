"""Texts that are small and, read without care, larger than any memory."""

from __future__ import annotations


def alias_bomb(levels: int, first: str = "x: 1") -> str:
    """A YAML mapping of so many levels, each of which has the one before nine times: by aliases that are merged."""
    lines = [first, "a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}")
    return "\n".join(lines) + "\n"
