"""What is looked at in the unit before it may be replaced: whose it is, and what else decides over it."""

from __future__ import annotations

from console.model.finding import Finding
from console.model.managed_unit import UnitText, dropped, parse
from console.model.profile import Profile, holds_secret
from console.model.text import clean
from console.sources.unit_file import UnitFiles
from console.store.adopted import ownership
from console.store.state import State, StateProblem


def owner_finding(files: UnitFiles, state: State) -> Finding:
    """Only a unit that gpuops wrote, or was given with this very text, may be overwritten."""
    id, title = "unit", "Unit"
    remedy = f"gpuops profile adopt {files.unit}"
    if files.load_state == "masked":
        return Finding(
            id, title, "fail", f"{files.unit} is masked", f"systemctl unmask {files.unit}, when that is meant"
        )
    try:
        whose = ownership(files.text, state, files.unit)
    except StateProblem as problem:
        return Finding(id, title, "fail", str(problem))
    match whose:
        case "missing":
            return Finding(id, title, "pass", f"there is no {files.unit} yet: it will be made")
        case "foreign":
            evidence = f"{files.fragment} was not written by gpuops, and it was not given it"
            return Finding(id, title, "fail", evidence, remedy)
        case "managed-edited":
            evidence = f"{files.fragment} was changed by hand since gpuops wrote it"
            return Finding(id, title, "fail", evidence, f"{remedy}, which keeps the change as a profile")
    known = f"{files.fragment} was {'written by gpuops' if whose == 'managed' else 'given to gpuops'}"
    if files.need_daemon_reload:
        return Finding(
            id,
            title,
            "warn",
            f"{known}; its files changed since systemd read them: the way back starts what is on the disk",
            "systemctl daemon-reload",
        )
    return Finding(id, title, "pass", known)


def drop_in_findings(files: UnitFiles, profile: Profile | None) -> list[Finding]:
    """Drop-ins come over the unit: one that sets the command makes a new unit file useless."""
    id, title = "drop-ins", "Drop-ins"
    if not files.drop_ins:
        return []
    found: list[Finding] = []
    for path, text in files.drop_ins:
        unit = parse(text)
        if unit.values("Service", "ExecStart"):
            found.append(
                Finding(
                    id,
                    title,
                    "fail",
                    f"{path} sets ExecStart=, which comes over the unit's",
                    f"remove it from {path}",
                )
            )
            continue
        wanted = {} if profile is None else profile.env
        other = [f"{name}={unit.environment[name]}" for name in wanted if name in unit.environment]
        differing = [name for name in wanted if unit.environment.get(name, wanted[name]) != wanted[name]]
        if differing:
            said = clean(f"{path} sets {', '.join(other)} over the profile's env")
            found.append(Finding(id, title, "fail", said, "set each variable in one of the two places only"))
        else:
            keys = ", ".join(dict.fromkeys(one.key for one in unit.settings)) or "nothing"
            found.append(Finding(id, title, "pass", f"{path} sets {keys} besides"))
    return found


def secret_finding(files: UnitFiles) -> Finding | None:
    """A plan is kept on the disk with the unit's text in it, so that text may hold no key or password."""
    unit = files.own
    names = [name for name in unit.environment if holds_secret(name)]
    names += [
        f"--{flag}"
        for word in unit.argv
        if word.startswith("--") and holds_secret(flag := word[2:].partition("=")[0])
    ]
    if not names:
        return None
    return Finding(
        "secret",
        "Secrets in the unit",
        "fail",
        f"{files.fragment} holds {', '.join(map(clean, names))}, which a plan would copy",
        "move it to a file that only root can read, named by EnvironmentFile= in the unit",
    )


def render_findings(text: str, profile: Profile, python: str, before: UnitText) -> list[Finding]:
    """The unit as it would be written, read back as systemd will read it, is the profile again."""
    id, title = "render", "New unit"
    unit = parse(text)
    wanted = (python, "-m", "sglang.launch_server", *profile.argv())
    if unit.argv != wanted:
        return [Finding(id, title, "fail", "the command that would be written reads back as another one")]
    if any(unit.environment.get(name) != value for name, value in profile.env.items()):
        return [Finding(id, title, "fail", "the environment that would be written reads back as another one")]
    lost = dropped(before)
    if lost:
        return [
            Finding(
                id,
                title,
                "warn",
                f"it reads back as the profile; not kept of the unit before: {', '.join(lost)}",
                "put what must stay into a drop-in",
            )
        ]
    return [Finding(id, title, "pass", "it reads back as the profile")]
