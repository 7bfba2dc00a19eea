"""Training scenarios: run through `foak train`'s own job, recorded, compared, shown.

| module | holds |
|---|---|
| `scenarios` | `scenarios.yaml`: which fields a scenario has, how lists become a matrix, names |
| `records` | the JSON file of a scenario, and medians over its repeats |
| `peers` | who accelerates a scenario, why it cannot run here, what it does to a model |
| `models`, `quantized` | random weights of a real geometry; quantized ones, as checkpoints or made on the device |
| `data`, `lengths` | data that never changes; the lengths of instruction data |
| `measure` | one scenario in this process: build, train, figures |
| `worker` | the process that measures one or several scenarios |
| `runner` | which scenarios are due, in which order, in which process |
| `verdict` | whether a row's loss is as near to float32's as plain Hugging Face's |
| `comparison`, `plots` | two folders of results against each other |
| `tables`, `ragged` | the tables of README.md and of the terminal |
"""

from __future__ import annotations
