"""Flags of speculative decoding that the engine does not take together, by version (as in together.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from console.checks.flags.given import Given
from console.checks.flags.judged import Judged, argument_line, variable_line
from console.checks.flags.variables import is_true

_EAGLE = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})


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
    elif page is not None and page > 1 and backend is not None and backend not in _tree_backends(given):
        yield given.judged(
            "topk-page-size",
            "speculative-eagle-topk",
            "fail",
            f"topk {topk} with page-size {page} works on {' and '.join(_tree_backends(given))} alone, "
            f"found {backend}",
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


RULES: tuple[Callable[[Given], Iterator[Judged]], ...] = (
    _algorithm,
    _speculation_alone,
    _running_requests,
    _steps,
    _topk,
    _mixed_chunk,
    _hybrid,
)
