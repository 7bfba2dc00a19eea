"""SFTTrainer whose checkpoints are whole or not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from trl import SFTTrainer

from foak.core.train.storage import is_complete_checkpoint, last_checkpoint, named_failure

__all__ = ["RunTrainer"]


class RunTrainer(SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer`; a checkpoint that cannot be written is removed and reported in one sentence.

    A whole checkpoint of an earlier run that has the same name stays until the new one is whole.
    """

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output = Path(self.args.output_dir)
        folder = output / f"checkpoint-{self.state.global_step}"
        earlier = folder.with_name(f".{folder.name}.previous")
        if self.args.should_save and is_complete_checkpoint(folder):
            shutil.rmtree(earlier, ignore_errors=True)
            folder.rename(earlier)
        self.accelerator.wait_for_everyone()
        before = folder if earlier.exists() else last_checkpoint(output)
        kept = f"the last whole checkpoint is {before}" if before is not None else "no checkpoint was saved before"
        try:
            with named_failure("The checkpoint", folder, kept):
                super()._save_checkpoint(model, trial)
        except BaseException:  # a second signal too
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
                if earlier.exists():
                    earlier.rename(folder)
            raise
        if self.args.should_save:
            shutil.rmtree(earlier, ignore_errors=True)
