"""Flags that argparse takes one by one and the engine does not take together, or not on these cards.

Each rule is from ``ServerArgs`` of the versions it names (0.5.8 to 0.5.23; there ``__post_init__`` and
``check_server_args``, later the hooks below ``srt/arg_groups``). A value that the engine would replace by
another fails like one that it refuses: what the profile says would not be what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from packaging.version import Version

from console.checks.flags import speculation
from console.checks.flags.given import Given
from console.checks.flags.hardware import Hardware
from console.checks.flags.judged import Judged, argument_line
from console.checks.flags.table import FlagTable
from console.model.profile import Profile


def judge_together(
    profile: Profile, table: FlagTable, version: Version, hardware: Hardware | None
) -> list[Judged]:
    """What to say of the flags together. The cards' rules are left out where the cards are not known."""
    given = Given(profile, table, version, hardware)
    return [judged for rule in RULES for judged in rule(given)]


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
    *speculation.RULES,
    _hierarchical,
    _pages,
    _cards,
    _sm120,
    _kimi,
    _configuration_file,
)
