"""What the files of a unit make of its service, and which of them says what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from console.model.unit_file import environment_file, read_unit, split_cat

UNIT = "/etc/systemd/system/sglang.service"
DROP_IN = f"{UNIT}.d/10-a.conf"


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    environment_file(text)
    read_unit(split_cat(text, (UNIT,)), {})
    read_unit(((UNIT, f"[Service]\nExecStart={text}\nEnvironment={text}\n"),), {})


def test_a_command_with_variables_and_prefixes() -> None:
    """systemd.service(5): ${ONE} is one word, $TWO is split, $$ is a dollar."""

    def command(text: str) -> tuple[str, ...]:
        unit = f'[Service]\nEnvironment=ONE=one "TWO=two two" noequals\nExecStart={text}\n'
        return read_unit(((UNIT, unit),), {}).command

    assert command("-/bin/echo ${ONE} $TWO ${TWO} $$ $NONE") == (
        "/bin/echo", "one", "two", "two", "two two", "$",
    )  # fmt: skip
    assert command(":/bin/echo $TWO") == ("/bin/echo", "$TWO")
    assert command('/bin/echo "not closed') == ()


def test_lines_go_on_after_a_backslash_with_comments_between() -> None:
    text = "[Service]\nExecStart=/bin/a \\\n  --b \\\n# a comment\n; another\n  --c\n[Install]\nWantedBy=x\n"
    assert read_unit(((UNIT, text),), {}).command == ("/bin/a", "--b", "--c")


def test_a_drop_in_clears_and_sets_anew() -> None:
    base = "[Service]\nExecStart=/bin/old\nEnvironment=A=1 B=2\n"
    over = "[Service]\nExecStart=\nExecStart=/bin/new --x\nEnvironment=A=3\nUnsetEnvironment=B\n"
    found = read_unit(((UNIT, base), (DROP_IN, over)), {})
    assert (found.command, found.command_where) == (("/bin/new", "--x"), DROP_IN)
    assert [(one.where, one.name, one.value) for one in found.assignments] == [
        (UNIT, "A", "1"), (DROP_IN, "A", "3"),
    ]  # fmt: skip
    cleared = read_unit(((UNIT, base), (DROP_IN, "[Service]\nEnvironment=\n")), {})
    assert cleared.assignments == ()


def test_an_environment_file_comes_over_what_the_unit_sets() -> None:
    text = "[Service]\nEnvironmentFile=-/etc/default/sglang\nEnvironment=A=unit\n"
    found = read_unit(((UNIT, text),), {"/etc/default/sglang": "A=file\n"})
    assert found.environment_files == (("-/etc/default/sglang", UNIT),)
    assert [(one.where, one.value) for one in found.assignments] == [
        (UNIT, "unit"), ("/etc/default/sglang", "file"),
    ]  # fmt: skip


def test_what_an_environment_file_may_hold() -> None:
    text = (
        '# comment\n; other\nA=1\n B = two words \nC=\'single \\n\'\nD="a \\" b"\nE=on\\\ne\nnonsense\nF=\n'
    )
    assert environment_file(text) == (
        ("A", "1"), ("B", "two words"), ("C", "single \\n"), ("D", 'a " b'), ("E", "one"), ("F", ""),
    )  # fmt: skip


def test_the_files_of_systemctl_cat_are_told_apart() -> None:
    text = (
        f"# {UNIT}\n[Service]\n# /not/a/unit\nExecStart=/bin/a\n# /etc/other.conf\n\n"
        f"# {DROP_IN}\n[Service]\nNice=1\n\n# /run/systemd/system/sglang.service.d/new.conf\n[Service]\n"
    )
    files = split_cat(text, (UNIT, DROP_IN))
    assert [path for path, _ in files] == [UNIT, DROP_IN, "/run/systemd/system/sglang.service.d/new.conf"]
    assert "ExecStart=/bin/a" in files[0][1]
