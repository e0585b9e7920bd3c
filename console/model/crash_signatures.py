"""Known ways in which the engine dies: how its own lines show it, and what to do about it.

``weight`` orders what a line proves: 3 a cause, 2 a probable cause, 1 any
exception, 0 a consequence that only says that something died.
"""

from __future__ import annotations

import re

import msgspec


class Signature(msgspec.Struct, frozen=True):
    """One way to die. ``pattern`` is searched in the line, without the engine's prefix."""

    id: str
    weight: int
    pattern: re.Pattern[str]
    remedy: str | None = None


def _signature(id: str, weight: int, pattern: str, remedy: str | None = None) -> Signature:
    return Signature(id, weight, re.compile(pattern), remedy)


#: The first that matches a line names it; so the special stands before the general.
SIGNATURES: tuple[Signature, ...] = (
    _signature(
        "bad-flag",
        3,
        r"^[\w./-]+(?: serve)?: error: |Unknown speculative algorithm|mutually exclusive",
        "Check the profile's flags against the installed SGLang: gpuops profile validate.",
    ),
    _signature(
        "no-kv-memory",
        3,
        r"[Nn]ot enough memory\. Please try to increase --mem-fraction-static"
        r"|leave no GPU memory for the KV cache",
        "Raise --mem-fraction-static, or free memory on the cards first; gpuops budget shows where it goes.",
    ),
    _signature(
        "no-state-memory",
        3,
        r"Not enough GPU memory for hybrid|Not enough space for mamba",
        "Raise --mem-fraction-static or --mamba-full-memory-ratio, or lower --max-running-requests.",
    ),
    _signature(
        "no-host-memory",
        3,
        r"Not enough host memory",
        "Lower --hicache-ratio or --hicache-size (it counts per rank), or give the container more memory.",
    ),
    _signature(
        "kv-exhausted",
        3,
        r"^(?:\w+: )?(?:Prefill |Decode )?[Oo]ut of memory\. Try to lower your batch size"
        r"|Out of memory even after retracting",
        "Lower --max-running-requests or --context-length; the KV cache pool is too small for the load.",
    ),
    _signature(
        "cuda-oom",
        3,
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        "Lower --mem-fraction-static or the CUDA graph batch size; look for a process left on the cards.",
    ),
    _signature(
        "killed-oom",
        3,
        r"killed by the OOM killer|[Rr]esult 'oom-kill'|oom-kill:|Out of memory: Killed process",
        "The kernel ran out of memory: lower the host cache or raise the container's memory limit.",
    ),
    _signature(
        "port-in-use",
        3,
        r"\[Errno 98\]|[Aa]ddress already in use|EADDRINUSE|Port is already in use",
        "Another process holds the port: end it, or give the service another port.",
    ),
    _signature(
        "card-lost",
        3,
        r"\bXid\b|GPU is lost|fallen off the bus|CUDA error: uncorrectable ECC",
        "A card failed: see the kernel's log for the Xid, and reset the card or the host.",
    ),
    _signature(
        "no-gpu",
        3,
        r"No CUDA GPUs are available|no CUDA-capable device|No accelerator \(|CUDA unknown error"
        r"|CUDA driver initialization failed|Can't initialize NVML",
        "The service sees no card: check that the cards are on the nvidia driver and given to the container.",
    ),
    _signature(
        "driver-mismatch",
        3,
        r"[Dd]river/library version mismatch|driver version is insufficient|unsupported display driver",
        "The container's driver does not fit the host's kernel module: install one version in both.",
    ),
    _signature(
        "illegal-access",
        3,
        r"an illegal memory access|misaligned address|device-side assert|unspecified launch failure"
        r"|illegal instruction was encountered",
        "A kernel failed on the card: try another attention or MoE backend, and look for an Xid.",
    ),
    _signature(
        "unsupported-kernel",
        3,
        r"no kernel image is available|Unsupported FusedMoe|(?:not|only) supported on (?:SM|sm_?)\d",
        "This backend has no kernel for these cards: choose another --attention-backend or "
        "--moe-runner-backend.",
    ),
    _signature(
        "nan",
        3,
        r"NaN detected!|NaN in the logits",
        "The model computes garbage with these kernels: choose another fp4 or MoE backend.",
    ),
    _signature(
        "disk-full",
        3,
        r"\[Errno 28\]|No space left on device",
        "Free space on the disk named in the lines above.",
    ),
    _signature(
        "bad-weights",
        3,
        r"SafetensorError|Repository ?Not ?Found|LocalEntryNotFoundError|HFValidationError"
        r"|does not appear to have a file named|Cannot find any model weights|is not a valid JSON file"
        r"|No such file or directory: .*(?:safetensors|config\.json)",
        "Check --model-path: the folder is missing, incomplete or damaged.",
    ),
    _signature(
        "watchdog",
        3,
        r"[Ww]atchdog timeout \((?!.*soft=True)",
        "A rank hung: look at the stacks in the log, for an Xid, and at NCCL.",
    ),
    _signature(
        "exec",
        3,
        r"status=20[03]/|Failed at step \w+|Failed to locate executable|Failed to load environment files",
        "systemd could not start the command: check the unit's ExecStart, WorkingDirectory and files.",
    ),
    _signature(
        "start-timeout",
        3,
        r"start operation timed out",
        "systemd's patience ended before the load did: raise TimeoutStartSec.",
    ),
    _signature(
        "bad-setting",
        2,
        r"^(?:ValueError|AssertionError|TypeError)\b.*--[a-z]",
        "Two settings do not go together: correct the profile's flags.",
    ),
    _signature(
        "missing-module",
        2,
        r"^(?:ModuleNotFoundError|ImportError): ",
        "The service's Python lacks a package: install it there.",
    ),
    _signature("permission", 2, r"^PermissionError|\[Errno 13\]", "The service's user may not open it."),
    _signature(
        "graph-capture",
        2,
        r"Capture .*graph failed",
        "Lower --mem-fraction-static or the CUDA graph batch size.",
    ),
    _signature(
        "nccl",
        2,
        r"NCCL error|nccl\w*Error|DistBackendError|caught collective operation timeout",
        "The ranks lost each other: another rank died first, or NCCL's variables or peer-to-peer are wrong.",
    ),
    _signature(
        "exception",
        1,
        r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)",
    ),
    _signature(
        "killed-oom",
        1,
        r"exit code:? -9\b",
        "It was killed, most often because memory ran out: see the kernel's log of the host.",
    ),
    _signature("start-limit", 0, r"Start request repeated too quickly", "Correct the cause, then start."),
    _signature("killed", 0, r"exit code:? -\d+|code=(?:killed|dumped)"),
    _signature(
        "exit",
        0,
        r"exit code:? \d+|code=exited, status=|Received sigquit|SIGQUIT received|hit an exception:"
        r"|scheduler (?:died|is dead)|Initialization failed",
    ),
)


def signature_of(message: str) -> Signature | None:
    """The signature that the line shows, if any."""
    head = message[:600]
    return next((signature for signature in SIGNATURES if signature.pattern.search(head)), None)
