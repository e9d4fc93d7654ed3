"""Range reads of objects in S3, GCS, Azure or HTTP, by obstore.

An object counts as unchanged while its ETag and size are the same. Every read requires this
(If-Match) and verifies the answer. Network failures are retried for a while (see `RetryPolicy`);
then the read fails with an error that names the remedy.

obstore comes with the extra `remote`, and is imported only when a URL is used.
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
from tierstore.model.urls import check_url, redact_secrets

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of retries.

    No attempt starts later than `deadline` seconds after the first. One request, including its
    body, may take `request_seconds`: for a piece of 8 MiB, less than half a MB/s is enough.
    `pauses` are the seconds between attempts; the last one is repeated.
    """

    deadline: float = 60.0
    request_seconds: float = 20.0
    pauses: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)


class _CurrentPolicy:
    """The policy in effect."""

    policy = RetryPolicy()


@contextmanager
def retry_policy(**changes: Any) -> Iterator[None]:
    """Change the retry policy of all threads inside the block: see `RetryPolicy`."""
    before, _CurrentPolicy.policy = (
        _CurrentPolicy.policy,
        replace(_CurrentPolicy.policy, **changes),
    )
    try:
        yield
    finally:
        _CurrentPolicy.policy = before


_URL = re.compile(r"(s3a?|gs|az|adl|azure|abfss?|https?|file|memory)://", re.IGNORECASE)
_HTTP_ONLY = re.compile(r"https?://", re.IGNORECASE)

_OPTION = re.compile(
    "(?:AWS|AZURE|GOOGLE)_(ALLOW_HTTP|ALLOW_INVALID_CERTIFICATES|CONNECT_TIMEOUT|TIMEOUT|PROXY_URL"
    "|PROXY_CA_CERTIFICATE|PROXY_EXCLUDES|POOL_IDLE_TIMEOUT|USER_AGENT)"
)

MAX_OBJECTS = 100_000
"""Maximum objects under the URL of one pipeline."""

_memory: dict[str, Any] = {}
_memory_lock = threading.Lock()


def is_url(path: object) -> TypeGuard[str]:
    """Return whether a path is a URL of an object store.

    >>> is_url("s3://bucket/flux"), is_url("models/flux"), is_url("c://flux")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


@dataclass(frozen=True, slots=True)
class ObjectStamp:
    """Identifies a version of an object.

    `etag` is None if the server sends none; then the modification time identifies the version.
    """

    etag: str | None
    size: int
    modified: str

    @classmethod
    def of(cls, meta: Any) -> ObjectStamp:
        """Return the stamp in obstore's metadata."""
        return cls(meta["e_tag"], meta["size"], meta["last_modified"].isoformat())

    def matches(self, other: ObjectStamp) -> bool:
        """Return whether both stamps identify the same content."""
        if self.etag is None or other.etag is None:
            return self == other
        return (self.etag, self.size) == (other.etag, other.size)

    @property
    def precondition(self) -> str | None:
        """The value for If-Match. None for a weak ETag, which matches nothing."""
        return None if self.etag is None or self.etag.startswith("W/") else self.etag


@dataclass(frozen=True, eq=False)
class RemoteObject:
    """One version of an object. Reads are thread-safe."""

    url: str
    stamp: ObjectStamp
    _store: Any
    _name: str

    def read(self, start: int, stop: int, closed: threading.Event | None = None) -> memoryview:
        """Return the bytes from `start` to `stop`.

        Raises StaleCheckpointError if the object has changed or is gone, TransferError if reading
        fails despite retries, and ClosedError, without another attempt, once `closed` is set.
        """
        return _with_retries(self.url, lambda: self._read_once(start, stop), self._is_gone, closed)

    def _read_once(self, start: int, stop: int) -> memoryview:
        import obstore

        options: Any = {"range": (start, stop)}
        if self.stamp.precondition is not None:
            options["if_match"] = self.stamp.precondition
        answer = obstore.get(self._store, self._name, options=options)
        if not ObjectStamp.of(answer.meta).matches(self.stamp):
            raise _stale(self.url)
        data = _read_body(answer, stop - start)
        if len(data) != stop - start or tuple(answer.range) != (start, stop):
            raise _Transient(f"{len(data):,} bytes arrived instead of {stop - start:,}")
        return data

    def _is_gone(self, error: BaseException) -> NoReturn:
        raise StaleCheckpointError(
            f"{self.url} is gone: it was removed after it was registered; restore it and register "
            "the checkpoint again",
            path=self.url,
        ) from error


def _read_body(answer: Any, nbytes: int) -> memoryview:
    """Return the body of an answer. Raises _Transient once it exceeds `nbytes`."""
    found: list[memoryview] = []
    for part in answer.stream(min_chunk_size=max(nbytes, 1)):
        found.append(memoryview(part))
        if sum(map(len, found)) > nbytes:
            raise _Transient(f"more bytes arrived than the {nbytes:,} requested")
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


class RemoteDirectory:
    """The objects under one URL. Raises TransferError if there is no such store, and UrlError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._store, self._prefix = _store_at(self.url)

    def find(self, name: str) -> RemoteObject | None:
        """Return the current version of an object; None if there is none. Raises TransferError."""
        import obstore

        url, path = f"{self.url}/{name}", self._prefix + name
        meta: Any = _with_retries(url, lambda: obstore.head(self._store, path), lambda _: None)
        return None if meta is None else RemoteObject(url, ObjectStamp.of(meta), self._store, path)

    def names(self) -> list[str] | None:
        """Return the names directly below; None if the server lists none. Raises TransferError."""
        import obstore

        if _HTTP_ONLY.match(self.url) and type(self._store).__name__ == "HTTPStore":
            return None

        def listed() -> list[str]:
            prefix = self._prefix or None
            found = obstore.list_with_delimiter(self._store, prefix=prefix)["objects"]
            return sorted(meta["path"].rpartition("/")[2] for meta in found)

        return _with_retries(self.url, listed, lambda _: [])

    def list_all(self) -> dict[str, ObjectStamp]:
        """Return the stamps of all objects below, by relative name.

        The stamps come from listings: Azure has other ETags there than in its answers. Raises
        TransferError, also if the server lists nothing, or too many objects.
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

        found = _with_retries(self.url, listed, lambda _: [])
        return {meta["path"].removeprefix(self._prefix): ObjectStamp.of(meta) for meta in found}


def split(url: str) -> tuple[str, str]:
    """Return the directory of an object, and its name there.

    Raises UrlError for an invalid URL, and for one that contains a password.
    """
    check_url(url)
    directory, _, name = url.rstrip("/").rpartition("/")
    return directory, unquote(name)


def memory_store(url: str) -> Any:
    """Return the obstore MemoryStore behind `memory://NAME/...`: one per NAME in this process."""
    from obstore.store import MemoryStore

    with _memory_lock:
        return _memory.setdefault(urlsplit(url).netloc, MemoryStore())


def _store_at(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and the prefix of its objects' names there."""
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
    limits = _CurrentPolicy.policy
    options: Any = {"timeout": timedelta(seconds=limits.request_seconds), **_client_options()}
    if url.lower().startswith("http://"):
        options["allow_http"] = True
    retries: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=limits.deadline / 3)}
    try:
        return obstore.store.from_url(url, client_options=options, retry_config=retries), ""
    except Exception as error:  # of many types; the cause is the environment or the URL
        raise TransferError(
            f"{url} cannot be opened ({_first_line(error)}): check the URL, and the environment "
            "variables by which obstore finds the region, the endpoint and the credentials",
            path=url,
        ) from error


def _client_options() -> dict[str, Any]:
    """Return connection options of the environment, such as AWS_ALLOW_HTTP or AZURE_PROXY_URL.

    obstore reads them itself, but not if any of them is passed explicitly.
    """
    found: dict[str, Any] = {}
    for name, value in os.environ.items():
        option = _OPTION.fullmatch(name)
        if option is not None:
            key = option[1].lower()
            found[key] = value.lower() in ("1", "true") if key.startswith("allow") else value
    return found


class _Transient(Exception):
    """A failure that a retry may fix."""


def _with_retries(
    url: str,
    ask: Callable[[], T],
    gone: Callable[[BaseException], T],
    closed: threading.Event | None = None,
) -> T:
    """Return the result of `ask`, retried while that may help, or `gone` if no object exists.

    Raises ClosedError once `closed` is set, and TransferError.
    """
    from obstore import exceptions

    closed = closed or threading.Event()
    began, tries, limits = time.monotonic(), 0, _CurrentPolicy.policy
    while not closed.is_set():
        try:
            return ask()
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            return gone(error)
        except (exceptions.BaseError, _Transient, OSError) as error:
            permanent = _permanent_error(url, error)
            if permanent is not None:
                raise permanent from error
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
    raise ClosedError(f"{url} was not read before the store was closed: open the store again")


def _permanent_error(url: str, error: Exception) -> TransferError | None:
    """Return the error if retrying cannot help, otherwise None."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError):
        return _stale(url)
    denied = exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError
    reason = _first_line(error)
    if isinstance(error, denied):
        text = (
            f"may not be read ({reason}): check the credentials in the environment, and their scope"
        )
    elif "builder error" in str(error):  # the request could not be built
        text = (
            f"cannot be requested ({reason}): check the endpoint in the environment; plain http "
            "needs AWS_ALLOW_HTTP=true (or AZURE_..., GOOGLE_...)"
        )
    elif isinstance(error, exceptions.GenericError | _Transient | OSError):
        return None
    else:
        text = f"could not be read ({reason}): check the URL and the server"
    return TransferError(f"{url} {text}", path=url)


def _stale(url: str) -> StaleCheckpointError:
    return StaleCheckpointError(
        f"{url} was replaced after it was registered: its tensors may be gone; register the "
        "checkpoint again",
        path=url,
    )


def _first_line(error: BaseException) -> str:
    return redact_secrets(str(error).partition("\n")[0]) or type(error).__name__
