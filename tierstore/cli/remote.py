"""The commands `ls` and `verify` for checkpoints in object stores, reading only headers."""

from __future__ import annotations

import time

from tierstore.cli.output import Code, Column, Document, Failure, data, draw, print_json, remark
from tierstore.errors import CorruptDataError, TierStoreError
from tierstore.model.formatting import count, size
from tierstore.tiers.object_store import is_url as is_url

_FILES = (
    Column("FILE", lambda row: row["name"], flexible=True),
    Column("TENSORS", lambda row: f"{row['tensors']:,}", right=True),
    Column("DTYPES", lambda row: ",".join(row["dtypes"])),
    Column("SIZE", lambda row: size(row["nbytes"]), right=True),
    Column("ETAG", lambda row: row["etag"] or "(none)"),
)


def list_files(url: str, *, as_json: bool) -> None:
    """List the files of a checkpoint."""
    try:
        rows = _rows(url)
    except CorruptDataError as error:
        raise _failure(url, error) from error
    nbytes = sum(row["nbytes"] for row in rows)
    if as_json:
        print_json({"url": url, "nbytes": nbytes, "files": rows})
        return
    draw(_FILES, rows)
    tensors = count(sum(row["tensors"] for row in rows), "tensor")
    data(f"{count(len(rows), 'file')}, {tensors}, {size(nbytes)}")


def verify_files(url: str, *, as_json: bool) -> int:
    """Check the header of each file, and its length."""
    began = time.monotonic()
    problem: Document | None = None
    rows: list[Document] = []
    try:
        rows = _rows(url)
    except CorruptDataError as error:
        problem = {"path": error.path, "reason": str(error)}
    if as_json:
        seconds = round(time.monotonic() - began, 3)
        print_json({"url": url, "seconds": seconds, "files": rows, "problem": problem})
    elif problem is not None:
        data(f"damaged: {problem['path']}\n  reason    {problem['reason']}")
    else:
        data(f"{count(len(rows), 'file')}: no damage found")
        remark("Checked headers and sizes only: checkpoints have no checksums.")
    return Code.OK if problem is None else Code.DAMAGED


def _failure(url: str, error: Exception) -> Failure:
    return Failure(f"{url} cannot be read: {error}", "Give the URL of a checkpoint.")


def _rows(url: str) -> list[Document]:
    """Read the headers. Raises CorruptDataError, or Failure."""
    from tierstore.engine.checkpoints import read_checkpoint

    try:
        files = read_checkpoint(url)
    except CorruptDataError:
        raise
    except (TierStoreError, ValueError) as error:
        raise _failure(url, error) from error
    return [
        {
            "name": file.path.rpartition("/")[2],
            "url": file.path,
            "tensors": len(file.tensors),
            "dtypes": sorted({tensor.dtype for tensor in file.tensors}),
            "nbytes": file.stamp.size,
            "etag": file.remote and file.remote.stamp.etag,
        }
        for file in files
    ]
