"""The operator's files: strict YAML in, values out, and every problem with its line and column."""

from console.sources.files.problems import FileError, FileProblem
from console.sources.files.profiles import (
    ProfileSet,
    load_profile,
    load_profiles,
    parse_profile,
    shipped_profiles_directory,
)
from console.sources.files.sites import find_site, load_site, parse_site, site_candidates
from console.sources.files.template import site_template

__all__ = [
    "FileError",
    "FileProblem",
    "ProfileSet",
    "find_site",
    "load_profile",
    "load_profiles",
    "load_site",
    "parse_profile",
    "parse_site",
    "shipped_profiles_directory",
    "site_candidates",
    "site_template",
]
