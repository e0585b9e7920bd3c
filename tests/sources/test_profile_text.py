"""A profile that is written as a file is read back as the same profile."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.model.profile import Expect, Load, Profile, holds_secret
from console.sources.files import load_profiles, parse_profile, shipped_profiles_directory
from console.sources.files.profile_text import profile_text

visible = st.text(
    st.one_of(
        st.sampled_from(" '\"\\%$#:,[]{}&*!|>?@`~-.0123456789ntefalsoy"),
        st.characters(exclude_categories=("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")),
    ),
    max_size=20,
)
texts = st.one_of(
    visible, st.sampled_from(["true", "No", "null", "~", "0x1F", "1_000", "12:30:45", "1e3", "="])
)
texts = texts.filter(lambda text: not text.startswith("-"))
values = st.one_of(st.just(True), texts, st.lists(texts, min_size=1, max_size=3).map(tuple))
profiles = st.builds(
    Profile,
    name=st.just("any"),
    title=visible.filter(lambda text: text != ""),
    key=st.none() | st.integers(1, 9),
    python=st.none() | visible.map(lambda text: f"/opt/{text}/python"),
    args=st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,5}){0,2}", fullmatch=True).filter(
            lambda flag: not holds_secret(flag)
        ),
        values,
        max_size=5,
    ).map(lambda args: {"model-path": "/m", **args}),
    env=st.dictionaries(
        st.from_regex(r"[A-Z][A-Z0-9_]{0,9}", fullmatch=True).filter(lambda name: not holds_secret(name)),
        texts,
        max_size=4,
    ),
    load=st.builds(Load, timeout_s=st.just(900.0), stop_s=st.integers(1, 86_400).map(float)),
)


@given(profiles)
def test_any_profile_is_read_back_as_it_was(profile: Profile) -> None:
    assert parse_profile(profile_text(profile, "Any."), "file") == profile


@pytest.mark.parametrize(
    "profile", load_profiles([shipped_profiles_directory()]).profiles, ids=lambda one: str(one.name)
)
def test_a_shipped_profile_is_read_back_as_it_was(profile: Profile) -> None:
    found = parse_profile(profile_text(profile, "Shipped."), "file")
    assert found == msgspec.structs.replace(profile, reference=None, notes=None)


def test_it_looks_as_one_would_write_it() -> None:
    profile = Profile(
        name="kimi",
        title="Kimi K2.5",
        args={"model-path": "/m", "tp-size": "8", "bare": True, "list": ("1", "a b")},
        env={"A": "True"},
        expect=Expect(served_name="kimi", tool_calls=True),
    )
    assert profile_text(profile, "Adopted from sglang.service.") == (
        '# Adopted from sglang.service.\nschema: 1\nname: kimi\ntitle: "Kimi K2.5"\n\n'
        'args:\n  model-path: /m\n  tp-size: 8\n  bare: true\n  list: [1, "a b"]\n\nenv:\n  A: "True"\n\n'
        "expect:\n  served_name: kimi\n  tool_calls: true\n"
    )
