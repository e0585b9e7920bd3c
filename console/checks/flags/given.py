"""A profile as the rules on several flags look at it: by canonical names, with its version and its cards."""

from __future__ import annotations

import functools

import msgspec
from packaging.version import Version

from console.checks.flags.hardware import Hardware
from console.checks.flags.judged import Judged
from console.checks.flags.table import FlagTable
from console.model.finding import Verdict
from console.model.profile import FlagValue, Profile


class Given(msgspec.Struct, frozen=True, dict=True):
    """A profile's flags by their canonical names, and what they are judged against."""

    profile: Profile
    table: FlagTable
    version: Version
    hardware: Hardware | None

    @functools.cached_property
    def args(self) -> dict[str, FlagValue]:
        return {self._canonical(name): value for name, value in self.profile.args.items()}

    @functools.cached_property
    def written(self) -> dict[str, str]:
        """The names as the profile has them, by canonical name."""
        return {self._canonical(name): name for name in self.profile.args}

    def _canonical(self, name: str) -> str:
        flag = self.table.find(name)
        return name if flag is None else flag.name

    def text(self, name: str) -> str | None:
        value = self.args.get(name)
        return value if isinstance(value, str) else None

    def number(self, name: str) -> int | None:
        """A whole number; None when it is not there, or is none (argparse's rules have told that)."""
        try:
            return int(self.text(name) or "")
        except ValueError:
            return None

    def on(self, name: str) -> bool:
        return self.args.get(name) is True

    def before(self, version: str) -> bool:
        return self.version < Version(version)

    @functools.cached_property
    def algorithm(self) -> str | None:
        """The speculative algorithm, in capitals as the engine compares it."""
        name = self.text("speculative-algorithm")
        return None if name is None else name.upper()

    @functools.cached_property
    def model(self) -> str:
        """Where the model is and what it is called, in small letters."""
        names = (self.text("model-path"), self.text("served-model-name"))
        return " ".join(filter(None, names)).lower()

    def judged(
        self, slug: str, name: str, verdict: Verdict, evidence: str, remedy: str, title: str | None = None
    ) -> Judged:
        return Judged(
            id=f"together.{slug}",
            title=title or f"--{name}",
            verdict=verdict,
            evidence=evidence,
            remedy=remedy,
            name=self.written.get(name),
        )
