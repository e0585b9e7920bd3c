"""The shipped profiles: exactly these flags, each known to the SGLang versions the profile says it fits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from console.model.profile import FlagValue, Profile
from console.sources.files import load_profiles, shipped_profiles_directory

#: By version, by flag: "bare", "value", or the choices it has. Made by SGLang's own add_cli_args.
FLAGS = json.loads((Path(__file__).parent / "fixtures" / "profiles" / "sglang-flags.json").read_text())

FOUND = load_profiles([shipped_profiles_directory()])

NCCL = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}

KIMI_BENCHMARK = (
    "--model-path /shared/kimi-k2.5-int4 --port 30000 --tp-size 8 --trust-remote-code --cuda-graph-max-bs 128"
    " --disable-custom-all-reduce --attention-backend flashinfer --enable-flashinfer-allreduce-fusion"
    " --speculative-algorithm EAGLE3 --speculative-draft-model-path /data/eagle3/output_100k_sglang/4"
    " --speculative-num-steps 2 --speculative-eagle-topk 1 --mem-fraction-static 0.88"
)
KIMI_SERVING = (
    "--served-model-name kimi-k2.5 --host 0.0.0.0 --tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
    " --enable-hierarchical-cache --hicache-ratio 4.0 --enable-metrics"
)
QWEN = (
    "--model-path nvidia/Qwen3.5-397B-A17B-NVFP4 --served-model-name qwen3.5-397b --host 0.0.0.0 --port 30000"
    " --tp-size 8 --quantization modelopt_fp4 --moe-runner-backend flashinfer_cutlass"
    " --fp4-gemm-backend flashinfer_cudnn --tool-call-parser qwen3_coder --reasoning-parser qwen3"
    " --enable-metrics"
)


def named(name: str) -> Profile:
    profile = FOUND.named(name)
    assert profile is not None
    return profile


def pairs(argv: tuple[str, ...] | str) -> set[str]:
    """Flags with their values, whatever their order."""
    line = argv if isinstance(argv, str) else " ".join(argv)
    return {flag.strip() for flag in f" {line}".split(" --") if flag}


def test_two_profiles_without_a_problem() -> None:
    assert FOUND.problems == ()
    assert [(p.key, p.name, p.title, p.served_name) for p in FOUND.profiles] == [
        (1, "kimi-k2.5-int4", "Kimi-K2.5 INT4 with EAGLE-3", "kimi-k2.5"),
        (2, "qwen3.5-397b-nvfp4", "Qwen3.5-397B-A17B NVFP4", "qwen3.5-397b"),
    ]


def test_kimi_serves_the_benchmark_command_and_what_serving_needs() -> None:
    profile = named("kimi-k2.5-int4")
    assert profile.reference is not None
    assert pairs(profile.reference.argv()) == pairs(KIMI_BENCHMARK)
    assert pairs(profile.argv()) == pairs(KIMI_BENCHMARK) | pairs(KIMI_SERVING)
    assert profile.env == profile.reference.env == {"SGLANG_ENABLE_SPEC_V2": "True", **NCCL}
    assert (profile.load.expect_s, profile.load.timeout_s) == (585, 900)
    assert profile.notes is not None
    assert "enable-metrics" in profile.notes


def test_qwen_serves_with_the_backends_that_gave_no_nan() -> None:
    profile = named("qwen3.5-397b-nvfp4")
    assert pairs(profile.argv()) == pairs(QWEN)
    assert profile.env == NCCL
    assert profile.notes is not None
    assert "NaN" in profile.notes


def takes(expected: str | list[str] | None, value: FlagValue) -> bool:
    if value is True:
        return expected == "bare"
    return expected == "value" or (isinstance(expected, list) and value in expected)


@pytest.mark.parametrize("profile", FOUND.profiles, ids=lambda profile: profile.name)
def test_flags_are_known_exactly_to_the_versions_of_the_range(profile: Profile) -> None:
    commands = [profile.args, *([profile.reference.args] if profile.reference else [])]
    fitting = [version for version in FLAGS if profile.fits(version)]
    assert "0.5.9" in fitting
    for version, known in FLAGS.items():
        refused = {
            flag for args in commands for flag, value in args.items() if not takes(known.get(flag), value)
        }
        assert bool(refused) != (version in fitting), (version, refused)


def test_the_range_of_kimi_ends_where_its_graph_flag_was_renamed() -> None:
    profile = named("kimi-k2.5-int4")
    assert not profile.fits("0.5.20")
    gone = set(profile.args) - set(FLAGS["0.5.20"])
    assert gone == {"cuda-graph-max-bs"}


def test_models_are_known_only_from_0_5_9() -> None:
    assert not any(profile.fits("0.5.8") for profile in FOUND.profiles)


def test_an_installed_package_finds_its_own_profiles(tmp_path: Path) -> None:
    """A wheel has the profiles inside the package; nothing of the source tree is near it."""
    root = Path(__file__).parents[1]
    shutil.copytree(root / "console", tmp_path / "console", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "profiles", tmp_path / "console" / "_data" / "profiles")
    script = (
        "from console.sources.files import load_profiles, shipped_profiles_directory as directory;"
        "print(directory(), *(profile.name for profile in load_profiles([directory()]).profiles))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [
        str(tmp_path / "console" / "_data" / "profiles"),
        "kimi-k2.5-int4",
        "qwen3.5-397b-nvfp4",
    ]
