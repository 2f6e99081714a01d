"""The page of a report: whole in one file, made of the JSON alone, the model's text as text."""

import itertools
import json
import re
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from moe_compile.cli import main
from moe_compile.config import CHOICES, MegaMoEConfig
from moe_compile.journal.entries import GraphText, Journal
from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import REMEDIES
from moe_compile.report.compilations import Compilation
from moe_compile.report.page import page_data, page_of
from moe_compile.report.process_report import ProcessReport, report_of, texts_of
from moe_compile.report.timelines import timelines_of
from moe_compile.schedule import timeline as schedule_timeline
from moe_compile.schedule.simulate import COMPUTE
from moe_compile.schedule.timeline import keep_timeline, kept_timeline, stream_name
from moe_compile.schedule.timeline_data import AFTER, AS_WRITTEN, BEFORE, packed, unpacked
from tests.test_visible import LAYER, explained

UNSTABLE = LAYER.replace("argsort(labels, stable=True)", "argsort(labels)")
NOT_COUNTED = LAYER.replace(
    "got = received.view(self.ranks, -1).sum(1).tolist()", "sent, got = [250, 262], [256, 256]"
)
HOSTILE = "</script><img src=x onerror=alert(1)>.py:3 in forward"
MOST_BYTES = 3_000_000


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


@pytest.fixture(scope="module")
def explanation(fake_ranks, tmp_path_factory):
    return explained(LAYER, fake_ranks, tmp_path_factory.mktemp("layer"), chunks=2)


@pytest.fixture(scope="module")
def page(explanation, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "new" / "page.html"
    assert explanation.html(path) == path
    return path


def one_launch(**launch):
    """Return a report on a graph with one collective of 8 us, half of it alone."""
    known = {"node": 0, "stream": "link 0", "bytes": 64, "region": "", "is_moved": False}
    known |= {"reason": "", "detail": "", **launch}
    run = {"step_us": 12.0, "exposed_us": 4.0, "peak_bytes": 64, "memory": [[0.0, 64, 0]]}
    run["spans"] = [[0, "link 0", 4.0, 8.0], [1, "compute", 0.0, 8.0]]
    nodes = [["exchange", "c10d::all_to_all_single", HOSTILE, "collective"]]
    nodes += [["mm", "aten::mm", "a.py:4 in forward", "product"]]
    timeline = {"nodes": nodes, "launches": [known], "runs": {BEFORE: run, AFTER: run}}
    record = {"site": HOSTILE, "phase": "forward", "launches": {}, "measures": {}}
    named = keep_timeline(packed({**timeline, "uncapped_us": 9.5}), is_cached=False)
    return [{**record, "timeline": named}]


def test_a_page_is_one_file_that_loads_nothing(page):
    text = page.read_text()
    assert "default-src 'none'" in text and len(text) < MOST_BYTES
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]  # a name
    assert not re.findall(r"<(?:link|script|img)[^>]*(?:src|href)=(?!\"data:)", text)
    assert "fetch(" not in text and "XMLHttpRequest" not in text and "@import" not in text


def test_a_page_has_each_collective_with_its_verdict_and_each_pass_that_changed_a_graph(
    page, explanation
):
    data = data_of(page.read_text())
    forward, backward = data["graphs"]
    assert [len(graph["launches"]) for graph in (forward, backward)] == [5, 4]
    for launch in (*forward["launches"], *backward["launches"]):
        assert launch["verdict"] and launch["where"].startswith("visible.py")
        asks = launch["change"] and not launch["change"].startswith("nothing")
        assert bool(launch["gain"]) == bool(asks)
    last = forward["launches"][-1]
    assert last["change"] == REMEDIES[Reason.NO_INDEPENDENT_COMPUTE]
    assert (
        last["gain"]
        == f"at most {last['alone_us'] / 1e3:.3f} ms, the time in which it runs alone now"
    )
    assert [run["name"] for run in forward["runs"]] == [AS_WRITTEN, BEFORE, AFTER]
    steps = {t["graph"]: [step["step"] for step in t["steps"]] for t in data["texts"]}
    assert "rewrite_regions" in steps["dynamo"] and "schedule_exchanges" in steps["forward"]
    assert re.search(r"Predicted time of these graphs.*-\d+\.\d%", data["times"])


def test_every_line_of_a_graph_that_the_model_made_names_the_users_line(explanation):
    (dynamo,) = (t for t in unpacked(explanation.report["graph_texts"]) if t["graph"] == "dynamo")
    made = [line for line in dynamo["lines"] if not line.startswith(("input ", "return "))]
    assert made and all("  # visible.py:" in line for line in made)
    exchanges = [line for line in made if "all_to_all_single(" in line]
    places = [int(re.search(r"# visible\.py:(\d+) in forward$", line)[1]) for line in exchanges]
    assert places == [23, 27, 37]


LINES = st.lists(st.sampled_from("abcde"), max_size=6)


@given(st.lists(LINES, min_size=1, max_size=5))
def test_changes_of_each_step_lead_from_the_first_lines_to_its_own(steps):
    texts = [GraphText("joint", str(i), tuple(lines)) for i, lines in enumerate(steps)]
    (found,) = texts_of([Compilation(site="a.py:3", journal=Journal(texts=texts))])
    lines, after = list(found["lines"]), {"0": steps[0]}
    for step in found["steps"]:
        for begin, end, others in reversed(step["changes"]):
            lines[begin:end] = others
        after[step["step"]] = list(lines)
    known = steps[0]
    for i, own in enumerate(steps):
        known = after.get(str(i), known)  # a step that changes no line is left out
        assert known == own


def test_times_and_peaks_of_a_timeline_are_those_of_the_report(explanation):
    for graph, timeline in zip(
        explanation.report["graphs"], timelines_of(explanation.report), strict=True
    ):
        before, after = timeline.run(BEFORE), timeline.run(AFTER)
        for run, end in ((before, "_before"), (after, "")):
            assert run.exposed_us == pytest.approx(graph[f"exposed_us{end}"], abs=0.02)
            assert run.peak_bytes == graph[f"peak_bytes{end}"]
            assert max(live for _, live, _ in run.memory) == run.peak_bytes
            ends = max(start + length for _, _, start, length in run.spans)
            assert ends == pytest.approx(run.step_us, abs=0.03)
            stood = run.exposed_us - graph.get("host_us", 0.0)  # nothing slows the other on a CPU
            assert sum(run.waited_us().values()) == pytest.approx(stood, abs=0.1)
            for stream in run.streams():
                spans = sorted(s[2:] for s in run.spans if s[1] == stream)
                assert all(a + b <= c + 0.03 for (a, b), (c, _) in itertools.pairwise(spans))


def test_the_trace_beside_a_page_has_every_span_of_every_run(page, explanation):
    events = json.loads(page.with_suffix(".trace.json").read_text())["traceEvents"]
    runs = [run for graph in timelines_of(explanation.report) for run in graph.runs]
    assert sum(e["ph"] == "X" for e in events) == sum(len(run.spans) for run in runs)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(names) == len(runs) == 6
    (dispatch, *_) = (e for e in events if e["ph"] == "X" and ":27" in e["name"])
    assert dispatch["args"]["line"] == "visible.py:27 in forward"


@pytest.mark.parametrize(
    ("layer", "reason", "lines"),
    [(UNSTABLE, Reason.UNSTABLE_SORT, {27, 37}), (NOT_COUNTED, Reason.NO_COUNT_EXCHANGE, {27})],
    ids=["refused", "not found"],
)
def test_a_change_of_code_gains_at_most_what_is_alone(fake_ranks, tmp_path, layer, reason, lines):
    """All exchanges of a region count, each forward and backward; of others those of a line."""
    data = page_data(explained(layer, fake_ranks, tmp_path, chunks=2).report)
    exchange = data["exchanges"][0]
    assert exchange["change"] == REMEDIES[reason] and ":27" in exchange["where"]
    launches = [launch for graph in data["graphs"] for launch in graph["launches"]]
    places = {f"visible.py:{line} in forward" for line in lines}
    alone = [launch["alone_us"] for launch in launches if launch["where"] in places]
    assert len(alone) == 2 * len(lines)
    assert exchange["gain"] == (
        f"at most {sum(alone) / 1e3:.3f} ms, the time in which these {len(alone)} collectives run "
        "alone now"
    )


def test_a_price_of_the_remedy_is_said_where_there_is_one():
    capped = page_data(report_of([], one_launch(reason="MEMORY_CAP"), hardware="cpu"))
    (launch,) = capped["graphs"][0]["launches"]
    assert launch["gain"] == "0.003 ms of this graph, if memory allows the fastest order"
    assert launch["alone_us"] == 4.0 and launch["us"] == 8.0
    done = page_data(report_of([], one_launch(reason="ALREADY_DONE"), hardware="cpu"))
    assert done["graphs"][0]["launches"][0]["gain"] == ""
    advice = [{"candidate": "2 chunks", "predicted_us": 6e3, "is_lossy": True}]
    decision = {"predicted_us": 8e3, "advice": advice}
    region = {"where": "a.py:3", "verdict": "left whole", "remarks": [], "to_do": []}
    region |= dict.fromkeys(("num_chunks", "num_local_experts", "num_ranks", "num_host_reads"), 1)
    exchange = {"where": "a.py:3", "is_found": True, "what": "", "because": "", "change": ""}
    report = report_of([], [], hardware="cpu")
    report |= {"regions": [{**region, "decision": decision}], "exchanges": [exchange]}
    (found,) = page_data(report)["exchanges"]
    assert found["gain"] == "2.000 ms by 2 chunks, not chosen because it changes bits"
    assert page_data(report)["headline"] == "megamoe: rewritten, without predicted times"
    report |= {"regions": [], "exchanges": [{**exchange, "change": "write stable=True"}]}
    assert page_data(report)["headline"] == "megamoe: nothing is rewritten"
    assert page_data(report)["exchanges"][0]["gain"].startswith("not predicted: no graph")


def test_what_auto_would_choose_has_its_predicted_gain(explanation, tmp_path):
    path = explanation.html(tmp_path / "page.html", compare=True)
    asked, *others = data_of(path.read_text())["choices"]
    assert asked["name"] == "as asked" and asked["what"].startswith("2 chunks")
    assert [one["name"] for one in others] == list(CHOICES["numerics"])
    graphs = data_of(path.read_text())["graphs"]
    now = sum(graph["runs"][-1]["step_us"] for graph in graphs)
    assert asked["step_us"] == pytest.approx(now, rel=1e-4)
    assert others[0]["step_us"] <= asked["step_us"]


def test_a_link_is_called_as_the_mesh_calls_its_group(fake_ranks):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "experts"))
    name = mesh["experts"].get_group().group_name
    assert stream_name(name) == f"link experts ({name})"
    assert stream_name(fake_ranks.group_name) == f"link {fake_ranks.group_name}"
    assert stream_name("gone") == "link gone" and stream_name(COMPUTE) == "compute"


def test_a_timeline_lies_beside_the_code_of_its_graph(tmp_path, monkeypatch):
    """Another process finds it there, as it finds the code; without it the page says so."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(schedule_timeline, "_KNOWN", OrderedDict())
    alone, cached = (keep_timeline(packed([i]), is_cached=bool(i)) for i in (0, 1))
    assert len(cached) == 32 and unpacked(kept_timeline(alone)) == [0]
    schedule_timeline._KNOWN.clear()
    assert unpacked(kept_timeline(cached)) == [1]
    assert kept_timeline(alone) == "" == kept_timeline("")
    record = {"site": "a.py:3", "phase": "forward", "launches": {"0": ["a"]}, "measures": {}}
    report = report_of([], [{**record, "timeline": alone}], hardware="cpu")
    assert "comes from a cache without them" in page_data(report)["no_timelines"]


def test_text_of_the_model_stays_text():
    page = page_of(report_of([], one_launch(), hardware="cpu"))
    assert "<img" not in page and page.count("</script>") == 2
    assert data_of(page)["graphs"][0]["launches"][0]["where"] == HOSTILE
    assert "innerHTML" not in page and "document.write" not in page


def test_a_report_whose_path_is_of_a_page_is_written_as_both(tmp_path):
    report = ProcessReport()
    path = tmp_path / "new" / "report.html"
    report.paths.add(path)
    report.write()
    assert json.loads(path.with_suffix(".json").read_text())["regions"] == []
    assert "no text of graphs" in data_of(path.read_text())["no_texts"]
    assert MegaMoEConfig(report=str(path)).digest_text() == MegaMoEConfig().digest_text()


def test_a_report_of_a_job_is_explained_and_written_as_a_page(explanation, tmp_path, capsys):
    path, page = tmp_path / "report.json", tmp_path / "page.html"
    path.write_text(json.dumps(explanation.report))
    assert main(["explain", str(path), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "megamoe: 1 graph, 1 exchange, 1 found" in said and str(page) in said
    assert data_of(page.read_text())["graphs"] == page_data(explanation.report)["graphs"]


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON"])
def test_what_is_no_report_is_refused(tmp_path, capsys, text):
    path = tmp_path / "report.json"
    path.write_text(text)
    assert main(["explain", str(path)]) == 2
    assert "is not a report of megamoe" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", str(path), "--html", "page.pdf"])
    assert "write a name that ends in .html" in capsys.readouterr().err


def test_a_picture_has_the_timelines(explanation, tmp_path):
    pytest.importorskip("matplotlib")
    from moe_compile.report.timeline_picture import draw_report  # noqa: PLC0415

    draw_report(explanation.report, tmp_path / "timelines.png")
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "timelines.png").stat().st_size > 10_000
