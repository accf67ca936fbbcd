"""A census as a folder: pages that open offline, small data beside them, and the whole state to load and merge."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import FileError
from ...memory.partial_folder import partial_folder
from ...report.census_pages import write_comparison, write_pages
from .counted_heads import CountedHeads
from .difference import CensusDifference
from .state import write_state
from .view import comparison_view, overview_view

__all__ = ["STATE_FILE", "check_free", "save", "save_comparison"]

STATE_FILE = "state.npz"


def save(census: CountedHeads, folder: Path) -> Path:
    """Write the folder beside its place, and rename it when it is complete."""
    check_free(folder, "save")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(folder.absolute()) as place:
            write_pages(place.path, *overview_view(census))
            write_state(census.state, place, STATE_FILE)
            os.rename(place.path, folder)
    except OSError as error:
        raise FileError(
            f"save: {str(folder)!r} cannot be written: {error.strerror or error}. Give a new folder in a place that "
            f"you may write to."
        ) from error
    return folder


def save_comparison(difference: CensusDifference, folder: Path) -> Path:
    """Write the page of a comparison of two censuses, completely or not at all."""
    check_free(folder, "save")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with partial_folder(folder.absolute()) as place:
            write_comparison(place.path, comparison_view(difference))
            os.rename(place.path, folder)
    except OSError as error:
        raise FileError(
            f"save: {str(folder)!r} cannot be written: {error.strerror or error}. Give a new folder."
        ) from error
    return folder


def check_free(folder: Path, who: str) -> None:
    """Refuse a place that has something already."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        what = "a census" if (folder / STATE_FILE).exists() else "something else"
        raise FileError(f"{who}: {str(folder)!r} already holds {what}. Give a new folder, or remove this one.")
