"""Flags that argparse takes one by one and the engine does not take together, or not on these cards.

Each rule is from ``ServerArgs`` of the versions it names (0.5.8 to 0.5.23; there ``__post_init__`` and
``check_server_args``, later the hooks below ``srt/arg_groups``). A value that the engine would replace by
another fails like one that it refuses: what the profile says would not be what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import msgspec
from packaging.version import Version

from console.checks.flags.hardware import Hardware
from console.checks.flags.judged import Judged, argument_line, variable_line
from console.checks.flags.table import FlagTable
from console.checks.flags.variables import is_true
from console.model.finding import Verdict
from console.model.profile import FlagValue, Profile

_EAGLE = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})


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


def judge_together(
    profile: Profile, table: FlagTable, version: Version, hardware: Hardware | None
) -> list[Judged]:
    """What to say of the flags together. The cards' rules are left out where the cards are not known."""
    given = Given(profile, table, version, hardware)
    return [judged for rule in RULES for judged in rule(given)]


# Speculation -----------------------------------------------------------------------------------


def _algorithm(given: Given) -> Iterator[Judged]:
    """Free text to argparse in later versions: a wrong name fails after the import, seconds later."""
    name = given.text("speculative-algorithm")
    flag = given.table.by_name.get("speculative-algorithm")
    known = given.table.algorithms
    if name is None or not known or (flag is not None and flag.choices is not None):
        return
    if name.upper() not in known:
        line = argument_line("speculative-algorithm", "EAGLE3" if "EAGLE3" in known else known[0])
        yield given.judged(
            "algorithm",
            "speculative-algorithm",
            "fail",
            f"SGLang {given.table.version} knows no algorithm of this name, only {', '.join(known)}",
            f"write one of them: {line}",
        )


def _speculation_alone(given: Given) -> Iterator[Judged]:
    lonely = [name for name in given.args if name.startswith("speculative-") and given.algorithm is None]
    if lonely:
        yield given.judged(
            "speculation-off",
            lonely[0],
            "warn",
            "has no effect without speculative-algorithm: nothing would be speculated",
            f"add: {argument_line('speculative-algorithm', 'EAGLE3')}; or remove the speculative- lines",
        )


def _running_requests(given: Given) -> Iterator[Judged]:
    if given.algorithm is not None and "max-running-requests" not in given.args:
        yield given.judged(
            "running-requests",
            "speculative-algorithm",
            "warn",
            "with speculation and no max-running-requests the engine serves 48 requests at a time, not more",
            f"say how many: {argument_line('max-running-requests', '48')}",
            "--max-running-requests",
        )


def _steps(given: Given) -> Iterator[Judged]:
    """num_steps, topk and draft tokens belong together."""
    if given.algorithm not in _EAGLE:
        return
    steps, topk = given.number("speculative-num-steps"), given.number("speculative-eagle-topk")
    tokens = given.number("speculative-num-draft-tokens")
    if "speculative-num-steps" not in given.args:
        alone = [n for n in ("speculative-eagle-topk", "speculative-num-draft-tokens") if n in given.args]
        if alone and not given.on("speculative-adaptive"):
            yield given.judged(
                "steps",
                alone[0],
                "fail",
                "without speculative-num-steps the engine ends with an AssertionError",
                f"add: {argument_line('speculative-num-steps', '3')}; or remove the line to let it choose",
            )
        return
    if "speculative-eagle-topk" not in given.args:
        yield given.judged(
            "steps",
            "speculative-num-steps",
            "fail",
            "without speculative-eagle-topk the engine ends with a TypeError ('>' not supported …)",
            f"add: {argument_line('speculative-eagle-topk', '1')}",
        )
    elif steps is not None and topk == 1 and tokens is not None and tokens != steps + 1:
        yield given.judged(
            "draft-tokens",
            "speculative-num-draft-tokens",
            "fail",
            f"with topk 1 the engine drafts speculative-num-steps + 1 = {steps + 1} tokens, "
            f"whatever it is told: here {tokens}",
            f"write: {argument_line('speculative-num-draft-tokens', str(steps + 1))}",
        )


def _topk(given: Given) -> Iterator[Judged]:
    topk = given.number("speculative-eagle-topk")
    if given.algorithm not in _EAGLE or topk is None or topk <= 1:
        return
    one = f"write: {argument_line('speculative-eagle-topk', '1')}"
    backend = given.text("attention-backend")
    page = given.number("page-size")
    if given.before("0.5.11") and is_true(given.profile.env.get("SGLANG_ENABLE_SPEC_V2")):
        yield given.judged(
            "topk-spec-v2",
            "speculative-eagle-topk",
            "fail",
            f"SGLANG_ENABLE_SPEC_V2 takes topk 1 alone up to 0.5.10, found {topk}",
            f"{one}; or switch v2 off: {variable_line('SGLANG_ENABLE_SPEC_V2', '0')}",
        )
    backends = [given.text(f"{part}attention-backend") for part in ("", "prefill-", "decode-")]
    if "trtllm_mha" in backends:
        yield given.judged(
            "topk-trtllm",
            "speculative-eagle-topk",
            "fail",
            f"trtllm_mha takes topk 1 alone for speculation, found {topk}",
            one,
        )
    elif page is not None and page > 1 and backend not in _tree_backends(given):
        yield given.judged(
            "topk-page-size",
            "speculative-eagle-topk",
            "fail",
            f"topk {topk} with page-size {page} works on {' and '.join(_tree_backends(given))} alone, "
            f"found {backend or 'no attention-backend'}",
            f"write: {argument_line('page-size', '1')}",
        )


def _tree_backends(given: Given) -> tuple[str, ...]:
    return ("flashinfer", "fa3") if given.before("0.5.14") else ("flashinfer", "fa3", "triton")


def _mixed_chunk(given: Given) -> Iterator[Judged]:
    able = frozenset() if given.before("0.5.20") else frozenset({"EAGLE", "EAGLE3", "NEXTN"})
    if given.algorithm in (_EAGLE | {"NGRAM"}) - able and given.on("enable-mixed-chunk"):
        yield given.judged(
            "mixed-chunk",
            "enable-mixed-chunk",
            "fail",
            f"the engine switches it off for {given.algorithm}",
            "remove the line",
        )


def _hybrid(given: Given) -> Iterator[Judged]:
    """Qwen3.5 and Qwen3-Next keep a recurrent state, which speculation writes ahead of the radix cache."""
    hybrid = any(name in given.model for name in ("qwen3.5", "qwen3_5", "qwen3-next"))
    if not hybrid or given.algorithm is None or given.on("disable-radix-cache"):
        return
    old = given.before("0.5.14")
    flag = "mamba-scheduler-strategy" if old else "mamba-radix-cache-strategy"
    strategy = given.text("mamba-radix-cache-strategy") or given.text("mamba-scheduler-strategy")
    if given.before("0.5.11"):
        if strategy == "extra_buffer" and is_true(given.profile.env.get("SGLANG_ENABLE_SPEC_V2")):
            return
        yield given.judged(
            "hybrid",
            flag if flag in given.args else "speculative-algorithm",
            "fail",
            "a model with linear attention (judged by its path) takes speculation with the radix cache only "
            "with the extra_buffer strategy and SGLANG_ENABLE_SPEC_V2",
            f"add below args: {argument_line(flag, 'extra_buffer')}; "
            f"below env: {variable_line('SGLANG_ENABLE_SPEC_V2', '1')}",
        )
    elif strategy == "no_buffer" and not given.on("disable-overlap-schedule"):
        yield given.judged(
            "hybrid",
            flag,
            "fail",
            "no_buffer does not go with the overlap scheduler, which speculation on a model with linear "
            "attention (judged by its path) uses",
            f"write: {argument_line(flag, 'extra_buffer')}",
        )


# Caches ----------------------------------------------------------------------------------------


def _hierarchical(given: Given) -> Iterator[Judged]:
    on = given.on("enable-hierarchical-cache")
    if not on:
        lonely = [name for name in given.args if name.startswith("hicache-")]
        if lonely:
            yield given.judged(
                "hicache-off",
                lonely[0],
                "warn",
                "has no effect without enable-hierarchical-cache",
                f"add: {argument_line('enable-hierarchical-cache', True)}; or remove the line",
            )
        return
    if given.on("disable-radix-cache"):
        yield given.judged(
            "hicache-radix",
            "disable-radix-cache",
            "fail",
            "enable-hierarchical-cache and disable-radix-cache exclude each other: the engine refuses both",
            f"remove one of the lines; {argument_line('disable-radix-cache', True)} is the one that goes "
            "where the host cache is wanted",
        )
    direct = given.text("hicache-io-backend") == "direct"
    if direct and given.text("hicache-mem-layout") == "page_first" and not given.before("0.5.10"):
        yield given.judged(
            "hicache-layout",
            "hicache-mem-layout",
            "fail",
            "with the io backend direct the engine takes page_first_direct instead of page_first",
            f"write: {argument_line('hicache-mem-layout', 'page_first_direct')}",
        )
    yield from _host_pool(given)


def _host_pool(given: Given) -> Iterator[Judged]:
    try:
        ratio = float(given.text("hicache-ratio") or "nan")
    except ValueError:
        return
    if not ratio <= 1 or (given.number("hicache-size") or 0) > 0 or not given.before("0.5.15"):
        return
    yield given.judged(
        "hicache-ratio",
        "hicache-ratio",
        "fail",
        "up to 0.5.14 the host's pool has to be larger than the card's: else an AssertionError",
        f"write more than 1: {argument_line('hicache-ratio', '2.0')}",
    )


def _pages(given: Given) -> Iterator[Judged]:
    chunk, page = given.number("chunked-prefill-size"), given.number("page-size")
    if chunk is None or page is None or chunk <= 0 or page <= 0 or chunk % page == 0:
        return
    if given.text("disaggregation-mode") == "decode":
        return
    yield given.judged(
        "chunk-pages",
        "chunked-prefill-size",
        "fail",
        f"{chunk} is no multiple of page-size {page}: the engine ends with an AssertionError",
        f"write: {argument_line('chunked-prefill-size', str(max(page, chunk // page * page)))}",
    )


# Cards -----------------------------------------------------------------------------------------


def _cards(given: Given) -> Iterator[Judged]:
    """More ranks on this node than it has cards."""
    hardware = given.hardware
    if hardware is None:
        return
    tensor, pipeline = given.number("tp-size") or 1, given.number("pp-size") or 1
    nodes, data = given.number("nnodes") or 1, given.number("dp-size") or 1
    copies = 1 if given.on("enable-dp-attention") or "attn-dp-size" in given.args else data
    ranks = tensor * pipeline * copies // max(nodes, 1)
    if ranks <= hardware.cards:
        return
    flag = "tp-size" if tensor > 1 else "dp-size" if data > 1 else "pp-size"
    yield given.judged(
        "cards",
        flag,
        "fail",
        f"{ranks} ranks want a card each, this host has {hardware.cards}",
        f"write: {argument_line('tp-size', str(max(1, hardware.cards // (pipeline * copies))))}",
    )


#: Kernels that are built for SM100 alone, by flag; the value to write instead on SM120.
_SM100_ONLY = {
    "attention-backend": (("trtllm_mla",), "flashinfer"),
    "prefill-attention-backend": (("trtllm_mla",), "flashinfer"),
    "decode-attention-backend": (("trtllm_mla",), "flashinfer"),
    "moe-runner-backend": (("flashinfer_trtllm", "flashinfer_trtllm_routed"), "flashinfer_cutlass"),
    "speculative-moe-runner-backend": (
        ("flashinfer_trtllm", "flashinfer_trtllm_routed"),
        "flashinfer_cutlass",
    ),
    "fp4-gemm-backend": (("flashinfer_trtllm",), "flashinfer_cudnn"),
}


def _sm120(given: Given) -> Iterator[Judged]:
    if given.hardware is None or not given.hardware.sm120:
        return
    for flag, (refused, instead) in _SM100_ONLY.items():
        value = given.text(flag)
        mha = value == "trtllm_mha" and flag.endswith("attention-backend") and given.before("0.5.20")
        if given.before("0.5.20") and flag == "decode-attention-backend" and not given.before("0.5.10"):
            mha = False  # decoding with it works on SM120 from 0.5.10
        if value in refused or mha:
            yield given.judged(
                f"sm120.{flag}",
                flag,
                "fail",
                f"{value} has no kernels for the cards here, which are of compute capability 12.0",
                f"write: {argument_line(flag, instead)}",
            )
    yield from _nvfp4(given)


def _nvfp4(given: Given) -> Iterator[Judged]:
    """NVFP4 with the default backends gave NaN and "++++" on SM120 (sgl-project/sglang#24321)."""
    if given.text("quantization") != "modelopt_fp4":
        return
    for flag, value in (
        ("moe-runner-backend", "flashinfer_cutlass"),
        ("fp4-gemm-backend", "flashinfer_cudnn"),
    ):
        if given.text(flag) in (None, "auto"):
            yield given.judged(
                f"nvfp4.{flag}",
                flag if flag in given.args else "quantization",
                "warn",
                "left to the engine; with its choice NVFP4 models gave NaN on compute capability 12.0",
                f"write: {argument_line(flag, value)}",
                f"--{flag}",
            )


# Parsers ---------------------------------------------------------------------------------------


def _kimi(given: Given) -> Iterator[Judged]:
    if not any(name in given.model for name in ("kimi-k2", "kimi_k2")):
        return
    if given.text("reasoning-parser") == "kimi":
        yield given.judged(
            "kimi-reasoning",
            "reasoning-parser",
            "fail",
            "kimi is the parser of the older ◁think▷ format; K2 writes <think>, which would stay in the text",
            f"write: {argument_line('reasoning-parser', 'kimi_k2')}",
        )
    elif given.text("tool-call-parser") == "kimi_k2" and given.before("0.5.10"):
        yield given.judged(
            "kimi-leak",
            "tool-call-parser",
            "warn",
            f"in SGLang {given.version} a tool call that opens inside <think> leaks into the text",
            'use a version whose parser knows it: sglang: ">=0.5.10"',
        )


def _configuration_file(given: Given) -> Iterator[Judged]:
    if "config" in given.args:
        yield given.judged(
            "config",
            "config",
            "unknown",
            "the flags in this file are not checked here, and no audit sees them",
            "write them below args instead, and remove the line",
        )


RULES: tuple[Callable[[Given], Iterator[Judged]], ...] = (
    _algorithm,
    _speculation_alone,
    _running_requests,
    _steps,
    _topk,
    _mixed_chunk,
    _hybrid,
    _hierarchical,
    _pages,
    _cards,
    _sm120,
    _kimi,
    _configuration_file,
)
