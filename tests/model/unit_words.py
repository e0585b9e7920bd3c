"""Words that are hard to write into a unit file."""

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
