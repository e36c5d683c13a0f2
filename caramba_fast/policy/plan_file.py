"""PlanFile: a JSON file of many plans, safe to share between processes.

Writers hold a lock and replace the file atomically, so readers need none. A damaged file, or one of another version, is
renamed with a warning and rebuilt. A file that never was one is refused, and stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from caramba_fast.config.files import explain, parse_json, read_at_most, shown
from caramba_fast.policy.plan import SCHEMA_VERSION, CachePlan, PlanKey
from caramba_fast.writing import check_regular, replacing

#: Largest file that is read, in bytes; enough for thousands of plans.
LARGEST = 64 * 2**20


class PlanFileError(RuntimeError):
    """The plan file cannot be used; the message says why and what to do."""


class PlanFile:
    """Plans, stored under the digest of their key.

    Args:
        path: the file; its folder is created if only that one level is missing.
        timeout: seconds to wait for another process that is choosing; negative waits forever.
    """

    def __init__(self, path: str | Path, timeout: float = -1) -> None:
        self.path, self.timeout = Path(path), timeout
        target = os.path.realpath(self.path) if self.path.is_symlink() else self.path
        self._lock = FileLock(f"{target}.lock", timeout=timeout)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the file's lock, which is reentrant within a process.

        Raises PlanFileError if the folder is missing or cannot be written to, or another process holds the lock for
        longer than ``timeout``.
        """
        try:
            self.path.parent.mkdir(exist_ok=True)
            Path(self._lock.lock_file).touch()  # the lock waits for a folder that cannot have it
            self._lock.acquire()
        except Timeout as error:
            raise PlanFileError(
                f"cache_plan_path={self.path}: another process has held its lock for {self.timeout:g} s"
            ) from error
        except OSError as error:
            raise PlanFileError(_cannot("write", self.path, error)) from error
        try:
            yield
        finally:
            self._lock.release()

    def get(self, key: PlanKey) -> CachePlan | None:
        """The plan of a key, or None; for a key without text, the newest plan that differs only in its text.

        A damaged file is renamed to ``<name>.damaged-<n>``, with a warning.
        """
        plans = self._read()
        if plans is None:
            with self.locked():
                plans = self._read_or_set_aside()
        found = plans.get(key.digest)
        if found is not None and found.key == key:
            return found
        others = [plan for plan in plans.values() if plan.key.serves(key)]
        return max(others, key=lambda plan: plan.made_at, default=None)

    def put(self, plan: CachePlan) -> None:
        """Adds a plan, replacing any with the same key; raises PlanFileError if the file cannot be written."""
        with self.locked():
            plans = self._read_or_set_aside()
            plans[plan.key.digest] = plan
            self._replace(plans)

    def _read(self) -> dict[str, CachePlan] | None:
        """All plans: {} without a file, None if the file is damaged."""
        try:
            return self._parse()
        except ValueError:
            return None

    def _read_or_set_aside(self) -> dict[str, CachePlan]:
        """All plans; renames a damaged file, with a warning. The lock must be held."""
        try:
            return self._parse()
        except ValueError as error:
            aside = self._set_aside()
            warnings.warn(
                f"{self.path} cannot be used ({error}); it was moved to {aside.name} and is made anew",
                stacklevel=4,
            )
            return {}

    def _parse(self) -> dict[str, CachePlan]:
        try:
            check_regular(self.path)
            text = read_at_most(self.path, LARGEST)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise PlanFileError(_cannot("read", self.path, error)) from error
        except ValueError:
            raise PlanFileError(_foreign(self.path)) from None
        if text[8:9] == b"{" and int.from_bytes(text[:8], "little") < len(text):
            raise PlanFileError(_foreign(self.path))  # safetensors: a model's weights
        try:
            found = parse_json(text, finite=True)
        except ValueError:
            if not _may_have_been_plans(text):
                raise PlanFileError(_foreign(self.path)) from None
            raise
        foreign = not isinstance(found, (dict, list))
        if isinstance(found, dict) and found:
            foreign = not found.keys() & {"plans", "schema_version"}
        if foreign:
            raise PlanFileError(_foreign(self.path))
        if not isinstance(found, dict) or not isinstance(found.get("plans"), dict):
            raise ValueError("it is JSON, but no file of plans")
        if found.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"its schema_version is {shown(found.get('schema_version'))}; {SCHEMA_VERSION} is known"
            )
        try:
            return {key: CachePlan.model_validate(plan) for key, plan in found["plans"].items()}
        except ValidationError as error:
            raise ValueError(f"a plan in it is damaged: {explain(error)[:200]}") from error

    def _set_aside(self) -> Path:
        """Renames the file to the first free ``<name>.damaged-<n>`` in its folder; of a symlink, its target."""
        damaged, number = Path(os.path.realpath(self.path)), 1
        while (aside := damaged.with_name(f"{damaged.name}.damaged-{number}")).exists():
            number += 1
        try:
            damaged.replace(aside)
        except OSError as error:
            raise PlanFileError(_cannot("rename", self.path, error)) from error
        return aside

    def _replace(self, plans: dict[str, CachePlan]) -> None:
        content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "plans": {key: plan.model_dump(mode="json") for key, plan in sorted(plans.items())},
        }
        text = json.dumps(content, indent=1, allow_nan=False)
        try:
            with replacing(self.path) as stream:
                stream.write(f"{text}\n".encode())
        except OSError as error:
            raise PlanFileError(_cannot("write", self.path, error)) from error


def _may_have_been_plans(text: bytes) -> bool:
    """Whether a file that is no JSON may be damaged plans: cut off, zeroed by a crash, or saved as UTF-16."""
    rest = text.lstrip()
    return not rest or rest.startswith((b"{", b"\0", BOM_UTF8, BOM_UTF16_LE, BOM_UTF16_BE))


def _foreign(path: Path) -> str:
    return f"cache_plan_path={path} is another file, no file of plans, and stays as it is; give another name"


def _cannot(do: str, path: Path, error: OSError) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return (
        f"cache_plan_path={path}: cannot {do} it ({cause.strerror or cause}); give a file in a folder that "
        "exists and can be written to, or None"
    )
