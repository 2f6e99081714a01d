import dataclasses
import json
import random

import pytest

pytest.importorskip("matplotlib", reason="pip install megamoe[dev]")

from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence.compare import LAST, SEEDS, SHARE, TREND, compare, slope_of
from benchmarks.convergence.jobs import (
    BASELINE,
    COMMON,
    MODELS,
    WAYS,
    Ended,
    Job,
    check_rewrites,
    ended,
    flags_of,
    train,
)
from benchmarks.convergence.picture import draw

STEPS = 120
DEMO = MODELS[0]
FED = next(way for way in WAYS if "feed_products" in way.passes)


def noise(seed, size=0.01):
    draws = random.Random(seed)
    return [draws.gauss(0.0, size) for _ in range(STEPS)]


def runs(change=lambda step: 0.0, noisy=0, size=0.01):
    """Losses of five seeds that end 0.1 apart, `change` added and noise of `noisy` + seed."""
    return {
        seed: [5.0 - 0.01 * t + 0.1 * seed + change(t) + n
               for t, n in enumerate(noise(noisy + seed, size))]
        for seed in range(1, 6)
    }  # fmt: skip


def test_noise_alone_is_close_and_level():
    found = compare(runs(noisy=10), runs())
    assert found.spread == pytest.approx(0.1 * 2.5**0.5, abs=0.01)
    assert found.is_close
    assert found.is_level


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_difference_of_half_the_spread_between_seeds_is_not_close(sign):
    spread = compare(runs(noisy=10), runs()).spread
    near = compare(runs(lambda _: sign * 0.8 * SHARE * spread, 10), runs())
    far = compare(runs(lambda _: sign * 1.2 * SHARE * spread, 10), runs())
    assert near.is_close
    assert not far.is_close
    assert far.difference == pytest.approx(sign * 0.6 * spread, abs=0.005)
    assert far.is_level  # it is the same at every step


def test_a_difference_that_grows_is_a_trend_however_small():
    grows = compare(runs(lambda step: 2e-4 * (step - 110), 10), runs())
    assert grows.is_close
    assert not grows.is_level
    assert grows.slope == pytest.approx(2e-4 * TREND, abs=0.005)
    assert grows.largest_slope == pytest.approx(4.604 * grows.slope_error)


def test_what_differed_before_the_last_hundred_steps_is_no_trend():
    early = compare(runs(lambda step: 1.0 if step < STEPS - TREND else 0.0, 10), runs())
    assert early.is_close
    assert early.is_level


def test_a_line_has_its_slope():
    assert slope_of([3.0 - 0.5 * t for t in range(9)]) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: {s: r[s] for s in (1, 2)}, "compare 3 to 10"),
        (lambda r: {s: v[:LAST] for s, v in r.items()}, "a trend is of 100"),
    ],
)
def test_runs_that_tell_nothing_are_an_error(change, says):
    with pytest.raises(ValueError, match=says):
        compare(change(runs(noisy=10)), change(runs()))
    assert SEEDS[0] == 3


def test_a_run_with_all_losses_of_bf16_is_an_error():
    other, base = runs(noisy=10), runs()
    other[4] = [*base[4][:-1], base[4][-1] + 1e-5]
    assert compare(other, base).is_close
    other[4] = base[4]
    with pytest.raises(ValueError, match="not rounded otherwise"):
        compare(other, base)


def report(**applied):
    """megamoe's report on two regions, with what passes rewrote."""
    passes = [{"pass": name, "applied": list("ab")[:n]} for name, n in applied.items()]
    return {"regions": [{}, {}], "passes": [*passes, {"pass": "sort_nodes"}]}


def test_a_job_whose_products_were_left_is_an_error():
    done = {"quantize_exchanges": 2, "quantize_products": 2, "feed_products": 2}
    assert check_rewrites(report(**done), FED) == {"regions": 2, **done}
    assert check_rewrites(report(), BASELINE)["quantize_products"] == 0
    for name in done:
        with pytest.raises(RuntimeError, match=f"{name} rewrote 1, not at least 2"):
            check_rewrites(report(**{**done, name: 1}), FED)
        with pytest.raises(RuntimeError, match=f"{name} rewrote 1, not 0"):
            check_rewrites(report(**{name: 1}), BASELINE)
    with pytest.raises(RuntimeError, match="no region"):
        check_rewrites({"regions": [], "passes": []}, BASELINE)


def kept(job, losses):
    machine = {"cpu": "one", "load_average": float(job.seed)}
    return Ended(settings=job.settings, losses=losses, rewrites={}, machine=machine, took_s=60.0)


def keep_all(folder, seeds):
    """Write what jobs of the demo model would leave; return the names of their files."""
    jobs = [Job(model=DEMO, way=w, seed=s, steps=STEPS) for s in seeds for w in WAYS]
    for job in jobs:
        losses = runs(noisy=10 * WAYS.index(job.way))[job.seed]
        path = folder / f"{job.name}.json"
        path.write_text(json.dumps(dataclasses.asdict(kept(job, losses))))
    return {job.name for job in jobs}


def test_jobs_that_ended_are_not_run_again_and_what_is_there_is_compared(
    tmp_path, monkeypatch, capsys
):
    names = keep_all(tmp_path, (1, 2, 3))
    assert len(names) == 3 * len(WAYS)
    result = tmp_path / "result.json"
    flags = [tmp_path, "--models", "demo", "--steps", STEPS, "--json", result]
    monkeypatch.setattr("sys.argv", ["convergence", *map(str, flags), "--seeds", "1", "2", "3"])
    assert convergence.main() == 0  # torchtitan would not be found: nothing is trained
    written = json.loads(result.read_text())
    assert written["missing"] == []
    assert [*written["losses"][DEMO.title]] == [way.name for way in WAYS]
    assert len(written["machines"]) == 1
    assert result.with_suffix(".png").stat().st_size > 10_000
    assert "3 seeds" in capsys.readouterr().out


def test_a_seed_of_which_one_way_is_missing_is_left_out(tmp_path):
    keep_all(tmp_path, (1, 2, 3, 4))
    jobs = [Job(model=DEMO, way=w, seed=s, steps=STEPS) for s in (1, 2, 3, 4) for w in WAYS]
    (tmp_path / f"{jobs[-1].name}.json").unlink()
    found = {job: one for job in jobs if (one := ended(job, tmp_path)) is not None}
    said = convergence.report_of(jobs, found)
    assert said["missing"] == [jobs[-1].name]
    assert all([*by_seed] == [1, 2, 3] for by_seed in said["losses"][DEMO.title].values())


def test_what_is_kept_of_other_settings_is_an_error(tmp_path):
    keep_all(tmp_path, (1,))
    for way in WAYS:
        job = Job(model=DEMO, way=way, seed=1, steps=STEPS)
        assert ended(job, tmp_path) is not None
        with pytest.raises(ValueError, match="other settings"):
            ended(dataclasses.replace(job, steps=STEPS + 1), tmp_path)


@pytest.mark.slow
def test_a_job_keeps_its_losses_and_what_megamoe_did(tmp_path):
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    job = Job(model=DEMO, way=FED, seed=1, steps=2)
    found = train(job, tmp_path)
    assert found == ended(job, tmp_path)
    assert len(found.losses) == 2
    assert all(found.rewrites[name] >= found.rewrites["regions"] > 0 for name in FED.passes)
    assert [*tmp_path.glob("*.json")] == [tmp_path / f"{job.name}.json"]
    assert not [*(tmp_path / "work").iterdir()]


def test_time_left_counts_models_by_their_cost():
    jobs = [Job(model=model, way=BASELINE, seed=1, steps=1) for model in MODELS]
    known = {jobs[0]: kept(jobs[0], [])}
    assert convergence.left_s([jobs[1]], known) == 60.0 * MODELS[1].cost
    assert convergence.left_s([jobs[1]], {**known, jobs[1]: kept(jobs[1], [])}) == 60.0
    assert convergence.left_s(jobs, {}) == 0.0


def test_settings_become_flags():
    assert flags_of({"a.b": 1, "megamoe.strict": True}) == ["--a.b", "1", "--megamoe.strict"]
    job = Job(model=DEMO, way=FED, seed=7, steps=9)
    assert job.settings["debug.seed"] == 7
    assert COMMON.items() <= job.settings.items()
    names = {Job(model=m, way=w, seed=1, steps=1).name for m in MODELS for w in WAYS}
    assert len(names) == len(MODELS) * len(WAYS)


def test_a_picture_has_a_column_per_model(tmp_path):
    both = {BASELINE.name: runs(), "other": runs(noisy=10)}
    for titles in (["one"], ["one", "two"]):
        draw(dict.fromkeys(titles, both), BASELINE.name, tmp_path / f"{len(titles)}.png")
    assert (tmp_path / "2.png").stat().st_size > 1.5 * (tmp_path / "1.png").stat().st_size
