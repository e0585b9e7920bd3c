"""The budgets of the screen and of one look: the table tells the truth, only what no noise explains fails."""

from __future__ import annotations

import pytest

from tests.bench.compare import Row, compare, table

pytestmark = pytest.mark.bench

#: Share of a budget that fails the test; ``table`` tells of everything above 1.0.
ALLOWED = 2.5

WINDOW_S, ROUNDS = 20.0, 2


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return compare(WINDOW_S, ROUNDS, print)


def test_the_console_keeps_its_budgets_beside_nvitop(rows: list[Row]) -> None:
    print(table(rows))
    over = {row.name: row.over for row in rows if row.over is not None}
    assert len(over) == 5
    assert not [name for name, share in over.items() if share > ALLOWED], table(rows)
