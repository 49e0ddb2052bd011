"""Training: a training loop that can resume after a disconnect.

- `trainer`, `run`, `report`, `saved_run`, `plot`, `trace`: `train()`, its internal state, the report that it returns,
  reading a saved report, and the report's plot and trace.
- `run_status`, `status_writer`: the file `status.json`, which shows a run to other processes, and its writer.
- `schedule`, `records`: when to save, validate and stop; the numbers recorded for steps and epochs.
- `checkpoints`, `run_checkpoints`, `state_loading`: checkpoint files, written in the background and sealed; saving and
  resuming a run; loading a state into an object.
- `step_factory`, `steps`, `models`, `batch_values`: `supervised_step()` and the step that it returns; the precision,
  memory layout and compilation of its model; the images, labels, loss and accuracy of its batches.
- `shards`: models and optimizers that FSDP2 has sharded over the processes.
- `network_choice`: the network, optimizer and learning rates of `train_on()`.
- `evaluation`: `evaluate()` and `predict()`.
- `ceiling`, `folds`, `ranks`: `headspace()`, `k_fold()` and `notebook_launch()`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
