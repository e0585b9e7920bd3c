"""What the engine says it is, over the releases that are in use."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.engine import EngineIdentity
from console.sources.engine.identity import model_list, read_identity, redact
from console.sources.engine.loads import rates_from_loads, read_loads

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "version", "model_path", "context_length", "tp_size", "speculative_algorithm", "internal_states", "graph",
    "memory_usage", "token_capacity", "launch_command", "data", "id", "max_model_len", "loads", "speculative",
    "num_running_reqs", "num_reqs", "num_waiting_reqs", "token_usage", "gen_throughput", "accept_length",
)  # fmt: skip
NEAR_JSON = st.recursive(
    JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
)


def test_0_5_23(recorded):
    found = read_identity(
        recorded("server_info-0.5.23.json"),
        recorded("models-0.5.23.json"),
        recorded("model_info-0.5.23.json"),
    )
    assert found.version == "0.5.23"
    assert found.served_names == ("tiny",)
    assert found.model_path == "/models/tiny"
    assert found.context_length == 2048
    assert (found.tp_size, found.dp_size) == (1, 1)
    assert found.speculative_algorithm is None
    assert found.speculative_steps is None
    assert (found.tool_call_parser, found.reasoning_parser) == ("kimi_k2", "kimi_k2")
    assert found.max_running_requests == 2048
    assert found.kv_token_capacity == 4096
    assert found.kv_cache_gb == 0.008
    assert found.graph_gb == 0.0
    assert found.launch_command.startswith("--model-path /models/tiny")


def test_speculation(recorded):
    found = read_identity(recorded("server_info-0.5.23-speculation.json"), None, None)
    assert found.speculative_algorithm == "STANDALONE"
    assert found.speculative_steps == 3
    assert found.served_names == ("/models/scripted",)
    assert found.max_running_requests == 32


def test_0_5_9(recorded):
    found = read_identity(
        recorded("server_info-0.5.9.json"), recorded("models-0.5.9.json"), recorded("model_info-0.5.9.json")
    )
    assert found == EngineIdentity(
        version="0.5.9",
        served_names=("kimi-k2.5",),
        model_path="/models/Kimi-K2.5",
        context_length=131072,
        tp_size=8,
        dp_size=1,
        speculative_algorithm="EAGLE3",
        speculative_steps=3,
        tool_call_parser="kimi_k2",
        reasoning_parser="kimi_k2",
        max_running_requests=48,
        kv_token_capacity=260000,
        weight_gb=69.81,
        kv_cache_gb=17.02,
        graph_gb=2.25,
        launch_command=None,
    )


def test_graph_memory_by_phase_is_added_up(recorded):
    server = json.loads(recorded("server_info-0.5.9.json"))
    server["internal_states"][0]["memory_usage"]["graph"] = {"decode": 1.5, "prefill": 0.25, "other": None}
    assert read_identity(json.dumps(server).encode(), None, None).graph_gb == 1.75


def test_a_model_of_no_weight_weighs_zero_not_minus_zero():
    """A tiny model on the CPU: the engine rounds a small negative difference."""
    server = b'{"internal_states": [{"memory_usage": {"weight": -0.0}}]}'
    assert str(read_identity(server, None, None).weight_gb) == "0.0"


def test_replicas_are_added_up(recorded):
    server = json.loads(recorded("server_info-0.5.9.json"))
    server["internal_states"] *= 2
    found = read_identity(json.dumps(server).encode(), None, None)
    assert found.kv_token_capacity == 520000
    assert found.max_running_requests == 96
    assert found.weight_gb == 69.81  # of a rank, not of the host


def test_without_server_info_the_rest_is_told(recorded):
    found = read_identity(None, recorded("models-0.5.23.json"), recorded("model_info-0.5.23.json"))
    assert found.served_names == ("tiny",)
    assert found.tool_call_parser == "kimi_k2"
    assert found.version is None


def test_an_error_page_is_no_identity():
    assert read_identity(b"<html>502 Bad Gateway</html>", b"NaN", b"[]") == EngineIdentity()
    assert model_list(b'{"data": [{"id": 3}, "x", {"id": "good"}]}') == [("good", None)]


@pytest.mark.parametrize(
    "command",
    [
        "--api-key s3cr3t --port 30000",
        "--api-key=s3cr3t --port 30000",
        "--admin-api-key 's3cr3t s3cr3t' --port 30000",
        '--api-key "s3cr3t s3cr3t" --port 30000',
        "HF_TOKEN=s3cr3t sglang serve --port 30000",
        "OPENAI_API_KEY='s3cr3t' sglang serve --port 30000",
        '--hicache-storage-backend-extra-config \'{"secret_key": "s3cr3t", "a": 1}\' --port 30000',
        '--extra "{\\"access_key\\": \\"s3cr3t\\"}" --port 30000',
        "--header 'Authorization: Bearer s3cr3t' --port 30000",
    ],
)
def test_secrets_of_a_launch_command_are_hidden(command):
    shown = redact(command)
    assert "s3cr3t" not in shown
    assert "--port 30000" in shown


def test_what_is_no_secret_stays():
    command = "--tokenizer-path /m --max-total-tokens 4096 --speculative-num-draft-tokens 4 --ssl-keyfile /k"
    assert redact(command) == command


def test_a_launch_command_is_redacted_and_printable(recorded):
    server = json.dumps({"launch_command": "--api-key s3cr3t\x1b[2J --x"}).encode()
    shown = read_identity(server, None, None).launch_command
    assert "s3cr3t" not in shown
    assert shown.isprintable()


class TestLoads:
    def test_0_5_23(self, recorded):
        loads = read_loads(recorded("loads-0.5.23.json"))
        assert (loads.running, loads.queued) == (32, 8)
        assert (loads.used_tokens, loads.total_tokens) == (6505, 65536)
        assert loads.gen_throughput == 1351.97
        assert loads.version == "0.5.23"

    def test_the_older_envelope(self, recorded):
        loads = read_loads(recorded("loads-0.5.9.json"))
        assert (loads.running, loads.queued, loads.usage) == (3, 1, 0.1)
        assert loads.accept_length == 2.84
        assert loads.gen_throughput is None  # 0.0 without metrics says nothing

    def test_get_load_counts_running_and_waiting_together(self, recorded):
        loads = read_loads(recorded("get_load-0.5.7.json"))
        assert (loads.running, loads.queued) == (4, 2)
        assert loads.usage is None

    def test_rates_say_why_there_is_no_more(self, recorded):
        identity = EngineIdentity(version="0.5.9", speculative_algorithm="EAGLE3")
        rates = rates_from_loads(read_loads(recorded("loads-0.5.9.json")), identity)
        assert rates.requests_running == 3
        assert rates.decode_tokens_per_s is None
        assert rates.missing["decode_tokens_per_s"] == "the engine runs without --enable-metrics"
        assert rates.missing["ttft"] == "the engine runs without --enable-metrics"
        assert rates.accept_length == 2.84
        assert rates.notes["accept_length"] == "mean since the engine started"

    def test_a_throughput_is_as_of(self, recorded):
        rates = rates_from_loads(read_loads(recorded("loads-0.5.23.json")), None)
        assert rates.decode_tokens_per_s == 1351.97
        assert "last decode interval" in rates.notes["decode_tokens_per_s"]

    def test_nothing_running_is_zero(self):
        loads = read_loads(
            b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "gen_throughput": 99.5}]}'
        )
        assert rates_from_loads(loads, None).decode_tokens_per_s == 0.0

    def test_speculation_off(self, recorded):
        rates = rates_from_loads(read_loads(recorded("loads-0.5.9.json")), EngineIdentity(version="0.5.9"))
        assert rates.accept_length is None
        assert rates.missing["accept_length"] == "speculation is off"

    @pytest.mark.parametrize("body", [b"", b"null", b"[]", b'{"loads": 3}', b'{"loads": [1]}', b"<html>"])
    def test_anything_else_is_none(self, body):
        assert read_loads(body) is None


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_survived(one, two, three):
    assert isinstance(read_identity(one, two, three), EngineIdentity)
    read_loads(one)


@given(NEAR_JSON, NEAR_JSON)
def test_fields_of_any_kind_are_survived(one, two):
    first, second = json.dumps(one).encode(), json.dumps(two).encode()
    assert isinstance(read_identity(first, second, first), EngineIdentity)
    loads = read_loads(first)
    if loads is not None:
        rates_from_loads(loads, None)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b'{"tp_size": 1e999}', b'{"tp_size": 1%s}' % (b"0" * 400)]
)
def test_hostile_json_is_survived(body):
    assert read_identity(body, body, body).tp_size is None
