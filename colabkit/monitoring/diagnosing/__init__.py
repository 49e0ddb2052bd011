"""The doctor: find the bottleneck of a training run and suggest fixes.

`api` holds `doctor()` and `watch()`. `run_profile` summarizes a run. The rules listed in `rules` give advice about
the profile, with speeds predicted by `forecast`. `verdict` combines them into a `diagnosis`.
"""
