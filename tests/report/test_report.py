"""The report: what it says, that it says the same twice, and that it opens in a real browser."""

from __future__ import annotations

import base64
import hashlib
import lzma
import os
import re
import shutil
import socket
import subprocess
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import geometric_mean

import pytest

import tune
from generator.cli.main import main as command
from generator.errors import NormforgeError
from generator.kernels.knobs import KNOBS
from generator.kernels.strategies import Strategy
from generator.kernels.variant import Variant
from generator.package.known_winners import known_winners
from generator.paths import GENERATED, REPOSITORY
from generator.problem import Problem
from generator.report import charts
from generator.report.collect import summaries
from generator.report.page import anchor, render_page, shade
from generator.report.summary import Summary, runners_up
from generator.report.text import render_text
from generator.result import OUTCOMES, Result
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.studies.reader import Study, describe_location, read_studies
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog
from tests.support.committed import committed_studies
from tests.support.patience import patience
from tests.support.searches import quick_proposals
from tests.support.synthetic import TARGET, FakeEvaluator, FakePool, cost

ROOT = REPOSITORY
SHAPES = ("4096x1024:bf16", "8192x1024:bf16", "4096x4096:bf16", "4096x1024:fp32")
NASTY = '<script>alert("7")</script> & more'


class Unlucky(FakeEvaluator):
    """Every fifth variant is wrong, with a note that would be a script in a careless page."""

    def _result(self, variant: Variant) -> Result:
        if int(variant.id[-1], 16) % 5 == 0:
            return Result("wrong", note=NASTY)
        return super()._result(variant)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run over four shapes, one of them tuned by prediction as well."""
    folder = tmp_path_factory.mktemp("run")
    storage, space = open_storage(folder / JOURNAL_NAME), load_space()
    for evidence, shapes in (("predicted", SHAPES[:1]), ("measured", SHAPES)):
        for shape in shapes:
            legal = LegalConfigs(space, Problem.parse(shape), TARGET)
            evaluator = Unlucky(cost, evidence=evidence)
            with quick_proposals():
                search_problem(legal, FakePool(), evaluator, storage, Budget(trials=40))
    return folder


@pytest.fixture(scope="module")
def studies(folder: Path) -> list[Study]:
    return read_studies(folder, importance=True)


@pytest.fixture(scope="module")
def summary(studies: list[Study]) -> Summary:
    [summary] = summaries(studies, "somewhere/studies.journal")
    return summary


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed studies. Every knob is as important in each: to compute how much
    takes long, and the page is as large."""
    shares = dict.fromkeys(KNOBS, 1 / len(KNOBS))
    studies = [
        replace(study, importance=shares)
        for study in committed_studies("h200")
        if study.problem.operation == "rmsnorm_backward"
    ]
    [summary] = summaries(studies, "generated/h200/studies.journal.xz")
    page = tmp_path_factory.mktemp("page") / "report_h200.html"
    page.write_text(render_page(summary), encoding="utf-8")
    return page


class Page(HTMLParser):
    """Tags that are open, identifiers, links and what the browser would load."""

    VOID = ("meta", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        self.attributes |= {name for name, _ in attrs}
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "action", "data", "xlink:href", "poster"):
                self.loads.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_numbers_are_those_of_the_studies(summary: Summary) -> None:
    ratios = [study.winner.result.ratio for study in summary.studies if study.winner]
    assert len(ratios) == len(SHAPES)
    assert summary.ratio == pytest.approx(geometric_mean([ratio for ratio in ratios if ratio]))
    overheads = [study.winner.overhead_of_determinism for study in summary.studies if study.winner]
    known = [overhead for overhead in overheads if overhead]
    assert summary.overhead == pytest.approx(geometric_mean(known))
    assert summary.trials == sum(summary.outcomes.values()) == 40 * len(SHAPES)
    assert list(summary.outcomes) == [o for o in OUTCOMES if o in summary.outcomes]
    wrong = sum(r.result.outcome == "wrong" for s in summary.studies for r in s.records)
    reason = NASTY.replace("7", "…")
    assert ("wrong", reason, wrong) in summary.reasons, "reasons that differ in numbers are one"
    best = min(summary.standings, key=lambda standing: standing.typical)
    assert summary.standings[0] == best
    for standing in summary.standings:
        eligible = standing.strategy.deterministic
        assert eligible == (str(standing.strategy) not in ("atomic", "bulk_reduce (free)"))
        assert not eligible or all(ratio >= 1 for _, ratio in standing.behind)


def test_of_several_studies_of_a_problem_the_measured_one_counts(
    studies: list[Study], summary: Summary
) -> None:
    assert len(studies) == len(SHAPES) + 1
    assert {str(study.problem) for study in summary.studies} == set(SHAPES)
    assert {study.evidence for study in summary.studies} == {"measured"}
    assert summary.left_out == 1
    predicted = next(study for study in studies if study.evidence == "predicted")
    [alone] = summaries([predicted], "x")
    assert "Predicted times are computed" in render_page(alone)
    assert "Predicted times are computed" not in render_page(summary)


def test_words_follow_the_evidence(studies: list[Study], summary: Summary) -> None:
    claims = ("measured side by side", "bits never change", "accurate, the same bits")
    predicted = next(study for study in studies if study.evidence == "predicted")
    assert predicted.winner is not None
    result = replace(predicted.winner.result, extra={"expected_error": 0.07})
    told = replace(predicted, winner=replace(predicted.winner, result=result))
    [alone] = summaries([told], "x")
    page, text = render_page(alone), render_text(alone)
    for claim in claims:
        assert claim in render_page(summary)
        assert claim not in page and claim not in text
    assert "both predicted" in page and "Runners-up" in page
    section = text[text.index("Predicted winners: nothing ran on this GPU") :]
    assert "7%" in section
    assert all(name in section and name in page for name, _ in runners_up(told))
    assert len(runners_up(told)) == 3
    assert "Predicted winners" not in render_text(summary)


def test_gpus_have_summaries_of_their_own(studies: list[Study]) -> None:
    other = replace(studies[1], gpu="h100")
    assert [s.gpu for s in summaries([*studies, other], "x")] == ["h100", "h200"]


def test_a_study_without_finals_is_shown_as_such(studies: list[Study]) -> None:
    [running] = summaries([replace(studies[1], winner=None, finals=(), importance={})], "x")
    assert "no winner yet" in render_page(running)
    assert "none yet" in render_text(running)
    [hopeless] = summaries(
        [
            replace(
                studies[1],
                winner=None,
                records=(replace(studies[1].records[0], result=Result("crashed", note="gone")),),
                importance={},
            )
        ],
        "x",
    )
    assert "crashed" in render_page(hopeless)
    assert "crashed" in render_text(hopeless)


def test_the_page_is_well_formed_and_every_link_inside_it_leads_somewhere(
    summary: Summary,
) -> None:
    page = Page(render_page(summary))
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    inside = [link[1:] for link in page.links if link.startswith("#")]
    assert set(inside) <= set(page.ids)
    assert {anchor(study) for study in summary.studies} <= set(inside)
    bars = len(summary.knobs) + len(summary.outcomes)
    assert page.tags["svg"] == len(SHAPES) + 1 + bars
    assert page.tags["script"] == 1, "what a note says stays text"


def test_every_section_folds_and_the_first_is_open(summary: Summary) -> None:
    page = render_page(summary)
    sections = re.findall(r'<section id="(\w+)">\n<details( open)?>\n<summary><h2>', page)
    assert [f"#{name}" for name, _ in sections] == Page(page).links[: page.count("<section")]
    assert [name for name, opened in sections if opened] == ["winners"]


def test_what_a_crafted_journal_says_stays_text(summary: Summary) -> None:
    evil = '"><script>evil()</script><img onerror="evil()" class="'

    def crafted(study: Study) -> Study:
        assert study.winner is not None
        config = dict.fromkeys(study.winner.config, evil)
        config |= {knob: study.winner.config[knob] for knob in ("strategy", "order")}
        tied = tuple(replace(f, variant=evil, config=config) for f in study.winner.tied)
        free = replace(tied[0], variant=evil)
        result = replace(study.winner.result, checks=(evil,), determinism=evil)
        winner = replace(
            study.winner,
            **{"variant": evil, "config": config, "tied": tied, "reason": evil, "result": result},
            **{"fastest_nondeterministic": free, "evidence": evil, "date": evil},
        )
        importance = {evil: max(study.importance.values())}
        return replace(study, winner=winner, gpu=evil, evidence=evil, importance=importance)

    plain = Page(render_page(summary))
    studies = tuple(map(crafted, summary.studies))
    page = Page(render_page(replace(summary, gpu=evil, place=evil, studies=studies)))
    assert page.open == []
    assert page.tags["script"] == 1 and page.tags["img"] == 0
    assert page.attributes == plain.attributes
    standing = replace(summary.standings[0], strategy=Strategy(evil, (), way=""))
    assert Page(str(charts.strategies([standing]))).tags["script"] == 0


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone(summary: Summary) -> None:
    text = render_page(summary)
    assert "unsafe" not in text
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in text
    assert "style" not in Page(text).attributes, "the policy would ignore it"


def test_a_study_of_another_program_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / JOURNAL_NAME).read_text()
    for old, new in (("column_slices", "column_slicer"), ('"origin"', '"source"')):
        (tmp_path / JOURNAL_NAME).write_text(re.sub(r',"seal":"\w+"', "", text).replace(old, new))
        assert tune.main(["report", "--out", str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "cannot be read" in said and said.count("\n") == 1


def test_every_strategy_has_its_colours_in_light_and_dark(summary: Summary) -> None:
    page = render_page(summary)
    for place, name in enumerate(KNOBS["strategy"].domain):
        assert page.count(f"--s-{place}: #") == page.count(f"--d-{place}: #") == 2
        assert f"td.s-{name}, b.s-{name} {{ background: var(--s-{place})" in page
        assert f"circle.s-{name} {{ fill: var(--d-{place})" in page


def test_the_page_loads_nothing(summary: Summary) -> None:
    text = render_page(summary)
    assert "default-src 'none'" in text
    assert [load for load in Page(text).loads if not load.startswith("data:")] == []
    assert re.search(r"url\(|@import|fetch\(|XMLHttp|import\(", text) is None


def test_text_and_page_say_the_same(summary: Summary) -> None:
    page, text = render_page(summary), render_text(summary)
    for study in summary.studies:
        assert study.winner is not None
        assert study.winner.result.ratio is not None
        for said in (str(study.problem), f"{study.winner.result.ratio:.3f}"):
            assert said in page
            assert said in text
    for knob in summary.knobs:
        assert f"{100 * knob.share:.1f} %" in page
        assert f"{knob.share:.1%}" in text
    for outcome in summary.outcomes:
        assert outcome in page
        assert outcome in text


@pytest.mark.parametrize("trials", [1, 2])
def test_two_trials_tell_of_knobs_and_one_does_not_and_neither_warns(
    tmp_path: Path, trials: int
) -> None:
    problem, storage = Problem.parse(SHAPES[0]), open_storage(tmp_path / JOURNAL_NAME)
    legal = LegalConfigs(load_space(), problem, TARGET)
    search_problem(legal, FakePool(), FakeEvaluator(), storage, Budget(trials=trials))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [study] = read_studies(tmp_path, importance=True)
    assert (len(study.records), bool(study.importance)) == (trials, trials == 2)


def test_trials_that_are_out_of_date_say_nothing_about_knobs(folder: Path, tmp_path: Path) -> None:
    storage = open_storage(Path(shutil.copy(folder / JOURNAL_NAME, tmp_path)))
    for entry in storage.get_all_studies():
        log = StudyLog(storage, entry.study_name)
        log.mark_outdated([trial.number for trial in log.trials()[1:]])
    assert {len(study.importance) for study in read_studies(tmp_path, importance=True)} == {0}


def test_importance_is_a_share_of_one_over_the_knobs_of_the_space(studies: list[Study]) -> None:
    for study in studies:
        assert sum(study.importance.values()) == pytest.approx(1)
        assert study.importance.keys() <= {knob.name for knob in load_space().knobs}


def test_a_knob_that_means_nothing_in_the_fastest_trials_has_no_importance(
    studies: list[Study],
) -> None:
    """Its value there only repeats which strategy or pipeline it does not belong to."""
    space, found = load_space(), 0
    for study in studies:
        fastest = [r.config for r in study.by_time[: len(study.by_time) // 10 + 1]]
        known = [space.active_knobs(config, study.problem, TARGET) for config in fastest]
        for name in {knob.name for knob in space.knobs}.difference(*known):
            found += 1
            assert study.importance.get(name, 0.0) == 0.0, (study.name, name)
    assert found > 4


@pytest.mark.parametrize(("value", "index"), [(1.0, 0), (1.01, 1), (9.0, 2)])
def test_a_value_on_the_edge_of_a_shade_belongs_to_it(value: float, index: int) -> None:
    assert shade(value, (1.0, 2.0)) == index


@pytest.mark.parametrize("damage", ["packed", "record"])
def test_damage_of_packed_studies_names_the_packed_file(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    """The file that it is unpacked to is gone by then."""
    content = (folder / JOURNAL_NAME).read_bytes()
    if damage == "record":
        content = b"}garbage{\n" + content
    packed = tmp_path / f"{JOURNAL_NAME}.xz"
    compressed = lzma.compress(content, preset=0)
    packed.write_bytes(compressed[:-50] if damage == "packed" else compressed)
    with pytest.raises(NormforgeError) as caught:
        read_studies(tmp_path)
    assert f"the study file {packed} is corrupt" in str(caught.value)
    assert str(caught.value).count(str(packed.parent)) == str(caught.value).count("/studies.")


def test_reading_packed_studies_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:

    packed = tmp_path / f"{JOURNAL_NAME}.xz"
    packed.write_bytes(lzma.compress((folder / JOURNAL_NAME).read_bytes(), preset=0))
    assert len(read_studies(tmp_path)) == len(SHAPES) + 1
    assert list(tmp_path.iterdir()) == [packed]


def test_a_place_without_studies_is_told(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="no studies in"):
        read_studies(tmp_path)
    open_storage(tmp_path / JOURNAL_NAME)
    (tmp_path / JOURNAL_NAME).touch()
    with pytest.raises(NormforgeError, match="no study with finished trials"):
        read_studies(tmp_path)


def test_a_database_without_a_file_is_told_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="there is no such file"):
        read_studies(f"sqlite:///{tmp_path}/typo.db")
    assert list(tmp_path.iterdir()) == []
    open_storage(f"sqlite:///{tmp_path}/studies.db")
    with pytest.raises(NormforgeError, match="no study with finished trials"):
        read_studies(f"sqlite:///{tmp_path}/studies.db")


def test_a_password_is_never_shown() -> None:
    url = "postgresql+psycopg://me:secret@db.example:5432/runs?sslmode=require"
    assert describe_location(url) == "postgresql+psycopg://db.example:5432/runs"


def test_the_command_writes_the_page_and_prints_the_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(["report", "--out", str(folder), "--html", str(tmp_path)]) == 0
    page = tmp_path / f"report_{TARGET.name}.html"
    said = capsys.readouterr().out
    assert str(page) in said
    assert SHAPES[0] in said
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert tune.main(["report", "--out", str(folder), "--gpu", "a100"]) == 2
    assert "no studies of a100" in capsys.readouterr().err
    assert tune.main(["report"]) == 2
    assert "--gpu" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_of_all_studies_is_small(committed: Path) -> None:
    assert committed.stat().st_size < 2_000_000
    winners = known_winners(GENERATED / "h200" / "rmsnorm_backward")
    assert committed.read_text(encoding="utf-8").count("<article") == len(winners)


# ---- In a browser -----------------------------------------------------------------------------

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium (or chromium-browser)"
)


@contextmanager
def recording_proxy() -> Iterator[tuple[int, list[str]]]:
    """A port that browsers take for their proxy, and the requests that arrive there."""
    requests: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(2)
                    try:
                        requests.append(connection.recv(4096).decode(errors="replace"))
                    except OSError:
                        requests.append("")

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1], requests
        server.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=patience(10))


def browse(
    url: str, tmp_path: Path, *options: str, width: int = 1280
) -> tuple[str, str, list[str]]:
    """The page's DOM after its scripts have run, what the console said, and the requests of the
    page. Every host, this one too, is behind the proxy."""
    assert CHROMIUM is not None
    with recording_proxy() as (port, requests):
        done = subprocess.run(
            [
                *(CHROMIUM, "--headless=new", "--disable-gpu", "--no-first-run"),
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                *("--disable-background-networking", "--disable-component-update"),
                *("--disable-sync", "--disable-default-apps", "--disable-dev-shm-usage"),
                *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"),
                *(f"--proxy-server=http://127.0.0.1:{port}", "--proxy-bypass-list=<-loopback>"),
                *("--enable-logging=stderr", "--virtual-time-budget=3000", *options),
                *("--dump-dom", url),
            ],
            capture_output=True,
            text=True,
            timeout=patience(120),
        )
    assert done.returncode == 0, done.stderr
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, said, requests


def asked_for(requests: list[str], host: str) -> bool:
    return any(host in request for request in requests)


@in_browser
@pytest.mark.slow
def test_the_page_opens_and_no_request_leaves_it(committed: Path, tmp_path: Path) -> None:
    text = committed.read_text(encoding="utf-8")
    # Its policy is not the reason: there is nothing to ask for.
    lax = tmp_path / "lax.html"
    lax.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text), encoding="utf-8")
    dom, said, requests = browse(f"{lax.as_uri()}#study-4096x4096-bf16", tmp_path)
    assert "http-equiv" not in dom
    assert said == ""
    details = re.search(r"<details[^>]*>", dom[dom.index('id="study-4096x4096-bf16"') :])
    assert details is not None
    assert details.group() == '<details open="">', "the script of the page did not run"
    # Chromium itself asks its maker for the time and the like; the page does not know that name.
    assert "google" not in text
    first_lines = [request.split("\r\n")[0] for request in requests]
    assert [line for line in first_lines if "google" not in line] == []


@in_browser
def test_a_request_would_have_been_seen(tmp_path: Path) -> None:
    careless = tmp_path / "careless.html"
    careless.write_text('<img src="http://tracker.invalid/pixel.png">')
    _, _, requests = browse(careless.as_uri(), tmp_path)
    assert asked_for(requests, "tracker.invalid")


@in_browser
@pytest.mark.parametrize(
    ("link", "opened"),
    [("", ["winners"]), ("knobs", ["winners", "knobs"]), ("study", ["winners", "studies", ""])],
)
def test_a_link_opens_the_section_that_it_leads_to(
    summary: Summary, tmp_path: Path, link: str, opened: list[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(summary), encoding="utf-8")
    study = anchor(summary.studies[0])
    dom, said, _ = browse(f"{page.as_uri()}#{study if link == 'study' else link}", tmp_path)
    assert said == ""
    found = re.findall(r'(?:<section id="(\w+)">\s*)?<details open="">', dom)
    assert found == opened


@in_browser
@pytest.mark.slow
def test_the_page_of_all_studies_is_a_few_screens_high(committed: Path, tmp_path: Path) -> None:
    page = tmp_path / "high.html"
    script = "<script>document.title = document.documentElement.scrollHeight</script>"
    policy = '<meta http-equiv="Content-Security-Policy"'  # which would stop the script
    page.write_text(committed.read_text(encoding="utf-8").replace(policy, "<meta") + script)
    dom, _, _ = browse(page.as_uri(), tmp_path)
    assert int(re.search(r"<title>(\d+)", dom).group(1)) < 6000  # type: ignore[union-attr]


@in_browser
@pytest.mark.slow
def test_the_policy_of_the_page_stops_what_it_should_not_load(
    committed: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.html"
    text = committed.read_text(encoding="utf-8")
    broken.write_text(text.replace("<h1>", '<img src="http://tracker.invalid/pixel.png"><h1>'))
    _, said, requests = browse(broken.as_uri(), tmp_path)
    assert "Content Security Policy" in said
    assert not asked_for(requests, "tracker.invalid")
    for inserted in ("<script>console.log('evil ran')</script>", "<i style='color:red'>x</i>"):
        broken.write_text(text.replace("<h1>", f"{inserted}<h1>"))
        _, said, _ = browse(broken.as_uri(), tmp_path)
        assert "Content Security Policy" in said
        assert "evil ran" not in said.replace(inserted, "")


@in_browser
@pytest.mark.slow
def test_the_page_fits_a_narrow_window(committed: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.html"
    script = (
        "<script>document.title = `${document.documentElement.scrollWidth}/${innerWidth}`</script>"
    )
    policy = '<meta http-equiv="Content-Security-Policy"'  # which would stop the script
    narrow.write_text(committed.read_text(encoding="utf-8").replace(policy, "<meta") + script)
    dom, _, _ = browse(narrow.as_uri(), tmp_path, width=500)
    content, window = map(int, re.search(r"<title>(\d+)/(\d+)", dom).groups())  # type: ignore[union-attr]
    assert content <= window <= 500


def test_the_dashboard_command_names_the_file_not_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """optuna-dashboard opens a journal; a packed one is unpacked first."""
    assert command(["report", "--gpu", "gb200", "--html", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    journal = GENERATED / "gb200" / JOURNAL_NAME
    unpack = "" if journal.exists() else f"xz -dk {journal}.xz && "
    assert f"Every trial: {unpack}optuna-dashboard {journal}\n" in said
