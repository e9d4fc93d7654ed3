"""What `ls` and `verify` say of a checkpoint in an object store: its headers, read by ranges."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tierstore.cli import words
from tierstore.cli.output import Code, Column, Document, Failure, data, draw, print_json, remark
from tierstore.model.errors import CorruptDataError, TierStoreError
from tierstore.tiers.object_store import is_url as is_url

if TYPE_CHECKING:  # for who gives a URL only
    from tierstore.engine.checkpoint_file import CheckpointFile

_FILES = (
    Column("FILE", lambda row: row["name"], flexible=True),
    Column("TENSORS", lambda row: f"{row['tensors']:,}", right=True),
    Column("DTYPES", lambda row: ",".join(row["dtypes"])),
    Column("SIZE", lambda row: words.size(row["nbytes"]), right=True),
    Column("ETAG", lambda row: row["etag"] or "(none)"),
)


def list_files(url: str, *, as_json: bool) -> None:
    """The files of a checkpoint."""
    rows = [_row(file) for file in _files(url)]
    nbytes = sum(row["nbytes"] for row in rows)
    if as_json:
        print_json({"url": url, "nbytes": nbytes, "files": rows})
        return
    draw(_FILES, rows)
    tensors = words.count(sum(row["tensors"] for row in rows), "tensor")
    data(f"{words.count(len(rows), 'file')}, {tensors}, {words.size(nbytes)}")


def verify_files(url: str, *, as_json: bool) -> int:
    """See whether each file's header is whole, and says as many bytes as there are."""
    began = time.monotonic()
    problem: Document | None = None
    rows: list[Document] = []
    try:
        rows = [_row(file) for file in _read(url)]
    except CorruptDataError as error:
        problem = {"path": error.path, "reason": str(error)}
    except (TierStoreError, ValueError) as error:
        raise _failure(url, error) from error
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        print_json({"url": url, "seconds": seconds, "files": rows, "problem": problem})
    elif problem is not None:
        data(f"damaged: {problem['path']}\n  reason    {problem['reason']}")
    else:
        data(f"{words.count(len(rows), 'file')}: no damage found")
        remark("Headers and sizes only: a checkpoint has no checksums of its tensors.")
    return Code.OK if problem is None else Code.DAMAGED


def _files(url: str) -> list[CheckpointFile]:
    try:
        return _read(url)
    except (TierStoreError, ValueError) as error:
        raise _failure(url, error) from error


def _read(url: str) -> list[CheckpointFile]:
    from tierstore.engine.checkpoints import read_checkpoint

    return read_checkpoint(url)


def _failure(url: str, error: Exception) -> Failure:
    return Failure(f"{url} cannot be looked at: {error}", "Give the URL of a checkpoint.")


def _row(file: CheckpointFile) -> Document:
    assert file.remote is not None
    return {
        "name": file.path.rpartition("/")[2],
        "url": file.path,
        "tensors": len(file.tensors),
        "dtypes": sorted({tensor.dtype for tensor in file.tensors}),
        "nbytes": file.stamp.size,
        "etag": file.remote.stamp.etag,
    }
