"""SharedPages: pages with reference counts, whose content is kept for prefix caching.

A page is held (by as many sequences as its reference count says), kept (by none, but with known content that the next
sequence with the same tokens reuses), or free.

A page is looked up by a hash of its tokens, of all before them and of their scope, a chain as in vLLM's prefix caching
(arXiv:2309.06180). Scope and tokens are then compared, so a hash collision cannot match.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from caramba_fast.cache import OutOfPagesError, PageAllocator


@dataclass(frozen=True, eq=False)
class Content:
    """Content of a full page.

    Attributes:
        key: hash it is looked up by.
        scope: who may find it.
        parent: content of the page before; None for the first.
        tokens: its tokens.
    """

    key: bytes
    scope: str
    parent: Content | None
    tokens: array[int]

    def is_same(self, other: Content) -> bool:
        """Whether scope, tokens and all tokens before them are equal, whatever the keys."""
        mine: Content | None = self
        theirs: Content | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.scope != theirs.scope:
                return False
            if mine.tokens != theirs.tokens:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


class SharedPages(PageAllocator):
    """A pool of pages with reference counts; unless ``keeps`` is False, pages are found by their content."""

    def __init__(self, num_pages: int, page_size: int, keeps: bool = True) -> None:
        super().__init__(num_pages)
        self.page_size, self.keeps = page_size, keeps
        #: Key -> page, and page -> content.
        self._known: dict[bytes, int] = {}
        self._content: dict[int, Content] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        #: How often all content was forgotten.
        self.epoch = 0

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and kept ones, whose content is then forgotten."""
        return self.free + len(self._kept)

    @property
    def kept(self) -> int:
        """Pages that no sequence holds and whose content is known."""
        return len(self._kept)

    @property
    def held(self) -> int:
        """Pages that a sequence holds."""
        return len(self.references) - self.available

    def take(self) -> int:
        """Takes a page, if none is free the one kept longest; raises OutOfPagesError if every page is held."""
        if not self.free and self._kept:
            page, _ = self._kept.popitem(last=False)
            self.forget(page)
            self._free.append(page)
        return super().take()

    def take_many(self, count: int) -> list[int]:
        """Takes ``count`` pages; raises OutOfPagesError, and changes nothing, if fewer are available."""
        if count > self.available:
            raise OutOfPagesError(
                f"{count} pages are needed and {self.available} of {len(self.references)} are available"
            )
        return [self.take() for _ in range(count)]

    def release(self, page: int) -> None:
        """Drops one reference; a page without any is kept if its content is known, else free."""
        self._check_held(page, "released")
        self.references[page] -= 1
        if self.references[page]:
            return
        if page in self._content:
            self._kept[page] = None
        else:
            self._free.append(page)

    def release_all(self, pages: Iterable[int]) -> None:
        """Releases the last pages first: they are the least likely to be reused, and so are evicted first."""
        for page in reversed(list(pages)):
            self.release(page)

    def is_fixed(self, page: int) -> bool:
        """Whether the page must not be written to: it is shared, or its content is known."""
        return self.references[page] > 1 or page in self._content

    def learn(self, page: int, content: Content) -> Content:
        """Records the content of a full, held page; returns that content, or an equal one already known."""
        other = self._known.get(content.key)
        if other is not None and self._content[other].is_same(content):
            return self._content[other]
        if self.keeps and other is None and page not in self._content:
            self._known[content.key] = page
            self._content[page] = content
        return content

    def forget(self, page: int) -> None:
        """Forgets the content of a page, which is about to change."""
        content = self._content.pop(page, None)
        if content is not None:
            del self._known[content.key]

    def scope_of(self, scope: str, epoch: int | None = None) -> str:
        """Name of a scope in an epoch, by default the current one; a new epoch begins when all is forgotten."""
        return f"{self.epoch if epoch is None else epoch} {scope}"

    def forget_scope(self, scope: str) -> None:
        """Frees the kept pages of a scope that no request will use again."""
        scope = self.scope_of(scope)
        for page in [page for page in self._kept if self._content[page].scope == scope]:
            del self._kept[page]
            self.forget(page)
            self._free.append(page)

    def find(self, wanted: Sequence[Content]) -> list[int]:
        """The pages, held or kept, with the first of these contents; they are not taken yet."""
        found: list[int] = []
        before: Content | None = None  # content of the page before
        for content in wanted:
            page = self._known.get(content.key)
            if page is None:
                break
            known = self._content[page]
            follows = known.parent is before and known.scope == content.scope
            if not (follows and known.tokens == content.tokens) and not known.is_same(content):
                break
            before = known
            found.append(page)
        return found

    def content(self, page: int) -> Content | None:
        """The known content of a page, or None."""
        return self._content.get(page)

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page; kept pages are held again."""
        for page in pages:
            if self.references[page]:
                self.references[page] += 1
            else:
                del self._kept[page]
                self.references[page] = 1

    def forget_all(self) -> None:
        """Forgets all content and frees kept pages.

        Pages that running sequences fill later belong to the old epoch, which is no longer looked up.
        """
        self.epoch += 1
        self._known.clear()
        self._content.clear()
        self._free.extend(self._kept)
        self._kept.clear()

    def rebuild(self, tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Recomputes references and states after an interrupt, from the pages of all sequences.

        ``tables`` has the pages of each sequence, and how many of the first are full and known. The content of the
        others is forgotten, since they will be written again.
        """
        counted, unknown = [0] * len(self.references), set[int]()
        for pages, known in tables:
            unknown.update(pages[known:])
            for page in pages:
                counted[page] += 1
        content = {page: what for page, what in self._content.items() if page not in unknown}
        idle = [page for page in (*self._kept, *content) if page in content and not counted[page]]
        self.references, self._content = counted, content
        self._known = {what.key: page for page, what in content.items()}
        self._kept = OrderedDict.fromkeys(idle)
        self._free = [p for p, count in enumerate(counted) if not count and p not in content]

    def problems(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """Contradictions to the pages of all sequences; for tests, and after a fault."""
        counted = [0] * len(self.references)
        for table in tables:
            for page in table:
                counted[page] += 1
        found = [
            f"page {page} is in {count} tables and has {kept} references"
            for page, (count, kept) in enumerate(zip(counted, self.references, strict=True))
            if count != kept
        ]
        free, kept = set(self._free), set(self._kept)
        if len(free) != len(self._free) or free & kept:
            found.append("a page is free twice")
        idle = {page for page, count in enumerate(self.references) if not count}
        if idle != free | kept:
            found.append(f"pages {sorted(idle ^ (free | kept))} are lost or both held and free")
        if any(page not in self._content for page in kept):
            found.append("a page is kept whose content is not known")
        if {what.key: page for page, what in self._content.items()} != self._known:
            found.append("keys and contents of pages differ")
        return found


class KeptSinks:
    """Where a pool keeps the attention sinks of first pages, least recently used first."""

    def __init__(self, places: Sequence[int], pages: SharedPages) -> None:
        self._all, self._free, self._pages = places, list(places), pages
        self._places: OrderedDict[Content, int] = OrderedDict()

    def __contains__(self, content: Content) -> bool:
        return content in self._places

    def find(self, content: Content | None) -> int | None:
        """Where the sinks of a page are; None if they are not kept."""
        if content is None or content not in self._places:
            return None
        self._places.move_to_end(content)
        return self._places[content]

    def have_room(self) -> bool:
        """Whether a place is free, after freeing those of pages whose content was forgotten."""
        gone = [] if self._free else [x for x in self._places if not self._pages.find([x])]
        self._free += [self._places.pop(content) for content in gone]
        return bool(self._free)

    def keep(self, content: Content, write: Callable[[int], None]) -> int:
        """Writes the sinks of a page to a place, evicting the least recently used if none is free; returns it."""
        if not self.have_room():
            self._free.append(self._places.popitem(False)[1])
        place = self._free[-1]
        write(place)
        self._places[content] = self._free.pop()
        return place

    def rebuild(self) -> None:
        """Recomputes the free places after an interrupt."""
        kept = set(self._places.values())
        self._free = [place for place in self._all if place not in kept]


def content_of(scope: str, parent: Content | None, tokens: array[int]) -> Content:
    """Content of a page with ``tokens`` after the page ``parent``."""
    before = scope.encode(errors="surrogatepass") if parent is None else parent.key
    return Content(key_of(before + tokens.tobytes()), scope, parent, tokens)


def key_of(what: bytes) -> bytes:
    """A 16-byte hash."""
    return blake2b(what, digest_size=16).digest()
