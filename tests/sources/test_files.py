"""Site and profile files: what is read from good ones, and what is said of bad ones, with the exact place."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from console.model.profile import Profile, argv_of
from console.model.site import Container, Service, Simulated, Site, SwitchTo, Vm
from console.sources.files import (
    FileError,
    find_site,
    load_profile,
    load_profiles,
    load_site,
    parse_profile,
    parse_site,
    site_template,
)
from console.sources.files.problems import LISTED

SITE = """\
schema: 1
host: pve1
gpus: auto                      # or a list of PCI addresses
container: {kind: lxc, id: 129} # kind: none when the service runs on this host itself
vm: {id: 100}                   # optional
service:
  unit: sglang.service
  url: http://127.0.0.1:30000
  api_key_file: null
profiles: /etc/gpuops/profiles  # beside the shipped ones
read_only: false
"""

PROFILE = """\
schema: 1
name: small
title: A small model
key: 3
sglang: ">=0.5.9,<0.6"
args:
  model-path: /models/small
  tp-size: 8
  mem-fraction-static: 0.880
  trust-remote-code: true
  cuda-graph-bs: [1, 2, 016]
  served-model-name: small
env: {NCCL_P2P_LEVEL: SYS, X: 1, Y: on, T: 12:30:45, E: 1e3, O: 0777, Q: "", S: 'true'}
load: {expect_s: 30, timeout_s: 120.5}
reference: {args: {model-path: /models/small}, results: {output_tokens_per_s: 812.5}}
expect: {tool_calls: true, accept_length_min: 1.2}
notes: |
  First line.
  Second line.
"""


def said(parse, text: str | bytes) -> list[str]:
    with pytest.raises(FileError) as caught:
        parse(text, "f.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_the_site_of_the_manual() -> None:
    assert parse_site(SITE, "site.yaml") == Site(
        host="pve1",
        container=Container("lxc", 129),
        vm=Vm(100),
        service=Service("sglang.service", "http://127.0.0.1:30000", None),
        profiles="/etc/gpuops/profiles",
    )


def test_a_site_may_say_no_more_than_its_schema() -> None:
    assert parse_site("schema: 1\n", "site.yaml") == Site()


def test_byte_order_mark_and_carriage_returns_of_other_editors_are_read() -> None:
    assert parse_site(b"\xef\xbb\xbf" + SITE.replace("\n", "\r\n").encode(), "f") == parse_site(SITE, "f")


def test_pci_addresses_stay_text() -> None:
    site = parse_site("schema: 1\ngpus:\n  - 0000:41:00.0\n  - 0000:c1:00.0\n", "f")
    assert site.gpus == ("0000:41:00.0", "0000:c1:00.0")


def test_keys_that_yaml_takes_for_truth_stay_keys() -> None:
    assert parse_site("schema: 1\nkeys: {restart: y, stop: n, 'start': \"f5,on\"}\n", "f").keys == {
        "restart": "y",
        "stop": "n",
        "start": "f5,on",
    }


def test_profile_values_are_as_written_and_in_order() -> None:
    profile = parse_profile(PROFILE, "p.yaml")
    assert profile.argv() == (
        *("--model-path", "/models/small", "--tp-size", "8", "--mem-fraction-static", "0.880"),
        *("--trust-remote-code", "--cuda-graph-bs", "1", "2", "016", "--served-model-name", "small"),
    )
    assert profile.env == {
        "NCCL_P2P_LEVEL": "SYS",
        "X": "1",
        "Y": "on",
        "T": "12:30:45",
        "E": "1e3",
        "O": "0777",
        "Q": "",
        "S": "true",
    }
    assert list(profile.env) == ["NCCL_P2P_LEVEL", "X", "Y", "T", "E", "O", "Q", "S"]
    assert (profile.load.expect_s, profile.load.timeout_s, profile.load.stop_s) == (30, 120.5, 90)
    assert profile.reference is not None
    assert profile.reference.argv() == ("--model-path", "/models/small")
    assert profile.reference.results == {"output_tokens_per_s": 812.5}
    assert profile.notes == "First line.\nSecond line."


def test_quoted_true_is_a_text_and_not_a_bare_flag() -> None:
    profile = parse_profile("schema: 1\nname: a\nargs: {model-path: m, x: 'true', y: -1}\n", "f")
    assert profile.argv() == ("--model-path", "m", "--x", "true", "--y", "-1")


def test_served_name_is_what_the_engine_would_serve() -> None:
    head = "schema: 1\nname: a\nargs: {model-path: org/m"
    assert parse_profile(head + "}\n", "f").served_name == "org/m"
    assert parse_profile(head + ", served-model-name: m}\n", "f").served_name == "m"
    assert parse_profile(head + "}\nexpect: {served_name: e}\n", "f").served_name == "e"


def test_a_false_flag_has_no_command_line() -> None:
    with pytest.raises(ValueError, match="leave the flag out"):
        argv_of({"trust-remote-code": False})


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.5.8", False),
        ("0.5.9", True),
        ("0.5.10.post2", True),
        ("0.5.10rc1", True),
        ("0.5.19", True),
        ("0.5.20", False),
        ("0.6.0", False),
        ("unknown", None),
    ],
)
def test_version_range(version: str, fits: bool | None) -> None:
    profile = Profile(name="a", title="a", args={}, sglang=">=0.5.9,<0.5.20")
    assert profile.fits(version) is fits


NO_SECRETS = (
    "a key or password must not stand in this file; keep it in a file only root can read, and give it to the"
    " service with EnvironmentFile= in its unit, to this console with service.api_key_file"
)
GUEST = "expected a whole number from 100 to 999999999"
SITE_KEYS = (
    "schema, host, gpus, container, vm, service, profiles, state, switch, read_only, theme, keys, simulated"
)

BAD_YAML: list[tuple[str | bytes, str]] = [
    ("", "1:1: expected keys and values, found an empty file"),
    ("# nothing but this\n", "1:1: expected keys and values, found an empty file"),
    ("---\n...\n", "1:1: expected keys and values, found an empty file"),
    ("just text\n", "1:1: expected keys and values, found just text"),
    ("- schema: 1\n", "1:1: expected keys and values, found a list"),
    ("schema: 1\nservice:\n\tunit: x\n", "3:1: a tab; YAML wants spaces"),
    ("schema: 1\nservice:\n  \tunit: x\n", "3:3: a tab; YAML wants spaces"),
    ("schema: 1\nhost:\tpve1\n", "2:6: a tab; YAML wants spaces"),
    ("schema: 1\nschema: 1\n", "2:1: duplicate key schema; it stands in line 1 already, keep one"),
    (
        "schema: 1\nvm: {id: 100, id: 101}\n",
        "2:15: duplicate key id; it stands in line 2 already, keep one",
    ),
    (
        "schema: 1\nhost: &a pve1\n",
        "2:7: an anchor, &a; remove it and write the value out where it is used",
    ),
    ("schema: 1\nhost: *a\n", "2:7: an alias, *a; write the value out again"),
    ("schema: 1\n<<: {host: a}\n", "2:1: a merge key, <<; write the values out again"),
    ("schema: 1\nhost: !!str pve1\n", "2:7: a tag, !!str; remove it"),
    ("schema: 1\n---\nschema: 1\n", "2:1: a second document; a file holds one, so remove this ---"),
    ("schema: 1\n? [a]\n: b\n", "2:3: expected a key, found a list"),
    ("schema: 1\nx: {~: b}\n", "2:5: expected a key, found nothing"),
    ("schema: 1\nkeys: [[[[[[[[[[\n", "2:14: nested deeper than 8 levels"),
    (
        "schema: 1\nhost: a: b\n",
        '2:8: a ":" that does not fit here; put text that holds ": " in quotes, or look at the indentation',
    ),
    ("schema: 1\nhost: 'pve1\n", "2:7: a quote that is not closed"),
    ("schema: 1\nvm: {id: 100\n", '2:5: a mapping that is not closed; expected "," or "}"'),
    ("schema: 1\ngpus: [a\n", '2:7: a list that is not closed; expected "," or "]"'),
    ("schema: 1\nhost: ]\n", "2:7: expected a value here; look for a bracket that stands alone"),
    ("schema: 1\nhost: @pve1\n", "2:7: a value cannot begin with '@'; put it in quotes"),
    (
        'schema: 1\nhost: "\\q"\n',
        "2:9: an unknown escape after a backslash; use single quotes for text with backslashes",
    ),
    ('schema: 1\nhost: "\\UFFFFFFFF"\n', "2:1: not YAML: a number or an escape out of range, hereabouts"),
    (
        "schema: 1\nhost pve1\nread_only: true\n",
        '2:1: expected "key: value"; look for a missing ":" or quote',
    ),
    (
        "schema: 1\nservice:\n  unit: a.service\n url: x\n",
        "4:2: this line does not belong here; look at its indentation",
    ),
    (
        b"schema: 1\nhost: \xc3\xa9\xff\n",
        "2:8: expected text in UTF-8, found the byte 0xff; save it as UTF-8",
    ),
    (
        b"\x7fELF\x02\x01\x01\x00",
        "1:1: expected text in UTF-8, found NUL bytes: a binary file, or text saved as UTF-16",
    ),
    (
        SITE.encode("utf-16"),
        "1:1: expected text in UTF-8, found NUL bytes: a binary file, or text saved as UTF-16",
    ),
    ("schema: 1\nhost: a\x1b[2Jb\n", "2:8: an invisible character, U+001B; remove it"),
    ("schema: 1\nhost: a\u202eb\n", "2:8: an invisible character, U+202E; remove it"),
    ("schema: 1\nhost: a\rb\n", "2:8: an invisible character, U+000D; remove it"),
]

BAD_SITES: list[tuple[str, str]] = [
    ("host: pve1\n", "1:1: schema is missing; add a first line schema: 1"),
    (
        "schema: 2\nnew_thing: 1\n",
        "1:9: schema: written for a newer gpuops: found 2, and this one reads 1",
    ),
    ("schema: 0\n", "1:9: schema: expected 1, found 0"),
    ("schema: 1.0\n", "1:9: schema: expected 1, found 1.0"),
    ('schema: "1"\n', '1:9: schema: expected 1, found the text "1"'),
    ("schema: 1\nsevice: {}\n", "2:1: unknown key sevice; did you mean service?"),
    ("schema: 1\nzzz: 1\n", f"2:1: unknown key zzz; known here: {SITE_KEYS}"),
    (
        "schema: 1\nservice:\n  port: 1\n",
        "3:3: unknown key service.port; known here: unit, url, api_key_file",
    ),
    (
        "schema: 1\nservice:\n  api_key: hunter2\n",
        "3:3: unknown key service.api_key; did you mean api_key_file?",
    ),
    ("schema: 1\nhost: [pve1]\n", "2:7: host: expected text, found a list"),
    ("schema: 1\nhost: pve/1\n", "2:7: host: expected a host name such as pve1, found pve/1"),
    (
        'schema: 1\nhost: "a\\nb"\n',
        '2:7: host: expected one line of text, found the text "a\\nb"',
    ),
    (
        'schema: 1\nhost: "a\\u202eb"\n',
        '2:7: host: expected text without tabs or invisible characters, found the text "a\\u202eb"',
    ),
    ("schema: 1\ngpus: []\n", "2:7: gpus: expected auto or a list of at least one PCI address, found a list"),
    (
        "schema: 1\ngpus: [41:00.0]\n",
        "2:8: gpus: expected a PCI address as the kernel writes it: 0000:41:00.0, found 41:00.0",
    ),
    (
        "schema: 1\ngpus: [00000000:C1:00.0]\n",
        "2:8: gpus: expected a PCI address as the kernel writes it: 0000:c1:00.0, found 00000000:C1:00.0",
    ),
    (
        "schema: 1\ngpus: [0000:41:00.0, 0000:41:00.0]\n",
        "2:22: gpus: 0000:41:00.0 stands in the list already; remove one",
    ),
    ("schema: 1\nread_only: yes\n", "2:12: read_only: expected true or false, found yes"),
    ('schema: 1\nread_only: "true"\n', '2:12: read_only: expected true or false, found the text "true"'),
    ("schema: 1\nread_only:\n", "2:11: read_only: expected true or false, found nothing"),
    ("schema: 1\ncontainer: {id: 129}\n", "2:12: container.kind is missing; add kind: …"),
    ("schema: 1\ncontainer: {kind: lxc}\n", "2:12: container.id is missing; add id: …"),
    (
        "schema: 1\ncontainer: {kind: docker, id: 129}\n",
        "2:19: container.kind: expected lxc or none, found docker",
    ),
    (
        "schema: 1\ncontainer: {kind: none, id: 129}\n",
        "2:29: container.id: expected no id with kind: none, found one; remove it, or say lxc",
    ),
    ("schema: 1\nvm: 100\n", "2:5: vm: expected a mapping, found 100"),
    ("schema: 1\nvm: {}\n", "2:5: vm.id is missing; add id: …"),
    ("schema: 1\nvm: {id: 99}\n", f"2:10: vm.id: {GUEST}, found 99"),
    ("schema: 1\nvm: {id: 12:30:45}\n", f"2:10: vm.id: {GUEST}, found 12:30:45"),
    ("schema: 1\nvm: {id: 1e3}\n", f"2:10: vm.id: {GUEST}, found 1e3; write 1000"),
    ("schema: 1\nvm: {id: 0129}\n", f"2:10: vm.id: {GUEST}, found 0129; write 129"),
    ('schema: 1\nvm: {id: "129"}\n', f'2:10: vm.id: {GUEST}, found the text "129"; remove the quotes'),
    (
        "schema: 1\ncontainer: {kind: lxc, id: 129}\nvm: {id: 129}\n",
        "3:10: vm.id: expected an id of its own, found the container's, 129",
    ),
    (
        "schema: 1\nservice: {unit: ../x.service}\n",
        "2:17: service.unit: expected the name of a systemd service such as sglang.service,"
        " found ../x.service",
    ),
    (
        "schema: 1\nservice: {unit: sglang}\n",
        "2:17: service.unit: expected the name of a systemd service such as sglang.service, found sglang",
    ),
    (
        "schema: 1\nservice: {url: localhost:30000}\n",
        "2:16: service.url: expected an address such as http://127.0.0.1:30000, found localhost:30000",
    ),
    (
        "schema: 1\nservice: {url: http://root:hunter2@a/}\n",
        "2:16: service.url: expected an address without a user or password; the key goes in a file named by"
        " api_key_file, found http://…@a/",
    ),
    (
        "schema: 1\nservice: {api_key_file: sk-hunter2}\n",
        "2:25: service.api_key_file: expected the path of a file that holds the key, beginning with /",
    ),
    (
        "schema: 1\nprofiles: profiles\n",
        "2:11: profiles: expected a path that begins with /, found profiles",
    ),
    (
        "schema: 1\ntheme: Bright Blue\n",
        "2:8: theme: expected the name of a theme such as textual-dark, found Bright Blue",
    ),
    (
        "schema: 1\nkeys: {stop: x, restart: 'f5,x'}\n",
        "2:26: keys.restart: x is the key of stop already; choose another",
    ),
    (
        "schema: 1\nkeys: {stop: ctrl + x}\n",
        "2:14: keys.stop: expected a key, or several with commas between, such as ctrl+r,f5, found ctrl + x",
    ),
    ("schema: 1\nsimulated: {}\n", "2:12: simulated.directory is missing; add directory: …"),
]

HEAD = "schema: 1\nname: a\nargs:\n  model-path: m\n"

BAD_PROFILES: list[tuple[str, str]] = [
    ("schema: 1\nargs: {model-path: m}\n", "1:1: name is missing; add name: …"),
    ("schema: 1\nname: a\n", "1:1: args is missing; add args: …"),
    ("schema: 1\nname: a\nargs:\n", "3:6: args: expected flags, model-path among them, found nothing"),
    ("schema: 1\nname: a\nargs: {}\n", "3:7: args.model-path is missing; add model-path: …"),
    (
        "schema: 1\nname: a\nargs: {model-path: true}\n",
        "3:20: args.model-path: expected a path or a model's name, found true",
    ),
    *(
        (
            f"schema: 1\nname: {name}\nargs: {{model-path: m}}\n",
            "2:7: name: expected a name of lower-case letters, digits, '.', '-' and '_', such as"
            f" kimi-k2.5-int4, found {name}",
        )
        for name in ("../a", "a..b", "Kimi", "a b", ".hidden")
    ),
    (HEAD + "key: 0\n", "5:6: key: expected a whole number from 1 to 9, found 0"),
    (HEAD + "key: a\n", "5:6: key: expected a whole number from 1 to 9, found a"),
    (HEAD + "python: python3\n", "5:9: python: expected a path that begins with /, found python3"),
    (
        HEAD + "sglang: 0.5.9\n",
        '5:9: sglang: expected a range of versions such as ">=0.5.9,<0.5.20", found 0.5.9',
    ),
    (HEAD + "  tp_size: 8\n", "5:3: args.tp_size: expected a flag without its dashes in front: tp-size"),
    (HEAD + "  --tp-size: 8\n", "5:3: args.--tp-size: expected a flag without its dashes in front: tp-size"),
    (HEAD + "  x y: 8\n", "5:3: args.x y: expected a flag such as tp-size"),
    (
        HEAD + "  trust-remote-code: yes\n",
        '5:22: args.trust-remote-code: yes may mean two things; write true for a bare flag, or "yes"',
    ),
    (
        HEAD + "  trust-remote-code: True\n",
        '5:22: args.trust-remote-code: True may mean two things; write true for a bare flag, or "True"',
    ),
    (
        HEAD + "  trust-remote-code: false\n",
        "5:22: args.trust-remote-code: false would pass nothing; remove the line to leave the flag out",
    ),
    (HEAD + "  x:\n", "5:5: args.x: expected a value, found nothing; write true for a bare flag"),
    (
        HEAD + "  x: {a: 1}\n",
        "5:6: args.x: expected one value or a list, found a mapping; write JSON in quotes",
    ),
    (HEAD + "  x: []\n", "5:6: args.x: expected at least one value in the list, found a list"),
    (HEAD + "  x: [a, [b]]\n", "5:10: args.x: expected text, found a list"),
    (HEAD + "  x: --port\n", "5:6: args.x: expected a value, found --port, which would be read as a flag"),
    (HEAD + '  x: "a\\nb"\n', '5:6: args.x: expected one line of text, found the text "a\\nb"'),
    (HEAD + "  api-key: hunter2\n", f"5:12: args.api-key: {NO_SECRETS}"),
    (HEAD + "  admin-api-key: hunter2\n", f"5:18: args.admin-api-key: {NO_SECRETS}"),
    (HEAD + "  ssl-keyfile-password: hunter2\n", f"5:25: args.ssl-keyfile-password: {NO_SECRETS}"),
    (HEAD + "env: {HF_TOKEN: hunter2}\n", f"5:17: env.HF_TOKEN: {NO_SECRETS}"),
    (HEAD + "reference: {args: {api-key: hunter2}}\n", f"5:29: reference.args.api-key: {NO_SECRETS}"),
    (
        HEAD + "  served-model-name: a:b\n",
        "5:22: args.served-model-name: expected a served name without ':' or spaces, found a:b",
    ),
    (HEAD + "env: {X: }\n", '5:9: env.X: expected text, found nothing; write "" for an empty text'),
    (HEAD + "env: {X: [1]}\n", "5:10: env.X: expected text, found a list"),
    (
        HEAD + 'env: {X: "a\\tb"}\n',
        '5:10: env.X: expected text without tabs or invisible characters, found the text "a\\tb"',
    ),
    (
        HEAD + "env: {1X: 1}\n",
        "5:7: env.1X: expected the name of an environment variable such as NCCL_PROTO",
    ),
    (HEAD + "env: [X=1]\n", "5:6: env: expected a mapping, found a list"),
    (
        HEAD + "load: {timeout_s: 9e2}\n",
        "5:19: load.timeout_s: expected a number from 1 to 86400, found 9e2; write 900",
    ),
    (HEAD + "load: {stop_s: .inf}\n", "5:16: load.stop_s: expected a number from 1 to 86400, found .inf"),
    (HEAD + "load: {expect_s: 900}\n", "5:18: load.expect_s: expected less than timeout_s, 900, found 900"),
    (
        HEAD + "expect: {resoning: true}\n",
        "5:10: unknown key expect.resoning; did you mean reasoning?",
    ),
    (HEAD + "expect: {tool_calls: on}\n", "5:22: expect.tool_calls: expected true or false, found on"),
    (
        HEAD + "  served-model-name: a\nexpect: {served_name: b}\n",
        "6:23: expect.served_name: expected a as in args, found b",
    ),
    (HEAD + "reference: {results: {x: fast}}\n", "5:26: reference.results.x: expected a number, found fast"),
    (HEAD + 'notes: "a\\ab"\n', "5:8: notes: expected text without tabs or invisible characters"),
]


@pytest.mark.parametrize(("text", "problem"), BAD_YAML)
def test_what_is_said_of_bad_yaml(text: str | bytes, problem: str) -> None:
    assert f"f.yaml:{problem}" in said(parse_site, text)
    assert f"f.yaml:{problem}" in said(parse_profile, text)


@pytest.mark.parametrize(("text", "problem"), BAD_SITES)
def test_what_is_said_of_a_bad_site(text: str, problem: str) -> None:
    assert said(parse_site, text) == [f"f.yaml:{problem}"]


@pytest.mark.parametrize(("text", "problem"), BAD_PROFILES)
def test_what_is_said_of_a_bad_profile(text: str, problem: str) -> None:
    problems = said(parse_profile, text)
    assert problems == [f"f.yaml:{problem}"]
    assert "hunter2" not in problems[0]


def test_all_problems_are_told_at_once_in_the_order_of_lines() -> None:
    text = "schema: 1\nread_only: off\nsevice: {}\nvm: &v {id: x}\nhost: [a]\nhost: b\n"
    assert said(parse_site, text) == [
        "f.yaml:2:12: read_only: expected true or false, found off",
        "f.yaml:3:1: unknown key sevice; did you mean service?",
        "f.yaml:4:5: an anchor, &v; remove it and write the value out where it is used",
        f"f.yaml:4:13: vm.id: {GUEST}, found x",
        "f.yaml:5:7: host: expected text, found a list",
        "f.yaml:6:1: duplicate key host; it stands in line 5 already, keep one",
    ]


def test_no_flood_of_problems() -> None:
    problems = said(parse_site, "schema: 1\n" + "".join(f"k{number}: 1\n" for number in range(500)))
    assert len(problems) == LISTED + 1
    assert problems[-1].endswith("and more problems from here on; mend those above first")


def test_unknown_actions_are_told_when_the_actions_are_known() -> None:
    with pytest.raises(FileError) as caught:
        parse_site("schema: 1\nkeys: {restrat: f5}\n", "f", actions=("restart", "stop"))
    assert str(caught.value) == "f:2:8: unknown action keys.restrat; did you mean restart?"


def test_a_message_is_safe_to_print() -> None:
    with pytest.raises(FileError) as caught:
        parse_site("- a\n", "evil\x1b[2J\nname")
    assert str(caught.value) == "evil\\x1b[2J\\nname:1:1: expected keys and values, found a list"


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: b\n" * 2_000_000, "1:1: expected at most 256 KiB, found 9766 KiB; is this the right file?"),
        (bytes(range(256)) * 900, "1:1: expected text in UTF-8, found NUL bytes"),
        (b"\xfe\xed" * 100_000, "1:1: expected text in UTF-8, found the byte 0xfe"),
        (b"a: &a [*a]\n", "1:4: an anchor, &a"),
        (b"&a {a: *a}\n", "1:1: an anchor, &a"),
        (BOMB.encode(), "1:4: an anchor, &a"),
        (b"[" * 200_000, "1:9: nested deeper than 8 levels"),
        (b"- " * 100_000, "1:17: nested deeper than 8 levels"),
    ],
    ids=["10 MB", "binary", "not UTF-8", "cycle", "cycle at the root", "bomb", "deep", "deep block"],
)
def test_hostile_files_are_refused_at_once(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    said(parse_site, "schema: 2\n")  # loads pyyaml, which is not what is timed
    spent = []
    for _ in range(3):  # the least of them: this process has a large heap, whose collection is not the work
        began = time.process_time()
        with pytest.raises(FileError) as caught:
            load_site(path)
        spent.append(time.process_time() - began)
    assert min(spent) < 0.2
    told = [text for text in str(caught.value).split("\n") if text.startswith(f"{path}:{problem}")]
    assert len(told) == 1


@pytest.mark.parametrize("load", [load_site, load_profile])
def test_what_is_no_file_is_told(tmp_path: Path, load) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, reason in {
        "none.yaml": "cannot read this file: No such file or directory",
        "circle": "cannot read this file: Too many levels of symbolic links",
        "pipe": "expected a file, found a directory, pipe or device",
        ".": "expected a file, found a directory, pipe or device",
    }.items():
        with pytest.raises(FileError) as caught:
            load(tmp_path / name)
        assert str(caught.value) == f"{tmp_path / name}:1:1: {reason}"


def test_the_site_is_searched_in_order(tmp_path: Path) -> None:
    system = tmp_path / "etc" / "site.yaml"
    home = tmp_path / "home"
    configured = tmp_path / "xdg" / "gpuops" / "site.yaml"
    plain = home / ".config" / "gpuops" / "site.yaml"
    environ = {"HOME": str(home), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}

    def found(explicit: Path | None = None, **changed: str) -> Path | None:
        return find_site(explicit, environ | changed, system)

    assert found() is None
    for path in (system, plain, configured):
        path.parent.mkdir(parents=True)
        path.write_text("schema: 1\n")
    assert found() == configured
    assert found(XDG_CONFIG_HOME="") == plain
    assert found(XDG_CONFIG_HOME="relative") == plain
    configured.unlink()
    assert found() == system
    assert found(Path("given.yaml")) == Path("given.yaml")
    configured.symlink_to(tmp_path / "gone")
    assert found() == configured


def profile_file(directory: Path, name: str, *, file: str | None = None, key: int | None = None) -> Path:
    path = directory / (file or f"{name}.yaml")
    path.write_text(f"schema: 1\nname: {name}\nargs: {{model-path: m}}\n" + (f"key: {key}\n" if key else ""))
    return path


def test_profiles_come_by_key_and_broken_ones_hide_none(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    profile_file(one, "z", key=1)
    profile_file(one, "unkeyed")
    profile_file(two, "c", key=3, file="c.yml")
    profile_file(two, ".draft", file=".draft.yaml")
    (two / "readme.txt").write_text("not a profile")
    (one / "bad.yaml").write_text("schema: 1\nname: bad\nagrs: {}\n")
    (one / "circle.yaml").symlink_to("circle.yaml")
    found = load_profiles([one, two, one, tmp_path / "none"])
    assert [profile.name for profile in found.profiles] == ["z", "c", "unkeyed"]
    assert found.paths["c"] == str(two / "c.yml")
    assert [str(problem) for problem in found.problems] == [
        f"{one}/bad.yaml:1:1: args is missing; add args: …",
        f"{one}/bad.yaml:3:1: unknown key agrs; did you mean args?",
        f"{one}/circle.yaml:1:1: cannot read this file: Too many levels of symbolic links",
        f"{tmp_path}/none:1:1: cannot read this directory of profiles: No such file or directory",
    ]


def test_two_profiles_with_one_name_or_one_key_name_both_files(tmp_path: Path) -> None:
    first = profile_file(tmp_path, "a", key=1)
    same_key = profile_file(tmp_path, "b", key=1)
    same_name = profile_file(tmp_path, "a", file="c.yaml", key=2)
    found = load_profiles([tmp_path])
    assert [(profile.name, profile.key) for profile in found.profiles] == [("a", 1), ("b", None)]
    assert found.paths["a"] == str(first)
    assert [str(problem) for problem in found.problems] == [
        f"{same_key}:1:1: key: 1 is the key of {first} too; change one",
        f"{same_name}:1:1: name: a is the name of {first} too; rename one",
    ]
    assert found.keyed(1) == found.named("a")


# Properties.

YAML_PIECES = st.sampled_from(
    [
        *"\n\t :-?[]{},&*!|>'\"%@`#~\\",
        *("\n  ", ": ", "- ", "schema: 1\n", "args:\n", "  model-path: m\n", "<<", "&a ", "*a", "!!int "),
        *("---\n", "...\n", "on", "1e3", "0o7", '"\\x', '"\\UFFFFFFFF', "%YAML " + "9" * 5000, "\ud800"),
    ]
)


@settings(max_examples=400)
@given(st.binary(max_size=300) | st.text(max_size=300) | st.lists(YAML_PIECES, max_size=40).map("".join))
def test_anything_at_all_raises_nothing_but_a_file_error(content: str | bytes) -> None:
    for parse in (parse_site, parse_profile):
        try:
            parse(content, "f")
        except FileError as error:
            assert error.problems
            assert all(problem.line >= 1 and problem.column >= 1 for problem in error.problems)
            assert all(str(problem).isprintable() for problem in error.problems)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
IDS = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
ADDRESSES = st.from_regex(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", fullmatch=True)
PATHS = WORDS.map(lambda word: "/" + word)


@st.composite
def sites(draw: st.DrawFn) -> Site:
    kind, container = draw(st.sampled_from([("none", None), ("lxc", 129)]))
    key_names = draw(st.lists(IDS, unique=True, max_size=4))
    return Site(
        host=draw(st.none() | st.sampled_from(["pve1", "null", "on", "12", "1e3", "0x1f", "a.b-c"])),
        gpus=draw(st.just("auto") | st.lists(ADDRESSES, min_size=1, max_size=8, unique=True).map(tuple)),
        container=Container(kind, container),
        vm=draw(st.none() | st.integers(130, 10_000).map(Vm)),
        service=Service(
            draw(
                st.sampled_from(
                    ["sglang.service", "a@b:c.service", "no.service", "-".join("ab") + ".service"]
                )
            ),
            draw(st.sampled_from(["http://127.0.0.1:30000", "https://[::1]:1", "http://pve1/prefix"])),
            draw(st.none() | PATHS),
        ),
        profiles=draw(st.none() | PATHS),
        read_only=draw(st.booleans()),
        theme=draw(st.none() | IDS),
        keys={action: f"f{number}" for number, action in enumerate(key_names)},
        state=draw(st.none() | PATHS),
        switch=draw(st.dictionaries(IDS, st.builds(SwitchTo, st.booleans()), max_size=2)),
        simulated=draw(st.none() | st.builds(Simulated, PATHS, st.sampled_from(["simulated", "library"]))),
    )


@given(sites())
def test_a_written_site_reads_back_the_same(site: Site) -> None:
    assert parse_site(site_template(site), "site.yaml") == site


def test_examples_in_a_written_site_are_right_once_uncommented() -> None:
    text = re.sub(r"^# ?(?=[a-z_]+: *(\S+|\{.*\})?$|  )", "", site_template(Site()), flags=re.MULTILINE)
    site = parse_site(text, "site.yaml")
    assert (site.host, site.vm, site.profiles) == ("pve1", Vm(100), "/etc/gpuops/profiles")
    assert (site.theme, site.keys) == ("textual-dark", {"restart": "ctrl+r"})
    assert (site.state, site.switch) == ("/var/lib/gpuops", {"kimi-k2.5-int4": SwitchTo(confirm=False)})


def test_a_profile_is_confirmed_unless_the_site_says_otherwise() -> None:
    text = "schema: 1\nswitch:\n  fast: {confirm: false}\n  slow: {confirm: true}\n  usual: {}\n"
    assert [how.confirm for how in parse_site(text, "site.yaml").switch.values()] == [False, True, True]
    with pytest.raises(FileError, match=r"3:19: switch\.fast\.confirm: expected true or false"):
        parse_site("schema: 1\nswitch:\n  fast: {confirm: no}\n", "site.yaml")


ENV_NAMES = st.from_regex(r"X_[A-Z0-9_]{0,8}", fullmatch=True)


@given(st.dictionaries(ENV_NAMES, WORDS | st.sampled_from(["on", "1e3", "~", "null", "0777", "1:30"])))
def test_quoted_environment_reads_back_the_same(env: dict[str, str]) -> None:
    lines = "".join(f"  {name}: '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in env.items())
    profile = parse_profile(HEAD + "env:\n" + lines, "f")
    assert profile.env == env
    assert list(profile.env) == list(env)
