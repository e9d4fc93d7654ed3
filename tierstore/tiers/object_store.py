"""Objects in an object store: S3, GCS, Azure, HTTP, read in ranges, by obstore.

An object is what it was as long as its ETag and its size are. Every read asks for that (If-Match),
and looks whether the answer says so. What a network does is repaired for a
while (see `Patience`). After that, the read fails, with an error that says what to do.

Nothing here is imported from obstore before a URL is used: it comes with the extra `remote`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn, TypeGuard, TypeVar
from urllib.parse import unquote, urlsplit

from tierstore.errors import ClosedError, StaleCheckpointError, TransferError
from tierstore.model.urls import check_url, without_secrets

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """For how long a read is tried.

    After `deadline` seconds none is tried again. One request may take `request_seconds`, its body
    included: a piece has 8 MiB, so half a MB/s will do. `pauses` are the seconds between one try
    and the next; the last one is repeated.
    """

    deadline: float = 60.0
    request_seconds: float = 20.0
    pauses: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)


class _PatienceNow:
    """The patience that counts now."""

    patience = Patience()


@contextmanager
def patience(**changes: Any) -> Iterator[None]:
    """Inside, reads of all threads are tried with another patience: see `Patience`."""
    before, _PatienceNow.patience = _PatienceNow.patience, replace(_PatienceNow.patience, **changes)
    try:
        yield
    finally:
        _PatienceNow.patience = before


_URL = re.compile(r"(s3a?|gs|az|adl|azure|abfss?|https?|file|memory)://", re.IGNORECASE)
_HTTP_ONLY = re.compile(r"https?://", re.IGNORECASE)

_OPTION = re.compile(
    "(?:AWS|AZURE|GOOGLE)_(ALLOW_HTTP|ALLOW_INVALID_CERTIFICATES|CONNECT_TIMEOUT|TIMEOUT|PROXY_URL"
    "|PROXY_CA_CERTIFICATE|PROXY_EXCLUDES|POOL_IDLE_TIMEOUT|USER_AGENT)"
)

MAX_OBJECTS = 100_000
"""What may lie under the URL of one pipeline."""

_memory: dict[str, Any] = {}
_memory_lock = threading.Lock()


def is_url(path: object) -> TypeGuard[str]:
    """Whether it is a URL of an object store, not the name of a file.

    >>> is_url("s3://bucket/flux"), is_url("models/flux"), is_url("c://flux")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


@dataclass(frozen=True, slots=True)
class ObjectStamp:
    """What tells an object from a changed one. `etag` is None where a server tells none: then the
    time of its last change has to do."""

    etag: str | None
    size: int
    modified: str

    @classmethod
    def of(cls, meta: Any) -> ObjectStamp:
        """The stamp in what obstore says of an object."""
        return cls(meta["e_tag"], meta["size"], meta["last_modified"].isoformat())

    def is_as(self, other: ObjectStamp) -> bool:
        """Whether both are of the same content."""
        if self.etag is None or other.etag is None:
            return self == other
        return (self.etag, self.size) == (other.etag, other.size)

    @property
    def precondition(self) -> str | None:
        """What If-Match may be asked with: a weak ETag matches nothing."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag


@dataclass(frozen=True, eq=False)
class RemoteObject:
    """One object, as it was when it was found. Any number of threads may read it."""

    url: str
    stamp: ObjectStamp
    _store: Any
    _name: str

    def read(self, start: int, stop: int, closed: threading.Event | None = None) -> memoryview:
        """The bytes from `start` to `stop`.

        Raises StaleCheckpointError if it is not what it was, or is gone; TransferError if they
        cannot be had, however often one asks; ClosedError, asking no more, once it is `closed`.
        """
        return _patiently(self.url, lambda: self._read_once(start, stop), self._is_gone, closed)

    def _read_once(self, start: int, stop: int) -> memoryview:
        import obstore

        options: Any = {"range": (start, stop)}
        if self.stamp.precondition is not None:
            options["if_match"] = self.stamp.precondition
        answer = obstore.get(self._store, self._name, options=options)
        if not ObjectStamp.of(answer.meta).is_as(self.stamp):
            raise _stale(self.url)
        data = _all_of(answer, stop - start)
        if len(data) != stop - start or tuple(answer.range) != (start, stop):
            raise _Transient(f"{len(data):,} bytes came instead of {stop - start:,}")
        return data

    def _is_gone(self, error: BaseException) -> NoReturn:
        raise StaleCheckpointError(
            f"{self.url} is gone: it was removed after it was registered; put it back and register "
            "the checkpoint again",
            path=self.url,
        ) from error


def _all_of(answer: Any, nbytes: int) -> memoryview:
    """The body of an answer, which should have so many bytes: one that goes on is not kept."""
    found: list[memoryview] = []
    for part in answer.stream(min_chunk_size=max(nbytes, 1)):
        found.append(memoryview(part))
        if sum(map(len, found)) > nbytes:
            raise _Transient(f"more bytes came than the {nbytes:,} that were asked for")
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


class RemoteDirectory:
    """What lies under one URL. Raises TransferError where there is no such store, and UrlError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store, self._prefix = _store_at(self.url)

    def find(self, name: str) -> RemoteObject | None:
        """The object of this name as it is now; None if there is none. Raises TransferError."""
        import obstore

        url, path = f"{self.url}/{name}", self._prefix + name
        meta: Any = _patiently(url, lambda: obstore.head(self._store, path), lambda _: None)
        return None if meta is None else RemoteObject(url, ObjectStamp.of(meta), self._store, path)

    def names(self) -> list[str] | None:
        """The objects right under it; None where a server lists nothing. Raises TransferError."""
        import obstore

        if _HTTP_ONLY.match(self.url) and type(self._store).__name__ == "HTTPStore":
            return None

        def listed() -> list[str]:
            prefix = self._prefix or None
            found = obstore.list_with_delimiter(self._store, prefix=prefix)["objects"]
            return sorted(meta["path"].rpartition("/")[2] for meta in found)

        return _patiently(self.url, listed, lambda _: [])

    def everything(self) -> dict[str, ObjectStamp]:
        """What lies under it now, by names from here on. Its stamps are those of lists: Azure has
        other ETags there than in its answers.

        Raises TransferError, also where a server lists nothing, or lists without end.
        """
        import obstore

        if _HTTP_ONLY.match(self.url) and type(self._store).__name__ == "HTTPStore":
            raise TransferError(
                f"{self.url} cannot be listed, as it is on a web server: download it, or copy it "
                "to S3, GCS or Azure",
                path=self.url,
            )

        def listed() -> list[Any]:
            found: list[Any] = []
            for part in obstore.list(self._store, prefix=self._prefix or None):
                found += part
                if len(found) > MAX_OBJECTS:
                    raise TransferError(
                        f"{self.url} has more than {MAX_OBJECTS:,} objects: pass the URL of one "
                        "pipeline or model",
                        path=self.url,
                    )
            return found

        found = _patiently(self.url, listed, lambda _: [])
        return {meta["path"].removeprefix(self._prefix): ObjectStamp.of(meta) for meta in found}


def split(url: str) -> tuple[str, str]:
    """The directory of an object, and its name there. Raises UrlError for what is no such URL, and
    for one with a password in it."""
    check_url(url)
    directory, _, name = url.rstrip("/").rpartition("/")
    return directory, unquote(name)


def memory_store(url: str) -> Any:
    """The obstore MemoryStore behind `memory://NAME/...`: one for each NAME in this process."""
    from obstore.store import MemoryStore

    with _memory_lock:
        return _memory.setdefault(urlsplit(url).netloc, MemoryStore())


def _store_at(url: str) -> tuple[Any, str]:
    """The store of what is under a URL, and what the names of its objects begin with there."""
    check_url(url)
    try:
        import obstore.store
    except ImportError as error:
        raise TransferError(
            f"{url} is read with obstore, which is not installed: pip install 'tierstore[remote]'",
            path=url,
        ) from error
    if url.lower().startswith("memory://"):
        prefix = urlsplit(url).path.strip("/")
        return memory_store(url), f"{prefix}/" if prefix else ""
    if url.lower().startswith("file://"):
        return obstore.store.from_url(url), ""
    limits = _PatienceNow.patience
    options: Any = {"timeout": timedelta(seconds=limits.request_seconds), **_client_options()}
    if url.lower().startswith("http://"):
        options["allow_http"] = True
    retries: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=limits.deadline / 3)}
    try:
        return obstore.store.from_url(url, client_options=options, retry_config=retries), ""
    except Exception as error:  # of many kinds: what is wrong is in the environment, or in the URL
        raise TransferError(
            f"{url} cannot be opened ({_first_line(error)}): check the URL, and the environment "
            "variables by which obstore finds the region, the endpoint and the credentials",
            path=url,
        ) from error


def _client_options() -> dict[str, Any]:
    """What the environment says of connections, such as AWS_ALLOW_HTTP or AZURE_PROXY_URL. obstore
    reads it, but not where it is given any of it in another way."""
    found: dict[str, Any] = {}
    for name, value in os.environ.items():
        option = _OPTION.fullmatch(name)
        if option is not None:
            key = option[1].lower()
            found[key] = value.lower() in ("1", "true") if key.startswith("allow") else value
    return found


class _Transient(Exception):
    """An answer that may be a better one the next time."""


def _patiently(
    url: str,
    ask: Callable[[], T],
    gone: Callable[[BaseException], T],
    closed: threading.Event | None = None,
) -> T:
    """What `ask` gives, asked again as long as that may help; `gone` if there is no such object.

    Raises ClosedError once it is `closed`, and TransferError.
    """
    from obstore import exceptions

    closed = closed or threading.Event()
    began, tries, limits = time.monotonic(), 0, _PatienceNow.patience
    while not closed.is_set():
        try:
            return ask()
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            return gone(error)
        except (exceptions.BaseError, _Transient, OSError) as error:
            lasting = _lasting(url, error)
            if lasting is not None:
                raise lasting from error
            pause = limits.pauses[min(tries, len(limits.pauses) - 1)]
            tries += 1
            if time.monotonic() + pause > began + limits.deadline:
                raise TransferError(
                    f"{url} could not be read, tried {tries} times in "
                    f"{time.monotonic() - began:.0f} s ({_first_line(error)}): check the network "
                    "and the server, then try again",
                    path=url,
                ) from error
            closed.wait(pause)
    raise ClosedError(f"{url} was still to be read when the store was closed: open it again")


def _lasting(url: str, error: Exception) -> TransferError | None:
    """What to raise where to ask again is of no use."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError):
        return _stale(url)
    denied = exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError
    why = _first_line(error)
    if isinstance(error, denied):
        text = f"may not be read ({why}): check the credentials in the environment, and their scope"
    elif "builder error" in str(error):  # no request was made, and none will be
        text = (
            f"cannot be asked for ({why}): check the endpoint in the environment; plain http needs "
            "AWS_ALLOW_HTTP=true (or AZURE_..., GOOGLE_...)"
        )
    elif isinstance(error, exceptions.GenericError | _Transient | OSError):
        return None
    else:
        text = f"could not be read ({why}): check the URL and the server"
    return TransferError(f"{url} {text}", path=url)


def _stale(url: str) -> StaleCheckpointError:
    return StaleCheckpointError(
        f"{url} was replaced after it was registered: the tensors that were promised may be gone; "
        "register the checkpoint again",
        path=url,
    )


def _first_line(error: BaseException) -> str:
    return without_secrets(str(error).partition("\n")[0]) or type(error).__name__
