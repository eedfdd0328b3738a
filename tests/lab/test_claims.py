"""Numbers on pages are drawn from results files by a key, and marked where code changed since."""

import json
import re
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import results_tables
from claims import CLAIM, ClaimError, Claims
from code_versions import digest
from results_tables import CLAIMS, MARKED, NOTES, PAGES, codes, filled

ROOT = Path(__file__).parents[2]

# -- on a small copy: what turns a test red --------------------------------------------------------

REGISTRY = """
[code]
"kernels" = ["kernel.py"]

[speed]
command = "python bench.py"
code = ["kernels"]

[speed.claims]
step = "rows[variant=ours, batch=64].ms | {:.1f} ms"
faster = "rows[variant=bf16, batch=64].ms / rows[variant=ours, batch=64].ms | {:.2f}x"
difference = "other:rows[name=a 4x, b].nll - other:rows[name=original].nll | mean | {}"

[other.claims]
loss = "lost(a 4x, b, wiki) | nats"
"""
SPEED = [
    {"variant": "ours", "batch": 64, "ms": 8.04},
    {"variant": "bf16", "batch": 64, "ms": 16.08},
]
OTHER = [
    {"name": name, "nll": nll, "texts": {"wiki": {"window_nll": nll}}}
    for name, nll in (("original", [1.0, 2.0]), ("a 4x, b", [1.25, 2.25]))
]
PAGE = "A step takes <!--=speed:step-->8.0 ms<!--/-->.\n\n<!-- stale -->\n\n\n<!-- end -->\n"
KERNEL = 'def width():\n    """How wide."""\n    return 64\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    (tmp_path / "benchmarks/claims.toml").write_text(REGISTRY)
    for name, rows in (("speed", SPEED), ("other", OTHER)):
        (tmp_path / f"benchmarks/results/{name}.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "kernel.py").write_text(KERNEL)
    claims = Claims(tmp_path)
    claims.versions.decide("kernels", "the first measurement", same=True)
    claims.versions.measured("speed", ["kernels"])
    return tmp_path


def test_a_number_is_drawn_from_its_file(root: Path) -> None:
    claims = Claims(root)
    assert filled(PAGE, claims) == PAGE and not claims.versions.undecided()
    assert claims.shown("speed", "faster") == "2.00x"
    assert claims.shown("speed", "difference") == "0.25" and claims.shown("other", "loss") == ".250"
    assert "command:  python bench.py" in claims.described("speed", "step")


def test_a_row_that_was_measured_again_has_versions_of_its_own(root: Path) -> None:
    rows = [SPEED[0] | {"versions": {"device": "new"}}, SPEED[1]]
    report = {"rows": rows, "versions": {"device": "old"}}
    (root / "benchmarks/results/speed.json").write_text(json.dumps(report))
    assert "versions: device new" in Claims(root).described("speed", "step")


def test_another_number_on_the_page_is_red(root: Path) -> None:
    assert filled(PAGE.replace("8.0", "7.9"), Claims(root)) == PAGE


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (("speed:step", "speed:nothing"), "claims.toml has no `nothing` in [speed.claims]"),
        (("speed:step", "slow:step"), "there is no benchmarks/results/slow.json"),
    ],
    ids=["key", "file"],
)
def test_what_a_page_names_and_is_missing_is_red(
    root: Path, broken: tuple[str, str], message: str
) -> None:
    with pytest.raises(ClaimError, match=re.escape(message)):
        filled(PAGE.replace(*broken), Claims(root))


def test_a_row_missing_in_the_results_is_red(root: Path) -> None:
    (root / "benchmarks/results/speed.json").write_text(json.dumps({"rows": SPEED[1:]}))
    with pytest.raises(ClaimError, match=re.escape("speed.json has no `rows[variant=ours")):
        filled(PAGE, Claims(root))


def test_two_rows_of_a_name_are_red(root: Path) -> None:
    (root / "benchmarks/results/speed.json").write_text(json.dumps({"rows": SPEED * 2}))
    with pytest.raises(ClaimError, match="has no"):
        filled(PAGE, Claims(root))


def test_changed_code_is_red_until_somebody_judges_it(root: Path) -> None:
    (root / "kernel.py").write_text(KERNEL.replace("64", "128"))
    claims = Claims(root)
    assert claims.versions.undecided() == {"kernels": ["kernel.py"]}
    claims.versions.decide("kernels", "the width is of no account", same=True)
    assert not Claims(root).versions.undecided() and filled(PAGE, Claims(root)) == PAGE


def test_a_stale_number_without_its_mark_is_red(root: Path) -> None:
    Claims(root).versions.decide("kernels", "twice as wide", same=False)
    marked = filled(PAGE, Claims(root))
    assert marked != PAGE and "8.0 ms†<!--/-->" in marked
    assert "twice as wide (`speed.json`)" in marked and filled(marked, Claims(root)) == marked
    with pytest.raises(ClaimError, match="needs `<!-- stale -->`"):
        filled(PAGE.split("\n")[0], Claims(root))


def test_a_mark_that_is_no_longer_true_is_red(root: Path) -> None:
    Claims(root).versions.decide("kernels", "twice as wide", same=False)
    marked = filled(PAGE, Claims(root))
    Claims(root).versions.measured("speed", ["kernels"])
    assert filled(marked, Claims(root)) == PAGE != marked


def test_some_rows_may_be_measured_again_alone(root: Path) -> None:
    versions = Claims(root).versions
    versions.decide("kernels", "twice as wide", same=False)
    versions.measured("speed", ["kernels", "other"], "other")
    assert versions.files["speed"] == {"kernels": 1, "other": 1}
    versions.measured("speed", ["kernels", "other"], "kernels")
    assert versions.files["speed"] == {"kernels": 2, "other": 1}


def test_only_the_rows_that_code_decides_are_marked(root: Path) -> None:
    some = '\n[speed.some]\n"kernels" = ["rows & ours"]\n\n[speed.claims]'
    theirs = '\ntheirs = "rows[variant=bf16, batch=64].ms | {:.1f}"'
    text = REGISTRY.replace('code = ["kernels"]\n', "").replace("\n[speed.claims]", some + theirs)
    (root / "benchmarks/claims.toml").write_text(text)
    Claims(root).versions.decide("kernels", "twice as wide", same=False)
    claims = Claims(root)
    assert claims.shown("speed", "step") == "8.0 ms†" and claims.shown("speed", "theirs") == "16.1"
    assert claims.mark("speed", "rows", "ours") == "†" and not claims.mark("speed", "ours")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (KERNEL.replace("How wide.", "The width."), True),
        ("import math\n\n\n" + KERNEL.replace("64", "64  # a tile"), True),
        (KERNEL.replace("width()", "width() -> int"), True),
        (KERNEL + '\n\ndef check():\n    raise ValueError("old")\n', False),
        (KERNEL.replace("64", "32"), False),
        (KERNEL.replace("width", "height"), False),
    ],
    ids=["docstring", "comment and import", "annotation", "function", "constant", "name"],
)
def test_a_digest_is_of_what_code_computes(tmp_path: Path, text: str, same: bool) -> None:
    (tmp_path / "before.py").write_text(KERNEL)
    (tmp_path / "after.py").write_text(text)
    assert (digest(tmp_path, "before.py") == digest(tmp_path, "after.py")) is same


def test_a_digest_may_be_of_one_function(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(KERNEL)
    before = digest(tmp_path, "x.py:width")
    (tmp_path / "x.py").write_text("other = 1\n\n\n" + KERNEL)
    assert digest(tmp_path, "x.py:width") == before
    assert digest(tmp_path, "x.py:depth") == digest(tmp_path, "y.py") == "missing"


def test_comments_of_cuda_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("int n = 4;  // tiles\n/* none */ int m;")
    (tmp_path / "b.cu").write_text("int n = 4; int m;")
    assert digest(tmp_path, "a.cu") == digest(tmp_path, "b.cu")


# -- of this repository ----------------------------------------------------------------------------


def test_changes_of_watched_code_are_judged() -> None:
    undecided = CLAIMS.versions.undecided()
    assert not undecided, "\n".join(results_tables.undecided(*x) for x in undecided.items())


def test_a_developer_is_told_what_a_change_makes_stale() -> None:
    text = results_tables.undecided("steps under vLLM", ["src/blocks.py"])
    assert "src/blocks.py changed" in text and 'same "steps under vLLM"' in text
    assert "vllm-documents-128-8b.json: README.md, docs/performance.md\n" in text


def test_a_number_is_traced_to_its_file_and_command() -> None:
    found = "\n".join(results_tables.where("vllm-documents-128-8b:bits-4"))
    assert "README.md: " in found and "docs/performance.md: " not in found
    assert "file:     benchmarks/results/vllm-documents-128-8b.json" in found
    assert "command:  python benchmarks/vllm_agents.py" in found
    table = "\n".join(results_tables.where("89.2"))
    assert "docs/quality.md: table `ruler`" in table and "benchmarks/suite_table.py" in table


def test_what_is_stale_is_listed() -> None:
    listed = [*results_tables.stale()]
    marked = {file for page in PAGES for file in files_marked(page)}
    assert marked <= {Path(x.split()[0].rstrip(":")).stem for x in listed}


def files_marked(page: str) -> set[str]:
    """Results files that a page's marks are about."""
    filled((ROOT / page).read_text(encoding="utf-8"))
    return set(CLAIMS.marked)


def test_numbers_show_what_the_results_say() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert filled(text) == text, f"{page}: run python tools/results_tables.py"


def test_every_key_is_on_a_page_and_every_file_exists() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    used = {(file, key) for file, key, _ in CLAIM.findall(text)}
    defined = {
        (file, key) for file, entry in CLAIMS.files.items() for key in entry.get("claims", {})
    }
    assert used == defined
    for file, entry in CLAIMS.files.items():
        assert (ROOT / f"benchmarks/results/{file}.json").exists(), file
        assert set(codes(entry)) <= set(CLAIMS.code), file
        assert set(CLAIMS.versions.files[file]) == set(codes(entry)), f"run .. measured {file}"


def test_every_claim_of_a_page_is_on_a_page_that_is_filled() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    holding = {x.relative_to(ROOT).as_posix() for x in pages if CLAIM.search(x.read_text("utf-8"))}
    assert holding - {"CONTRIBUTING.md"} <= set(PAGES)


def test_numbers_do_not_begin_a_line() -> None:
    """Markdown takes a line that begins with a comment for HTML."""
    for page in PAGES:
        lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
        assert not [x for x in lines if re.match(r"[\s>*\d.-]*<!--=", x)], page


def test_files_that_lab_notes_name_are_there() -> None:
    known = {x.name for x in ROOT.rglob("benchmarks/results/*.json")}
    for page in (ROOT / "docs/lab").glob("*.md"):
        names = re.findall(r"benchmarks/results/([\w.+-]+\.json)", page.read_text("utf-8"))
        assert {*names} <= known, page.name


# -- numbers that no file stands behind ------------------------------------------------------------

UNIT = r"%|ms|µs|us|s|GB|MB|TB/s|nats|requests|sessions|facts|points"
MEASURED = re.compile(
    rf"(?<![\w.,/-])[+-]?(?:\d[\d,]*)?\.?\d+ ?(?:{UNIT})(?![\w/])"
    r"|(?<![\w.])\d*\.\d+x\b|(?<![\w.])\d+x(?= (?:the time|as|faster|slower|less|more))"
    r"|(?<![\w.])\d[\d,]* of \d[\d,]*\b"
)
# What is no measurement, by page: a limit, a setting, what is computed.
ALLOWED = {
    "docs/load-tests.md": {
        "90 %": "of requests: the rule of `sustained`",
        "10 s": "a setting",
        "40 s": "a setting",
        "95 %": "of first tokens and turns: the rule",
        "2 s": "a setting",
        "40 ms": "a setting",
    },
    "docs/performance.md": {
        "24 GB": "a card's memory",
        "95 %": "of first tokens and turns: the rule",
    },
    "docs/recipes.md": {
        "0.9x": "predicted by planning/step_time.py",
        "1.4x": "predicted by planning/step_time.py",
        "2.7x": "predicted by planning/step_time.py",
        "4 of 2": "numbers of heads",
        "8 of 2": "numbers of heads",
    },
    "docs/vllm.md": {"1.33x": "computed from which latents two GPUs store both"},
}


def test_measured_numbers_are_seen() -> None:
    text = "2.1x, 23x the time, +0.2 %, .5 nats, 13 GB, 20.6 ms, 62 of 100, 32 sessions"
    assert len(MEASURED.findall(text)) == len(text.split(", "))
    assert not MEASURED.findall("4x smaller, 64 sequences, 8192 tokens, vLLM 0.25.1, H200, Fig. 5b")


# How many numbers of a page have neither a file nor a reason. These bounds only fall.
BOUNDS = {
    "README.md": 0,
    "docs/quality.md": 0,
    "docs/performance.md": 0,
    "docs/vllm.md": 0,
    "docs/recipes.md": 0,
    "docs/start.md": 0,
    "docs/compress.md": 1,
    "docs/http.md": 2,
    "docs/load-tests.md": 0,
    "docs/paged-cache.md": 2,
    "docs/quantised.md": 1,
    "docs/replicas.md": 2,
}


def unexplained(text: str, allowed: Container[str] = ()) -> Iterator[str]:
    """Measured numbers that a page has without a key, outside its tables of results."""
    for pattern in (MARKED, NOTES, CLAIM, re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)):
        text = pattern.sub("", text)
    text = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    yield from (x for x in MEASURED.findall(text) if x not in allowed)


def test_a_measured_number_without_a_key_is_red() -> None:
    table = "<!-- table: x -->\n| 7 ms |\n<!-- end -->"
    text = f"It takes <!--=speed:step-->8.0 ms<!--/-->, `9 ms`, 3.2 ms on 24 GB.\n{table}\n"
    assert [*unexplained(text, {"24 GB": "a card"})] == ["3.2 ms"]


@pytest.mark.parametrize("page", BOUNDS)
def test_measured_numbers_have_a_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [*unexplained(text, ALLOWED.get(page, {}))]
    assert len(found) <= BOUNDS[page], f"{found}: give them a key, see CONTRIBUTING"


def test_allowed_numbers_are_on_their_pages() -> None:
    for page, numbers in ALLOWED.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not [x for x in numbers if x not in text], page
