"""``python e2e [all]``: build the programs and images of the stories and print the duration of each build.

With ``all``, also build the images that the upgrade story starts from. Parts in the cache are not built again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.kubernetes_programs import kubernetes_program
from previous_release import earlier_version
from provider import pick_provider


def main() -> int:
    try:
        provider = pick_provider()
        print(f"cluster: {provider.name}")
        for program in provider.programs:
            _timed(program, partial(kubernetes_program, program))
        for image in provider.images:
            _timed(f"image {image}", partial(provider.image, image))
        earlier = earlier_version() if "all" in sys.argv[1:] else None
        if earlier is not None:
            _timed("images to upgrade from", partial(provider.earlier_images, earlier))
    except PartMissing as missing:
        print(f"missing: {missing}")
        return 1
    return 0


def _timed(name: str, make: Callable[[], object]) -> None:
    print(f"{name:24}", end="", flush=True)
    began = time.monotonic()
    make()
    took = time.monotonic() - began
    print("ready" if took < 1 else f"ready (made in {took:.0f} s)")


if __name__ == "__main__":
    sys.exit(main())
