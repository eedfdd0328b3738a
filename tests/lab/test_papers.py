"""`python -m benchmarks.papers`: tables of papers beside ours, of the rows of their pages."""

import re

import pytest

import papers
from claims import CLAIM, STALE


@pytest.mark.parametrize(
    ("claim", "tables"),
    [
        ("half is enough; Table 1", ["Table 1"]),
        ("ranks; Tables 8 to 11", ["Table 8", "Table 9", "Table 10", "Table 11"]),
        ("elements; Tables 4 and 5", ["Table 4", "Table 5"]),
        ("lower; abstract, Fig. 1a", ["Fig. 1a"]),
        ("lower; Figs. 19, 20", ["Fig. 19", "Fig. 20"]),
        ("one bound; eq. 16", ["text"]),
    ],
)
def test_tables_that_a_claim_cites(claim: str, tables: list[str]) -> None:
    assert list(papers.cited(claim)) == tables


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_row_of_a_page_is_in_a_table_with_the_page_s_numbers(paper: str) -> None:
    page = (papers.PAGES / f"{paper}.md").read_text(encoding="utf-8")
    lines = [x for x in page.splitlines() if re.match(r"\| (?!claim)", x)]
    rows = papers.rows(paper)
    assert len(rows) == len(lines) > 0
    shown = "".join(papers.show(paper, table) for table in papers.tables(paper))
    for row, line in zip(rows, lines, strict=True):
        assert "<!--" not in row.here
        numbers = [x for _, _, x in CLAIM.findall(line)]
        assert all(x in row.here + row.why for x in numbers), line
        assert len(row.commands) == len(set(re.findall(r"\[(\d+)\](?!\()", row.here)))
        assert row.claim.split()[0] in shown
        assert row.here.count(STALE) + row.why.count(STALE) == line.count(STALE)


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_what_was_not_measured_has_a_reason(paper: str) -> None:
    rows = [row for row in papers.rows(paper) if re.search("not (measured|timed|run)", row.here)]
    assert not [row.claim for row in rows if row.why == "–"]


def test_a_table_is_printed_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    papers.main(["palu", "table 1"])
    printed = capsys.readouterr().out
    assert "paper    J-LRD 5.47 to 5.62" in printed and "palu-j .392" in printed
    assert "[1] python benchmarks/real_quality.py" in printed and ".json)" not in printed
    papers.main(["palu"])
    assert capsys.readouterr().out.startswith("palu: Table 1, Table 2,")
    papers.main([])
    assert [x.partition(":")[0] for x in capsys.readouterr().out.splitlines()] == [*papers.PAPERS]


def test_a_table_that_is_not_there_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        papers.main(["zdc", "Fig. 99"])
    assert "zdc has no 'Fig. 99' here; there are Fig. 19, Fig. 20," in capsys.readouterr().err
