"""The one training loop: pretraining, long context and SFT are recipes of it."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from megacomposer.checkpoint.lock import RunLock
from megacomposer.data.indexed import IndexedDataset
from megacomposer.data.loader import heldout_batches
from megacomposer.data.manifest import manifest_of
from megacomposer.observe.logging import get_logger, setup_logging
from megacomposer.observe.metrics import MetricsWriter, format_metrics
from megacomposer.observe.profiler import ProfilerWindow
from megacomposer.observe.progress import progress_bar
from megacomposer.optim.qk_clip import QKClip
from megacomposer.optim.schedule import learning_rate
from megacomposer.runtime.process import Process, start_process
from megacomposer.train.config import RunConfig
from megacomposer.train.evaluate import complete, evaluate
from megacomposer.train.preemption import PREEMPTED_MARKER, PreemptionFlag, mark_preempted
from megacomposer.train.speed import SpeedMeter, attended_length
from megacomposer.train.state import TrainState, build_state
from megacomposer.train.step import StepResult, TrainStep

_logger = get_logger(__name__)


def train(config: RunConfig) -> int:
    """Run, or continue, the training that `config` describes; returns the steps done so far.

    Raises:
        ValueError: the configuration, the data or a checkpoint does not fit; nothing was changed.
        CheckpointError: a checkpoint could not be written; earlier ones are as they were.
    """
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(start_process(config.runtime))
        # At once: a signal that comes before would end the rank.
        preemption = PreemptionFlag(process.device)
        run_dir = Path(config.run_dir)
        stack.enter_context(RunLock(run_dir))
        setup_logging(run_dir, process.rank, process.world_size)
        state = build_state(config, process)
        stack.enter_context(state.loader)
        loaded = state.restore()
        if process.is_main:
            config.save(run_dir / "config.json")
            (run_dir / PREEMPTED_MARKER).unlink(missing_ok=True)
            _logger.info("%s", state.layout)
            _logger.info("start: %s", f"from {loaded}" if loaded else "fresh weights")
        metrics = None
        if process.is_main:
            metrics = stack.enter_context(
                MetricsWriter(
                    run_dir, tensorboard=config.observe.tensorboard, resume_step=state.step
                )
            )
        return _Loop(state, process, metrics, preemption).run()


class _Loop:
    def __init__(
        self,
        state: TrainState,
        process: Process,
        metrics: MetricsWriter | None,
        preemption: PreemptionFlag,
    ) -> None:
        config = state.config
        self.state, self.process, self.config = state, process, config
        self._metrics = metrics
        threshold = config.optim.qk_clip_threshold
        model, layout, shards = state.model, state.layout, state.shards
        self._train_step = TrainStep(
            model,
            layout,
            shards,
            state.optimizer,
            clip_grad_norm=config.optim.clip_grad_norm,
            device=process.device,
            qk_clip=QKClip(model, layout, shards, threshold=threshold) if threshold else None,
        )
        self._speed = SpeedMeter(config.model, state.layout, process.device)
        self._preemption = preemption
        self._skipped_in_a_row = 0

    def run(self) -> int:
        state, settings = self.state, self.config.train
        last = settings.num_steps
        if settings.stop_after_steps:
            last = min(last, settings.stop_after_steps)
        if state.step == 0 and settings.eval_interval_steps:
            self._evaluate()
        bar_on = self.process.is_main and self.config.observe.progress
        run_dir = Path(self.config.run_dir)
        preempted = False
        with (
            progress_bar(settings.num_steps, bar_on, completed=state.step) as bar,
            ProfilerWindow(self.config.observe, run_dir, self.process.rank) as profiler,
        ):
            while state.step < last and not preempted:
                profiler.step(state.step + 1)
                result = self._one_step()
                bar.advance(loss=result.loss)
                preempted = self._preemption.agreed()
                self._after_step(done=state.step == last, leaving=preempted)
        if preempted and self.process.is_main:
            mark_preempted(run_dir)
            _logger.info("stopped by SIGUSR1 at step %d; the checkpoint is saved", state.step)
        if state.step == settings.num_steps and settings.completion_prompt:
            self._print_completion()
        return state.step

    def _one_step(self) -> StepResult:
        state, config = self.state, self.config
        started = time.perf_counter()
        batches = state.loader.next_step()
        data_s = time.perf_counter() - started
        lr = learning_rate(config.schedule, config.optim.lr, state.step, config.train.num_steps)
        result = self._train_step(batches, lr=lr)
        step_s = time.perf_counter() - started
        state.step += 1
        state.trained_tokens += result.num_tokens
        self._count_skips(result)
        due = state.step % config.observe.log_interval_steps == 0
        if self.process.is_main and (due or state.step in (1, config.train.num_steps)):
            speed = self._speed.metrics(
                num_tokens=result.num_tokens, step_s=step_s, length=attended_length(batches)
            )
            values = {
                "train/loss": result.loss,
                **({} if result.mtp_loss is None else {"train/mtp_loss": result.mtp_loss}),
                "train/tokens": state.trained_tokens,
                "train/skipped_steps": state.skipped_steps,
                "optim/grad_norm": result.grad_norm,
                "optim/lr": lr,
                **result.balance,
                **result.qk_clip,
                **state.optimizer.metrics(),
                **speed,
                "time/step_s": step_s,
                "time/data_s": data_s,
                "data/consumed_samples": state.loader.consumed_samples,
            }
            self._record(values)
            shown = ("train/loss", "train/mtp_loss", "optim/grad_norm", "perf/tokens_per_s")
            shown += ("perf/mfu",)
            _logger.info(
                "%s", format_metrics(state.step, {k: values[k] for k in shown if k in values})
            )
        return result

    def _count_skips(self, result: StepResult) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            return
        self.state.skipped_steps += 1
        if self.process.is_main:
            _logger.warning(
                "step %d skipped: the gradient norm is %s", self.state.step, result.grad_norm
            )
        if self._skipped_in_a_row > self.config.train.max_skipped_steps:
            raise ValueError(
                f"{self._skipped_in_a_row} steps in a row had a gradient that is not finite (last:"
                f" step {self.state.step}); lower optim.lr, or look at the data of these steps"
            )

    def _after_step(self, *, done: bool, leaving: bool) -> None:
        """Evaluate and save where the intervals, the end, or a preemption ask for it."""
        step = self.state.step
        interval = self.config.train.eval_interval_steps
        if interval and not leaving and (done or step % interval == 0):
            self._evaluate()
        settings = self.config.checkpoint
        every = settings.save_interval_steps
        if leaving or (done and settings.save_final) or (every and step % every == 0):
            started = time.perf_counter()
            path = self.state.save()
            elapsed = time.perf_counter() - started
            self._record({"time/checkpoint_s": elapsed})
            if self.process.is_main:
                _logger.info("saved %s in %.1f s", path, elapsed)

    def _evaluate(self) -> None:
        config, layout = self.config, self.state.layout
        prefix = config.data.heldout_prefix
        assert prefix is not None
        started = time.perf_counter()
        batches = heldout_batches(
            IndexedDataset(prefix),
            seq_length=config.data.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp,
            max_windows=config.train.eval_sequences or None,
        )
        loss = evaluate(self.state.model, layout, batches, device=self.process.device)
        values = {"eval/loss": loss, "time/eval_s": time.perf_counter() - started}
        per_byte = loss * _tokens_per_byte(prefix)
        values |= {"eval/nats_per_byte": per_byte, "eval/bits_per_byte": per_byte / math.log(2)}
        self._record(values)
        if self.process.is_main:
            _logger.info("step %d | held-out loss %.4f", self.state.step, loss)

    def _record(self, values: dict[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.write(self.state.step, values)

    def _print_completion(self) -> None:
        settings = self.config.train
        text = complete(
            self.state.model,
            self.state.layout,
            self.state.tokenizer,
            settings.completion_prompt,
            num_tokens=settings.completion_tokens,
            seed=self.config.runtime.seed,
            device=self.process.device,
        )
        if self.process.is_main:
            print(f"--- completion ---\n{settings.completion_prompt}{text}\n---", flush=True)


def _tokens_per_byte(prefix: str) -> float:
    """Tokens per byte of text in the dataset `prefix`, by its manifest; 1 for data without one."""
    manifest = manifest_of(prefix)
    if manifest is None or manifest["tokenizer"]["spec"] == "byte":
        return 1.0
    split = manifest["splits"][Path(prefix).name]
    return split["tokens"] / split["text_bytes"]
