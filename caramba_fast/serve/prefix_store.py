"""PrefixStore: full pages of prompts in a folder, found again by their tokens after a restart.

Each page is a file with the stored bytes (and the sinks of a first page), its tokens, a hash of those before it, its
scope, and the model and storage it belongs to, under a checksum. It is looked up by a hash of all tokens up to its
end, and used only if all of these are equal. Damaged files are deleted and logged. Files are replaced atomically, so a
killed process leaves none half written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from caramba_fast.cache import PageBytes, PagePool
from caramba_fast.cache.sealed import SealedFileError, read_sealed, sealed
from caramba_fast.models.identity import model_digest
from caramba_fast.serve.block_pool import Content, SharedPages
from caramba_fast.serve.config import EngineConfig
from caramba_fast.serve.request import PagedSequence, is_salted
from caramba_fast.writing import replacing

LOG = logging.getLogger("caramba_fast.serve")
#: Pages of versions 1 and 2, which had all tokens up to their end, are not found: they go as others do that are unused.
WHAT, VERSION = "page of a prefix", 3
_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{40}\.page")
#: Bytes of pages that may wait to be written; pages beyond that are not kept.
WAITING = 256 * 2**20


class StoredPage(NamedTuple):
    """A page that was read and verified.

    Attributes:
        page: as `PagePool.write` takes it.
        sinks: as `PagePool.write_sinks` takes them; empty except for a first page.
    """

    page: PageBytes
    sinks: PageBytes


class PrefixStore:
    """The prefix store of one engine.

    Args:
        folder: created for its owner alone if missing; one process at a time may use it.
        most: bytes of all pages; the least recently used are deleted.
        model, pool: the model, and the pool that pages are copied from and to.

    Raises:
        ValueError: another process uses the folder.
        OSError: it cannot be created or read.
        TypeError: the model has no digest.
    """

    def __init__(self, folder: Path, most: int, model: Any, pool: PagePool) -> None:
        self.folder, self.most, self.model, self.pool = folder, most, model, pool
        self._epoch = -1
        self.identify()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = FileLock(folder / ".lock", timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"prefix_store is {folder}, which another process uses; give each a folder of its own"
            ) from None
        #: Sizes by name, least recently used first.
        self._files = self._found()
        self._writing: set[str] = set()
        self._changing = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "caramba-fast-prefixes")
        with self._changing:
            self._make_room(0)

    def identify(self, epoch: int = 0) -> None:
        """Computes the model's digest, once per epoch of `SharedPages`; pages of other models are not found."""
        if self._epoch == epoch:
            return
        streams = self.pool.layers[0].streams.items()
        self._about: dict[str, Any] = {
            "model": model_digest(self.model),
            "layout": [repr(shape) for shape in self.model.cache_layout],
            "storage": {name: stream.config.model_dump(mode="json") for name, stream in streams},
            "page_size": self.pool.page_size,
        }
        self._mark = blake2b(repr((VERSION, self._about)).encode(), digest_size=8).hexdigest()
        self._epoch = epoch  # at last: an interrupted call is repeated

    def _found(self) -> OrderedDict[str, int]:
        """The stored pages; partial files of killed writers are removed."""
        known = []
        for entry in os.scandir(self.folder):
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                seen = entry.stat(follow_symlinks=False)
                known.append((seen.st_mtime_ns, entry.name, seen.st_size))
            elif entry.name.endswith(".part") and _NAME.match(entry.name[1:]):
                Path(entry.path).unlink()
        return OrderedDict((name, size) for _, name, size in sorted(known))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, those of other models included."""
        with self._changing:
            return sum(self._files.values())

    def describe(self) -> str:
        """What is stored, as text."""
        with self._changing:
            mine = sum(name.startswith(self._mark) for name in self._files)
            others = len(self._files) - mine
        unused = f", and {others} of other models or storage, which are not used" if others else ""
        return f"prefix store {self.folder}: {mine} pages{unused}; {self.nbytes:,} of {self.most:,} bytes"

    def find(self, scope: str, tokens: array[int], start: int) -> Iterator[StoredPage]:
        """Yields the full pages of ``tokens`` from page ``start`` on, up to the first that is missing."""
        size = self.pool.page_size
        names = self._names(scope, tokens, len(tokens) // size)
        for place, name in islice(enumerate(names), start, None):
            with self._changing:
                known = name in self._files
            page = None
            if known:
                wanted = self._about_page(scope, names, place)
                page = self._read(name, wanted, tokens[place * size : (place + 1) * size])
            if page is None:
                self._drop_missing(names[place + 1 :])
                return
            yield page

    def _drop_missing(self, names: Sequence[str]) -> None:
        """Forgets pages whose files were deleted, so that all of them are written again."""
        with self._changing:
            known = [name for name in names if name in self._files]
        for name in known:
            if not (self.folder / name).exists():
                self._drop(name)

    def _names(self, scope: str, tokens: array[int], count: int) -> list[str]:
        """File names of the first full pages of tokens."""
        size, found = self.pool.page_size, []
        key = blake2b(f"{self._mark} {_scope(scope)}".encode(), digest_size=20)
        for place in range(count):
            key.update(tokens[place * size : (place + 1) * size].tobytes())
            found.append(f"{self._mark}-{key.hexdigest()}.page")
        return found

    def _about_page(self, scope: str, names: Sequence[str], place: int) -> dict[str, Any]:
        """What a page is of; a page's name stands for all tokens up to its end."""
        return {
            "of": self._about, "scope": _scope(scope), "before": names[place - 1] if place else "",
        }  # fmt: skip

    def _read(self, name: str, wanted: dict[str, Any], tokens: array[int]) -> StoredPage | None:
        """A page; if it is damaged or not the wanted one, it is deleted."""
        path = self.folder / name
        try:
            about, tensors = read_sealed(path, WHAT, VERSION)
            page = self._checked(about, tensors, wanted, tokens)
        except FileNotFoundError:  # it was evicted or deleted, and may be written again
            self._drop(name)
            return None
        except SealedFileError as error:
            LOG.warning("a page of the prefix store is dropped: %s: %s", path, error)
            self._drop(name)
            return None
        except OSError as error:  # too many open files, say: the page may be sound
            LOG.warning("a page of the prefix store is not read: %s: %s", path, error)
            return None
        self._use([name])
        return page

    def _checked(
        self,
        about: dict[str, Any],
        tensors: dict[str, Tensor],
        wanted: dict[str, Any],
        tokens: array[int],
    ) -> StoredPage:
        """The page in a file; raises SealedFileError if its model, storage, scope or tokens differ."""
        if about.get("of") != wanted["of"]:
            raise SealedFileError("it is of another model or another storage of the cache")
        if about.get("scope") != wanted["scope"]:
            raise SealedFileError("it is of another scope: whoever asks may not share it")
        held = tensors.pop("tokens", None)
        same = held is not None and held.dtype == torch.int32 and held.tolist() == tokens.tolist()
        if not same or about.get("before") != wanted["before"]:
            raise SealedFileError("it is of other tokens")
        first = not wanted["before"]
        shapes = [(x.shape[1:], x.dtype) for x in self.pool.page_buffers]
        sinks = [(x.shape[1:], x.dtype) for x in self.pool.sinks] if first else []
        parts = [tensors.pop(f"page.{i}", None) for i in range(len(shapes))]
        sides = [tensors.pop(f"sinks.{i}", None) for i in range(len(sinks))]
        there = [x for x in (*parts, *sides) if x is not None]
        if tensors or [(x.shape, x.dtype) for x in there] != [*shapes, *sinks]:
            raise SealedFileError("it does not have the tensors of a page")
        return StoredPage([x[None] for x in parts if x is not None], [x for x in sides if x is not None])  # fmt: skip

    def put(self, scope: str, tokens: array[int], pages: Sequence[int], ring: int) -> None:
        """Stores the first full pages of a sequence; they are copied now and written in a thread.

        Args:
            scope: who may find them.
            tokens: the sequence's.
            pages: its first pages, all full.
            ring: the place of its ring and sinks in the pool.
        """
        names, missing = self._names(scope, tokens, len(pages)), list[int]()
        try:
            with self._changing:
                there = self._files.keys() | self._writing
                missing = [place for place, name in enumerate(names) if name not in there]
                room = max(0, WAITING // self.pool.page_bytes - len(self._writing))
                if len(missing) > room:  # the first are of use alone; others follow next time
                    LOG.info(
                        "%d pages are not kept yet: there is too much to write", len(missing) - room
                    )
                    missing = missing[:room]
                self._writing.update(names[place] for place in missing)
            content = self.pool.read([pages[place] for place in missing]) if missing else []
            sinks = self.pool.read_sinks(ring) if missing[:1] == [0] else []
            abouts = [self._about_page(scope, names, place) for place in missing]
            self._writer.submit(self._put, names, abouts, tokens[:], missing, content, sinks)
        except BaseException:
            with self._changing:
                self._writing.difference_update(names[place] for place in missing)
            raise

    def _put(
        self,
        names: list[str],
        abouts: Sequence[dict[str, Any]],
        tokens: array[int],
        missing: list[int],
        content: PageBytes,
        sinks: PageBytes,
    ) -> None:
        """Writes pages, the last first, so that the beginning of a prompt is evicted last."""
        for index, place in reversed(list(enumerate(missing))):
            tensors = {f"page.{i}": part[index] for i, part in enumerate(content)}
            if place == 0:
                tensors |= {f"sinks.{i}": part for i, part in enumerate(sinks)}
            held = tokens[place * self.pool.page_size : (place + 1) * self.pool.page_size]
            try:
                tensors["tokens"] = torch.tensor(held, dtype=torch.int32, device="cpu")
                self._write(names[place], sealed(WHAT, VERSION, abouts[index], tensors))
            except Exception as error:  # a full disk or memory; the others may still fit
                LOG.warning("a page is not kept in the prefix store: %s", error)
            finally:
                with self._changing:
                    self._writing.discard(names[place])
        self._use(names)

    def _write(self, name: str, data: bytearray) -> None:
        with self._changing:
            if not self._make_room(len(data)):
                LOG.warning("a page of %d bytes is larger than the prefix store may be", len(data))
                return
        # `_found` has removed what killed writers left, and the folder may be of others.
        with replacing(self.folder / name, sweep=False, private=True) as stream:
            stream.write(data)
        with self._changing:
            self._files[name] = len(data)

    def _make_room(self, size: int) -> bool:
        """Deletes the least recently used pages until ``size`` bytes fit. False, and deletes none, if they never do."""
        if size > self.most:
            return False
        total = sum(self._files.values()) + size
        while total > self.most and self._files:
            name, gone = self._files.popitem(last=False)
            (self.folder / name).unlink(missing_ok=True)
            total -= gone
        return True

    def _use(self, names: Sequence[str]) -> None:
        """Marks pages as used now, the first as the latest."""
        for name in reversed(names):
            with self._changing:
                if name not in self._files:
                    continue
                self._files.move_to_end(name)
            with contextlib.suppress(OSError):
                os.utime(self.folder / name)

    def _drop(self, name: str) -> None:
        with self._changing:
            self._files.pop(name, None)
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()

    def close(self) -> None:
        """Waits until all pages are written, and unlocks the folder."""
        self._writer.shutdown()
        self._lock.release()


def store_for(model: Any, pool: PagePool, settings: EngineConfig) -> PrefixStore | None:
    """The store of the settings, or None; errors as in `PrefixStore`."""
    if settings.prefix_store is None:
        return None
    return PrefixStore(settings.prefix_store, settings.prefix_store_bytes, model, pool)


def bring_back(
    store: PrefixStore,
    pages: SharedPages,
    sequence: PagedSequence,
    contents: Sequence[Content],
    keep_sinks: Callable[[Content, Callable[[int], None]], int],
) -> int | None:
    """Loads pages with the next tokens of a sequence from disk.

    Args:
        pages: allocates the pages and records their content.
        sequence: has the pages found in memory; those loaded are added.
        contents: content of its full pages.
        keep_sinks: finds a place for the sinks of a first page and has them written there.

    Returns:
        where its sinks are kept, if its first page came from disk.
    """
    scope, start, sinks = sequence.request.scope, len(sequence.pages), None
    needed = len(sequence) // pages.page_size + 1 - start
    if not is_salted(scope) or needed > pages.available:
        return None
    store.identify(pages.epoch)
    found = store.find(scope, sequence.tokens, start)
    for content, stored in zip(contents[start:], found, strict=False):
        page = pages.take()
        try:
            store.pool.write([page], stored.page)
        except Exception:
            pages.release(page)
            raise
        known = pages.learn(page, content)
        sequence.pages.append(page)
        if stored.sinks:
            sinks = keep_sinks(known, partial(store.pool.write_sinks, content=stored.sinks))
    return sinks


def put_away(store: PrefixStore, pages: SharedPages, sequence: PagedSequence) -> None:
    """Stores the full pages of an ended sequence, if others may find them."""
    full = len(sequence.keys)
    current = sequence.epoch == pages.epoch and sequence.finish_reason != "error"
    if full and current and is_salted(sequence.request.scope):
        try:
            store.identify(pages.epoch)
            store.put(sequence.request.scope, sequence.tokens, sequence.pages[:full], sequence.ring)
        except Exception as error:  # the answer is complete anyway
            LOG.warning("pages are not kept in the prefix store: %s", error)


def _scope(scope: str) -> str:
    """Hash of a scope, which may contain an API key."""
    return blake2b(scope.encode(errors="surrogatepass"), digest_size=32).hexdigest()
