"""Small YAML texts that expand to more than the memory."""

from __future__ import annotations


def alias_bomb(levels: int, first: str = "x: 1") -> str:
    """Return a YAML mapping with levels of merged aliases, each with nine references to the level before."""
    lines = [first, "a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}")
    return "\n".join(lines) + "\n"
