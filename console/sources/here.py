"""Which site this console looks after, and with which profiles: from files, else from what is here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from console.model.actions import ACTIONS
from console.model.site import Site
from console.sources.files import ProfileSet, find_site, load_profiles, load_site, shipped_profiles_directory


class Here(NamedTuple):
    """The site, the file it is from (None: it was found by looking), and what to tell of that."""

    site: Site
    path: Path | None = None
    notices: tuple[str, ...] = ()


def site_from_file(explicit: Path | None, environ: Mapping[str, str]) -> Here | None:
    """The site of the file in use; None when there is no file. Raises FileError."""
    path = find_site(explicit, environ)
    return None if path is None else Here(load_site(path, [action.id for action in ACTIONS]), path)


async def site_from_host() -> Here:
    """The site as this host looks."""
    from console.sources.discovery import discover
    from console.transport.local import LocalRunner

    found = await discover(LocalRunner())
    advice = f"no site file; gpuops config init writes one. Found here: {found.words}"
    return Here(found.site, None, (advice,))


def profiles_of(site: Site, instead: Path | None) -> ProfileSet:
    """The operator's own first, so that they win a name, then the shipped ones.

    ``instead`` is a directory that takes the place of the site's own. Never raises.
    """
    own = instead or (Path(site.profiles) if site.profiles is not None else None)
    shipped = shipped_profiles_directory()
    return load_profiles([shipped] if own is None else [own, shipped])
