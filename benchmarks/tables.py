"""Tables in Markdown, for pages and for the terminal."""

import math
from collections.abc import Iterable, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """
    :param header: names of the columns
    :param rows: cells of each, printed as ``str`` has them; what a short one lacks at its end stays empty
    :return: the table, without a line break at its end
    :raises ValueError: if a row has more cells than there are columns
    """
    lines = [["", *header, ""], ["", *["---"] * len(header), ""]]
    for row in rows:
        if len(row) > len(header):
            raise ValueError(f"A row has {len(row)} cells, and the table {len(header)} columns: {row!r}.")
        lines.append(["", *map(str, row), *[""] * (len(header) - len(row)), ""])
    return "\n".join(" | ".join(line).strip() for line in lines)


def format_steps(steps: float) -> str:
    """
    :param steps: to print
    :return: as a whole number, "never" for infinity
    """
    return "never" if math.isinf(steps) else f"{steps:,.0f}"
