"""Checkpoints on disk: write them atomically, seal them, and load the newest undamaged one.

A checkpoint consists of two files. `checkpoint-00000120.pt` is written by `torch.save`. `checkpoint-00000120.json` is
its seal: it is written last and holds the name, size and SHA-256 of the first file. A checkpoint without a seal counts
as absent, and one that does not match its seal as damaged. The number is the step after which the checkpoint was taken.
"""
