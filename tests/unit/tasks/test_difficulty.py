"""The task sampler, with a simulated learner that gets better at what it is given."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pytest

from megacomposer.env.sandbox import Snapshot
from megacomposer.env.task import Task, TestPlan
from megacomposer.observe.registry import is_registered
from megacomposer.tasks.difficulty import DifficultyConfig, TaskSampler, effort_estimate

GROUP = 8
BATCH = 8
TASKS = {f"t{number:03}": float(number) for number in range(60)}
"""Higher numbers are harder; from t050 on they cannot be solved."""


class Learner:
    """Passes a task by how far its skill is above the task's level; skill grows by training."""

    def __init__(self) -> None:
        self.skill = 8.0

    def passes(self, id: str, step: int) -> int:
        level = TASKS[id]
        if level >= 50:
            return 0
        chance = min(max(0.5 + (self.skill - level) / 10, 0.0), 1.0)
        draw = random.Random(f"{id}/{step}")
        return sum(draw.random() < chance for _ in range(GROUP))

    def train(self, sampler: TaskSampler, steps: range) -> list[tuple[str, ...]]:
        drawn = []
        for step in steps:
            ids = sampler.draw(step, BATCH)
            for id in ids:
                passes = self.passes(id, step)
                self.skill += 0.05 * (
                    0 < passes < GROUP
                )  # a group with one outcome teaches nothing
                effort = 5.0 + TASKS[id]
                sampler.record(
                    id, passes=passes, rollouts=GROUP, turns=effort, thinking_tokens=100 * effort
                )
            drawn.append(ids)
        return drawn


def mean_level(batches: list[tuple[str, ...]]) -> float:
    levels = [TASKS[id] for ids in batches for id in ids if TASKS[id] < 50]
    return sum(levels) / len(levels)


def test_hard_tasks_rise_and_solved_ones_retire_as_the_learner_gets_better() -> None:
    sampler, learner = TaskSampler(DifficultyConfig(), TASKS), Learner()
    early = learner.train(sampler, range(20, 60))
    late = learner.train(sampler, range(60, 200))[-40:]
    assert mean_level(late) > mean_level(early) + 5
    retired = {id for id in TASKS if sampler.known(id).retired}
    assert {f"t{number:03}" for number in range(5)} <= retired
    assert not any(TASKS[id] >= 50 for id in retired)
    uniform = TaskSampler(DifficultyConfig(sharpness=0.0, retire_groups=8, floor_weight=1.0), TASKS)
    other = Learner()
    other.train(uniform, range(20, 200))
    assert learner.skill > other.skill


def test_never_solved_tasks_stay_at_the_floor_and_are_still_drawn() -> None:
    config = DifficultyConfig(floor_weight=0.05)
    sampler, learner = TaskSampler(config, TASKS), Learner()
    drawn = Counter(id for ids in learner.train(sampler, range(300)) for id in ids)
    weights = sampler.weights(300)
    hopeless = [id for id in TASKS if TASKS[id] >= 50]
    assert all(weights[id] == 0.05 for id in hopeless)
    assert sum(drawn[id] for id in hopeless[:]) > len(hopeless)
    assert sampler.metrics()["data/tasks_unsolved"] >= len(hopeless)


def test_a_resumed_sampler_draws_what_an_uninterrupted_one_draws(tmp_path: Path) -> None:
    config = DifficultyConfig(curriculum_end_step=100, seed=3)
    whole, one = TaskSampler(config, TASKS), Learner()
    expected = one.train(whole, range(120))
    first, two = TaskSampler(config, dict(reversed(TASKS.items()))), Learner()
    seen = two.train(first, range(70))
    first.save(tmp_path / "sampler.json")
    second = TaskSampler.load(config, tmp_path / "sampler.json")
    seen += two.train(second, range(70, 120))
    assert seen == expected
    whole.save(tmp_path / "whole.json")
    second.save(tmp_path / "resumed.json")
    assert (tmp_path / "whole.json").read_bytes() == (tmp_path / "resumed.json").read_bytes()
    assert second.weights(120) == whole.weights(120)


def test_a_single_epoch_draws_no_task_twice_and_ends() -> None:
    sampler = TaskSampler(DifficultyConfig(single_epoch=True), TASKS)
    drawn = [id for step in range(7) for id in sampler.draw(step, 8)]
    assert len(drawn) == len(set(drawn)) == 56
    assert len(sampler.draw(7, 8)) == 4
    assert sampler.draw(8, 8) == ()


def test_retired_tasks_are_revisited_and_come_back_when_they_fail() -> None:
    sampler = TaskSampler(DifficultyConfig(revisit_frac=0.1), TASKS)
    for id in list(TASKS)[:30]:
        for _ in range(2):
            sampler.record(id, passes=8, rollouts=8, turns=1.0, thinking_tokens=1.0)
    counts = Counter(
        sampler.known(id).retired for step in range(2000) for id in sampler.draw(step, 1)
    )
    assert 0.07 < counts[True] / 2000 < 0.13
    assert sampler.metrics()["data/task_revisits"] == counts[True]
    sampler.record("t000", passes=3, rollouts=8, turns=1.0, thinking_tokens=1.0)
    assert not sampler.known("t000").retired
    assert sampler.known("t001").retired


def test_the_weight_peaks_at_an_intermediate_pass_rate() -> None:
    config = DifficultyConfig(peak_pass_frac=0.4, prior_passes=0.01, prior_failures=0.01)
    tasks = {f"{passes:03}": 0.0 for passes in range(101)}
    sampler = TaskSampler(config, tasks)
    for id in tasks:
        sampler.record(id, passes=int(id), rollouts=100, turns=1.0, thinking_tokens=1.0)
    weights = sampler.weights(0)
    best = max(weights, key=weights.__getitem__)
    assert int(best) == 40
    assert weights[best] == pytest.approx(1.0, abs=1e-3)
    order = [weights[f"{n:03}"] for n in range(1, 41)]
    assert order == sorted(order)


def test_draws_follow_the_weights() -> None:
    sampler = TaskSampler(DifficultyConfig(untried_weight=1.0, floor_weight=0.25), {"a": 0, "b": 0})
    sampler.record("b", passes=0, rollouts=8, turns=1.0, thinking_tokens=1.0)
    counts = Counter(sampler.draw(step, 1)[0] for step in range(4000))
    assert 0.77 < counts["a"] / 4000 < 0.83


def test_the_curriculum_raises_tasks_of_many_turns() -> None:
    config = DifficultyConfig(curriculum_start_step=10, curriculum_end_step=20)
    sampler = TaskSampler(config, {"short": 0.0, "long": 0.0, "untried": 9.0})
    for id, turns in (("short", 3.0), ("long", 90.0)):
        sampler.record(id, passes=4, rollouts=8, turns=turns, thinking_tokens=10 * turns)
    before, after = sampler.weights(10), sampler.weights(20)
    assert before["long"] == before["short"]
    assert after["long"] / after["short"] == pytest.approx(2.718281828**1.5)
    assert after["untried"] > before["untried"]


def test_a_task_of_an_old_window_is_judged_by_its_last_groups() -> None:
    sampler = TaskSampler(DifficultyConfig(window_groups=4), {"a": 0.0})
    for passes in (0,) * 20 + (6,) * 4:
        sampler.record("a", passes=passes, rollouts=8, turns=1.0, thinking_tokens=1.0)
    assert sampler.pass_frac("a") == pytest.approx(24.5 / 33)
    assert sampler.known("a").rollouts == 24 * 8


def test_tasks_may_be_added_while_training_runs() -> None:
    sampler = TaskSampler(DifficultyConfig(), {"a": 0.0})
    sampler.record("a", passes=1, rollouts=8, turns=1.0, thinking_tokens=1.0)
    sampler.add("b", 2.0)
    sampler.add("a", 5.0)
    assert set(sampler.draw(0, 2)) == {"a", "b"}
    assert sampler.known("a").rollouts == 8


def test_bad_input_names_the_field(tmp_path: Path) -> None:
    sampler = TaskSampler(DifficultyConfig(), {"a": 0.0})
    with pytest.raises(ValueError, match="9 passes of 8"):
        sampler.record("a", passes=9, rollouts=8, turns=1.0, thinking_tokens=1.0)
    with pytest.raises(ValueError, match="retire_groups 9"):
        DifficultyConfig(retire_groups=9)
    with pytest.raises(ValueError, match="peak_pass_frac"):
        DifficultyConfig(peak_pass_frac=1.0)
    (tmp_path / "bad.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"bad\.json"):
        TaskSampler.load(DifficultyConfig(), tmp_path / "bad.json")


def test_metrics_are_registered() -> None:
    sampler = TaskSampler(DifficultyConfig(), TASKS)
    assert all(is_registered(name) for name in sampler.metrics())
    assert TaskSampler(DifficultyConfig(), {}).metrics()["data/tasks_active"] == 0.0


def test_estimates_order_tasks_by_size() -> None:
    small = Task(
        id="a",
        instruction="",
        base=Snapshot(layers=()),
        pristine=Snapshot(layers=()),
        tests=TestPlan(),
        difficulty={"deleted_lines": 10.0, "files": 1.0, "target_tests": 3.0},
    )
    large = dataclasses.replace(small, difficulty={"deleted_lines": 200.0, "target_tests": 9.0})
    assert effort_estimate(large) > effort_estimate(small) > 0.0
