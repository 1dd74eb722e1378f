"""How long one generated example takes says nothing on a machine that runs other tests at the same time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
