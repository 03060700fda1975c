"""
What a trainer says of itself: its summary, the memory that it holds, its position for progress bars, and its model as a
file in another format.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hybrid.plan.accounting import ByteTable
from hf_hybrid.records.log import LogFile
from hf_hybrid.records.progress import memory_in_use
from hf_hybrid.records.redaction import shareable
from hf_hybrid.records.summary import HybridSummary, RunPosition

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # a mixin that named it would put it before the mixins that extend it


class ReportingMixin(Trainer):
    """The methods of a trainer that report."""

    run: Any
    parts: Any
    memory: Any
    log_file: LogFile
    saver: Any
    _held: ByteTable | None
    """Bytes that were held at the end of the last training."""

    def hybrid_summary(self) -> HybridSummary:
        """
        Return the run so far as plain values: `steps_by_phase`, `real_steps`, `predicted_steps`, `backward_passes`,
        `forward_only_passes`, `leaps_made`, `leaps_by_verdict`, `seconds_by_phase` and more; all zero with
        `enable_predict=False`, which counts nothing because it does nothing. `leaps`, `divergence_events` and
        `learning_rate_scales` have the last entries, and `hybrid_log.jsonl` has all. `no_leaps` says why no leaps are
        made, and is `None` where they are. `memory` is [`memory_summary`]; `out_of_memory` lists what was done each
        time that memory ran out; `forecast` is the last forecast of the final loss (`step`, `loss`, `low`, `high`, and
        the same of the held-out loss in `held_out`), or `None`; `recomputed_layers` counts those that
        `activation_checkpointing="auto"` chose; `resumed` says what a checkpoint brought back and what not, or `None`;
        `failed_savings` lists savings that are off because of an exception, each with it.

        Every run has `tokens_per_second`, `device_share` and `speed_hint`, since it was started or resumed. Tokens are
        those without padding, of this process until the training ends and then of all. Seconds are those of training
        steps, with the wait for batches, without evaluating, saving and pushing. `device_share` is the share of them in
        which kernels ran on the GPU, by samples of its driver. `speed_hint` says what to do if the host is the limit.
        Each is `None` where it is not known.
        """
        failed = list(dict.fromkeys(why for part in self.parts for why in part.failed))
        own = {"memory": self.memory_summary(), "resumed": self.saver.report, "failed_savings": failed}
        for part in self.parts:  # as they are now; the run's own summary ends with it
            own.update(part.summary())
        return HybridSummary({**self.run.summary(), **own})

    def would_save(self) -> dict[str, Any] | None:
        """
        Return what a run would leave out of its first windows, before it begins: `shared` (prefixes, and tokens without
        influence on a label) and `padding`, as shares of the tokens of padded rows; `reason`, why nothing is left out;
        and `but`, what is computed all the same or not known. Some hundred rows are read on the host, and nothing is
        computed. Of GRPO and RLOO these are shares of prompts. `None` where a loss puts its rows together itself (ORPO,
        CPO) or generates them (distillation, online DPO), and of streams.
        """
        from hf_hybrid.rows.foreseen import foresee

        found = foresee(self)
        return None if found is None else found._asdict()

    def write_log(self, entry: dict[str, Any]) -> None:
        """Append an entry of Trainer's log to ours; the last of a run that writes no summary file has the summary."""
        if "train_runtime" in entry and not self.run.has_phases:
            entry = {**entry, "summary": self.hybrid_summary()}
        self.log_file.add(shareable(entry))

    def memory_summary(self) -> dict:
        """
        `held`: bytes by category on device and host at the end of the last training, exact for what is held between
        steps (activations and temporary memory are not); `plan` and `statistics` (loads, bytes moved, seconds waited)
        of streamed layers, `None` where nothing is streamed.
        """
        plan = self.memory.plan
        return {
            "held": None if self._held is None else self._held.to_dict(),
            "plan": None if plan is None else plan.to_dict(),
            "statistics": self.memory.statistics(),
        }

    @property
    def phase_name(self) -> str | None:
        """Phase of the step under way; `None` without leaps."""
        return None if self.run.phase is None or self.run.no_leaps is not None else self.run.phase.value

    def run_position(self) -> RunPosition | None:
        """Return the values that progress bars and notebooks show; `None` outside a run, and without leaps."""
        run = self.run
        if not run.has_phases:
            return None
        phase = run.last_phase.value if run.no_leaps is None and run.last_phase is not None else None
        return RunPosition(phase, run.last_loss, memory_in_use(self.args.device), run.forecast)

    def export(
        self,
        format: str,
        folder: str | os.PathLike | None = None,
        *,
        eval_dataset: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """
        Write the model in 16 bits or in a low-bit format into `folder` (by default `output_dir` with `-FORMAT` after
        it), and measure its loss on `eval_dataset` (by default the trainer's) beside that of the original; see
        [`~hf_hybrid.export.exporter.export`] for the other `options`, and for what it returns.

        Each is loaded from its files, so that memory must have room for one beside the trainer. Adapters are merged
        into their base, which is loaded anew.

        Raises:
            ValueError: If the format cannot be written here, with what to install; if `folder` is not empty; if several
                processes train.
        """
        if self.accelerator.num_processes > 1:
            raise ValueError(
                f"`export` runs on one process, got `{self.accelerator.num_processes}`. Save the model, and run "
                f"`hf-hybrid export {self.args.output_dir} --format {format}` afterwards."
            )
        from hf_hybrid.export import exporter

        folder = Path(folder or f"{os.path.abspath(str(self.args.output_dir))}-{format}")
        exporter.check_output(folder)
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        held_out: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        batches = None if held_out is None else self.get_eval_dataloader(held_out)
        card = Path(str(self.args.output_dir), "README.md")
        with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f"_{folder.name}.") as saved:
            self.save_model(saved, _internal_call=True)  # else it would push
            return exporter.export(saved, folder, format, batches=batches, card=card, **options)
