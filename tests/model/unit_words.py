"""Words that are hard to write into a unit file, and ways to write words that are hard to read."""

from __future__ import annotations

from hypothesis import strategies as st

NASTY = (
    "", " ", "two words", "  spaced  ", "'", '"', "it's", '"whole"', "\\", "\\\\", "trailing\\", "\\n",
    "\\x41", "%", "%n", "%%", "100%", "%h/%i", "$", "$$", "$HOME", "${HOME}", "$$HOME", "a$b", "${", "$ HOME",
    ";", "\\;", "a;b", "#", "# comment", "#x", "-x", "--flag=value", "@x", ":x", "+x", "!x", "!!x", "|x", "=",
    "a=b", "[Service]", "ExecStart=/bin/false", "~", "*", "?", ">x", "<x", "&", "&&", "`id`", "$(id)", "!",
    "^", "{}", "()", '{"image": {"a b": [1, "%n"]}}', "é", "日本語", "\U0001f600", "\u00a0", "\u202e",
    "\u200b", "\ufeff", "\u2028", "x" * 3000,
)  # fmt: skip

_letters = st.one_of(
    st.sampled_from(" '\"\\%$;#{}()[]<>&|`!?*~^=+-@:,./_abnstux07AHOME"),
    st.characters(exclude_categories=("Cc", "Cs", "Cn")),
)

#: Any text that a unit file can hold on one line.
words = st.one_of(st.sampled_from(NASTY), st.text(_letters, max_size=24))


PYTHON = "/usr/bin/python3"

#: Pieces of an ExecStart after "python3 -m sglang.launch_server ", each one word or several.
WRITTEN = (
    r"a\sb", r"\x41\102\u00e9\U0001f600", r"\xc3\xa9", '"two words"', "'single \"inside\"'", "mid'dle q'uote",
    r'"esc \" \\ \t end"', "%%n", '"%%%%"', "$ONE", '"$TWO"', "${TWO}", "x${ONE}y${TWO}z", "$$ONE", "a$ONE",
    "$", "${MISSING}", "$MISSING", "$TWO$ONE", r"\;", '";"', "a;b", "#", '""', "''", r"unknown\q",
    "--flag=value", "${ONE", "${}", "$1", "\\\n  continued", "\\\n# a comment \\\n; another\n  after",
    "tab\tapart", "é日本", "$QUOTED", "~", "*", ">x", "&&", "`id`", r"\a\b\f\v\r", r"\"quoted\"", "a\\\\",
    "-x", "@", "=",
)  # fmt: skip
VARIABLES = r"""
Environment=ONE=1 "TWO=t w 'o'"
Environment='THREE=a\tb' FOUR=%%x IGNORED 5=x
Environment="QUOTED=a 'b c'd \\'e \\\\n \"f"
"""


def foreign(pieces: list[str]) -> str:
    command = " ".join([f"{PYTHON} -m sglang.launch_server", *pieces])
    return f"[Unit]\nDescription=Theirs\n[Service]\n{VARIABLES}ExecStart={command}\n"
