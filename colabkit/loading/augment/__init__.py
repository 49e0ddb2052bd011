"""Transforms of whole batches, on any device: random for each sample, and reproducible after a resume.

Random numbers are a pure function of the seed, the epoch and the sample's position in the epoch. A sample therefore
gets the same crop with any number of threads, in any batch and on any rank. On the CPU, crops and flips of `uint8`
images run one sample at a time, while the loader gathers the batch. On other devices, and for floating-point images,
they run on the whole batch.
"""
