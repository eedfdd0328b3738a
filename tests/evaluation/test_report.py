"""The HTML report: every number is in it, nothing outside it is needed, and its figures parse."""

import builtins
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from kvfold.evaluation import compare, report
from kvfold.evaluation.compare import Row
from kvfold.evaluation.report import RankMap, spread, write_report

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

COMMON = {"bytes_per_token": 3072, "baseline_bytes_per_token": 3072}
RANKS = RankMap(
    labels_y=("head 0", "head 1", "head 0"),
    ranks=((61, 53, 47), (43, 37, None), (31, 0, 23)),
    widths=(64, 64, 64),
    parts=("keys", "keys", "values"),
)
SPECTRA = {"keys": [[4.0, 2.0, 1.0], [3.0, 0.3, 0.0]]}


def row(recipe, keep, delta):
    return Row(
        recipe=recipe,
        keep=keep,
        kept_fraction=keep - 0.003,
        bytes_per_token=3072 * keep,
        baseline_bytes_per_token=3072,
        cache_bytes_allocated=int(12e6 * keep),
        perplexity={"wiki": 18.6 + delta, "books": 21.3 + delta},
        delta_nll={"wiki": (delta, 0.0031), "books": (2 * delta, 0.0047)},
        needle={512: 0.98 - keep / 100, 2048: 0.91},
        seconds=33.0,
    )


ROWS = [
    Row(
        recipe="uncompressed",
        keep=1.0,
        kept_fraction=1.0,
        **COMMON,
        cache_bytes_allocated=12_000_000,
        perplexity={"wiki": 18.61},
        delta_nll={},
    ),
    row("zack", 0.5, 0.213),
    row("zack", 0.25, 0.871),
    row("small <ours>", 0.5, -0.0004),
    row("small <ours>", 0.25, 0.0189),
]


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    write_report(
        path,
        title="A & B",
        summary=[("cache", "4.1× smaller"), ("needle", "96 %")],
        rows=ROWS,
        ranks=RANKS,
        spectra=SPECTRA,
        sizes=[row("planned", 0.0613, 0.0099)],
        prompt="… and <i>then</i>",
        examples=[
            ("original", "Once <b>upon</b> a time"),
            ("small", "Once <b>upon</b>\n a tame"),
        ],
    )
    return path.read_text(encoding="utf-8")


def cells(html):
    """Visible text of the page, piece by piece."""
    found = []
    parser = HTMLParser()
    parser.handle_data = lambda data: found.append(" ".join(data.split()))
    parser.feed(html)
    return found


def test_every_number_of_every_row_is_shown(html):
    shown = cells(html)
    for one in ROWS:
        wanted = [one.recipe, *compare.format_storage(one), compare.format_seconds(one)]
        wanted += [compare.format_perplexity(value) for value in one.perplexity.values()]
        wanted += [compare.format_delta(delta) for delta in one.delta_nll.values()]
        wanted += [compare.format_needle(one, length) for length in one.needle or ()]
        assert set(wanted) <= set(shown)
    assert "+0.213 ±0.003" in shown and "-0.0004 ±0.0031" in shown and "1.5 KiB" not in shown


def test_summary_ranks_and_examples_are_shown(html):
    shown = cells(html)
    assert {"A & B", "4.1× smaller", "96 %", "Once <b>upon</b> a time"} <= set(shown)
    for rank in itertools.chain(*RANKS.ranks):
        assert rank is None or str(rank) in shown
    assert "keys" in shown and "values" in shown and "… and <i>then</i>" in shown


def test_words_that_differ_from_the_original_are_marked(html):
    assert re.findall("<mark>(.*?)</mark>", html.partition("<pre")[2], flags=re.S) == [" tame"]


def test_sizes_are_in_figures_and_not_in_the_table(html):
    figures = re.findall("<svg.*?</svg>", html, flags=re.S)
    assert [">planned</text>" in figure for figure in figures] == [True, True] + [False] * 3
    assert "planned" not in html[html.index("<table") :]


def test_losses_are_drawn_as_per_cent_above_a_floor(monkeypatch):
    monkeypatch.setattr(report, "_svg", lambda figure, name: figure.axes[0])
    deltas = (-0.4, 0.0003, 0.0013, 1.1)
    axes = [report._loss_figure([row("a", 0.5, delta)], "wiki") for delta in deltas]
    marks = [one.collections[-1] for one in axes]
    heights = [mark.get_offsets()[0, 1] for mark in marks]
    assert heights == pytest.approx([0.1, 0.1, 100 * math.expm1(0.0013), 100 * math.expm1(1.1)])
    assert [mark.get_facecolors()[0, 3] for mark in marks] == [0, 0, 1, 1]  # hollow on the floor
    assert all(one.get_ylim()[0] < 0.1 for one in axes)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        ((0.00995, 0.004), "1.0 ± 0.4 % more perplexity"),
        ((-0.0202, math.nan), "2.0 % less perplexity"),
        ((-0.0003, 0.0), "0.0 ± 0.0 % more perplexity"),
        ((math.log(2), 0.01), "100.0 ± 2.0 % more perplexity"),
    ],
)
def test_losses_are_told_as_per_cent_of_perplexity(delta, words):
    assert compare.format_increase(delta) == words


def test_the_page_stands_alone(html):
    assert "http" not in html and "//" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S)
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)
    references = re.findall(r'(?:url\(|xlink:href="|href=")([^)"]*)', html)
    assert references and all(reference.startswith("#") for reference in references)


def test_figures_are_well_formed_and_follow_the_colour_scheme(html):
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.S)
    assert len(figures) == 2 + 2 + 1  # texts, rank parts, spectra
    declared = set(re.findall(r"(--\w+):", html))
    for figure in figures:
        ElementTree.fromstring(figure.replace("<svg", '<svg xmlns:xlink="x"', 1))
        assert set(re.findall(r"var\((--\w+)\)", figure)) <= declared
        assert not re.search(r"(fill|stroke): #", figure)  # a fixed colour would vanish in the dark
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert "prefers-color-scheme:dark" in html and "@media print" in html


def test_recipes_are_labelled_in_both_loss_figures(html):
    for name in ("zack", "small &lt;ours&gt;"):
        figures = re.findall(r"<svg.*?</svg>", html, flags=re.S)
        assert [f">{name}</text>" in figure for figure in figures] == [True, True] + [False] * 3


def test_a_report_without_extras_has_no_empty_sections(tmp_path):
    path = tmp_path / "r.html"
    write_report(path, title="t", summary=[], rows=ROWS[:1], ranks=None)
    html = path.read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", html) == ["What each recipe saves and costs"]
    assert "<svg" not in html


def test_labels_are_spread_without_leaving_the_axes():
    moved = spread([0.1, 0.5, 0.5, 0.52, 0.99, 1.0], 0.06)
    gaps = [b - a for a, b in itertools.pairwise(moved)]
    assert min(gaps) >= 0.06 - 1e-9 and moved[0] >= 0 and moved[-1] <= 1 + 1e-9
    assert moved[0] == pytest.approx(0.1)
    assert moved[2] == pytest.approx(0.5, abs=0.03)  # a cluster stays around its middle
    assert spread([], 0.1) == []


def test_ragged_ranks_are_refused(tmp_path):
    ranks = RankMap(labels_y=("a", "b"), ranks=((1, 2), (1,)), widths=(2, 2))
    with pytest.raises(ValueError, match="ranks: labels_y, ranks, widths"):
        write_report(tmp_path / "r.html", title="t", summary=[], rows=[], ranks=ranks)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_a_missing_extra_says_how_to_install_it(tmp_path, monkeypatch, missing):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=rf'{missing} is not installed.*"kvfold\[report\]"'):
        write_report(tmp_path / "r.html", title="t", summary=[], rows=[], ranks=None)
