"""Writes that are on the disk when they return, and files of ours read back with their schema checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from console.store.state import StateProblem

#: A file of ours that is larger, in bytes, is not read: none grows so large.
LARGEST = 64 * 1024 * 1024

Value = TypeVar("Value")


class _Schema(msgspec.Struct):
    schema: int


def sync_directory(path: Path) -> None:
    """Put names in a directory on the disk: files made in it, moved into it, or removed (fsync(2))."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_new(path: Path, content: bytes) -> None:
    """A new file, readable by its owner only, on the disk. FileExistsError when it is there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def read_whole(path: Path) -> bytes:
    """The file's bytes. StateProblem, with the path, when they cannot be had or are too many."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as problem:
        raise StateProblem(f"{path}: {problem.strerror}") from None
    if len(content) > LARGEST:
        raise StateProblem(f"{path}: larger than {LARGEST} bytes; this is no file of gpuops")
    return content


def decode(content: bytes, kind: type[Value], path: Path, schema: int) -> Value:
    """A JSON document of ours. StateProblem in words when it is of a newer gpuops, or not ours at all."""
    check_schema(content, path, schema)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise StateProblem(f"{path}: not as gpuops writes it: {problem}") from None


def check_schema(content: bytes, path: Path, schema: int) -> None:
    """StateProblem unless the document says that it has this schema."""
    try:
        found = msgspec.json.decode(content, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise StateProblem(
            f'{path}: expected a JSON object with "schema": {schema}, as gpuops writes it'
        ) from None
    if found > schema:
        raise StateProblem(
            f"{path}: schema {found} is of a newer gpuops; this one knows {schema}: use the newer one"
        )
    if found != schema:
        raise StateProblem(f"{path}: expected schema {schema}, found {found}")
