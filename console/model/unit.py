"""What systemd says of the service's unit."""

from __future__ import annotations

import msgspec


class UnitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one unit that an operator reads (``systemctl show``).

    Times are Unix seconds; None where systemd printed nothing or "[not set]".
    """

    id: str
    load_state: str  # loaded, not-found, bad-setting, error, masked
    active_state: str  # active, activating, deactivating, inactive, failed, reloading
    sub_state: str  # running, dead, start, auto-restart, …
    result: str = "success"  # success, exit-code, signal, oom-kill, timeout, start-limit-hit, …
    main_pid: int | None = None  # as counted where systemd runs
    exit_status: int | None = None  # of the last main process
    exit_code: str | None = None  # exited, killed, dumped
    restarts: int | None = None
    invocation_id: str | None = None
    started_at: float | None = None  # when the main process was executed
    active_since: float | None = None
    changed_at: float | None = None
    memory_bytes: int | None = None
    tasks: int | None = None
    unit_file_state: str | None = None  # enabled, disabled, static, …
    need_daemon_reload: bool = False
    fragment_path: str | None = None
    drop_in_paths: tuple[str, ...] = ()
    control_group: str | None = None
    status_text: str | None = None
    restart_policy: str | None = None  # no, on-failure, always, …
    job: int | None = None  # id of a queued start or stop
    stop_timeout_s: float | None = None
