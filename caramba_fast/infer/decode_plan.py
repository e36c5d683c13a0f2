"""DecodePlan: the attention limits (window and query chunk) of a read, by the length of the cache.

It picks one of a few `caramba_fast.cache.AttentionLimits`, which every read of a cache honours.
"""

from __future__ import annotations

import sys

from caramba_fast.cache import AttentionLimits
from caramba_fast.infer.policy_fields import DecodePlanFields

#: Query chunks of "auto" where none are set. The score matrix is q_chunk times the cached length, so the chunk shrinks
#: as the cache grows; 256 is the op's default.
DEFAULT_Q_CHUNKS = {"short": 256, "mid": 256, "long": 128}
_SUFFIXES = {"short": "", "mid": "_mid", "long": "_long"}


class DecodePlan:
    """The plan of one run.

    "auto" adds no window by itself, because a window changes results: only buckets with a window set, or models with
    one of their own, have one.
    """

    def __init__(self, settings: DecodePlanFields) -> None:
        self.settings = settings
        #: One object per bucket, so that a recorded step detects a change by identity.
        self._reaches = {name: self._reach(name) for name in self._names()}

    def _names(self) -> tuple[str, ...]:
        plan = self.settings.decode_plan
        return tuple(_SUFFIXES) if plan == "auto" else (plan,)

    def _reach(self, bucket: str) -> AttentionLimits:
        settings = self.settings
        if bucket == "none":
            return AttentionLimits()
        suffix = _SUFFIXES.get(bucket, "")
        q_chunk = getattr(settings, f"decode_q_chunk{suffix}")
        if q_chunk is None:
            q_chunk = DEFAULT_Q_CHUNKS.get(bucket)
        return AttentionLimits(q_chunk, getattr(settings, f"decode_local_window{suffix}"), bucket)

    def bucket(self, length: int) -> str:
        """short, mid or long with "auto", else the plan's name."""
        settings = self.settings
        if settings.decode_plan != "auto":
            return settings.decode_plan
        if length <= settings.decode_bucket_short:
            return "short"
        return "mid" if length <= settings.decode_bucket_mid else "long"

    def plan_for(self, length: int) -> AttentionLimits:
        """The limits of a read of ``length`` tokens, new ones included (in a batch, of the longest row).

        Returns the same object for every length of a bucket. Raises ValueError for a negative length.
        """
        if length < 0:
            raise ValueError(f"length is {length}; 0 or more is allowed")
        return self._reaches[self.bucket(length)]

    def lengths_like(self, length: int) -> range:
        """The lengths around ``length`` for which `plan_for` returns the same."""
        settings = self.settings
        bounds: tuple[int, ...] = ()
        if settings.decode_plan == "auto":
            bounds = (settings.decode_bucket_short, settings.decode_bucket_mid)
        start = max((bound + 1 for bound in bounds if bound < length), default=0)
        stop = min((bound + 1 for bound in bounds if bound >= length), default=sys.maxsize)
        return range(start, stop)

    def describe(self) -> dict[str, object]:
        """The plan as JSON types, for the report of a run."""
        settings = self.settings
        found: dict[str, object] = {"decode_plan": settings.decode_plan}
        if settings.decode_plan == "auto":
            found["decode_bucket_short"] = settings.decode_bucket_short
            found["decode_bucket_mid"] = settings.decode_bucket_mid
        limits = {
            name: {"q_chunk": reach.q_chunk, "local_window": reach.local_window}
            for name, reach in self._reaches.items()
            if name != "none"
        }
        return {**found, "reach": limits} if limits else found

    def __str__(self) -> str:
        if self.settings.decode_plan == "none":
            return "decode_plan none: the layers' defaults"
        parts = []
        for name, reach in self._reaches.items():
            window = "whole cache" if reach.local_window is None else f"window {reach.local_window}"
            chunk = "default" if reach.q_chunk is None else reach.q_chunk
            parts.append(f"{name}: {window}, q_chunk {chunk}")
        return f"decode_plan {self.settings.decode_plan}: " + "; ".join(parts)


def plan_for(settings: DecodePlanFields, length: int) -> AttentionLimits:
    """`DecodePlan.plan_for` for one length."""
    return DecodePlan(settings).plan_for(length)
