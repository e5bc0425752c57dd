"""A window of training steps recorded by torch.profiler, as a Chrome trace per rank."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megacomposer.observe.config import ObserveConfig
from megacomposer.observe.logging import get_logger

if TYPE_CHECKING:
    import torch

_logger = get_logger(__name__)


class ProfilerWindow:
    """Records steps `profile_start_step` .. `+ profile_num_steps - 1` on the configured ranks.

    Use as a context manager and call `step(n)` at the start of each step n, before its work, with
    n as in metrics.jsonl: the number of steps done once it is. The trace goes to
    `profiles/rank<r>_step<first>-<last>.json.gz` in the run directory when the step after the
    window begins, or when the block ends inside the window; it opens in Perfetto and in
    chrome://tracing. The step before the window, if there is one, is traced and thrown away: the
    first traced step pays for starting the tracer. A block left by an exception writes nothing.
    """

    def __init__(self, config: ObserveConfig, run_dir: Path, rank: int) -> None:
        self._start = config.profile_start_step
        self._end = config.profile_start_step + config.profile_num_steps
        self._active = config.profile_num_steps > 0 and rank in config.profile_ranks
        self._folder = Path(run_dir) / "profiles"
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None
        self._first = self._last = -1
        self.path: Path | None = None
        """The trace, once it is written."""

    def __enter__(self) -> Self:
        return self

    def step(self, step: int) -> None:
        """Step `step` begins."""
        if not self._active:
            return
        if step >= self._end:
            self._finish()
        elif self._profiler is not None:
            self._synchronize()
            self._profiler.step()
            self._last = step
        elif step >= self._start - 1:
            self._begin(step)

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception_type is None:
            self._finish()
        elif self._profiler is not None:
            self._first = self._end  # nothing worth keeping: stop the tracer and say so
            self._finish()

    def _begin(self, step: int) -> None:
        import torch

        self._first, self._last = max(step, self._start), step
        warmup = self._first - step
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._synchronize()
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=0, warmup=warmup, active=self._end - self._first, repeat=1
            ),
            on_trace_ready=self._export,
            record_shapes=True,
        )
        self._profiler.start()

    def _finish(self) -> None:
        if self._profiler is not None:
            self._synchronize()
            self._profiler.stop()
            self._profiler = None
        self._active = False

    def _export(self, profiler: torch.profiler.profile) -> None:
        if self._first > self._last:
            _logger.info("no profile: the run stopped before step %d was traced", self._start)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}_step{self._first}-{self._last}.json.gz"
        self.path = self._folder / name
        profiler.export_chrome_trace(str(self.path))
        _logger.info(
            "profile of steps %d-%d: %s (open it in Perfetto)", self._first, self._last, self.path
        )

    @staticmethod
    def _synchronize() -> None:
        """Kernels still in flight belong to the step that launched them."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
