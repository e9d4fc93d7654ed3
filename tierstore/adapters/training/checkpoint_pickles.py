"""Pickles of torch, read as descriptions: nothing that a pickle names is imported, made or called.

A pickle is a program, and even one that may name only harmless classes can be a bomb: 87 bytes
nest tuples so that a hash of them takes for ever, inside of C code that no signal ends; a call that
doubles its argument, named thirty times, takes gigabytes. So `described` runs the few instructions
that picklers write, and makes only lists, tuples, texts, numbers, and notes of what would be made.
No value is hashed or compared, nothing is copied, and what may be made is counted. What comes out
is then measured as a tree: whoever walks through it, or makes it for real, takes time and memory in
proportion to the bytes of the file.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

UnpicklingError = pickle.UnpicklingError

MAX_PICKLE_BYTES = 256 << 20
"""The metadata of a million chunks."""

DEPTH = 200
"""Levels of lists in lists: no more than picklers of Python can write."""

FREE = 1 << 16
"""What any pickle may make, however short it is: about 10 MB."""

BYTES_EACH = 4
"""Bytes of a pickle for each object more. Metadata have about 7."""

NODES_EACH = 16
"""How often each byte of a pickle may count where what it made is used again, as in a tree."""


@dataclass(slots=True, eq=False, repr=False)
class Named:
    """Stands for a class or a function, `module.name`."""

    name: str


@dataclass(slots=True, eq=False, repr=False)
class Made:
    """Stands for what a call of `function` with `arguments` would make, and what it is given."""

    function: Any
    arguments: Any
    states: list[Any] = field(default_factory=list)
    members: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Pairs:
    """Stands for a dict: keys and values by turns, as they came, `members`."""

    members: list[Any] = field(default_factory=list)


@dataclass(slots=True, eq=False, repr=False)
class Stored:
    """Stands for what lies beside the pickle: a storage."""

    where: Any


_CONTAINERS = (list, tuple, Made, Pairs, Stored)


def described(raw: bytes, admits: Callable[[str], bool] = lambda name: True) -> Any:
    """The description of a pickle. Only names that it `admits` may occur.

    Raises UnpicklingError for what no pickler writes, for cycles, and for what is too deep or would
    take too much.
    """
    if len(raw) > MAX_PICKLE_BYTES:
        raise UnpicklingError(f"a pickle of {len(raw):,} bytes is too long")
    try:
        found = _Reader(raw, admits).read()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise UnpicklingError(f"it is no pickle: {error!r:.100}") from error
    containers(found, FREE + NODES_EACH * len(raw))
    return found


class _Reader:
    """Runs the instructions of one pickle."""

    def __init__(self, raw: bytes, admits: Callable[[str], bool]) -> None:
        self._raw = raw
        self._at = 0
        self._admits = admits
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._left = FREE + len(raw) // BYTES_EACH

    def read(self) -> Any:
        """Run to the end."""
        while (code := self._byte()) != _STOP:
            action = _ACTIONS.get(code)
            if action is None:
                raise UnpicklingError(f"it has the instruction {code}, which no pickler writes")
            action(self)
        [found] = self._stack if len(self._stack) == 1 else [None]
        if len(self._stack) != 1 or self._marks:
            raise UnpicklingError("it leaves something over")
        return found

    def _take(self, nbytes: int) -> bytes:
        start, self._at = self._at, self._at + nbytes
        if self._at > len(self._raw):
            raise UnpicklingError("it ends in the middle")
        return self._raw[start : self._at]

    def _byte(self) -> int:
        found = self._raw[self._at]
        self._at += 1
        return found

    def _number(self, form: str) -> int:
        [found] = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(found)

    def _make(self, made: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise UnpicklingError("it makes more than its size allows")
        self._stack.append(made)

    def _pop(self) -> Any:
        if self._marks and self._marks[-1] == len(self._stack):
            raise UnpicklingError("a value is missing")
        return self._stack.pop()

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _text(self, nbytes: int) -> None:
        self._make(str(self._take(nbytes), "utf-8", "surrogatepass"))

    def _bytes(self, nbytes: int) -> None:
        self._make(self._take(nbytes))

    def _long(self) -> None:
        self._make(int.from_bytes(self._take(self._byte()), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _tuple_of(self, count: int) -> None:
        self._make(tuple(reversed([self._pop() for _ in range(count)])))

    def _add(self, kinds: tuple[type, ...], members: Iterable[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in kinds:
            raise UnpicklingError("it adds to what has no members")
        (target if type(target) is list else target.members).extend(members)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._add((Pairs, Made), (key, value))

    def _set_items(self) -> None:
        found = self._since_mark()
        if len(found) % 2:
            raise UnpicklingError("a key has no value")
        self._add((Pairs, Made), found)

    def _append(self) -> None:
        member = self._pop()
        self._add((list, Made), (member,))

    def _appends(self) -> None:
        found = self._since_mark()
        self._add((list, Made), found)

    def _remember(self, number: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise UnpicklingError("it remembers more than its size allows")
        self._memo[number] = self._stack[-1]

    def _global(self) -> None:
        end = self._raw.index(b"\n", self._raw.index(b"\n", self._at) + 1)
        module, name = self._take(end + 1 - self._at)[:-1].decode().split("\n")
        self._named(module, name)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise UnpicklingError("a name is no text")
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        found = f"{module}.{name}"
        if not self._admits(found):
            raise UnpicklingError(f"it names {found:.200}")
        self._make(Named(found))

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._make(Made(function, arguments))

    def _build(self) -> None:
        state = self._pop()
        target = self._stack[-1]
        if type(target) is not Made:
            raise UnpicklingError("it gives attributes to what has none")
        target.states.append(state)


_STOP = ord(".")
_ACTIONS: dict[int, Callable[[_Reader], object]] = {
    ord(b"\x80"): lambda r: r._take(1),  # the version
    ord(b"\x95"): lambda r: r._take(8),  # how long a part is: all of it is here
    ord(b"("): lambda r: r._marks.append(len(r._stack)),
    ord(b"N"): lambda r: r._stack.append(None),
    ord(b"\x88"): lambda r: r._stack.append(True),
    ord(b"\x89"): lambda r: r._stack.append(False),
    ord(b"J"): lambda r: r._stack.append(r._number("<i")),
    ord(b"K"): lambda r: r._stack.append(r._byte()),
    ord(b"M"): lambda r: r._stack.append(r._number("<H")),
    ord(b"\x8a"): _Reader._long,
    ord(b"G"): _Reader._float,
    ord(b"X"): lambda r: r._text(r._number("<I")),
    ord(b"\x8c"): lambda r: r._text(r._byte()),
    ord(b"C"): lambda r: r._bytes(r._byte()),
    ord(b"B"): lambda r: r._bytes(r._number("<I")),
    ord(b"U"): lambda r: r._bytes(r._byte()),
    ord(b"]"): lambda r: r._make([]),
    ord(b")"): lambda r: r._stack.append(()),
    ord(b"}"): lambda r: r._make(Pairs()),
    ord(b"\x8f"): lambda r: r._make([]),  # a set
    ord(b"a"): _Reader._append,
    ord(b"e"): _Reader._appends,
    ord(b"\x90"): _Reader._appends,
    ord(b"s"): _Reader._set_item,
    ord(b"u"): _Reader._set_items,
    ord(b"t"): lambda r: r._make(tuple(r._since_mark())),
    ord(b"\x85"): lambda r: r._tuple_of(1),
    ord(b"\x86"): lambda r: r._tuple_of(2),
    ord(b"\x87"): lambda r: r._tuple_of(3),
    ord(b"q"): lambda r: r._remember(r._byte()),
    ord(b"r"): lambda r: r._remember(r._number("<I")),
    ord(b"\x94"): lambda r: r._remember(len(r._memo)),
    ord(b"h"): lambda r: r._stack.append(r._memo[r._byte()]),
    ord(b"j"): lambda r: r._stack.append(r._memo[r._number("<I")]),
    ord(b"c"): _Reader._global,
    ord(b"\x93"): _Reader._stack_global,
    ord(b"R"): _Reader._call,
    ord(b"\x81"): _Reader._call,
    ord(b"b"): _Reader._build,
    ord(b"Q"): lambda r: r._make(Stored(r._pop())),
}


def _parts(node: Any) -> Sequence[Any]:
    kind = type(node)
    if kind is list or kind is tuple:
        return node  # type: ignore[no-any-return]
    if kind is Made:
        return (node.function, node.arguments, *node.states, *node.members)
    if kind is Pairs:
        return node.members  # type: ignore[no-any-return]
    return (node.where,)


def containers(root: Any, most: int) -> list[Any]:
    """Whatever has parts in a description, each once, parts first.

    Raises UnpicklingError for cycles, for more than DEPTH levels, and where a tree of it, in which
    nothing is shared, would have more than `most` nodes.
    """
    nodes: dict[int, int] = {}
    depths: dict[int, int] = {}
    found: list[Any] = []
    under_way: set[int] = set()  # a node, the one that it is a part of, and so on
    pending = [root] if type(root) in _CONTAINERS else []
    while pending:
        node = pending[-1]
        if id(node) in nodes:
            pending.pop()
            continue
        parts = _parts(node)
        inner = [part for part in parts if type(part) in _CONTAINERS]
        if id(node) not in under_way:
            under_way.add(id(node))
            unknown = [part for part in inner if id(part) not in nodes]
            if len(under_way) > DEPTH or not under_way.isdisjoint(map(id, unknown)):
                raise UnpicklingError(f"it is more than {DEPTH} levels deep")
            pending += unknown
            if unknown:
                continue
        depths[id(node)] = 1 + max((depths[id(part)] for part in inner), default=0)
        nodes[id(node)] = 1 + len(parts) + sum(nodes[id(part)] for part in inner)
        if depths[id(node)] > DEPTH or nodes[id(node)] > most:
            raise UnpicklingError("as a tree, it has more nodes or levels than its size allows")
        found.append(node)
        under_way.discard(id(node))
        pending.pop()
    return found
