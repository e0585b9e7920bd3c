"""The memory budget: of the service that runs, or of a profile that does not."""

from __future__ import annotations

import msgspec

from console.checks.budget_evidence import Evidence, look
from console.checks.budget_findings import (
    arithmetic_finding,
    cards_finding,
    context_finding,
    geometry_findings,
    host_cache_finding,
    others_finding,
    plan_findings,
)
from console.model.budget import Budget, host_words, kv_words
from console.model.card_memory import CardMemory, RankMemory, divide, rank_key
from console.model.finding import Finding, Verdict
from console.model.host_cache import HostCache, host_cache, shrinks
from console.model.kv import KvGeometry, Range, bytes_per_token, cache_dtype, exactly
from console.model.kv_arguments import KvArguments, read_arguments
from console.model.kv_plan import CardRoom, Weights, plan, spread
from console.model.profile import Profile
from console.model.site import Site
from console.model.snapshot import Snapshot
from console.model.text import clean
from console.sources.connect import Sources, connect
from console.sources.model_files import ModelFiles

#: Half of the last digit that the engine logs, bytes.
_ROUNDED = 1024**3 // 200


async def examine(sources: Sources, snapshot: Snapshot, profile: Profile | None = None) -> Budget:
    """The budget of ``profile``; of the running service where None. Changes nothing, never raises."""
    return judge(await look(sources, snapshot, profile))


async def read_budget(site: Site, snapshot: Snapshot, profile: Profile | None = None) -> Budget:
    """``examine`` through runners and a client of its own."""
    sources = connect(site)
    try:
        return await examine(sources, snapshot, profile)
    finally:
        await sources.client.close()


# Judgement -------------------------------------------------------------------------------------


def judge(evidence: Evidence) -> Budget:
    """The budget from what was read. Pure."""
    if evidence.profile is None and evidence.running:
        budget = _of_running(evidence)
    elif (profile := evidence.profile or evidence.snapshot.profile) is not None:
        budget = _of_profile(evidence, profile)
    else:
        finding = Finding(
            "service",
            "Running service",
            "unknown",
            "no service runs, and no profile is named",
            "name a profile: gpuops profile list shows them",
        )
        budget = Budget(subject="nothing", wall=evidence.snapshot.wall, findings=(finding,))
        return msgspec.structs.replace(budget, answer=finding.evidence)
    answer = f"{kv_words(budget)}; {host_words(budget)}"
    return msgspec.structs.replace(budget, answer=answer)


def _of_running(evidence: Evidence) -> Budget:
    """The service as it is: the engine's own figures first, the load's log where it is more exact."""
    snapshot, report = evidence.snapshot, evidence.report
    arguments, problems = read_arguments(report.arguments if report is not None else _flags(evidence))
    ranks = _merged(evidence)
    cards = _cards(evidence, ranks, arguments, running=True)
    told = ranks.get(rank_key(None)) or next(iter(ranks.values()), None)
    version = report.version if report is not None else None
    findings = [cards_finding(cards), others_finding(cards), *_argument_findings(problems)]
    if report is None:
        why = evidence.problems.get("report", "not asked")
        findings.append(
            Finding(
                "engine-report",
                "Engine's own figures",
                "unknown",
                f"/server_info: {why}" + ("; figures are from the load's log" if ranks else ""),
                "while it loads the figures come with the log; the whole report comes once it is ready",
            )
        )
    if "log" in evidence.problems and arguments.drafts:
        text = f"{evidence.problems['log']}: the draft's share and each rank's own figures are not known"
        findings.append(Finding("load-log", "Log of the load", "unknown", text))
    geometry = evidence.files.geometry
    cell = dtype = None
    if geometry is None:
        findings.append(_model_finding(evidence.files, fails=False))
    else:
        dtype, cell, problem = _cell(geometry, arguments, told)
        findings += [problem, *geometry_findings(geometry)]
        if cell is not None and told is not None:
            findings.append(arithmetic_finding(told, cell, arguments.page_size))
    tokens = None if told is None or told.tokens is None else exactly(told.tokens)
    kv = None if told is None or told.kv is None else exactly(told.kv)
    if tokens is not None and cell is not None:
        kv = exactly(tokens.low * cell)  # without the rounding of the report
    context = _context(snapshot, arguments, geometry)
    if tokens is None:
        findings.append(Finding("context", "Context, concurrency", "unknown", "no cache is allocated yet"))
    else:
        findings.append(context_finding(tokens, context, _most_running(evidence, arguments)))
    cache = _running_host_cache(ranks, arguments, cell, tokens, version)
    memory = None if evidence.host is None else msgspec.structs.replace(evidence.host, returned=0)
    if cache is not None:
        findings.append(host_cache_finding(cache, memory, version=version, running=True))
    profile = snapshot.profile
    return Budget(
        subject="running",
        wall=snapshot.wall,
        name=profile.name if profile is not None else None,
        model_path=None if arguments.model_path is None else clean(arguments.model_path),
        version=version,
        cards=cards,
        geometry=geometry,
        dtype=dtype,
        token_bytes=None if cell is None else exactly(cell),
        tokens=tokens,
        kv=kv,
        context_length=context,
        max_running_requests=_most_running(evidence, arguments),
        host_cache=cache,
        host_memory=memory,
        findings=tuple(finding for finding in findings if finding is not None),
    )


def _of_profile(evidence: Evidence, profile: Profile) -> Budget:
    """A profile as it would be on these cards, once what runs now has stopped."""
    snapshot = evidence.snapshot
    arguments, problems = read_arguments(profile.args)
    version = evidence.report.version if evidence.report is not None else None
    if version is None and snapshot.identity is not None:
        version = snapshot.identity.version
    cards = _cards(evidence, _merged(evidence), _now(evidence), running=evidence.running)
    findings = [*_argument_findings(problems)]
    geometry = evidence.files.geometry
    budget = Budget(
        subject="profile",
        wall=snapshot.wall,
        name=profile.name,
        model_path=arguments.model_path,
        version=version,
        cards=cards,
        geometry=geometry,
        context_length=arguments.context_length
        or (geometry.context_length if geometry is not None else None),
        max_running_requests=arguments.max_running_requests
        or (48 if arguments.speculative_algorithm else None),
        host_memory=evidence.host,
    )
    if geometry is None:
        findings.append(_model_finding(evidence.files, fails=True))
        return msgspec.structs.replace(budget, findings=tuple(findings))
    findings += geometry_findings(geometry)
    dtype, cell, problem = _cell(geometry, arguments, None)
    if cell is None:
        return msgspec.structs.replace(budget, findings=(*findings, *filter(None, (problem,))))
    budget = msgspec.structs.replace(budget, dtype=dtype, token_bytes=exactly(cell))
    room = _smallest(cards)
    weights = _weights(evidence, arguments)
    if room is None or weights is None:
        missing = "the cards' memory is not known" if room is None else evidence.files.weights_source
        remedy = "gpuops doctor tells what is missing" if room is None else "see the model's folder"
        findings.append(Finding("weights", "Room for caches", "unknown", missing, remedy))
        return msgspec.structs.replace(budget, findings=tuple(findings))
    draft = evidence.draft
    found = plan(
        geometry,
        arguments,
        room,
        weights,
        version=version,
        draft=None if draft is None else draft.geometry,
        draft_weights=_draft_weights(evidence, arguments),
        free=_free(evidence, arguments, room),
    )
    findings += plan_findings(found, arguments)
    if draft is not None and draft.geometry is None:
        findings.append(_model_finding(draft, fails=True, what="draft"))
    findings.append(context_finding(found.tokens, budget.context_length, budget.max_running_requests))
    cache = host_cache(
        arguments,
        found.target_cell,
        found.tokens,
        version=version,
        draft_cell=max(found.draft_cell, found.draft_own_cell or 0),
        state=0 if found.state is None else found.state.high,
    )
    if cache is not None:
        shrinking = shrinks(arguments, version)
        findings.append(host_cache_finding(cache, evidence.host, version=version, shrinks=shrinking))
    return msgspec.structs.replace(
        budget,
        plan=found,
        token_bytes=found.cell,
        tokens=found.tokens,
        kv=found.kv,
        host_cache=cache,
        findings=tuple(findings),
    )


# Parts -----------------------------------------------------------------------------------------


def _flags(evidence: Evidence) -> dict[str, object]:
    """Those of the profile that loads, while the engine itself does not answer."""
    profile = evidence.snapshot.profile
    return {} if profile is None else dict(profile.args)


def _now(evidence: Evidence) -> KvArguments:
    """The arguments of what runs now."""
    report = evidence.report
    return read_arguments(report.arguments if report is not None else _flags(evidence))[0]


def _merged(evidence: Evidence) -> dict[str, RankMemory]:
    """By rank: the log's figures, and for each replica's first rank the report's where it has them."""
    ranks = dict(evidence.ranks)
    for name, told in (evidence.report.memory if evidence.report is not None else {}).items():
        logged = ranks.get(name)
        if logged is None:
            ranks[name] = told
            continue
        better = {
            field: value
            for field in ("weights", "kv", "graphs", "tokens")
            if (value := getattr(told, field)) is not None
        }
        source = f"{told.source} and {logged.source}"
        ranks[name] = msgspec.structs.replace(logged, source=source, **better)
    return ranks


def _cards(
    evidence: Evidence, ranks: dict[str, RankMemory], arguments: KvArguments, *, running: bool
) -> tuple[CardMemory, ...]:
    """The cards on the service's side; one that the VM has, or nobody, is not part of its budget."""
    snapshot = evidence.snapshot
    holders = None if snapshot.holders_at is None else snapshot.holders
    return tuple(
        divide(card, holders, ranks, drafts=arguments.drafts, running=running)
        for card in snapshot.cards
        if card.owner.kind in ("ct", "host", "lost")
    )


def _cell(
    geometry: KvGeometry, arguments: KvArguments, told: RankMemory | None
) -> tuple[str | None, int | None, Finding | None]:
    """Kind of cache and bytes a token; a finding where the kind is not known here."""
    logged = None if told is None else told.cache_dtype
    dtype = logged or cache_dtype(geometry, arguments.kv_cache_dtype, arguments.dtype)
    dtype = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(dtype, dtype)
    try:
        return dtype, bytes_per_token(geometry, dtype, arguments.attention_tp), None
    except ValueError as problem:
        return dtype, None, Finding("kv-dtype", "Kind of KV cache", "unknown", clean(str(problem)))


def _context(snapshot: Snapshot, arguments: KvArguments, geometry: KvGeometry | None) -> int | None:
    """Tokens one request may have: as set, as the engine says, as the model was made."""
    identity = snapshot.identity
    told = arguments.context_length or (identity.context_length if identity is not None else None)
    return told or (geometry.context_length if geometry is not None else None)


def _most_running(evidence: Evidence, arguments: KvArguments) -> int | None:
    identity = evidence.snapshot.identity
    told = None if identity is None else identity.max_running_requests
    return told or arguments.max_running_requests


def _running_host_cache(
    ranks: dict[str, RankMemory],
    arguments: KvArguments,
    cell: int | None,
    tokens: Range | None,
    version: str | None,
) -> HostCache | None:
    """What was allocated, as each rank logged it; reckoned where the log is gone."""
    if not arguments.hierarchical:
        return None
    logged = [told.host for told in ranks.values() if told.host is not None]
    if logged and tokens is not None:
        ratio = arguments.hicache_ratio or 2.0
        size = Range(min(logged), max(logged))
        held = Range(size.low // cell, size.high // cell) if cell else exactly(int(tokens.low * ratio))
        return HostCache(tokens=held, per_rank=size, ranks=arguments.ranks, set_by="the engine's log")
    if cell is None or tokens is None:
        return None
    return host_cache(arguments, cell, tokens, version=version)


def _smallest(cards: tuple[CardMemory, ...]) -> CardRoom | None:
    """The card with the least room once the service has stopped; None when none is known."""
    rooms = [
        CardRoom(card.total, card.reserved or 0, card.size("others") or 0)
        for card in cards
        if card.total is not None and card.used is not None
    ]
    return min(rooms, key=lambda room: room.usable, default=None)


def _free(evidence: Evidence, arguments: KvArguments, room: CardRoom) -> Range | None:
    """What the running engine found free before its weights, where as many ranks will find the same."""
    now = _now(evidence)
    seen = [told.before_weights for told in evidence.ranks.values() if told.before_weights]
    if not seen or room.others or (now.tp_size, now.pp_size) != (arguments.tp_size, arguments.pp_size):
        return None
    return Range(min(seen) - _ROUNDED, min(seen) + _ROUNDED)


def _measured(evidence: Evidence, arguments: KvArguments) -> RankMemory | None:
    """What the running engine reports, where it serves the very model in the very way."""
    now = _now(evidence)
    same = (now.model_path, now.tp_size, now.pp_size) == (
        arguments.model_path,
        arguments.tp_size,
        arguments.pp_size,
    )
    ranks = [told for told in _merged(evidence).values() if told.weights is not None]
    return max(ranks, key=lambda told: told.weights or 0, default=None) if same and evidence.running else None


def _weights(evidence: Evidence, arguments: KvArguments) -> Weights | None:
    measured = _measured(evidence, arguments)
    if measured is not None and measured.weights is not None:
        return Weights(exactly(measured.weights), None, "as the running engine reports")
    files = evidence.files
    if files.weights is None:
        return None
    return spread(files.weights, arguments.tp_size * arguments.pp_size, files.weights_source)


def _draft_weights(evidence: Evidence, arguments: KvArguments) -> Weights | None:
    measured = _measured(evidence, arguments)
    same = arguments.drafts and _now(evidence).draft_path == arguments.draft_path
    if same and measured is not None and measured.draft is not None:
        size = exactly(measured.draft - (measured.draft_kv or 0))
        return Weights(size, None, "as the running engine reports")
    draft = evidence.draft
    if not arguments.drafts or draft is None or draft.weights is None:
        return None
    return spread(draft.weights, arguments.tp_size, draft.weights_source)


def _argument_findings(problems: tuple[str, ...]) -> list[Finding | None]:
    if not problems:
        return []
    text = "; ".join(map(clean, problems))
    return [Finding("arguments", "Arguments", "fail", text, "correct them in the profile")]


def _model_finding(files: ModelFiles, *, fails: bool, what: str = "model") -> Finding:
    problem = files.problem or "its config.json was not read"
    verdict: Verdict = "fail" if fails and files.folder is not None else "unknown"
    remedy = f"check the {what}'s path and its config.json in the container"
    return Finding(f"{what}-files", f"Files of the {what}", verdict, problem, remedy)
