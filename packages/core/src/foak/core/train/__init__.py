"""The main job, `foak train RUN.yaml`: one fine-tuning run with TRL's `SFTTrainer` under foak's plugins.

| module | holds |
|---|---|
| `runfile` | the sections of RUN.yaml: what may be written, and how it is read |
| `fields` | holding written values against the type hints of a dataclass |
| `data` | JSON Lines, Parquet and hub data sets in TRL's formats, checked before training |
| `model` | the model and its tokenizer: hub id, folder, GGUF file, or inside an installed package |
| `job` | the run: build, train, evaluate, save |
| `trainer` | `SFTTrainer` with checkpoints that are whole or not there |
| `progress`, `record`, `plot` | progress bar, foak_report.json, loss plot |
| `storage`, `interrupt` | writing that leaves nothing half done, signals |

Nothing heavy is imported here: `trl`, `peft` and `datasets` come with `foak-core[train]`, and are imported when a run
starts.
"""

from __future__ import annotations
